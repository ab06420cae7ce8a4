"""What runs would take on this machine: one timed round per kind of run that there is.

Runs are of one kind where a round of theirs is the same work: the data, the model, the methods, the
cohort, steps and batch. What was timed is kept in the cache, for this number of cores.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from raydpfl.core.hardware import cores
from raydpfl.experiment import Experiment
from raydpfl.runtime import runner
from raydpfl.simulation.plan import Plan
from raydpfl.storage.files import cache_root, keep_json, kept_json
from raydpfl.sweep.timeouts import like, work
from raydpfl.sweep.trial_folders import name_of

log = logging.getLogger("raydpfl")
TIMED = 2  # rounds, of which the last one counts: the first has much to set up
START = 0.1  # seconds between a run's end and the next one's beginning in the same process
Runs = Iterable[tuple[Experiment, int]]  # an experiment, and how often something like it is run


@dataclass(frozen=True)
class Kind:
    """Runs of one kind: an example, and of all their rounds and how many they are."""

    name: str
    example: Experiment
    runs: int
    rounds: int


@dataclass(frozen=True)
class Estimate:
    """`seconds` with all cores at work; None as long as a kind of run was not timed. `kinds` of
    runs there are, `timed` of them known.
    """

    seconds: float | None
    kinds: int
    timed: int

    def words(self) -> str:
        """What it takes here."""
        if self.seconds is None:
            return f"not timed here yet ({self.timed} of {self.kinds} kinds of runs are)"
        return f"about {duration(self.seconds)} here"


def duration(seconds: float) -> str:
    """A time in words.

    >>> duration(42), duration(150), duration(5400), duration(400_000)
    ('42 s', '2.5 min', '1.5 h', '4.6 days')
    """
    for most, unit, name in ((60, 1, "s"), (3600, 60, "min"), (172_800, 3600, "h")):
        if seconds < most:
            return f"{seconds / unit:.2g} {name}"
    return f"{seconds / 86_400:.2g} days"


def estimate(runs: Runs) -> Estimate:
    """From what has been timed on this machine."""
    found = kinds(runs)
    known = [(kind, _known(kind)) for kind in found]
    parts = [_cost(kind, times) for kind, times in known if times is not None]
    whole = len(parts) == len(found)
    at_once = min(cores(), max(1, sum(kind.runs for kind in found)))  # a run has one core
    return Estimate(sum(parts) / at_once if whole else None, len(found), len(parts))


def measure(runs: Runs, root: Path | None) -> Estimate:
    """Times what has not been timed yet, here and now, without Ray.

    Args:
        runs: What is to be run.
        root: Where data sets lie.

    Raises:
        ConfigError: A run cannot begin.
        RunError: One failed on the way.
    """
    runs = [*runs]
    left = [kind for kind in kinds(runs) if _known(kind) is None]
    level = log.level
    log.setLevel(logging.ERROR)  # what each run warns of is told when it is run
    try:
        for kind in left:
            keep_json(_path(kind), _timed(kind.example, root))
    finally:
        log.setLevel(level)
    return estimate(runs)


def kinds(runs: Runs) -> list[Kind]:
    """The kinds of runs, each experiment counted once."""
    found: dict[str, Kind] = {}
    seen = set()
    for experiment, times in runs:
        name = name_of(experiment)
        if name in seen:
            continue
        seen.add(name)
        kind = _kind(experiment)
        before = found.get(kind, Kind(kind, experiment, 0, 0))
        rounds = before.rounds + times * experiment.rounds
        found[kind] = Kind(kind, before.example, before.runs + times, rounds)
    return list(found.values())


def _kind(experiment: Experiment) -> str:
    """The name of the kind of run that this is."""
    said = (sorted(like(experiment)), work(experiment), cores())
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def _path(kind: Kind) -> Path:
    return cache_root() / "rounds" / f"{kind.name}.json"


def _known(kind: Kind) -> tuple[float, float] | None:
    """Seconds to begin a run and of a round, as they were timed."""
    try:
        begin, each = kept_json(_path(kind))
        return float(begin), float(each)
    except (OSError, ValueError, TypeError):
        return None


def _cost(kind: Kind, times: tuple[float, float]) -> float:
    """Seconds of one core."""
    begin, each = times
    return kind.runs * (begin + START) + kind.rounds * each


def _timed(experiment: Experiment, root: Path | None) -> tuple[float, float]:
    """Runs the first rounds: seconds to begin the run, and of the last of them."""
    rows: list[dict] = []

    def enough(more: list[dict]) -> bool:
        rows.extend(more)
        return len(rows) >= TIMED

    experiment = experiment.model_copy(update={"track": ()})
    Plan.make(experiment, root)  # data and noise are prepared once for all runs that share them
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="raydpfl-timed-") as folder:
        runner.run(experiment, Path(folder) / "run", data_root=root, on_rows=enough)
    whole = time.perf_counter() - began
    return max(0.0, whole - sum(row["seconds"] for row in rows)), rows[-1]["seconds"]
