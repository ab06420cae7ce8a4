"""Groups that take turns."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.selection.availability import Periodic
from raydpfl.methods.selection.base import Ask, Cohort, Population
from raydpfl.methods.selection.fixed_size import distinct
from raydpfl.privacy import Sampling


class Cyclic(Periodic):
    """Groups take turns: in round t it is that of the clients k with k = t mod `period` (cyclic
    participation: Eichner et al. 2019; Cho et al. 2023).

    If `cohort` is None the whole group takes part. Else `cohort` of them do by `scheme`: `fixed`,
    uniformly without replacement, or `poisson`, each with probability cohort / (size of the group).
    If `period` does not divide N, the sizes of groups differ by one. The sum over a whole group is
    then divided by N / period, so that every client counts the same, and accounting assumes the
    smallest group.
    """

    examples = (
        {"period": 4},
        {"period": 4, "cohort": 5},
        {"period": 4, "cohort": 5, "scheme": "poisson"},
    )
    kind: str = "cyclic"
    cohort: int | None = Field(default=None, ge=1)
    scheme: Literal["fixed", "poisson"] = "fixed"

    @model_validator(mode="after")
    def _sized(self) -> Cyclic:
        if self.cohort is None and self.scheme == "poisson":
            expected = "fixed where no cohort is given, as all of a group take part"
            raise ConfigError("selection.scheme", self.scheme, expected)
        return self

    def meaning(self) -> dict[str, Any]:
        """See `Member.meaning`: `law` is what the scheme is called in keys of noise."""
        facts = super().meaning()
        facts["law"] = facts.pop("scheme")
        return facts

    def fits(self, count: int) -> None:
        least = self.fewest(count)
        if least < 1:
            expected = f"at most the population of {count} clients"
            raise ConfigError("selection.period", self.period, expected)
        if self.cohort is not None and self.cohort > least:
            expected = f"at most the {least} clients of the smallest group"
            raise ConfigError("selection.cohort", self.cohort, expected)

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        size = self.available(len(population), t)
        if self.cohort is None:
            return Cohort.of(self.clients_at(np.arange(size), t))
        generator = stream(seed, Purpose.COHORT, t=t)
        drawn = self.cohort
        if self.scheme == "poisson":
            drawn = int(generator.binomial(size, self.cohort / size))
        return Cohort.of(self.clients_at(distinct(generator, size, drawn), t))

    def sampling(self, population: Population) -> Sampling:
        count = len(population)
        least = self.fewest(count)
        turns = f"each 1 round of {self.period}"
        whole = self.cohort == least and (count % self.period == 0 or not self.hides_size())
        if self.cohort is None or whole:
            return Sampling("public", count, least, rule=f"groups take turns, {turns}")
        rule = f"the group whose turn it is, {turns}"
        return Sampling(self.scheme, least, self.cohort, rule=rule)

    def hides_size(self) -> bool:
        return self.scheme == "poisson"

    @property
    def separation(self) -> int:
        return self.period

    def divisor(self, population: Population) -> float:
        return float(self.cohort or len(population) / self.period)
