"""Normalisation."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field

from raydpfl.methods.bounding.base import Bound, Bounding


class Normalize(Bounding):
    """c u / ||u||, and 0 for u = 0 (001 eq. 12)."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"bound": 1.0},
        {"bound": 0.1, "scaling": "gradient"},
    )
    kind: str = "normalize"
    bound: Bound = Field(description="c: the L2 norm of what every client sends")

    def factor(self, norm: float, bound: float) -> float:
        return bound / norm if norm > 0 else 0.0

    def factors(self, norms: torch.Tensor, bound: float) -> torch.Tensor:
        return torch.where(norms > 0, bound / norms, 0.0)

    def closed(self, bound: float) -> tuple[float, float, float]:
        return -1.0, bound, 0.0
