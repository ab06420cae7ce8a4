"""Normalisation."""

from __future__ import annotations

from pydantic import Field

from raydpfl.methods.bounding.base import Bound, ClosedForm


class Normalize(ClosedForm):
    """c u / ||u||, and 0 for u = 0 (001 eq. 12)."""

    examples = ({"bound": 1.0}, {"bound": 0.1, "scaling": "gradient"})
    kind: str = "normalize"
    bound: Bound = Field(description="c: the L2 norm of what every client sends")

    def closed(self, bound: float) -> tuple[float, float, float]:
        return -1.0, bound, 0.0
