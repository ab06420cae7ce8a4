"""The base of the weights."""

import numpy as np

from raydpfl.config.registry import Member


class Weights(Member):
    """Base of the family. A member gives `of`.

    Weights are normalised over the population, never over a round's cohort, so that the largest of
    them, which accountants take, is that of any round.
    """

    def of(self, sizes: np.ndarray, samples: int, population: int) -> np.ndarray:
        """The weights of all clients, float64 [N], finite: of `sizes` int64 [N], the samples of
        each client, their sum `samples`, and N, `population`. Called once.
        """
        raise NotImplementedError

    def plain(self) -> bool:
        """Whether every weight is 1, so that the server's quotient is the plain mean."""
        return False
