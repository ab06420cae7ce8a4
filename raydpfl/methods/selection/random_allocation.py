"""Random allocation, and balls-in-bins sampling."""

from __future__ import annotations

from functools import lru_cache
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.selection.base import Ask, Cohort, Population, Selection
from raydpfl.privacy import Sampling


class RandomAllocation(Selection):
    """Each client takes part in exactly `per_epoch` of the rounds of every epoch, all choices of
    them equally likely, drawn afresh for every epoch and for every client by itself (Feldman and
    Shenfeld 2025). With one of them it is `balls_in_bins` (Chua et al. 2025).

    The divisor is always the expected N per_epoch / epoch, which does not tell the size of a round.
    A run may end within an epoch.
    """

    examples = ({"epoch": 4}, {"epoch": 5, "per_epoch": 2})
    kind: str = "random_allocation"
    epoch: int = Field(ge=1, description="T, rounds of an epoch, such as all of the run")
    per_epoch: int = Field(default=1, ge=1, description="k, rounds of an epoch that a client is in")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.per_epoch > self.epoch:
            expected = f"at most selection.epoch, {self.epoch} rounds"
            raise ConfigError("selection.per_epoch", self.per_epoch, expected)
        return self

    def hides_size(self) -> bool:
        return True

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        number, place = divmod(t, self.epoch)
        start_round = number * self.epoch
        clients, ends = _epoch(seed, start_round, self.epoch, self.per_epoch, len(population))
        return Cohort.of(clients[ends[place] : ends[place + 1]].astype(np.int64))

    def sampling(self, population: Population) -> Sampling:
        count = len(population)
        mean = max(1, round(self.divisor(population)))
        return Sampling(
            "random_allocation", count, mean, epoch=self.epoch, per_epoch=self.per_epoch
        )

    def divisor(self, population: Population) -> float:
        return len(population) * self.per_epoch / self.epoch

    def counted(self, cohort: Cohort, population: Population) -> float:
        return self.divisor(population) * (1 - self.dropout)


@lru_cache(maxsize=2)
def _epoch(
    seed: int, start_round: int, rounds: int, per_epoch: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The clients of an epoch that begins with round `start_round`, int32 [count per_epoch], round
    by round, and where the rounds begin and end among them, int64 [rounds + 1]. Each client's
    rounds are a uniform subset, by Floyd's algorithm (Bentley and Floyd 1987).
    """
    generator = stream(seed, Purpose.COHORT, t=start_round)
    places = np.empty((per_epoch, count), np.int32)
    for i, last in enumerate(range(rounds - per_epoch, rounds)):
        chosen_rounds = generator.integers(last + 1, size=count, dtype=np.int32)
        places[i] = np.where((places[:i] == chosen_rounds).any(0), last, chosen_rounds)
    order = np.argsort(places, axis=None, kind="stable")
    sizes = np.bincount(places.ravel(), minlength=rounds)
    return (order % count).astype(np.int32), np.append(0, np.cumsum(sizes))
