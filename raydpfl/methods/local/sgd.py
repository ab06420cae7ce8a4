from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from raydpfl.config.registry import Examples
from raydpfl.methods.local.base import LinearRule, Local, Step


class Sgd(Local):
    """v <- momentum v + g + weight_decay x + proximal (x - x_t);  x <- x - lr v, with v = 0 and x =
    x_t, the model, at a round's start.

    g is the gradient of the mean loss of the batch (cross-entropy; half the squared error in
    regression), all as `torch.optim.SGD` does it (000 Alg. 1-3, 001 Alg. 1-3: Q local steps; the L2
    terms of SPEC sec. 4 are `weight_decay`). FedProx is Li et al. 2020, Alg. 2.
    """

    examples: ClassVar[Examples] = (
        {"steps": 4, "batch": 5},
        {"steps": 2, "batch": "full", "momentum": 0.5, "weight_decay": 0.01, "proximal": 0.1},
        {"steps": 4, "batch": 5, "sampling": "epochs", "schedule": "inverse_sqrt"},
        {"steps": 4, "batch": {"share": 0.2}},
        {"epochs": 1.5, "batch": 4, "momentum": 0.5},
        {"epochs": 2, "batch": 5, "within": {"schedule": "cosine", "lr_period": 4}},
    )
    kind: str = "sgd"
    weight_decay: float = Field(
        default=0.0, ge=0, description="times x is added to the gradient, of biases too"
    )
    momentum: float = Field(default=0.0, ge=0, lt=1, description="share of v that a step keeps")
    proximal: float = Field(
        default=0.0, ge=0, description="mu of FedProx: loss + mu/2 ||x - x_t||^2"
    )

    def fresh(self, x: Tensor) -> Tensor:
        """v, float32 [..., P]."""
        return torch.zeros_like(x)

    def step(self, x: Tensor, gradient: Tensor, state: Tensor, at: Step) -> tuple[Tensor, Tensor]:
        """The backends take `linear` for it; a subclass may call it."""
        pull = self.weight_decay * x + self.proximal * (x - at.model)
        velocity = self.momentum * state + gradient + pull
        return x - at.lr * velocity, velocity

    def linear(self) -> LinearRule | None:
        if self.within:
            return None
        return LinearRule(self.momentum, self.weight_decay, self.proximal)

    @property
    def l2(self) -> float:
        return self.weight_decay
