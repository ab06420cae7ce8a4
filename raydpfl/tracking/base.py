"""The base of what shows a run while it goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from raydpfl.config.overrides import flatten
from raydpfl.config.registry import Member

# Of a summary, what `facts` gives of it next to the scores.
FACTS = ("status", "reason", "rounds", "seconds", "clients_per_second", "model_sha256")
Row = Mapping[str, Any]  # of the rounds table, by column


@dataclass(frozen=True)
class Tracked:
    """A run, as a tracker sees it.

    Args:
        folder: its directory on this machine.
        place: the whole path of its directory, or its address.
        name: what it may be called: its directory's name; of a trial, that of the sweep before it.
        group: the name of its sweep; empty for a run by itself.
        tree: its complete config.
        id: what an earlier part of this run was called by `Log.id`; empty for a run that begins.
        first: the first round, counted from 0, that this tracker has not been sent.
    """

    folder: Path
    place: str
    name: str
    group: str
    tree: Mapping[str, Any]
    id: str = ""
    first: int = 0

    @property
    def config(self) -> dict[str, Any]:
        """The config by dotted key."""
        return flatten(self.tree)


class Log:
    """One run in a tracker. All of it is called in one thread, which is no other's; whatever it
    raises becomes a warning, and the tracker is left out from then on.
    """

    id: str = ""  # by which the tracker knows the run again; in the run's trackers.json

    def write(self, rows: Sequence[Row]) -> None:
        """Shows rows of the rounds table, one or more, in the order of the rounds: each once,
        but that those of the last seconds before a kill may come again.
        """
        raise NotImplementedError

    def close(self, summary: Mapping[str, Any]) -> None:
        """The run ends, or is interrupted. `summary`: what summary.json holds; empty where nothing
        could be summed up.
        """


class Tracker(Member):
    """Base of the family: something that shows runs."""

    library: ClassVar[str] = ""  # what it needs to be installed, an extra of the package

    def is_external(self) -> bool:
        """Whether it shows runs anywhere but in their own directories."""
        return True

    def open(self, run: Tracked) -> Log:
        """Begins a run, or goes on with the one of `run.id`."""
        raise NotImplementedError

    def kept_in(self, folder: Path) -> Tracker:
        """The same, with all that it keeps in a folder: `raydpfl check` leaves nothing elsewhere.

        A tracker that writes to the run's directory alone need not say more.
        """
        return self


def numbers(row: Row) -> dict[str, float]:
    """The finite numbers of a row, but for the round.

    >>> numbers({"round": 3, "cohort": 30, "test_loss": None, "norm_mean": float("inf")})
    {'cohort': 30.0}
    """
    return {
        name: float(value)
        for name, value in row.items()
        if name != "round" and isinstance(value, (int, float)) and math.isfinite(value)
    }


def facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Of a summary what a run is found by: how it ended, its best scores, and the first guarantee
    that holds.

    >>> facts({"status": "completed", "best_test_accuracy": 0.75, "holds": [], "versions": {}})
    {'status': 'completed', 'best_test_accuracy': 0.75}
    """
    facts = {name: summary[name] for name in FACTS if summary.get(name) is not None}
    facts |= {
        name: value
        for name, value in summary.items()
        if name.startswith("best_") and isinstance(value, (int, float))
    }
    for guarantee in summary.get("holds", ())[:1]:
        facts |= {name: guarantee[name] for name in ("epsilon", "delta", "accountant", "unit")}
    return facts
