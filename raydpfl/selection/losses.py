"""Power-of-choice: the clients that fit the model worst are asked first (Cho, Wang, Joshi 2020; the biased baseline of 003 sec. VI-B).

>>> clients, member = Population(sizes=[10, 20, 30, 40]), PowerOfChoice(cohort=1, pool=3)
>>> found = member.candidates(seed=0, round=0, population=clients)
>>> found.clients, member.choose(0, 0, found, losses=np.array([0.1, 0.7, 0.3])).clients
(array([1, 2, 3]), array([2]))
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, stream
from raydpfl.privacy import Sampling
from raydpfl.selection.base import Cohort, Population
from raydpfl.selection.subsets import Sized


class PowerOfChoice(Sized):
    """Of `pool` candidates, drawn without replacement in proportion to their data, the `cohort` with the largest local loss under the global model.

    `candidates` says whose losses are needed, `choose` who then takes part; `draw` cannot say without them. The losses are a query
    on the data that carries no noise: no accountant covers it, and every guarantee says so. What the accountants do count are the candidates, as
    if each of them took part and everyone knew it. The weights are uniform.
    """

    kind: Literal["power_of_choice"] = "power_of_choice"
    needs_losses: ClassVar[bool] = True
    exclusions: ClassVar[tuple[str, ...]] = ("clients are chosen by their local losses, a data-dependent query that is not noised",)

    pool: int = Field(ge=1)

    @model_validator(mode="after")
    def _pool(self) -> PowerOfChoice:
        if self.pool < self.cohort:
            raise ConfigError("selection.pool", self.pool, f"at least selection.cohort, {self.cohort}")
        return self

    def check(self, count: int) -> None:
        super().check(count)
        if self.pool > count:
            raise ConfigError("selection.pool", self.pool, f"at most the population of {count} clients")

    def candidates(self, seed: int, round: int, population: Population) -> Cohort:
        """The clients whose losses are needed. Raises `ConfigError` when fewer than `pool` have data."""
        return Cohort.of(successive(stream(seed, Purpose.COHORT, round=round), population, self.pool))

    def choose(self, seed: int, round: int, candidates: Cohort, losses: np.ndarray) -> Cohort:
        """The candidates with the largest losses, without those that drop out.

        `losses` float64 [pool], in the order of `candidates.clients`; of equal ones the lower client comes first, NaN last.
        """
        order = np.argsort(-losses, kind="stable")
        return self.drop(seed, round, Cohort.of(candidates.clients[order[: self.cohort]]))

    def select(self, seed: int, round: int, population: Population) -> Cohort:
        raise NotImplementedError("power_of_choice needs losses: candidates(...), then choose(...)")

    def sampling(self, population: Population) -> Sampling:
        return Sampling("public", len(population), self.cohort, rule=f"the largest losses of {self.pool} candidates")

    def survivors(self, seed: int, rounds: int, population: Population) -> int:
        """At least so many: had all candidates that fail in a round been chosen in it."""
        if not self.dropout:
            return self.cohort
        return max(0, self.cohort - max(self.drop(seed, t, self.candidates(seed, t, population)).lost for t in range(rounds)))


def successive(generator: np.random.Generator, population: Population, size: int, attempts: int = 8) -> np.ndarray:
    """`size` distinct clients (int64) drawn one by one, each in proportion to its samples among those that are left.

    Draws with replacement, repeats passed over, have that law at O(size log N). Where few clients hold nearly all data and `attempts` times
    2 size draws do not suffice, the rest come in the order of exponential clocks of rate n_k, which has it too, at O(N).
    """
    sums = population.remember("sums of sizes", lambda: np.cumsum(population.sizes))
    drawn = np.empty(0, np.int64)
    for _ in range(attempts):
        drawn = np.concatenate([drawn, np.searchsorted(sums, generator.integers(sums[-1], size=2 * size), side="right")])
        drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]  # each client where it came first
        if len(drawn) >= size:
            return drawn[:size]
    with np.errstate(divide="ignore"):
        clocks = generator.standard_exponential(len(population)) / population.sizes
    clocks[drawn] = np.inf
    able, missing = int(np.isfinite(clocks).sum()), size - len(drawn)
    if able < missing:
        raise ConfigError("selection.pool", size, f"at most the {able + len(drawn)} clients that have data")
    return np.concatenate([drawn, np.argsort(clocks)[:missing]])
