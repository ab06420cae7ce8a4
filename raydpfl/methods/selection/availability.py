"""Clients that are available at public times."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.selection.availability_windows import available, fewest, nth, turns
from raydpfl.methods.selection.base import Ask, Cohort, Population, Selection
from raydpfl.methods.selection.fixed_size import distinct
from raydpfl.privacy import Sampling


class Availability(Selection):
    """`cohort` clients uniformly without replacement from those that are available, as by time zone
    or while they charge. See `raydpfl.methods.selection.availability_windows`.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"period": 6, "window": 2, "cohort": 5},)
    kind: str = "availability"
    period: int = Field(ge=1, description="rounds of a day")
    window: int = Field(ge=1, description="rounds of a day in which a client is available")
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

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        size, *phases = available(len(population), self.period, self.window, t)
        index = distinct(stream(seed, Purpose.COHORT, t=t), size, self.cohort)
        return Cohort.of(nth(index, self.period, self.window, *phases))

    def sampling(self, population: Population) -> Sampling:
        least = fewest(len(population), self.period, self.window)
        rule = f"those available, each in {self.window} rounds of {self.period}"
        if self.cohort == least:
            return Sampling("public", len(population), self.cohort, rule=rule)
        return Sampling("fixed", least, self.cohort, rule=rule)

    def open_to(self, clients: np.ndarray, t: int) -> np.ndarray:
        return (t - clients) % self.period < self.window

    def composed_rounds(self, seed: int, rounds: int, population: Population) -> np.ndarray:
        return turns(rounds, self.period, self.window)
