import math
from typing import Literal

from pydantic import Field

from raydpfl.methods.bounding.base import ClosedForm


class Unbounded(ClosedForm):
    """The update as it is (FedAvg: 000 Alg. 1, 001 Alg. 3). No privacy can be claimed for it."""

    kind: str = "none"
    scaling: Literal["update"] = Field(default="update", description="the update, as it is")

    def closed(self, bound: float) -> tuple[float, float, float]:
        return math.inf, 0.0, 0.0
