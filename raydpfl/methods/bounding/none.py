"""No bound."""

from __future__ import annotations

import math
from typing import Literal

import torch

from raydpfl.methods.bounding.base import Bounding


class Unbounded(Bounding):
    """The update as it is (FedAvg: 000 Alg. 1, 001 Alg. 3). No privacy can be claimed for it."""

    kind: str = "none"
    scaling: Literal["update"] = "update"

    def factor(self, norm: float, bound: float) -> float:
        return 1.0

    def factors(self, norms: torch.Tensor, bound: float) -> torch.Tensor:
        return torch.ones_like(norms)

    def closed(self, bound: float) -> tuple[float, float, float]:
        return math.inf, 0.0, 0.0
