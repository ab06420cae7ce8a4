"""Cohorts drawn with replacement, client k with probability p_k at each of r draws: the virtual
clients of 003 sec. III-C2. A client drawn twice trains twice, with independent batches and noise,
and counts twice in the sum that is divided by r.
"""

import numpy as np
from pydantic import Field

from raydpfl.core.prng import Purpose, stream
from raydpfl.methods.selection.base import Ask, Cohort, Population, Selection
from raydpfl.privacy import Sampling


class WithReplacement(Selection):
    """Base of these members, which give `draw_probabilities`; the sum is divided by `cohort`."""

    cohort: int = Field(ge=1, le=10**9, description="r, draws of a round")

    def draw_probabilities(self, population: Population) -> np.ndarray:
        """p, float64 [N], not negative and with sum 1."""
        raise NotImplementedError

    def probabilities(self, population: Population) -> np.ndarray:
        """`draw_probabilities`, float64 [N], computed once for a population."""
        return population.cached((self, "p"), lambda: self.draw_probabilities(population))

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        sums = population.cached((self, "sums"), lambda: np.cumsum(self.probabilities(population)))
        places = stream(seed, Purpose.COHORT, t=t).random(self.cohort) * sums[-1]
        return Cohort.of(np.searchsorted(sums, places, side="right"))

    def sampling(self, population: Population) -> Sampling:
        count = len(population)
        largest = population.cached((self, "largest"), lambda: self.probabilities(population).max())
        p_max = None if largest * count <= 1 + 1e-9 else min(float(largest), 1.0)
        return Sampling("with_replacement", count, self.cohort, p_max)


class Multinomial(WithReplacement):
    """p = p^u, p^u_k = n_k / sum n: MD sampling (002 sec. IV), the unbiased selection of 003 sec.
    III-C2.

    The mean of the cohort's updates is unbiased for sum p^u_k Delta_k, so the weights are uniform.
    """

    examples = ({"cohort": 6},)
    kind: str = "multinomial"

    def draw_probabilities(self, population: Population) -> np.ndarray:
        return population.shares
