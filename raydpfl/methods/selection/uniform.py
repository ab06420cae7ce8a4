"""A uniform subset of fixed size."""

from __future__ import annotations

from typing import ClassVar

from raydpfl.config.registry import Examples
from raydpfl.core.prng import Purpose, stream
from raydpfl.methods.selection.base import Ask, Cohort, Population
from raydpfl.methods.selection.fixed_size import Sized, distinct
from raydpfl.privacy import Sampling


class Uniform(Sized):
    """`cohort` clients uniformly without replacement (000 Alg. 1, 001 Alg. 1-3, 002 Alg. 1).

    With weights N p_k the sum divided by r is unbiased for sum p_k Delta_k (002 Lemma 5).
    """

    examples: ClassVar[Examples] = ({"cohort": 6}, {"cohort": 6, "dropout": 0.2})
    kind: str = "uniform"

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        return Cohort.of(distinct(stream(seed, Purpose.COHORT, t=t), len(population), self.cohort))

    def sampling(self, population: Population) -> Sampling:
        return Sampling("fixed", len(population), self.cohort)
