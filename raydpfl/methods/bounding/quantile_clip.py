import math
from collections.abc import Mapping

import numpy as np
from pydantic import Field

from raydpfl.core.messages import BOUNDS, Columns, State
from raydpfl.methods.bounding.base import BoundingQuery
from raydpfl.methods.bounding.clip import Clip


class QuantileClip(Clip):
    """Clipping at a bound that follows a quantile of the norms (Andrew, Thakkar, McMahan, Ramaswamy
    2021, Alg. 1).

    After each round, with b the noisy share of the cohort whose norm is at most C,

        C <- C exp(-lr (b - quantile)), clamped to [1e-12, 1e15].

    The noisy count is a second query of the round: each client gives its indicator minus 1/2, of
    absolute value 1/2, and `share` of the round's squared sensitivity-to-noise ratio is spent on
    it. With z the noise multiplier of the round, the noise on the sums has std

        z / (2 sqrt(share)) on the count,  z C / sqrt(1 - share) on the updates.

    Where clients draw the noise, each draws its part of both. The noise of a round uses the bound
    of that round.
    """

    examples = ({"bound": 1.0}, {"bound": 0.2, "quantile": 0.9, "lr": 0.5, "share": 0.2})
    kind: str = "quantile_clip"
    quantile: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="gamma: the share of clients whose update is to be no longer than the bound",
    )
    lr: float = Field(default=0.2, gt=0, description="of the bound's logarithm, by round")
    share: float = Field(
        default=0.05, gt=0, lt=1, description="of the round's privacy that the count takes"
    )

    def queries(self) -> tuple[BoundingQuery, ...]:
        return (BoundingQuery("count", bound=0.5, share=self.share),)

    def answers(self, columns: Columns, bound: float) -> Mapping[str, np.ndarray]:
        norms = columns["norm"]
        indicators = np.where(norms <= bound, 0.5, -0.5)
        return {"count": np.where(np.isfinite(norms), indicators, 0.0)}

    def adapt(self, bound: float, sums: Mapping[str, float], clients: float, state: State) -> float:
        fraction = sums["count"] / clients + 0.5  # beyond [0, 1] by its noise, whose mean is then 0
        next_bound = bound * math.exp(min(-self.lr * (fraction - self.quantile), 100.0))
        return min(max(next_bound, BOUNDS[0]), BOUNDS[1])
