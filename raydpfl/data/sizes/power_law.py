"""Few clients with many samples."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from raydpfl.data.sizes.base import Sizes


class PowerLaw(Sizes):
    """Proportional to rank^-exponent, the ranks assigned at random (the unbalanced
    settings of 002).
    """

    kind: str = "power-law"
    exponent: float = Field(default=1.0, gt=0, description="of the power law")

    def weights(self, clients: int, generator: np.random.Generator) -> np.ndarray:
        return (1.0 + generator.permutation(clients)) ** -self.exponent
