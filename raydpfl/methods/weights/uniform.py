import numpy as np

from raydpfl.methods.weights.base import Weights


class UniformWeights(Weights):
    """w_i = 1: the mean over the cohort, 1/r each (000, 001)."""

    kind: str = "uniform"

    def of(self, sizes: np.ndarray, samples: int, population: int) -> np.ndarray:
        return np.broadcast_to(1.0, len(sizes))

    def plain(self) -> bool:
        return True
