"""Clipping."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field

from raydpfl.methods.bounding.base import Bound, Bounding


class Clip(Bounding):
    """u min(1, c / ||u||) (000 eq. 3, 001 eq. 4)."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"bound": 1.0},
        {"bound": 0.05, "scaling": "gradient"},
    )
    kind: str = "clip"
    bound: Bound = Field(description="c: the largest L2 norm of what one client sends")

    def factor(self, norm: float, bound: float) -> float:
        return 1.0 if norm <= bound else bound / norm

    def factors(self, norms: torch.Tensor, bound: float) -> torch.Tensor:
        return torch.where(norms <= bound, 1.0, bound / norms)

    def closed(self, bound: float) -> tuple[float, float, float]:
        return bound, bound, 0.0
