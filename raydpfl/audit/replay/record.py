"""What is seen of the rounds of a replay's world."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raydpfl.methods.selection import Cohort
from raydpfl.privacy import Release
from raydpfl.simulation.plan import Plan


@dataclass(frozen=True)
class Neighbour:
    """How a neighbouring world differs from the first: in this client, which sends something else,
    or is `absent`. `first` is the place in `SENT` of what it sends in round 0. `is_rotating`: in
    every round in another client, `RoundRecord.turn`, -1 before the first.
    """

    victim: int
    absent: bool = False
    first: int = 1
    is_rotating: bool = False

    @property
    def share(self) -> int:
        """How far its part of a sum may move, in bounds."""
        return 1 if self.absent else 2

    def __str__(self) -> str:
        victim_text = f"client {self.victim}" if self.victim >= 0 else "a client of each cohort"
        return f"{victim_text} {'absent' if self.absent else 'replaced'}"


@dataclass
class RoundRecord:
    """What is seen of one round of a world."""

    # what must be the same in all worlds, by what it is in words
    flow: dict[str, Any] = field(default_factory=dict)
    cohort: Cohort | None = None
    turn: int = 0  # the client of the first world's cohort that differs where clients take turns
    bound: float | None = None
    sent: dict[int, np.ndarray] = field(default_factory=dict)  # by victim, of all its draws
    total: np.ndarray | None = None  # as it is added up: of integers in steps
    released: np.ndarray | None = None
    answers: Mapping[str, float] = field(default_factory=dict)
    # what was added to the exact values, by query
    noise: dict[str, np.ndarray] = field(default_factory=dict)
    asked: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    scores: np.ndarray | None = None  # of all clients
    histogram: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class ByClient:
    """A value by (client, draw); compared without the victim's where it may differ."""

    values: Mapping[tuple[int, int], Any]
    victim: int | None
    own: bool  # whether the victim's may differ even where it is there

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByClient):
            return NotImplemented
        victims = {self.victim, other.victim}
        # of the victims, and of the rest
        (part, rest), (other_part, other_rest) = (
            [
                {key: value for key, value in one.values.items() if (key[0] in victims) is flag}
                for flag in (True, False)
            ]
            for one in (self, other)
        )
        return rest == other_rest and (self.own or not (part and other_part) or part == other_part)


def mechanism_of(plan: Plan) -> Release:
    assert plan.mechanism is not None  # else nothing is claimed; see `raydpfl.audit.replay`
    return plan.mechanism
