"""Cohorts of distinct clients, all equally likely: uniform, Poisson, full, and FedAvg's with stale
models.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, stream
from raydpfl.privacy import Sampling
from raydpfl.selection.base import Cohort, Population, Selection


def distinct(generator: np.random.Generator, count: int, size: int) -> np.ndarray:
    """`size` of 0 .. count - 1, uniformly without replacement, ascending; O(size)."""
    return np.sort(generator.choice(count, size, replace=False, shuffle=False))


class Sized(Selection):
    """Base of the members with a `cohort` that the population must be able to fill."""

    cohort: int = Field(ge=1)

    def fits(self, count: int) -> None:
        if self.cohort > count:
            raise ConfigError(
                "selection.cohort", self.cohort, f"at most the population of {count} clients"
            )


class Uniform(Sized):
    """`cohort` clients uniformly without replacement (000 Alg. 1, 001 Alg. 1-3, 002 Alg. 1).

    With weights N p_k the sum over the divisor r is unbiased for sum p_k Delta_k (002 Lemma 5).
    """

    kind: str = "uniform"

    def select(self, seed: int, t: int, population: Population) -> Cohort:
        return Cohort.of(distinct(stream(seed, Purpose.COHORT, t=t), len(population), self.cohort))

    def sampling(self, population: Population) -> Sampling:
        return Sampling("fixed", len(population), self.cohort)


class FedAvgStale(Uniform):
    """FedAvg's own average (McMahan et al. 2017; the comparison of 002 Fig. 5): uniform, but the N
    - r clients that were not drawn count with the unchanged global model, so that the divisor is N.
    Biased towards standing still: each round moves r/N as far.
    """

    kind: str = "fedavg_stale"

    def divisor(self, population: Population) -> float:
        return float(len(population))


class Poisson(Sized):
    """Each client on its own with probability cohort / population; the divisor stays `cohort`, so
    it tells nothing.
    """

    kind: str = "poisson"

    @property
    def own_coins(self) -> bool:
        return True

    def select(self, seed: int, t: int, population: Population) -> Cohort:
        generator = stream(seed, Purpose.COHORT, t=t)
        count = len(population)
        # A binomial count, then a uniform subset of that size: the same law as a coin for every
        # client, in O(cohort).
        return Cohort.of(
            distinct(generator, count, int(generator.binomial(count, self.cohort / count)))
        )

    def sampling(self, population: Population) -> Sampling:
        return Sampling("poisson", len(population), self.cohort)


class Full(Selection):
    """Every client in every round (001 sec. 5.3)."""

    kind: str = "full"

    def select(self, seed: int, t: int, population: Population) -> Cohort:
        return Cohort.of(np.arange(len(population)))

    def sampling(self, population: Population) -> Sampling:
        return Sampling("full", len(population), len(population))
