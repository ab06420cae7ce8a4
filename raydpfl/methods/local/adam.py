"""Adam and AdamW, as torch has them."""

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from raydpfl.methods.local.base import Local, Step

Beta = Annotated[float, Field(ge=0, lt=1)]


class Adam(Local):
    """m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2;
    x <- x - lr m^ / (sqrt(v^) + eps).

    At step k, from 1, m^ = m / (1 - beta1^k) and v^ = v / (1 - beta2^k); m = v = 0 at a round's
    start (Kingma and Ba 2015, Alg. 1).

    g is the gradient of the batch, all as `torch.optim.Adam` does it.
    """

    examples = (
        {"steps": 4, "batch": 5, "lr": 0.01},
        {"epochs": 1, "batch": 5, "lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.9]},
    )
    kind: str = "adam"
    lr: float = Field(default=0.001, gt=0, description="eta_l of round 0")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="beta1 and beta2")
    eps: float = Field(default=1e-8, gt=0, description="added to sqrt(v^)")
    weight_decay: float = Field(default=0.0, ge=0, description="times x is added to the gradient")

    def fresh(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(m, v), float32 [..., P] each."""
        return torch.zeros_like(x), torch.zeros_like(x)

    def step(self, x: Tensor, gradient: Tensor, state: Any, at: Step) -> tuple[Tensor, Any]:
        if self.weight_decay:
            gradient = gradient + self.weight_decay * x
        return self._adam_step(x, gradient, state, at)

    def _adam_step(self, x: Tensor, gradient: Tensor, state: Any, at: Step) -> tuple[Tensor, Any]:
        """The step without decay."""
        beta1, beta2 = self.betas
        m = state[0].lerp(gradient, 1 - beta1)
        v = (state[1] * beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = v.sqrt().div_(math.sqrt(1 - beta2 ** (at.k + 1))).add_(self.eps)
        return x.addcdiv(m, size, value=-at.lr / (1 - beta1 ** (at.k + 1))), (m, v)

    @property
    def l2(self) -> float:
        return self.weight_decay


class AdamW(Adam):
    """x <- (1 - lr weight_decay) x, then Adam's step without decay, as `torch.optim.AdamW` does it
    (Loshchilov and Hutter 2019, Alg. 2).
    """

    examples = (
        {"steps": 4, "batch": 5, "lr": 0.01, "weight_decay": 0.1},
        {"steps": 4, "batch": 5, "lr": 0.01, "within": {"lr_warmup": 2}},
    )
    kind: str = "adamw"
    weight_decay: float = Field(default=0.01, ge=0, description="times lr: share of x taken off")

    def step(self, x: Tensor, gradient: Tensor, state: Any, at: Step) -> tuple[Tensor, Any]:
        return self._adam_step(x * (1 - at.lr * self.weight_decay), gradient, state, at)

    @property
    def l2(self) -> float:
        return 0.0  # its decay is no gradient of a loss
