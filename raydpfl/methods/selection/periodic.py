"""Clients that are available at public times: groups that take turns, and windows of availability.

Client k is available in the rounds t with (t - k) mod period < width. Which of the available a
round takes can be a secret, which amplifies privacy within them alone; a client's guarantee
composes over the rounds in which it is available.
"""

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.selection.base import Ask, Cohort, Population, Selection
from raydpfl.methods.selection.uniform import distinct
from raydpfl.privacy import Sampling


class Periodic(Selection):
    """Base of selections among clients that are available in `width` of every `period` rounds."""

    period: int = Field(ge=1, description="rounds from one turn of a client to its next")

    @property
    def width(self) -> int:
        """The rounds of a period in which a client is available."""
        return 1

    def fewest_available(self, count: int) -> int:
        """How many of `count` clients are available in the emptiest round."""
        blocks, rest = divmod(count, self.period)
        return blocks * self.width + max(0, rest + self.width - self.period)

    def available(self, count: int, t: int) -> int:
        """How many of `count` clients are available in round t."""
        blocks, rest = divmod(count, self.period)
        return blocks * self.width + int((self._open(t) < rest).sum())

    def clients_at(self, places: np.ndarray, t: int) -> np.ndarray:
        """The clients at these places, int64 [k], among those available in round t."""
        block, place = np.divmod(places, self.width)
        return block * self.period + self._open(t)[place]

    def _open(self, t: int) -> np.ndarray:
        """The numbers k mod period of the clients available in round t, ascending."""
        return np.sort((t - np.arange(self.width)) % self.period)

    def open_to(self, clients: np.ndarray, t: int) -> np.ndarray:
        return (t - clients) % self.period < self.width

    def composed_rounds(self, seed: int, rounds: int, population: Population) -> np.ndarray:
        blocks, rest = np.divmod(np.arange(1, rounds + 1), self.period)
        return blocks * self.width + np.minimum(rest, self.width)


class Availability(Periodic):
    """`cohort` clients uniformly without replacement from those that are available, as by time zone
    or while they charge: client k in the rounds t with (t - k) mod period < window.
    """

    examples = ({"period": 6, "window": 2, "cohort": 5},)
    kind: str = "availability"
    period: int = Field(ge=1, description="rounds of a day")
    window: int = Field(ge=1, description="rounds of a day in which a client is available")
    cohort: int = Field(ge=1, description="r, clients of a round")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.window > self.period:
            expected = f"at most selection.period, {self.period} rounds"
            raise ConfigError("selection.window", self.window, expected)
        return self

    @property
    def width(self) -> int:
        return self.window

    def fits(self, count: int) -> None:
        min_clients = self.fewest_available(count)
        if self.cohort > min_clients:
            expected = f"at most the {min_clients} clients that are available in the emptiest round"
            raise ConfigError("selection.cohort", self.cohort, expected)

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        size = self.available(len(population), t)
        places = distinct(stream(seed, Purpose.COHORT, t=t), size, self.cohort)
        return Cohort.of(self.clients_at(places, t))

    def sampling(self, population: Population) -> Sampling:
        min_clients = self.fewest_available(len(population))
        rule = f"those available, each in {self.window} rounds of {self.period}"
        if self.cohort == min_clients:
            return Sampling("public", len(population), self.cohort, rule=rule)
        return Sampling("fixed", min_clients, self.cohort, rule=rule)


class Cyclic(Periodic):
    """Groups take turns: in round t it is that of the clients k with k = t mod `period` (cyclic
    participation: Eichner et al. 2019; Cho et al. 2023).

    If `period` does not divide N, the sizes of groups differ by one. The sum over a whole group is
    then divided by N / period, and accounting assumes the smallest group.
    """

    examples = (
        {"period": 4},
        {"period": 4, "cohort": 5},
        {"period": 4, "cohort": 5, "scheme": "poisson"},
    )
    kind: str = "cyclic"
    cohort: int | None = Field(
        default=None, ge=1, description="clients of a group; None: all of it"
    )
    scheme: Literal["fixed", "poisson"] = Field(
        default="fixed",
        description="fixed: without replacement; poisson: each with probability cohort / group",
    )

    @model_validator(mode="after")
    def _check_scheme(self) -> Self:
        if self.cohort is None and self.scheme == "poisson":
            expected = "fixed where no cohort is given, as all of a group take part"
            raise ConfigError("selection.scheme", self.scheme, expected)
        return self

    def meaning(self) -> dict[str, Any]:
        facts = super().meaning()
        facts["law"] = facts.pop("scheme")  # what keys of noise call it
        return facts

    def fits(self, count: int) -> None:
        min_group = self.fewest_available(count)
        if min_group < 1:
            expected = f"at most the population of {count} clients"
            raise ConfigError("selection.period", self.period, expected)
        if self.cohort is not None and self.cohort > min_group:
            expected = f"at most the {min_group} clients of the smallest group"
            raise ConfigError("selection.cohort", self.cohort, expected)
        if self.cohort == min_group and self.scheme == "poisson":
            expected = f"fixed where all {min_group} clients of the smallest group take part"
            raise ConfigError("selection.scheme", self.scheme, expected)

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        size = self.available(len(population), t)
        if self.cohort is None:
            return Cohort.of(self.clients_at(np.arange(size), t))
        generator = stream(seed, Purpose.COHORT, t=t)
        cohort_size = self.cohort
        if self.scheme == "poisson":
            cohort_size = int(generator.binomial(size, self.cohort / size))
        return Cohort.of(self.clients_at(distinct(generator, size, cohort_size), t))

    def sampling(self, population: Population) -> Sampling:
        count = len(population)
        min_group = self.fewest_available(count)
        turns = f"each 1 round of {self.period}"
        is_whole = self.cohort == min_group and (count % self.period == 0 or not self.hides_size())
        if self.cohort is None or is_whole:
            return Sampling("public", count, min_group, rule=f"groups take turns, {turns}")
        rule = f"the group whose turn it is, {turns}"
        return Sampling(self.scheme, min_group, self.cohort, rule=rule)

    def hides_size(self) -> bool:
        return self.scheme == "poisson"

    @property
    def separation(self) -> int:
        return self.period

    def divisor(self, population: Population) -> float:
        return float(self.cohort or len(population) / self.period)
