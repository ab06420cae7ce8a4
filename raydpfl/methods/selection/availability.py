"""Clients that are available at public times: groups that take turns, and windows of availability.

Client k is available in the rounds t with (t - k) mod period < width. Which of the available a
round takes can be a secret, which amplifies privacy within them alone; a client's guarantee
composes over the rounds in which it is available.

>>> from raydpfl.methods.selection.cyclic import Cyclic
>>> clients = Population.balanced(10)
>>> [Cyclic(period=3).draw(0, t, clients).clients.tolist() for t in range(4)]
[[0, 3, 6, 9], [1, 4, 7], [2, 5, 8], [0, 3, 6, 9]]
>>> daily = Availability(period=5, window=2, cohort=2)
>>> print(daily.sampling(clients), daily.composed_rounds(0, 6, clients))
fixed size 2 of 4 (those available, each in 2 rounds of 5) [1 2 2 2 2 3]
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.selection.base import Ask, Cohort, Population, Selection
from raydpfl.methods.selection.fixed_size import distinct
from raydpfl.privacy import Sampling


class Periodic(Selection):
    """Base of selections among clients that are available in `width` of every `period` rounds."""

    period: int = Field(ge=1)

    @property
    def width(self) -> int:
        """The rounds of a period in which a client is available."""
        return 1

    def fewest(self, count: int) -> int:
        """How many of `count` clients are available in the emptiest round."""
        blocks, rest = divmod(count, self.period)
        return blocks * self.width + max(0, rest + self.width - self.period)

    def available(self, count: int, t: int) -> int:
        """How many of `count` clients are available in round t."""
        first, wrapped = self._phases(t)
        blocks, rest = divmod(count, self.period)
        later = min(max(0, rest - first), self.width - wrapped)
        return blocks * self.width + min(wrapped, rest) + later

    def clients_at(self, places: np.ndarray, t: int) -> np.ndarray:
        """The clients at these places, int64 [k], among those available in round t."""
        first, wrapped = self._phases(t)
        block, place = np.divmod(places, self.width)
        return block * self.period + np.where(place < wrapped, place, first + place - wrapped)

    def _phases(self, t: int) -> tuple[int, int]:
        """The first open phase k mod period, and how many open phases wrap around to 0."""
        first = (t - self.width + 1) % self.period
        return first, max(0, first + self.width - self.period)

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
    cohort: int = Field(ge=1)

    @model_validator(mode="after")
    def _fits(self) -> Availability:
        if self.window > self.period:
            expected = f"at most selection.period, {self.period} rounds"
            raise ConfigError("selection.window", self.window, expected)
        return self

    @property
    def width(self) -> int:
        return self.window

    def fits(self, count: int) -> None:
        least = self.fewest(count)
        if self.cohort > least:
            expected = f"at most the {least} clients that are available in the emptiest round"
            raise ConfigError("selection.cohort", self.cohort, expected)

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        size = self.available(len(population), t)
        places = distinct(stream(seed, Purpose.COHORT, t=t), size, self.cohort)
        return Cohort.of(self.clients_at(places, t))

    def sampling(self, population: Population) -> Sampling:
        least = self.fewest(len(population))
        rule = f"those available, each in {self.window} rounds of {self.period}"
        if self.cohort == least:
            return Sampling("public", len(population), self.cohort, rule=rule)
        return Sampling("fixed", least, self.cohort, rule=rule)
