"""Clients that are there at public times: groups that take turns, and windows of availability.

Client k has phase k mod `period` and is available in the `window` rounds t of every `period` with
(t - k) mod period < window. Who is available is public; which of them a round takes can be a
secret, which amplifies privacy within them alone. A client's guarantee composes over the rounds in
which it is available.

>>> clients = Population.balanced(10)
>>> [Cyclic(period=3).draw(0, t, clients).clients.tolist() for t in range(4)]
[[0, 3, 6, 9], [1, 4, 7], [2, 5, 8], [0, 3, 6, 9]]
>>> daily = Availability(period=5, window=2, cohort=2)
>>> print(daily.sampling(clients), daily.exposures(0, 6, clients))
fixed size 2 of 4 (those available, each in 2 rounds of 5) [1 2 2 2 2 3]
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, stream
from raydpfl.privacy import Sampling
from raydpfl.selection.base import Cohort, Population, Selection
from raydpfl.selection.subsets import distinct


def available(count: int, period: int, window: int, t: int) -> tuple[int, int, int]:
    """(how many of `count` clients are available in a round, the first open phase, how many open
    phases wrap around to 0).
    """
    first = (t - window + 1) % period
    wrapped = max(0, first + window - period)
    blocks, rest = divmod(count, period)
    return (
        blocks * window + min(wrapped, rest) + min(max(0, rest - first), window - wrapped),
        first,
        wrapped,
    )


def fewest(count: int, period: int, window: int) -> int:
    """How many clients are available in the emptiest round."""
    blocks, rest = divmod(count, period)
    return blocks * window + max(0, rest + window - period)


def turns(rounds: int, period: int, window: int) -> np.ndarray:
    """Int64 [rounds]: the most rounds in which any client has been available, after 1, 2, ... of
    them.
    """
    blocks, rest = np.divmod(np.arange(1, rounds + 1), period)
    return blocks * window + np.minimum(rest, window)


def nth(index: np.ndarray, period: int, window: int, first: int, wrapped: int) -> np.ndarray:
    """The clients int64 that are available, by their place among them: every `period` clients hold
    `window`, in the same phases.
    """
    block, place = np.divmod(index, window)
    return block * period + np.where(place < wrapped, place, first + place - wrapped)


class Cyclic(Selection):
    """Groups take turns: in round t the clients k with k = t mod `period` (cyclic participation:
    Eichner et al. 2019; Cho et al. 2023).

    All of the group where `cohort` is None; else `cohort` of them by `law`: `fixed`, uniformly
    without replacement, or `poisson`, each with probability cohort / (size of the group). Where
    `period` does not divide N the sizes differ by one: the whole group's sum is divided by N /
    period, so that every client counts the same, and the accountants are told of the smallest
    group.
    """

    kind: str = "cyclic"
    period: int = Field(ge=1)
    cohort: int | None = Field(default=None, ge=1)
    law: Literal["fixed", "poisson"] = "fixed"

    @model_validator(mode="after")
    def _sized(self) -> Cyclic:
        if self.cohort is None and self.law == "poisson":
            raise ConfigError(
                "selection.law", self.law, "with a cohort; without one the whole group takes part"
            )
        return self

    def fits(self, count: int) -> None:
        least = fewest(count, self.period, 1)
        if least < 1:
            raise ConfigError(
                "selection.period", self.period, f"at most the population of {count} clients"
            )
        if self.cohort is not None and self.cohort > least:
            raise ConfigError(
                "selection.cohort",
                self.cohort,
                f"at most the {least} clients of the smallest group",
            )

    def select(self, seed: int, t: int, population: Population) -> Cohort:
        size, *phases = available(len(population), self.period, 1, t)
        if self.cohort is None:
            return Cohort.of(nth(np.arange(size), self.period, 1, *phases))
        generator = stream(seed, Purpose.COHORT, t=t)
        taken = (
            self.cohort
            if self.law == "fixed"
            else int(generator.binomial(size, self.cohort / size))
        )
        return Cohort.of(nth(distinct(generator, size, taken), self.period, 1, *phases))

    def sampling(self, population: Population) -> Sampling:
        least = fewest(len(population), self.period, 1)
        whole = self.cohort == least and (self.law == "fixed" or len(population) % self.period == 0)
        if self.cohort is None or whole:
            return Sampling(
                "public",
                len(population),
                least,
                rule=f"groups take turns, each 1 round of {self.period}",
            )
        return Sampling(
            self.law,
            least,
            self.cohort,
            rule=f"the group whose turn it is, each 1 round of {self.period}",
        )

    @property
    def own_coins(self) -> bool:
        return self.law == "poisson"

    @property
    def separation(self) -> int:
        return self.period

    def divisor(self, population: Population) -> float:
        return len(population) / self.period if self.cohort is None else float(self.cohort)

    def exposures(self, seed: int, rounds: int, population: Population) -> np.ndarray:
        return turns(rounds, self.period, 1)


class Availability(Selection):
    """`cohort` clients uniformly without replacement from those that are available (time zones,
    charging at night).
    """

    kind: str = "availability"
    period: int = Field(ge=1)
    window: int = Field(ge=1)
    cohort: int = Field(ge=1)

    @model_validator(mode="after")
    def _fits(self) -> Availability:
        if self.window > self.period:
            raise ConfigError(
                "selection.window", self.window, f"at most selection.period, {self.period} rounds"
            )
        return self

    def fits(self, count: int) -> None:
        least = fewest(count, self.period, self.window)
        if self.cohort > least:
            raise ConfigError(
                "selection.cohort",
                self.cohort,
                f"at most the {least} clients that are available in the emptiest round",
            )

    def select(self, seed: int, t: int, population: Population) -> Cohort:
        size, *phases = available(len(population), self.period, self.window, t)
        index = distinct(stream(seed, Purpose.COHORT, t=t), size, self.cohort)
        return Cohort.of(nth(index, self.period, self.window, *phases))

    def sampling(self, population: Population) -> Sampling:
        least = fewest(len(population), self.period, self.window)
        rule = f"those available, each in {self.window} rounds of {self.period}"
        if self.cohort == least:
            return Sampling("public", len(population), self.cohort, rule=rule)
        return Sampling("fixed", least, self.cohort, rule=rule)

    def exposures(self, seed: int, rounds: int, population: Population) -> np.ndarray:
        return turns(rounds, self.period, self.window)
