"""Sizes whose logarithms are normal."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from raydpfl.data.sizes.base import Sizes


class LogNormal(Sizes):
    """n v_k / sum v with log v_k ~ N(0, sigma^2) (Li et al. 2020, sec. 5.1)."""

    kind: str = "lognormal"
    sigma: float = Field(default=1.0, gt=0, le=10, description="std of the logarithm of the sizes")

    def weights(self, clients: int, generator: np.random.Generator) -> np.ndarray:
        return generator.lognormal(0.0, self.sigma, clients)
