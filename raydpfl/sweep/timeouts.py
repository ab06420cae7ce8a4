"""When a trial hangs: how long it may take, or show no progress, before it is killed.

With `sweep.timeout` a trial may take so many seconds from its start, whatever it does. Without,
the limit follows from the trials that have finished: one that has recorded no round for `MULTIPLE`
times as long as the longest of them took from start to end hangs, and no trial is held to less than
`LEAST` seconds. Where a round of it is more work than one of theirs (cohort, steps, batch) it has
as much longer; where none of theirs had its data, model and methods, no less than `UNLIKE` seconds.
Before any trial has finished, nothing is known.

>>> from pathlib import Path
>>> from raydpfl import Experiment
>>> experiment = Experiment.from_dict({})
>>> limits = Limits(None, clock=iter([0.0, 20.0, 30.0, 200.0, 240.0]).__next__)
>>> limits.begin("first", experiment, Path("nowhere"))
>>> limits.end("first", True)  # after 20 s
>>> limits.begin("second", experiment, Path("nowhere"))
>>> list(limits.overdue()), list(limits.overdue())
([], [('second', 'no round in 210 s, where the longest of the others took 20 s in all')])
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from raydpfl import storage
from raydpfl.errors import FileError
from raydpfl.experiment import Experiment
from raydpfl.sweep.trial_folders import meaning

MULTIPLE = 10.0
LEAST = 90.0  # seconds; more than a trial waits for its directory (see `raydpfl.sweep.trial`)
UNLIKE = 300.0  # seconds
NUMBERS = ("selection.cohort", "local.steps", "local.batch")  # a round's work goes by their product
KINDS = tuple(f"{name}.kind" for name in ("selection", "local", "bounding", "noise", "server"))
LIKE = ("data.", "model.", "client.", *KINDS)


Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Running:
    experiment: Experiment
    folder: Path
    began: float  # all times are seconds of the clock
    moved: float  # when its directory was last seen to change
    sign: tuple[int, ...]


@dataclass(frozen=True)
class _Finished:
    like: frozenset[tuple[str, str]]
    work: float
    seconds: float


class Limits(Generic[Key]):
    """Holds trials, known by any key, to `timeout` seconds, or to what the finished ones took."""

    def __init__(self, timeout: float | None, clock: Callable[[], float] = time.monotonic):
        self._timeout = timeout
        self._clock = clock
        self._running: dict[Key, _Running] = {}
        self._finished: list[_Finished] = []

    def add(self, experiment: Experiment, seconds: float) -> None:
        """A trial that had finished before, after so many seconds."""
        self._finished.append(_Finished(like(experiment), work(experiment), seconds))

    def begin(self, key: Key, experiment: Experiment, folder: Path) -> None:
        """A trial has begun to run in `folder`, or has begun again."""
        now = self._clock()
        began = self._running[key].began if key in self._running else now
        self._running[key] = _Running(experiment, folder, began, now, _sign(folder))

    def end(self, key: Key, well: bool) -> None:
        """A trial runs no more. `well`: it has finished, and others are measured by it."""
        now = self._clock()
        trial = self._running.pop(key, None)
        if trial and well:
            self.add(trial.experiment, now - trial.began)

    def overdue(self) -> Iterator[tuple[Key, str]]:
        """The trials that are beyond their limit, and why, in one line."""
        now = self._clock()
        for key, trial in [*self._running.items()]:
            sign = _sign(trial.folder)
            if sign != trial.sign:
                trial.sign = sign
                trial.moved = now
            taken = now - trial.began
            silent = now - trial.moved
            if self._timeout is not None:
                if taken > self._timeout:
                    yield (
                        key,
                        f"not done after {taken:.0f} s, where sweep.timeout is {self._timeout:g}",
                    )
            elif self._finished and silent > self._silence(trial.experiment):
                longest = max(each.seconds for each in self._finished)
                others = f"the longest of the others took {longest:.0f} s in all"
                yield key, f"no round in {silent:.0f} s, where {others}"

    def _silence(self, experiment: Experiment) -> float:
        """Seconds that this trial may record nothing."""
        kind = like(experiment)
        share = work(experiment)
        alike = [each for each in self._finished if each.like == kind]
        factors = [(max(1.0, share / each.work), each.seconds) for each in alike or self._finished]
        nearest = min(factor for factor, _ in factors)
        longest = max(seconds for factor, seconds in factors if factor == nearest)
        return max(LEAST if alike else UNLIKE, MULTIPLE * longest * nearest)


def _sign(folder: Path) -> tuple[int, ...]:
    """Times of change, in ns, of which one moves with every round or checkpoint."""
    with suppress(OSError, FileError):  # nothing is known of it just now
        there = storage.times(folder)
        if there is not None:
            return there
    times = []
    for path in (folder, folder / "checkpoints", folder / "ledger.jsonl"):
        try:
            times.append(path.stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


def like(experiment: Experiment) -> frozenset[tuple[str, str]]:
    """What trials have in common where one's time says much of another's: all that `LIKE` names,
    and which of `NUMBERS` are numbers."""
    values = meaning(experiment)
    kinds = {key: value for key, value in values.items() if key.startswith(LIKE)}
    kinds |= {key: type(values.get(key)) for key in NUMBERS}
    return frozenset((key, str(value)) for key, value in kinds.items())


def work(experiment: Experiment) -> float:
    """In proportion to the samples of a round, as far as the config has numbers for them."""
    values = meaning(experiment)
    work = 1.0
    for key in NUMBERS:
        value = values.get(key)
        work *= value if isinstance(value, (int, float)) else 1.0
    return work
