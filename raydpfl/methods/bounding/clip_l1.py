from typing import ClassVar

from pydantic import Field

from raydpfl.config.registry import Examples
from raydpfl.methods.bounding.base import Bound
from raydpfl.methods.bounding.clip import Clip


class ClipL1(Clip):
    """u min(1, c / ||u||_1), by the L1 norm, for Laplace noise. As no L2 norm is above the L1 norm,
    Gaussian noise may follow too.
    """

    order: ClassVar[int] = 1
    examples: ClassVar[Examples] = ({"bound": 5.0}, {"bound": 0.5, "scaling": "gradient"})
    kind: str = "clip_l1"
    bound: Bound = Field(description="c: the largest L1 norm of what one client sends")
