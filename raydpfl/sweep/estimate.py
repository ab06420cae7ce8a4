"""How long runs take on this machine: one timed round for each kind of work.

Runs are of one kind where a round of theirs is the same work: the data, the model, the methods, and
the product of cohort, steps and batch. Timings are kept in the cache, for this number of cores.
"""

import hashlib
import logging
import math
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from raydpfl.core.hardware import cores
from raydpfl.experiment import Experiment
from raydpfl.runtime import runner
from raydpfl.simulation.resolution import resolve
from raydpfl.storage.files import cache_root, keep_json, read_own_json
from raydpfl.sweep.trials import meaning, name_of

log = logging.getLogger("raydpfl")
TIMED_ROUNDS = 2  # rounds, of which the last one counts: the first has much to set up
START = 0.1  # seconds between a run's end and the next one's beginning in the same process
NUMBERS = ("selection.cohort", "local.steps", "local.batch")  # a round's work goes by their product
KINDS = tuple(f"{name}.kind" for name in ("selection", "local", "bounding", "noise", "server"))
WORKLOAD_KEYS = ("data.", "model.", "client.", *KINDS)
Runs = Iterable[tuple[Experiment, int]]  # an experiment, and how often something like it is run


@dataclass(frozen=True)
class Estimate:
    """How long runs take."""

    seconds: float | None  # with all cores at work; None as long as a kind of run was not timed
    kinds: int  # of runs
    timed: int  # of these kinds

    def words(self) -> str:
        if self.seconds is None:
            return f"not timed here yet ({self.timed} of {self.kinds} kinds of runs are)"
        return f"about {duration(self.seconds)} here"


def duration(seconds: float) -> str:
    """A time in words.

    >>> duration(42), duration(150), duration(5400), duration(400_000)
    ('42 s', '2.5 min', '1.5 h', '4.6 days')
    """
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.2g} {name}"
    return f"{seconds / 86_400:.2g} days"


def estimate(runs: Runs) -> Estimate:
    """From the timings of this machine."""
    kinds = workloads(runs)
    times = {path: timing for path in kinds if (timing := _timing(path)) is not None}
    number = sum(count for load in kinds.values() for _, count in load)
    seconds = sum(
        count * (start + START + experiment.rounds * round_seconds)  # of one core
        for path, (start, round_seconds) in times.items()
        for experiment, count in kinds[path]
    )
    wall_seconds = seconds / min(cores(), max(1, number))  # a core a run
    return Estimate(wall_seconds if len(times) == len(kinds) else None, len(kinds), len(times))


def measure(runs: Runs, root: Path | None) -> Estimate:
    """Times what has not been timed yet, here and now, without Ray; `root` is where data sets lie.
    Raises `ConfigError` for a run that cannot begin, `RunError` for one that failed.
    """
    runs = [*runs]
    level = log.level
    log.setLevel(logging.ERROR)  # each run repeats its warnings when it is run
    try:
        for path, load in workloads(runs).items():
            if _timing(path) is None:
                keep_json(path, _time_rounds(load[0][0], root))
    finally:
        log.setLevel(level)
    return estimate(runs)


def workloads(runs: Runs) -> dict[Path, list[tuple[Experiment, int]]]:
    """The runs of each kind, by the file with its timing; each experiment counts once."""
    loads: dict[Path, list[tuple[Experiment, int]]] = {}
    distinct_runs: dict[str, tuple[Experiment, int]] = {}
    folder = cache_root() / "rounds"
    for run in runs:
        distinct_runs.setdefault(name_of(run[0]), run)
    for experiment, times in distinct_runs.values():
        digest = hashlib.sha256(repr((*_workload(experiment), cores())).encode()).hexdigest()[:16]
        loads.setdefault(folder / f"{digest}.json", []).append((experiment, times))
    return loads


def _workload(experiment: Experiment) -> tuple[list[tuple[str, str]], float]:
    """The kind of work: all that `WORKLOAD_KEYS` names, and which of `NUMBERS` are numbers; and the
    work of a round, in proportion to its samples, as far as the config has numbers for them.
    """
    values = meaning(experiment)
    kind = {key: str(value) for key, value in values.items() if key.startswith(WORKLOAD_KEYS)}
    numbers = [values.get(key) for key in NUMBERS]
    kind |= {key: str(type(number)) for key, number in zip(NUMBERS, numbers, strict=True)}
    work = math.prod(number for number in numbers if isinstance(number, int | float))
    return sorted(kind.items()), work


def _timing(path: Path) -> tuple[float, float] | None:
    """Seconds to start a run, and of a round, as `_time_rounds` measured them; None: not yet."""
    try:
        start, round_seconds = read_own_json(path)
        return float(start), float(round_seconds)
    except (OSError, ValueError, TypeError):
        return None


def _time_rounds(experiment: Experiment, root: Path | None) -> tuple[float, float]:
    """Runs `TIMED_ROUNDS` rounds: seconds to start the run, and seconds of the last of them."""
    rows: list[dict] = []

    def collect_rows(new_rows: list[dict]) -> bool:
        rows.extend(new_rows)
        return len(rows) >= TIMED_ROUNDS

    experiment = experiment.model_copy(update={"track": ()})
    resolve(experiment, root)  # data and noise are prepared once for all runs that share them
    start_time = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="raydpfl-timed-") as folder:
        runner.run(experiment, Path(folder) / "run", data_root=root, on_rows=collect_rows)
    elapsed = time.perf_counter() - start_time
    return max(0.0, elapsed - sum(row["seconds"] for row in rows)), rows[-1]["seconds"]
