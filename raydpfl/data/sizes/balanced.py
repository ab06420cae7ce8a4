"""The same number for all."""

from __future__ import annotations

import numpy as np

from raydpfl.data.sizes.base import Sizes


class Balanced(Sizes):
    """The same for all; when it does not come out even, the first clients hold one sample more."""

    kind: str = "balanced"

    def even(self) -> bool:
        return True

    def weights(self, clients: int, generator: np.random.Generator) -> np.ndarray:
        return np.ones(clients)
