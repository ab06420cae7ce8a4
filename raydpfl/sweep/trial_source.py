"""Where trials come from: what the driver knows of a sweep, or of a study, and no more.

A `Source` has trials, says which is next, and is told when something has changed; what the trials
are for is its own affair.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from raydpfl import storage
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.sweep.trial_folders import check, summary_of

FINISHED = ("completed", "budget", "stopped")  # a trial that is not run again
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # the colours of Ray's messages


class Stop(BaseException):
    """Leaves Ray Tune, whose own handling of errors would end the trials in good order and so mark
    them as stopped."""

    def __init__(self, error: Exception):
        self.error = error


@dataclass(eq=False)
class Trial:
    """One run, in a directory of its own. `label` is what it is called in print, but for its
    seed.
    """

    label: str
    experiment: Experiment  # `client.actors` is a number or per-client
    folder: Path
    status: str = "waiting"
    report: dict[str, Any] = field(default_factory=dict)  # the latest evaluated row
    summary: dict[str, Any] | None = None
    reason: str | None = None
    before: bool = False  # it had finished before what it belongs to began or was resumed

    @classmethod
    def found(
        cls, label: str, experiment: Experiment, folder: Path, searched: Collection[str] = ()
    ) -> Trial:
        """The trial in this directory, with what is there of it. `searched`: see `meaning`.

        Raises `ConfigError` for a directory that is there and holds something else than the trial.
        """
        trial = cls(label, experiment, folder)
        check(folder, experiment, searched, trial.named())
        trial.read()
        trial.before = trial.finished
        if not trial.before:  # it goes on, or is tried again
            trial.status = "waiting"
            trial.summary = None
            trial.reason = None
        return trial

    @property
    def seed(self) -> int:
        return self.experiment.seed

    def look(self) -> None:
        """Takes up what the directory says. Raises `FileError` where it is elsewhere, and cannot be
        fetched.
        """
        storage.refetch(self.folder)
        self.read()

    def read(self) -> None:
        """Takes up what is here of the directory."""
        summary = summary_of(self.folder)
        if summary:
            self.summary = summary
            self.status = summary["status"]
            self.reason = summary.get("reason")

    @property
    def finished(self) -> bool:
        return self.status in FINISHED

    @property
    def done(self) -> bool:
        """Nothing more will come of it."""
        return self.finished or self.status == "failed"

    def named(self) -> str:
        return f"{self.label} seed={self.seed}".strip()

    def failure(self) -> str:
        """Why it failed: the first line of the reason."""
        plain = _ESCAPES.sub("", self.reason or "").strip()
        return plain.splitlines()[0][:300] if plain else "no reason is known"

    def value(self, metric: str) -> float | None:
        """The metric at the last evaluation, of a trial that has not failed."""
        found = (self.summary or self.report).get(metric)
        if self.status == "failed" or found is None or not math.isfinite(found):
            return None
        return found


class Source(ABC):
    """Trials, in an order of its own, and whoever wants to know what becomes of them.

    All of it is called in the driver's process, between two steps of Ray Tune: it should be quick.
    """

    folder: Path  # in which Ray Tune may write while it runs
    # a file that stands beside `trials/` before the first of them is proposed, by which a node of
    # the cluster tells whether it sees the same directory
    mark: str
    metric = "test_loss"  # what its scheduler compares
    concurrent: int | None = None  # trials at once; None: as many as the cluster holds
    timeout: float | None = None  # seconds of a trial; None: see `raydpfl.sweep.timeouts`
    pauses = False  # whether a trial waits after every evaluation until it may go on

    @property
    @abstractmethod
    def trials(self) -> Sequence[Trial]:
        """All that are known so far, in order, whether or not they need to be run."""

    @abstractmethod
    def proposals(self) -> Iterator[Trial | None]:
        """The trials to run, one after another; None as long as the next one has to wait for what
        becomes of others.
        """

    def scheduler(self) -> TrialScheduler:
        """Ray Tune's, which may stop a trial before its last round."""
        return FIFOScheduler()

    def refused(self, trial: Trial, error: ConfigError) -> None:
        """A trial cannot be run; by default nothing else is then. It has failed already."""
        raise Stop(error)

    @abstractmethod
    def show(self) -> None:
        """Something has changed, and is to be shown."""

    @abstractmethod
    def save(self) -> None:
        """Something has changed, and is to be written."""
