"""When a trial hangs: how long it may take, or show no progress, before it is killed.

With `sweep.timeout` a trial may take so many seconds from its start. Without, the limit follows
from the trials that have finished: a trial hangs if it has recorded no round for `MULTIPLE` times
as long as the longest of them took from start to end, and for at least `MIN_LIMIT` seconds. Where a
round of it is more work than one of theirs (cohort, steps, batch), the limit grows in proportion;
where none of theirs had its data, model and methods, it is at least `UNLIKE_LIMIT` seconds. Before
any trial has finished, there is no limit.
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
MIN_LIMIT = 90.0  # seconds; more than a trial waits for its directory (see `tune`)
UNLIKE_LIMIT = 300.0  # seconds
NUMBERS = ("selection.cohort", "local.steps", "local.batch")  # a round's work goes by their product
KINDS = tuple(f"{name}.kind" for name in ("selection", "local", "bounding", "noise", "server"))
WORKLOAD_KEYS = ("data.", "model.", "client.", *KINDS)


@dataclass
class _TrialTiming:
    start_time: float  # seconds of the clock
    moved: float  # when its directory was last seen to change
    times: tuple[int, ...]  # of change


class Timeouts:
    """Holds trials to `timeout` seconds, or to what the finished ones took."""

    def __init__(self, timeout: float | None, clock: Callable[[], float] = time.monotonic):
        self._timeout = timeout
        self._clock = clock
        self._timings: dict[Trial, _TrialTiming] = {}
        # kind of work, work of a round, seconds
        self._finished_trials: list[tuple[frozenset[tuple[str, str]], float, float]] = []

    def add(self, experiment: Experiment, seconds: float) -> None:
        """A trial has finished after so many seconds."""
        self._finished_trials.append((*workload(experiment), seconds))

    def begin(self, trial: Trial) -> None:
        """A trial has started to run, or has been restarted."""
        clock_time = self._clock()
        timing = self._timings.get(trial)
        start_time = timing.start_time if timing else clock_time
        self._timings[trial] = _TrialTiming(start_time, clock_time, _times(trial.folder))

    def end(self, trial: Trial) -> None:
        """A trial runs no more; others are measured by it if it has finished."""
        clock_time = self._clock()
        timing = self._timings.pop(trial, None)
        if timing and trial.finished:
            self.add(trial.experiment, clock_time - timing.start_time)

    def overdue_trials(self) -> Iterator[tuple[Trial, str]]:
        """The trials that are beyond their limit, and why, in one line."""
        clock_time = self._clock()
        for trial, timing in [*self._timings.items()]:
            times = _times(trial.folder)
            if times != timing.times:
                timing.times, timing.moved = times, clock_time
            elapsed, idle_seconds = clock_time - timing.start_time, clock_time - timing.moved
            if self._timeout is not None:
                if elapsed > self._timeout:
                    limit = f"sweep.timeout is {self._timeout:g}"
                    yield trial, f"not done after {elapsed:.0f} s, where {limit}"
            elif self._finished_trials and idle_seconds > self._limit(trial.experiment):
                max_seconds = max(seconds for *_, seconds in self._finished_trials)
                comparison = f"the longest of the others took {max_seconds:.0f} s in all"
                yield trial, f"no round in {idle_seconds:.0f} s, where {comparison}"

    def _limit(self, experiment: Experiment) -> float:
        """Seconds for which this trial may record nothing."""
        kind, size = workload(experiment)
        similar_trials = [trial for trial in self._finished_trials if trial[0] == kind]
        # how many times the work of a round of theirs this one's is; the longest of the nearest
        ratio, seconds = min(
            (max(1.0, size / trial_size), -seconds)
            for _, trial_size, seconds in similar_trials or self._finished_trials
        )
        return max(MIN_LIMIT if similar_trials else UNLIKE_LIMIT, MULTIPLE * -seconds * ratio)


def _times(folder: Path) -> tuple[int, ...]:
    """Times of change, in ns, of which one moves with every round or checkpoint."""
    with suppress(OSError, FileError):  # an address that cannot be reached just now
        times = storage.times(folder)
        if times is not None:
            return times
    paths = (folder, folder / "checkpoints", folder / "ledger.jsonl")
    return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)


def workload(experiment: Experiment) -> tuple[frozenset[tuple[str, str]], float]:
    """What trials have in common where one's time says much of another's: all that `WORKLOAD_KEYS`
    names, and which of `NUMBERS` are numbers; and the work of a round, in proportion to its
    samples, as far as the config has numbers for them.
    """
    values = meaning(experiment)
    kinds = {key: value for key, value in values.items() if key.startswith(WORKLOAD_KEYS)}
    kinds |= {key: type(values.get(key)) for key in NUMBERS}
    numbers = [values.get(key) for key in NUMBERS]
    work = math.prod(value for value in numbers if isinstance(value, int | float))
    return frozenset((key, str(value)) for key, value in kinds.items()), work
