"""Lion (Chen et al. 2023, Alg. 2) as a local rule."""

from typing import ClassVar

import torch
from pydantic import Field

from raydpfl.methods.local import Local


class Lion(Local):
    """x <- x - lr (sign(b1 m + (1 - b1) g) + decay x); m <- b2 m + (1 - b2) g, m = 0 at first."""

    examples: ClassVar = ({"steps": 4, "lr": 0.01}, {"steps": 2, "batch": "full", "decay": 0.1})
    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.99, ge=0, lt=1)
    decay: float = Field(default=0.0, ge=0)

    def fresh(self, x):
        return torch.zeros_like(x)

    def step(self, x, gradient, state, at):
        direction = torch.sign(self.b1 * state + (1 - self.b1) * gradient)
        mean = self.b2 * state + (1 - self.b2) * gradient
        return x - at.lr * (direction + self.decay * x), mean
