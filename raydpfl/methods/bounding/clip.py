from typing import ClassVar

from pydantic import Field

from raydpfl.config.registry import Examples
from raydpfl.methods.bounding.base import Bound, ClosedForm


class Clip(ClosedForm):
    """u min(1, c / ||u||) (000 eq. 3, 001 eq. 4)."""

    examples: ClassVar[Examples] = ({"bound": 1.0}, {"bound": 0.05, "scaling": "gradient"})
    kind: str = "clip"
    bound: Bound = Field(description="c: the largest L2 norm of what one client sends")

    def closed(self, bound: float) -> tuple[float, float, float]:
        return bound, bound, 0.0


class ClipL1(Clip):
    """u min(1, c / ||u||_1), by the L1 norm, for Laplace noise. As no L2 norm is above the L1 norm,
    Gaussian noise may follow too.
    """

    order: ClassVar[int] = 1
    examples: ClassVar[Examples] = ({"bound": 5.0}, {"bound": 0.5, "scaling": "gradient"})
    kind: str = "clip_l1"
    bound: Bound = Field(description="c: the largest L1 norm of what one client sends")
