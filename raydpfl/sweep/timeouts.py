"""When a trial hangs: how long it may take, or show no progress, before it is killed.

With `sweep.timeout` a trial may take so many seconds from its start. Without, a trial hangs if it
has recorded no round for `MULTIPLE` times as long as the longest finished trial took from start to
end, and for at least `MIN_LIMIT` seconds. Before any trial has finished, there is no limit.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raydpfl import storage
from raydpfl.errors import FileError
from raydpfl.sweep.trials import Trial

MULTIPLE = 10.0
MIN_LIMIT = 300.0  # seconds; more than a trial waits for its directory (see `tune`)


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
        self._longest = 0.0  # seconds that a finished trial took; 0: none has finished

    def add(self, seconds: float) -> None:
        """A trial has finished after so many seconds."""
        self._longest = max(self._longest, seconds)

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
            self.add(clock_time - timing.start_time)

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
            elif self._longest and idle_seconds > max(MIN_LIMIT, MULTIPLE * self._longest):
                comparison = f"the longest of the others took {self._longest:.0f} s in all"
                yield trial, f"no round in {idle_seconds:.0f} s, where {comparison}"


def _times(folder: Path) -> tuple[int, ...]:
    """Times of change, in ns, of which one moves with every round or checkpoint."""
    with suppress(OSError, FileError):  # an address that cannot be reached just now
        times = storage.times(folder)
        if times is not None:
            return times
    paths = (folder, folder / "checkpoints", folder / "ledger.jsonl")
    return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)
