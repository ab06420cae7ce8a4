"""Carrying out a sweep: `run(sweep, out)`, and the sweep as a source of trials.

Everything that can be refused is refused first: a config that is no experiment, data that are not
there, a trial that no node of the cluster could ever hold. Then Ray Tune runs the trials.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    TrialScheduler,
)

from raydpfl import storage
from raydpfl.core import signals
from raydpfl.errors import ConfigError, FileError
from raydpfl.models.metric_columns import set_of
from raydpfl.simulation import provenance
from raydpfl.simulation.plan import Plan
from raydpfl.storage.run_files import make_folder, replace_file
from raydpfl.sweep.directory import Directory, said
from raydpfl.sweep.optuna_search import guided, optuna
from raydpfl.sweep.optuna_storage import Mirror
from raydpfl.sweep.resources import Room
from raydpfl.sweep.results import Result, gather, remove, write
from raydpfl.sweep.searcher import Proposals
from raydpfl.sweep.sweep import Setting, Sweep
from raydpfl.sweep.trial_source import Source, Trial
from raydpfl.sweep.tune_driver import drive, proposed
from raydpfl.tracking import installed

OUTPUTS = ("sweep.yaml", "results.parquet", "settings.parquet", "summary.json", "best.yaml")


def run(
    sweep: Sweep,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    data_root: str | Path | None = None,
    address: str | None = None,
    on_change: Callable[[Sequence[Setting]], None] = lambda settings: None,
) -> Result:
    """Runs all trials of `sweep` into the directory `out`, a path or an address (default: a new one
    under `runs/`).

    `resume` goes on with the sweep in `out`, from nothing if it had not begun: finished trials are
    not run again, the others go on from their checkpoints. `data_root` is where data sets lie
    (default: the variable RAYDPFL_DATA). `address` joins a running Ray cluster, whose nodes must
    all see `out`, unless that is an address. `on_change` is called, now and then, with all
    settings so far.

    The result's `problem` says what went wrong, such as trials that failed; such a sweep goes on
    with `resume`. Raises `ConfigError` before anything is started or written when the sweep cannot
    be run, `RunError` when it was cut off. A Ray that this process had started is used, and left.
    """
    place = out if out is not None else Path("runs") / time.strftime("sweep-%Y%m%d-%H%M%S")
    root = Path(data_root).absolute() if data_root else None
    with signals.handled(), storage.at(place) as folder:
        directory = _directory(folder, sweep, resume)
        if sweep.search.search == "optuna":
            optuna()
        with Room(sweep.search.cpus, root, address) as room, ExitStack() as stack:
            for experiment in sweep.probes:
                room.check(experiment)
            _check(sweep, root)
            course = Course(sweep, directory, on_change)
            make_folder(directory.folder)
            with directory.writable():
                stack.enter_context(directory.held())
                proposals = course.prepare(room)
            result = course.carry_out(proposals, room)
        return dataclasses.replace(result, out=storage.origin(directory.folder) or result.out)


def _directory(folder: Path, sweep: Sweep, resume: bool) -> Directory:
    """The directory of a sweep. Raises `ConfigError` where it cannot be that of this one."""
    directory = Directory(folder.absolute(), "sweep", OUTPUTS)
    with directory.writable():
        directory.check(resume)
        if resume:
            _same_sweep(sweep, directory)
    return directory


class Course(Source):
    """One carrying out of a sweep, from what lies in its directory to its result."""

    mark = "sweep.yaml"

    def __init__(self, sweep: Sweep, directory: Directory, on_change: Callable):
        self.sweep = sweep
        self.directory = directory
        self.folder = directory.folder
        self.on_change = on_change
        self.metric = sweep.search.metric
        self.concurrent = sweep.search.concurrent
        self.timeout = sweep.search.timeout
        self.pauses = sweep.search.scheduler != "none"
        self.settings: list[Setting] = []
        self.mirror = _mirror(sweep, directory.folder)
        self.began = time.monotonic()

    def prepare(self, room: Room) -> Proposals:
        """Takes up what the directory holds, and writes what the sweep is; the trials to run.

        Raises `ConfigError`, OSError, `FileError`.
        """
        sweep = self.sweep
        self.directory.tidy()
        self._source: Iterable[Setting | None] = (
            guided(sweep, self._add)
            if sweep.search.search == "optuna"
            else [self._add(values) for values in sweep.listed()]
        )
        replace_file(self.folder / self.mark, lambda file: file.write(sweep.to_yaml().encode()))
        provenance.keep(sweep.probes, self.folder)
        storage.push(self.folder)
        proposals = proposed(self, room)
        if proposals.waiting():  # what an earlier result says holds no more
            write(self.gather(False), sweep)
        return proposals

    def carry_out(self, proposals: Proposals, room: Room) -> Result:
        """All trials, and what they leave behind. Raises `ConfigError`, `RunError`."""
        processes = drive(self, proposals, room)
        seconds = time.monotonic() - self.began
        if self.mirror:
            self.mirror.show(self.settings, over=True)
        return self._leave(self.gather(True, seconds=seconds, processes=processes))

    @property
    def trials(self) -> list[Trial]:
        return [trial for setting in self.settings for trial in setting.trials]

    def proposals(self) -> Iterator[Trial | None]:
        """All trials of a setting before the next."""
        trials = self.trials
        over = bool(trials) and all(trial.finished for trial in trials)
        # As long as any trial runs, a scheduler must hear of the finished ones too.
        skipping = over or not self.pauses
        for setting in self._source:
            if setting is None:
                yield None
                continue
            for trial in setting.trials:
                if not (trial.finished and skipping):
                    yield trial

    def scheduler(self) -> TrialScheduler:
        return scheduler(self.sweep)

    def show(self) -> None:
        self.on_change(self.settings)

    def save(self) -> None:
        with suppress(OSError, FileError):  # the last writing says so, if it fails too
            write(self.gather(False), self.sweep)
        if self.mirror:
            self.mirror.show(self.settings)

    def gather(self, over: bool, **more: Any) -> Result:
        return gather(self.folder, self.settings, self.sweep, over, more)

    def _add(self, values: dict[str, Any]) -> Setting:
        setting = self.sweep.setting(values)
        self.sweep.add_trials(setting, self.folder / "trials")
        self.settings.append(setting)
        return setting

    def _leave(self, result: Result) -> Result:
        """Writes the result; one that could not be written is no result."""
        try:
            write(result, self.sweep)
        except (OSError, FileError) as error:
            problem = f"the results could not be written ({said(error)}); go on with --resume"
            problem = f"{result.problem}; {problem}" if result.problem else problem
            result = dataclasses.replace(result, best=None, problem=problem)
            with suppress(OSError):
                for name in ("best.yaml", "summary.json"):  # of before a resume
                    remove(self.folder / name)
                self.directory.tidy()
        return result


def _mirror(sweep: Sweep, folder: Path) -> Mirror | None:
    """What shows the sweep in an Optuna storage, if one is named. Raises `ConfigError`."""
    if sweep.search.storage is None:
        return None
    place = storage.origin(folder) or str(folder)
    return Mirror(sweep, place.rstrip("/").rpartition("/")[2])


def _check(sweep: Sweep, root: Path | None) -> None:
    """Raises `ConfigError` for data of some trial whose files are not there, for what the first
    trial's data or accountants cannot give, for a tracker that is not installed, and for a metric
    that these data do not have.
    """
    installed(sweep.probes[0].track)
    searched = any(key.partition(".")[0] == "data" for key in sweep.spaces)
    probes = sweep.probes if searched else sweep.probes[:1]
    for described in {each.data.model_dump_json(): each.data for each in probes}.values():
        described.identity(root)
    Plan.make(sweep.probes[0], root)
    metric = sweep.search.metric
    task = sweep.probes[0].data.task
    if metric.partition("_")[2] == "accuracy" and "accuracy" not in task.scores():
        expected = f"{set_of(metric)}_loss; a {task.kind} has no accuracy"
        raise ConfigError("sweep.metric", metric, expected)


def _same_sweep(sweep: Sweep, directory: Directory) -> None:
    """Raises `ConfigError` when the directory holds another sweep."""
    stored = directory.begun(Sweep.stored)
    difference = sweep.differs(stored) if stored else None
    if difference:
        field, here, there = difference
        raise ConfigError(field, here, f"{there!r}, as in the sweep to be resumed")


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
