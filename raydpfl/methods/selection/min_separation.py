"""Cohorts among the clients that have waited long enough, as deployed systems hold it by timers on
the devices (Xu et al. 2023: Federated learning of Gboard language models with differential
privacy).
"""

from collections import deque

import numpy as np
from pydantic import Field

from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.selection.base import Ask, Cohort, Population
from raydpfl.methods.selection.uniform import Sized, distinct
from raydpfl.privacy import Sampling


class MinSeparation(Sized):
    """`cohort` clients uniformly without replacement from those who took part in none of the
    `min_separation` - 1 rounds before, and in fewer than `participations` rounds (b-min-sep
    participation: Choquette-Choo et al. 2023; Dong et al. 2026 draw each by a coin of its own).

    That cohorts are random amplifies nothing here: the guarantee holds against an observer who
    knows them. A round's cohort follows from those before; all that were drawn are kept, 4 bytes
    for each participation.
    """

    examples = ({"cohort": 3, "min_separation": 3, "participations": 60},)
    kind: str = "min_separation"
    min_separation: int = Field(
        ge=1, description="b, the fewest rounds from one participation of a client to its next"
    )
    participations: int | None = Field(
        default=None, ge=1, description="the most rounds that a client takes part in; None: any"
    )

    @property
    def separation(self) -> int:
        return self.min_separation

    def most_participations(self, rounds: int) -> int:
        limit = super().most_participations(rounds)
        return limit if self.participations is None else min(limit, self.participations)

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        key = "min_separation", seed, self.model_dump_json()
        return Cohort.of(population.cached(key, lambda: _Drawn(self, seed, population)).cohort(t))

    def sampling(self, population: Population) -> Sampling:
        rule = f"at least {self.min_separation} rounds between a client's"
        if self.participations is not None:
            rule += f", at most {self.participations} of a client"
        return Sampling("public", len(population), self.cohort, rule=rule)

    def composed_rounds(self, seed: int, rounds: int, population: Population) -> np.ndarray:
        self.draw(seed, rounds - 1, population)  # which shows whether there are enough clients
        limit = self.most_participations(rounds)
        return np.minimum(
            np.arange(self.separation, rounds + self.separation) // self.separation, limit
        )


class _Drawn:
    """The cohorts of a run, drawn one after another: in every round O(cohort)."""

    def __init__(self, member: MinSeparation, seed: int, population: Population):
        self._member = member
        self._seed = seed
        # who may take part, then others
        self._open_clients = np.arange(len(population), dtype=np.int32)
        self._count = len(population)
        self._times = np.zeros(len(population), np.int32)
        self._waiting_cohorts: deque[np.ndarray] = deque()
        self._cohorts: list[np.ndarray] = []

    def cohort(self, t: int) -> np.ndarray:
        """The clients of round t, int64 [cohort]. Raises `ConfigError` where too few may take
        part.
        """
        while len(self._cohorts) <= t:
            self._cohorts.append(self._next())
        return self._cohorts[t].astype(np.int64)

    def _next(self) -> np.ndarray:
        member = self._member
        size, t = member.cohort, len(self._cohorts)
        if self._count < size:
            expected = f"at most the {self._count} clients that may still take part in round {t}: "
            expected += "give more clients, a smaller min_separation or more participations"
            raise ConfigError("selection.cohort", size, expected)
        places = distinct(stream(self._seed, Purpose.COHORT, t=t), self._count, size)
        clients = self._open_clients[places]
        # the last of those who may take part fill the places of the drawn
        self._count -= size
        gap_mask = places < self._count
        moved_places = np.setdiff1d(np.arange(self._count, self._count + size), places)
        self._open_clients[places[gap_mask]] = self._open_clients[moved_places]
        self._times[clients] += 1
        self._waiting_cohorts.append(clients)
        if len(self._waiting_cohorts) >= member.min_separation:
            cohort = self._waiting_cohorts.popleft()
            if member.participations is not None:
                cohort = cohort[self._times[cohort] < member.participations]
            self._open_clients[self._count : self._count + len(cohort)] = cohort
            self._count += len(cohort)
        return clients
