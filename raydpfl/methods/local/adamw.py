"""AdamW, as torch has it."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from raydpfl.methods.local.adam import Adam
from raydpfl.methods.local.base import Step


class AdamW(Adam):
    """x <- (1 - lr weight_decay) x, then Adam's step without decay, as `torch.optim.AdamW` does it
    (Loshchilov and Hutter 2019, Alg. 2).
    """

    examples = (
        {"steps": 4, "batch": 5, "lr": 0.01, "weight_decay": 0.1},
        {"steps": 4, "batch": 5, "lr": 0.01, "within": {"lr_warmup": 2}},
    )
    kind: str = "adamw"
    weight_decay: float = Field(default=0.01, ge=0)

    def step(
        self, x: torch.Tensor, gradient: torch.Tensor, state: Any, at: Step
    ) -> tuple[torch.Tensor, Any]:
        return self._moved(x * (1 - at.lr * self.weight_decay), gradient, state, at)

    @property
    def l2(self) -> float:
        return 0.0  # its decay is no gradient of a loss
