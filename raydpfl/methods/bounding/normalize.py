"""Normalisation, and its smooth form."""

from typing import ClassVar

from pydantic import Field

from raydpfl.config.registry import Examples
from raydpfl.core.messages import BOUNDS
from raydpfl.methods.bounding.base import Bound, ClosedForm


class Normalize(ClosedForm):
    """c u / ||u||, and 0 for u = 0 (001 eq. 12)."""

    examples = ({"bound": 1.0}, {"bound": 0.1, "scaling": "gradient"})
    kind: str = "normalize"
    bound: Bound = Field(description="c: the L2 norm of what every client sends")

    def closed(self, bound: float) -> tuple[float, float, float]:
        return -1.0, bound, 0.0


class SmoothNormalize(ClosedForm):
    """c u / (a + ||u||): normalisation without its jump at 0 (alpha-NormEC, 2025)."""

    examples: ClassVar[Examples] = ({"bound": 1.0}, {"bound": 0.5, "a": 1.0})
    kind: str = "smooth_normalize"
    bound: Bound = Field(description="c: the largest L2 norm of what one client sends")
    a: float = Field(
        default=0.01, ge=BOUNDS[0], le=BOUNDS[1], description="the norm that is sent as c/2"
    )

    @property
    def far(self) -> float:
        return 1000 * self.a

    def closed(self, bound: float) -> tuple[float, float, float]:
        return -1.0, bound, self.a
