"""Who takes part in a round.

A member of this family promises: the cohort of a round is a function of (seed, round) and of public values
alone; its clients come in ascending order, one drawn twice standing twice; and `sampling` says to the
accountants exactly the law that `draw` follows, so that sampler and accountant cannot disagree.

>>> Uniform(cohort=3).draw(seed=0, round=5, population=10).clients
array([1, 2, 5])
>>> Uniform(cohort=3).sampling(10)
Sampling(kind='fixed', population=10, cohort=3)

Public: the population, the cohort size, the sampling law. Whether the drawn cohort is secret is a matter of
the observer, and every guarantee says which it assumes. The cost of a draw grows with the cohort and never
with the population.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, stream
from raydpfl.member import Member
from raydpfl.privacy import Sampling
from raydpfl.selection.privacy_aware import Solution, kkt_residual, solve, solve_cvxpy

__all__ = ["FAMILY", "Cohort", "Full", "Poisson", "Selection", "Solution", "Uniform", "kkt_residual", "solve", "solve_cvxpy"]


@dataclass(frozen=True)
class Cohort:
    """The clients of one round: `clients` int64 [r], ascending; `draws` int64 [r] counts a client's repeats from 0."""

    clients: np.ndarray
    draws: np.ndarray

    def __len__(self) -> int:
        return len(self.clients)


class Selection(Member):
    """Base of the family. `divisor` is what the server divides the sum of the contributions by."""

    def draw(self, seed: int, round: int, population: int) -> Cohort:
        raise NotImplementedError

    def sampling(self, population: int) -> Sampling:
        raise NotImplementedError

    def divisor(self, population: int) -> float:
        return float(self.sampling(population).cohort)

    def check(self, population: int) -> None:
        """Raises `ConfigError` when this population cannot give such cohorts."""


def _distinct(generator: np.random.Generator, population: int, cohort: int) -> Cohort:
    clients = np.sort(generator.choice(population, cohort, replace=False, shuffle=False))
    return Cohort(clients, np.zeros_like(clients))


class _Sized(Selection):
    cohort: int = Field(ge=1)

    def check(self, population: int) -> None:
        if self.cohort > population:
            raise ConfigError("selection.cohort", self.cohort, f"at most the population of {population} clients")


class Uniform(_Sized):
    """`cohort` clients uniformly without replacement (000 Alg. 1, 001 Alg. 1-3, 002 Alg. 1)."""

    kind: Literal["uniform"] = "uniform"

    def draw(self, seed: int, round: int, population: int) -> Cohort:
        return _distinct(stream(seed, Purpose.COHORT, round=round), population, self.cohort)

    def sampling(self, population: int) -> Sampling:
        return Sampling("fixed", population, self.cohort)


class Poisson(_Sized):
    """Each client on its own with probability cohort / population; the divisor stays `cohort`, so it tells nothing."""

    kind: Literal["poisson"] = "poisson"

    def draw(self, seed: int, round: int, population: int) -> Cohort:
        generator = stream(seed, Purpose.COHORT, round=round)
        # A binomial count, then a uniform subset of that size: the same law as a coin for every client, in O(cohort).
        return _distinct(generator, population, int(generator.binomial(population, self.cohort / population)))

    def sampling(self, population: int) -> Sampling:
        return Sampling("poisson", population, self.cohort)


class Full(Selection):
    """Every client in every round (001 sec. 5.3)."""

    kind: Literal["full"] = "full"

    def draw(self, seed: int, round: int, population: int) -> Cohort:
        return Cohort(np.arange(population), np.zeros(population, np.int64))

    def sampling(self, population: int) -> Sampling:
        return Sampling("full", population, population)


FAMILY: dict[str, type[Selection]] = {"uniform": Uniform, "poisson": Poisson, "full": Full}
