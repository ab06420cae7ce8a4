"""When a trial hangs: how long it may take, or show no progress, before it is killed.

With `sweep.timeout` a trial may take so many seconds from its start. Without, the limit follows
from the trials that have finished: a trial hangs if it has recorded no round for `MULTIPLE` times
as long as the longest of them took from start to end, and for at least `LEAST` seconds. Where a
round of it is more work than one of theirs (cohort, steps, batch), the limit grows in proportion;
where none of theirs had its data, model and methods, it is at least `UNLIKE` seconds. Before any
trial has finished, there is no limit.

>>> from pathlib import Path
>>> from raydpfl import Experiment
>>> trials = [Trial(name, Experiment.from_dict({}), Path("nowhere")) for name in ("a", "b")]
>>> timeouts = Timeouts(None, clock=iter([0.0, 20.0, 30.0, 200.0, 240.0]).__next__)
>>> timeouts.begin(trials[0])
>>> trials[0].status = "completed"
>>> timeouts.end(trials[0])  # after 20 s
>>> timeouts.begin(trials[1])
>>> [*timeouts.overdue()], [reason for _, reason in timeouts.overdue()]
([], ['no round in 210 s, where the longest of the others took 20 s in all'])
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raydpfl import storage
from raydpfl.errors import FileError
from raydpfl.experiment import Experiment
from raydpfl.sweep.trials import Trial, meaning

MULTIPLE = 10.0
LEAST = 90.0  # seconds; more than a trial waits for its directory (see `tune`)
UNLIKE = 300.0  # seconds
NUMBERS = ("selection.cohort", "local.steps", "local.batch")  # a round's work goes by their product
KINDS = tuple(f"{name}.kind" for name in ("selection", "local", "bounding", "noise", "server"))
LIKE = ("data.", "model.", "client.", *KINDS)


@dataclass
class _Running:
    began: float  # seconds of the clock
    moved: float  # when its directory was last seen to change
    times: tuple[int, ...]  # of change


class Timeouts:
    """Holds trials to `timeout` seconds, or to what the finished ones took."""

    def __init__(self, timeout: float | None, clock: Callable[[], float] = time.monotonic):
        self._timeout = timeout
        self._clock = clock
        self._running: dict[Trial, _Running] = {}
        # kind of work, work of a round, seconds
        self._finished: list[tuple[frozenset[tuple[str, str]], float, float]] = []

    def add(self, experiment: Experiment, seconds: float) -> None:
        """A trial has finished after so many seconds."""
        self._finished.append((like(experiment), work(experiment), seconds))

    def begin(self, trial: Trial) -> None:
        """A trial has started to run, or has been restarted."""
        now = self._clock()
        held = self._running.get(trial)
        self._running[trial] = _Running(held.began if held else now, now, _times(trial.folder))

    def end(self, trial: Trial) -> None:
        """A trial runs no more; others are measured by it if it has finished."""
        now = self._clock()
        held = self._running.pop(trial, None)
        if held and trial.finished:
            self.add(trial.experiment, now - held.began)

    def overdue(self) -> Iterator[tuple[Trial, str]]:
        """The trials that are beyond their limit, and why, in one line."""
        now = self._clock()
        for trial, held in [*self._running.items()]:
            times = _times(trial.folder)
            if times != held.times:
                held.times, held.moved = times, now
            taken, silent = now - held.began, now - held.moved
            if self._timeout is not None:
                if taken > self._timeout:
                    limit = f"sweep.timeout is {self._timeout:g}"
                    yield trial, f"not done after {taken:.0f} s, where {limit}"
            elif self._finished and silent > self._limit(trial.experiment):
                longest = max(seconds for *_, seconds in self._finished)
                others = f"the longest of the others took {longest:.0f} s in all"
                yield trial, f"no round in {silent:.0f} s, where {others}"

    def _limit(self, experiment: Experiment) -> float:
        """Seconds for which this trial may record nothing."""
        kind, size = like(experiment), work(experiment)
        alike = [trial for trial in self._finished if trial[0] == kind]
        # how many times the work of a round of theirs this one's is; the longest of the nearest
        ratio, seconds = min(
            (max(1.0, size / other), -seconds) for _, other, seconds in alike or self._finished
        )
        return max(LEAST if alike else UNLIKE, MULTIPLE * -seconds * ratio)


def _times(folder: Path) -> tuple[int, ...]:
    """Times of change, in ns, of which one moves with every round or checkpoint."""
    with suppress(OSError, FileError):  # an address that cannot be reached just now
        times = storage.times(folder)
        if times is not None:
            return times
    paths = (folder, folder / "checkpoints", folder / "ledger.jsonl")
    return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)


def like(experiment: Experiment) -> frozenset[tuple[str, str]]:
    """What trials have in common where one's time says much of another's: all that `LIKE` names,
    and which of `NUMBERS` are numbers.
    """
    values = meaning(experiment)
    kinds = {key: value for key, value in values.items() if key.startswith(LIKE)}
    kinds |= {key: type(values.get(key)) for key in NUMBERS}
    return frozenset((key, str(value)) for key, value in kinds.items())


def work(experiment: Experiment) -> float:
    """In proportion to the samples of a round, as far as the config has numbers for them."""
    values = meaning(experiment)
    numbers = [values.get(key) for key in NUMBERS]
    return math.prod(value for value in numbers if isinstance(value, int | float))
