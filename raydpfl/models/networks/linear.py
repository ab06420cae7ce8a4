"""A linear model with a given start."""

from __future__ import annotations

from math import prod

from pydantic import Field
from torch import nn

from raydpfl.models.base import Model, Shape


class LinearModel(Model):
    """One linear layer, every parameter of which starts at `start` + U(0, `spread`), for regression
    and classification.

    With the quadratics of 001 sec. 5.3, whose optimum is the origin, `spread` 0.2 and 1 are its
    starts w* + z/5 and w* + z, z ~ U(0,1)^d.
    """

    kind: str = "linear"
    bias: bool = False
    start: float = 0.0
    spread: float = Field(default=0.0, ge=0)

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        layer = nn.Linear(prod(shape), outputs, self.bias)
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, self.start, self.start + self.spread)
        return nn.Sequential(nn.Flatten(), layer)
