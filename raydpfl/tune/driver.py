"""Carrying out a sweep: `run(sweep, out)`.

Everything that can be refused is refused first: a config that is no experiment, data that are not
there, a trial that no node of the cluster could ever hold. Then Ray Tune runs the trials. Each
holds a placement group, taken whole or not at all, with a bundle for its own process and one for
each of its client actors: so trials that wait hold nothing, and no two share a core.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    TrialScheduler,
)

from raydpfl import interrupts
from raydpfl.data import Shards
from raydpfl.errors import ConfigError, FileError
from raydpfl.files import LOCK
from raydpfl.plan import Plan
from raydpfl.runner import alone
from raydpfl.tracking import make_folder, replace_file
from raydpfl.tune.limits import Limits
from raydpfl.tune.proposals import Proposals, Stop, guided, optuna
from raydpfl.tune.results import Result, gather, remove, write
from raydpfl.tune.room import Room
from raydpfl.tune.sweep import FINISHED, Setting, Sweep, Trial
from raydpfl.tune.trial import TrialActor, work
from raydpfl.tune.watch import RETRIES, Watch

BUSY = 10.0  # seconds that what another sweep has started may take to let go of its directory
OUTPUTS = ("sweep.yaml", "results.parquet", "settings.parquet", "summary.json", "best.yaml")
TUNE = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # a run keeps its own tables and TensorBoard events
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "1000000000",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}


def run(
    sweep: Sweep,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    data_root: str | Path | None = None,
    address: str | None = None,
    on_change: Callable[[Sequence[Setting]], None] = lambda settings: None,
) -> Result:
    """Runs all trials of `sweep` into the directory `out` (default: a new one under `runs/`).

    `resume` goes on with the sweep in `out`, from nothing if it had not begun: finished trials are
    not run again, the others go on from their checkpoints. `data_root` is where data sets lie
    (default: the variable RAYDPFL_DATA). `address` joins a running Ray cluster, whose nodes must
    all see `out`. `on_change` is called, now and then, with all settings so far.

    The result's `problem` says what went wrong, such as trials that failed; such a sweep goes on
    with `resume`. Raises `ConfigError` before anything is started or written when the sweep cannot
    be run, `RunError` when it was cut off.
    A Ray that this process had already started is used, and left running.
    """
    folder = Path(out) if out is not None else Path("runs") / time.strftime("sweep-%Y%m%d-%H%M%S")
    folder = folder.absolute()
    root = Path(data_root).absolute() if data_root else None
    with _writable(folder):
        _check_folder(folder, resume)
        if resume:
            _same_sweep(sweep, folder)
    if sweep.search.search == "optuna":
        optuna()
    with interrupts.handled(), Room(sweep, root, address) as room, ExitStack() as stack:
        for experiment in sweep.probes:
            room.check(experiment)
        _check_metric(sweep, Plan.make(sweep.probes[0], root))
        make_folder(folder)
        course = _Course(sweep, folder, root, room, on_change)
        with _writable(folder):
            stack.enter_context(alone(folder, BUSY))
            course.prepare()
        return course.carry_out()


class _Course:
    """One carrying out of a sweep, from what lies in its directory to its result."""

    def __init__(
        self, sweep: Sweep, folder: Path, root: Path | None, room: Room, on_change: Callable
    ):
        self.sweep = sweep
        self.folder = folder
        self.root = root
        self.room = room
        self.on_change = on_change
        self.settings: list[Setting] = []
        self.began = time.monotonic()

    def prepare(self) -> None:
        """Takes up what the directory holds, and writes what the sweep is.

        Raises `ConfigError`, OSError, `FileError`.
        """
        sweep = self.sweep
        search = self.sweep.search
        _tidy(self.folder)
        source: Iterable[Setting | None] = (
            guided(sweep, self._add)
            if search.search == "optuna"
            else [self._add(values) for values in sweep.listed()]
        )
        replace_file(self.folder / "sweep.yaml", lambda file: file.write(sweep.to_yaml().encode()))
        trials = self._trials()
        over = bool(trials) and all(trial.finished for trial in trials)
        # As long as any trial runs, a scheduler must hear of the finished ones too.
        skipping = over or search.scheduler == "none"
        self.proposals = Proposals(source, lambda trial: trial.finished and skipping, self._work)
        self.waiting = self.proposals.waiting()
        if self.waiting:  # what an earlier result says holds no more
            write(self._gather(False), sweep)

    def carry_out(self) -> Result:
        """All trials, and what they leave behind. Raises `ConfigError`, `RunError`."""
        limits = self._limits()
        show = functools.partial(self.on_change, self.settings)
        watch = Watch(self.proposals, self.room, limits, show, self._write)
        cut_off = None
        if self.waiting:
            self.room.start()
            cut_off = _tune(self.sweep, self.folder, self.proposals, watch)
        _settle(self._trials(), cut_off)
        show()
        seconds = time.monotonic() - self.began
        return self._leave(self._gather(True, seconds=seconds, processes=len(watch.processes)))

    def _add(self, values: dict[str, Any]) -> Setting:
        setting = self.sweep.setting(values)
        self.sweep.add_trials(setting, self.folder / "trials")
        self.settings.append(setting)
        return setting

    def _work(self, trial: Trial) -> dict[str, Any]:
        search = self.sweep.search
        bundles = self.room.bundles(trial.experiment)
        pause = search.scheduler != "none"
        return work(trial, bundles, search.metric, self.root, pause)

    def _limits(self) -> Limits[Trial]:
        """Those that the trials are held to, by the ones that had finished before too."""
        limits: Limits[Trial] = Limits(self.sweep.search.timeout)
        for trial in self._trials():
            if trial.before and trial.summary:
                limits.add(trial.experiment, trial.summary["seconds"])
        return limits

    def _trials(self) -> list[Trial]:
        return [trial for setting in self.settings for trial in setting.trials]

    def _gather(self, over: bool, **more: Any) -> Result:
        return gather(self.folder, self.settings, self.sweep, over, more)

    def _write(self) -> None:
        with suppress(OSError, FileError):  # the last writing says so, if it fails too
            write(self._gather(False), self.sweep)

    def _leave(self, result: Result) -> Result:
        """Writes the result; one that could not be written is no result."""
        try:
            write(result, self.sweep)
        except (OSError, FileError) as error:
            problem = f"the results could not be written ({_said(error)}); go on with --resume"
            problem = f"{result.problem}; {problem}" if result.problem else problem
            result = dataclasses.replace(result, best=None, problem=problem)
            with suppress(OSError):
                for name in ("best.yaml", "summary.json"):  # of before a resume
                    remove(self.folder / name)
                _tidy(self.folder)
        return result


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Raises `ConfigError` where the directory of the sweep cannot be read or written."""
    try:
        yield
    except (OSError, FileError) as error:
        accepted = f"a directory that can be written to ({_said(error)})"
        raise ConfigError("--out", str(folder), accepted) from None


def _said(error: OSError | FileError) -> str:
    """What failed, and on which file, in one line."""
    if isinstance(error, FileError):
        return str(error)
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)


def _check_metric(sweep: Sweep, plan: Plan) -> None:
    if sweep.search.metric == "test_accuracy" and Shards.open(plan.shards).classes == 0:
        raise ConfigError(
            "sweep.metric", sweep.search.metric, "test_loss; a regression has no accuracy"
        )


def _check_folder(folder: Path, resume: bool) -> None:
    """Raises `ConfigError` unless a sweep can write to `folder`, or to one that it makes there."""
    taken = not folder.is_dir() or any(file.name != LOCK for file in folder.iterdir())
    if folder.exists() and taken and not (folder.is_dir() and resume):
        accepted = "a new or empty directory, or --resume to go on with the sweep in it"
        raise ConfigError("--out", str(folder), accepted)
    trials = folder / "trials"
    if (trials.exists() or trials.is_symlink()) and not trials.is_dir():
        accepted = "a directory whose trials/ is a directory; it is a file"
        raise ConfigError("--out", str(folder), accepted)


def _same_sweep(sweep: Sweep, folder: Path) -> None:
    """Raises `ConfigError` when `folder` holds another sweep."""
    path = folder / "sweep.yaml"
    if not path.exists():
        if folder.exists() and {*folder.iterdir()} - {*_left_over(folder), folder / LOCK}:
            raise ConfigError(
                "--resume", str(folder), "the directory of a sweep; it has no sweep.yaml"
            )
        return
    try:
        stored = Sweep.stored(folder)
    except ConfigError as error:
        if error.field == "--resume":
            raise
        raise ConfigError("--resume", str(path), f"the sweep.yaml of a sweep; {error}") from None
    difference = sweep.differs(stored)
    if difference:
        field, here, there = difference
        raise ConfigError(field, here, f"{there!r}, as in the sweep to be resumed")


def _left_over(folder: Path) -> list[Path]:
    """What a kill has left half written."""
    patterns = (".tune-*", *(f".{name}.*" for name in OUTPUTS))
    return [left for pattern in patterns for left in folder.glob(pattern)]


def _tidy(folder: Path) -> None:
    """Removes what a kill has left. Processes of the killed sweep may end, and write, only now."""
    for left in _left_over(folder):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _settle(trials: Sequence[Trial], cut_off: str | None) -> None:
    """Takes up how every trial ended.

    One that has not, as its node died while it was being stopped or as the sweep was `cut_off`,
    failed.
    """
    for trial in trials:
        if trial.status != "failed":
            trial.look()
        if trial.status not in (*FINISHED, "failed"):
            trial.status = "failed"
            trial.reason = cut_off or "its process ended before it did; it goes on with --resume"


def _tune(sweep: Sweep, folder: Path, proposals: Proposals, watch: Watch) -> str | None:
    """Has Ray Tune run what `proposals` hands out; what cut it off, if anything did.

    Ray Tune's own state is nobody's concern and is removed.
    """
    storage = stopped = cut_off = None
    try:
        storage = tempfile.mkdtemp(prefix=".tune-", dir=folder)
        with _quiet(TUNE | {"TUNE_MAX_PENDING_TRIALS_PG": str(_pending())}):
            tune.run(
                TrialActor,
                name="trials",
                search_alg=proposals,
                num_samples=-1,
                scheduler=scheduler(sweep),
                max_concurrent_trials=sweep.search.concurrent,
                reuse_actors=True,
                max_failures=RETRIES,
                raise_on_failed_trial=False,
                callbacks=[watch],
                storage_path=storage,
                verbose=0,
            )
    except Stop as stop:
        stopped = stop.error
    except (OSError, FileError) as error:  # the disk is full
        cut_off = f"{_said(error)}; it goes on with --resume"
    finally:
        if storage:
            shutil.rmtree(storage, ignore_errors=True)
    if stopped:
        gc.collect()  # what Ray Tune held of the cluster goes with its objects
        raise stopped
    return cut_off


def _pending() -> int:
    """How many trials may wait for their place at once: enough that a place that falls free finds
    the next one waiting.
    """
    return min(max(2, int(ray.cluster_resources().get("CPU", 1)) + 1), 200)


def scheduler(sweep: Sweep) -> TrialScheduler:
    """Ray Tune's, comparing trials at the same number of rounds."""
    search = sweep.search
    compared: dict[str, Any] = {
        "time_attr": "round",
        "metric": search.metric,
        "mode": "max" if sweep.sign > 0 else "min",
        "grace_period": search.grace,
    }
    if search.scheduler == "asha":
        rounds = max(experiment.rounds for experiment in sweep.probes)
        return AsyncHyperBandScheduler(
            **compared, max_t=rounds, reduction_factor=search.reduction, stop_last_trials=False
        )
    if search.scheduler == "median":
        never: Any = math.inf  # is a trial paused; Ray Tune compares it with a float
        return MedianStoppingRule(**compared, min_time_slice=never)
    return FIFOScheduler()


@contextmanager
def _quiet(environment: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    logger = logging.getLogger("ray.tune")
    level = logger.level
    os.environ.update(environment)
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
