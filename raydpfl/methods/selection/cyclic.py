"""Groups that take turns."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.selection.availability_windows import available, fewest, nth, turns
from raydpfl.methods.selection.base import Ask, Cohort, Population, Selection
from raydpfl.methods.selection.fixed_size import distinct
from raydpfl.privacy import Sampling


class Cyclic(Selection):
    """Groups take turns: in round t it is that of the clients k with k = t mod `period` (cyclic
    participation: Eichner et al. 2019; Cho et al. 2023).

    If `cohort` is None the whole group takes part. Else `cohort` of them do by `scheme`: `fixed`,
    uniformly without replacement, or `poisson`, each with probability cohort / (size of the group).
    If `period` does not divide N, the sizes of groups differ by one. The sum over a whole group is
    then divided by N / period, so that every client counts the same, and the accountants are told
    of the smallest group.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"period": 4},
        {"period": 4, "cohort": 5},
        {"period": 4, "cohort": 5, "scheme": "poisson"},
    )
    kind: str = "cyclic"
    period: int = Field(ge=1)
    cohort: int | None = Field(default=None, ge=1)
    scheme: Literal["fixed", "poisson"] = "fixed"

    @model_validator(mode="after")
    def _sized(self) -> Cyclic:
        if self.cohort is None and self.scheme == "poisson":
            raise ConfigError(
                "selection.scheme",
                self.scheme,
                "fixed where no cohort is given, as all of a group take part",
            )
        return self

    def meaning(self) -> dict[str, Any]:
        """See `Member.meaning`: `law` is what the scheme is called in keys of noise."""
        facts = super().meaning()
        facts["law"] = facts.pop("scheme")
        return facts

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

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        size, *phases = available(len(population), self.period, 1, t)
        if self.cohort is None:
            return Cohort.of(nth(np.arange(size), self.period, 1, *phases))
        generator = stream(seed, Purpose.COHORT, t=t)
        taken = self.cohort
        if self.scheme == "poisson":
            taken = int(generator.binomial(size, self.cohort / size))
        return Cohort.of(nth(distinct(generator, size, taken), self.period, 1, *phases))

    def sampling(self, population: Population) -> Sampling:
        least = fewest(len(population), self.period, 1)
        even = len(population) % self.period == 0
        whole = self.cohort == least and (even or not self.hides_size())
        if self.cohort is None or whole:
            return Sampling(
                "public",
                len(population),
                least,
                rule=f"groups take turns, each 1 round of {self.period}",
            )
        return Sampling(
            self.scheme,
            least,
            self.cohort,
            rule=f"the group whose turn it is, each 1 round of {self.period}",
        )

    def hides_size(self) -> bool:
        return self.scheme == "poisson"

    @property
    def separation(self) -> int:
        return self.period

    def divisor(self, population: Population) -> float:
        if self.cohort is None:
            return len(population) / self.period
        return float(self.cohort)

    def open_to(self, clients: np.ndarray, t: int) -> np.ndarray:
        return (t - clients) % self.period < 1

    def composed_rounds(self, seed: int, rounds: int, population: Population) -> np.ndarray:
        return turns(rounds, self.period, 1)
