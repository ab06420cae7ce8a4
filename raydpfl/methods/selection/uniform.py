"""Cohorts of distinct clients, all equally likely."""

from typing import ClassVar

import numpy as np
from pydantic import Field

from raydpfl.config.registry import Examples
from raydpfl.config.setting import Setting
from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.selection.base import Ask, Cohort, Population, Selection
from raydpfl.privacy import Sampling


def distinct(generator: np.random.Generator, count: int, size: int) -> np.ndarray:
    """`size` of the numbers 0, ..., count - 1, uniformly without replacement: int64 [size],
    ascending, in O(size).
    """
    return np.sort(generator.choice(count, size, replace=False, shuffle=False))


class Sized(Selection):
    """Base of the members with a `cohort`, which is at most the population."""

    cohort: int = Field(
        ge=1,
        description="r, clients of a round; their expected number if they are drawn independently",
    )

    def fits(self, count: int) -> None:
        if self.cohort > count:
            expected = f"at most the population of {count} clients"
            raise ConfigError("selection.cohort", self.cohort, expected)


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


class FedAvgStale(Uniform):
    """The average of FedAvg (McMahan et al. 2017; the comparison of 002 Fig. 5).

    The cohort is that of `uniform`, but the N - r clients that were not drawn count with the
    unchanged global model, so the divisor is N. It is biased towards standing still: each round
    moves r/N as far.
    """

    examples = ({"cohort": 6},)
    kind: str = "fedavg_stale"

    def check(self, setting: Setting) -> None:
        if "bounding" in setting.stateful:
            bounding = setting.kinds["bounding"]
            expected = f"another with bounding.kind {bounding}, whose mean has all clients' states"
            raise ConfigError("selection.kind", self.kind, expected)

    def divisor(self, population: Population) -> float:
        return float(len(population))
