"""One run from an experiment to its directory: `run(experiment)`.

Everything that can be refused is refused first; then Ray is started or joined (not at all for
`client.actors: 0`), the coordinator takes over, and this process only shows progress. Ctrl-C leaves
a checkpoint and no process behind.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from filelock import Timeout

from raydpfl import models, storage, tracking
from raydpfl.config.overrides import flat
from raydpfl.config.registry import choose
from raydpfl.config.yaml import read
from raydpfl.core import device, signals
from raydpfl.core.hardware import peak_rss_mb, single_blas
from raydpfl.data import Shards, prepare
from raydpfl.errors import BudgetError, ConfigError, FileError, RunError, contained
from raydpfl.experiment import Experiment
from raydpfl.methods import noise
from raydpfl.models import metric_columns
from raydpfl.models.tasks import Form
from raydpfl.privacy import Guarantee
from raydpfl.runtime.launcher import Call, Launcher
from raydpfl.simulation import export
from raydpfl.simulation.plan import FREE, SHOWS, Plan
from raydpfl.simulation.provenance import KEPT, store_code, versions
from raydpfl.simulation.resolution import resolve
from raydpfl.storage.files import LOCK, holding
from raydpfl.storage.run_files import make_folder, replace_file, write_json
from raydpfl.storage.tables import read_log
from raydpfl.tracking import Tracked
from raydpfl.tracking.sender import FILE, PATIENCE, Sender, senders

log = logging.getLogger("raydpfl")
# what is done before there are rows, and once it is interrupted, in words
PREPARING = "preparing data and noise"
FIRST = "first round"
STOPPING = "stopping"
RUSHED = 5.0  # seconds that a tracker may take to end once the run is to stop
# files that a run has before it has recorded anything
WRITTEN = ("config.yaml", "trajectory.bin", "optimum.bin", "rounds.parquet", "clients.parquet")
MISSING = "interrupted before its measures ({}) were computed; --resume computes them"


@dataclass(frozen=True)
class RunResult:
    """A finished run. `out` is its directory, or the address of that; `experiment` is complete, as
    its config is written; `rounds` is the rounds table, `summary` what `summary.json` holds,
    `model` the trained module.
    """

    out: Path | str
    experiment: Experiment
    rounds: pa.Table
    summary: dict[str, Any]
    guarantees: list[Guarantee]
    model: torch.nn.Module


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    fresh_noise: bool = False,
    data_root: str | Path | None = None,
    address: str | None = None,
    on_stage: Callable[[str], object] = lambda what: None,
    on_start: Callable[[Plan], object] = lambda plan: None,
    on_rows: Callable[[list[dict]], object] = lambda rows: None,
    on_measure: Callable[[int, int], object] = lambda done, of: None,
    prepare: Callable[..., Path] = prepare,
) -> RunResult:
    """Runs an experiment.

    Args:
        experiment: what to run.
        out: the run directory, or its address (`s3://bucket/run`); None: a new one under `runs/`.
        resume: continue from the checkpoint in `out`.
        fresh_noise: with new noise, as code or processor changed; rounds done again count twice.
        data_root: the folder of data sets; None: RAYDPFL_DATA.
        address: of a Ray cluster to join. A Ray that this process had started is left running.
        on_stage: is told what is done besides rounds, in words.
        on_start: is told the plan.
        on_rows: is given the rows that each round completed, one or more; True ends the run.
        on_measure: is told the steps done, of how many, of measures after the last round.
        prepare: in place of `raydpfl.data.prepare`, where this node lacks the source files.

    Raises `ConfigError` with nothing started or written, `RunError` for a run that failed, and
    `KeyboardInterrupt` by Ctrl-C or SIGTERM, with everything saved once there was a round.
    """
    place = out if out is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    with signals.handled(), storage.at(place) as folder:
        _check_folder(folder, resume, fresh_noise)
        with single_blas(), Launcher(experiment, address) as launcher, _leaving(on_stage):
            on_stage(PREPARING)
            plan = _planned(experiment, data_root, folder if resume else None, prepare)
            drive = _Drive(plan, folder, on_stage, on_start, on_rows, on_measure)
            done = drive.begin(launcher, resume, fresh_noise)
            signals.check()
        return replace(_result(drive.plan, folder, *done), out=storage.named(place))


def _planned(
    experiment: Experiment,
    data_root: str | Path | None,
    resumed: Path | None,
    prepare: Callable[..., Path],
) -> Plan:
    """The plan of a run; raises `ConfigError` where the one in `resumed` had another."""
    with contained():
        plan = resolve(experiment, Path(data_root) if data_root else None, prepare)
        plan.check_claims()
    if resumed is not None:
        _same_run(plan.experiment, resumed)
    return plan


@contextmanager
def _leaving(on_stage: Callable[[str], object]) -> Iterator[None]:
    """Tells of an interrupt, after which a Ray that comes up is waited for."""
    try:
        yield
    except KeyboardInterrupt:
        on_stage(STOPPING)
        raise


def _check_folder(folder: Path, resume: bool, fresh_noise: bool) -> None:
    """Raises `ConfigError` unless a run can write to `folder`, or to one that it makes there."""
    if fresh_noise and not resume:
        raise ConfigError("--fresh-noise", True, "--resume as well, for a run that has begun")
    if not folder.exists():
        return
    # what a kill leaves of a run that had not begun
    left = (".config.yaml", LOCK)
    empty = folder.is_dir() and all(file.name.startswith(left) for file in folder.iterdir())
    if not empty and not (resume and folder.is_dir()):
        expected = "a new or empty directory, or --resume to go on with the run in it"
        raise ConfigError("--out", str(folder), expected)


@contextmanager
def _settings_restored() -> Iterator[None]:
    """A run without actors computes on one thread, and sets how a GPU computes; afterwards all of
    that is as before.
    """
    threads = torch.get_num_threads()
    try:
        with device.restored():
            yield
    finally:
        torch.set_num_threads(threads)


def _result(
    plan: Plan, folder: Path, summary: dict[str, Any], module: torch.nn.Module
) -> RunResult:
    guarantees = [Guarantee.from_dict(guarantee) for guarantee in summary["guarantees"]]
    path = folder / "rounds.parquet"
    # a run that released nothing has no rows
    rounds = (
        pq.ParquetFile(path).read() if path.exists() else pa.Table.from_batches([], pa.schema([]))
    )
    return RunResult(folder, plan.experiment, rounds, summary, guarantees, module)


def _module(plan: Plan, model: np.ndarray) -> tuple[torch.nn.Module, Form]:
    """The module of a run with these parameters, float32 [d], and what its samples are."""
    experiment = plan.experiment
    form = Shards.open(plan.shards).form(experiment.data.task)
    module = models.build(experiment.model, form, experiment.seed)
    return models.load(module, torch.from_numpy(model.copy())), form


@contextmanager
def _undone(folder: Path, created: bool, resume: bool) -> Iterator[None]:
    """Of a fresh run that ends before it has recorded or saved anything, as by Ctrl-C while it
    starts, nothing is left, so that it can be asked for again; the directory too if it was `made`.
    """
    try:
        yield
    except BaseException as error:
        saved = {path.name for path in folder.glob("checkpoints/round-*")} - {"round-00000000.npz"}
        ended = [
            name for name in ("ledger.jsonl", "summary.json") if os.path.lexists(folder / name)
        ]
        if not resume and not saved and not ended:
            for name in ("tensorboard", "checkpoints", KEPT):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in (*WRITTEN, FILE, LOCK):
                (folder / name).unlink(missing_ok=True)
            if created:
                with suppress(OSError):  # something else is in it by now
                    folder.rmdir()
        elif isinstance(error, FileError):
            raise FileError(f"{error}; when that is mended, go on with --resume") from None
        raise


@contextmanager
def alone(folder: Path, patience: float = 1.0) -> Iterator[None]:
    """Holds the run directory, so that no two runs write to it; a killed run holds it no longer.

    Waits `patience` seconds for it: a process that a killed run was forking holds it until it is
    another program.

    Raises:
        ConfigError: when another run holds it, or it cannot be held.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(holding(folder, patience))
        except Timeout:
            expected = "a directory that no other run is writing to"
            raise ConfigError("--out", str(folder), expected) from None
        except OSError as error:
            expected = f"a directory that can be written to ({error.strerror})"
            raise ConfigError("--out", str(folder), expected) from None
        yield


class _Drive:
    """All rounds of a run, and its summary; whatever ends the run, the clients stop and the
    directory says how it ended.

    Callbacks are as `run` says.
    """

    call: Call  # a method of the coordinator, once there is one

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        on_stage: Callable[[str], object],
        on_start: Callable[[Plan], object],
        on_rows: Callable[[list[dict]], object],
        on_measure: Callable[[int, int], object],
    ):
        self.plan = plan
        self.folder = folder
        self.on_stage = on_stage
        self.on_start = on_start
        self.on_rows = on_rows
        self.on_measure = on_measure
        self.senders: list[Sender] = []
        self.early: str | None = None  # why it ends before its last round

    def begin(
        self, launcher: Launcher, resume: bool, fresh_noise: bool
    ) -> tuple[dict[str, Any], torch.nn.Module]:
        """Takes the directory and starts what the run needs; then as `carry_out`."""
        tracking.installed(self.plan.experiment.track)
        self.plan = plan = launcher.resolve(self.plan, self.on_stage)
        folder = self.folder
        self.launcher = launcher
        signals.check()
        created = not folder.exists()
        make_folder(folder)
        with alone(folder), _undone(folder, created, resume), _settings_restored():
            config = plan.experiment.to_yaml().encode()
            replace_file(folder / "config.yaml", lambda file: file.write(config))
            store_code([plan.experiment], folder, fresh_noise)
            self.on_start(plan)
            self.began = time.monotonic()
            self.fresh_noise = fresh_noise
            self.call = launcher.coordinator(plan, str(folder), resume, fresh_noise, self.on_stage)
            self.on_stage(FIRST)
            return self.carry_out()

    def carry_out(self) -> tuple[dict[str, Any], torch.nn.Module]:
        """What `summary.json` holds in the end, and the model.

        Raises:
            KeyboardInterrupt, RunError: what ended the run early, unless it was its budget.
        """
        done = self.call("position")
        self.senders = _senders(self.plan, self.folder, done, self.fresh_noise)
        summary: dict[str, Any] = {}
        try:
            with signals.deferred():
                status, failure, whole = self._rounds(done)
                summary, module = self._summary(status, failure, whole)
        finally:
            for sender in self.senders:
                sender.close(summary, RUSHED if signals.asked() else PATIENCE)
        left = self._left(status)
        if left:
            measures = _measured_after(self.call, self.folder, left, self.on_measure)
            summary |= {**measures, "reason": self.early}
            summary["wall_seconds"] = time.monotonic() - self.began
            write_json(self.folder / "summary.json", summary)
        if failure and status != "budget":
            raise failure
        return summary, module

    def _rounds(self, done: int) -> tuple[str, BaseException | None, bool]:
        """Does the rounds that are left after `done`: the status they end with, what ended them
        early, and whether the last one is whole.
        """
        rounds = self.plan.experiment.rounds
        enough = False
        self.early = self.call("over")
        try:
            while done < rounds and not (signals.asked() or enough or self.early):
                with contained():
                    row = self.call("round")
                done += 1
                for sender in self.senders:
                    sender.put(row)
                enough = self.on_rows([row]) is True
                self.early = self.call("over") if metric_columns.evaluated(row) else None
        except BudgetError as error:
            return "budget", error, True
        except OSError as error:
            return "failed", FileError(str(error)), False
        except Exception as error:
            return "failed", error, False
        if self.early:
            return "completed", None, True
        if done < rounds and signals.asked():
            return "interrupted", KeyboardInterrupt("interrupted by a signal"), True
        return "stopped" if done < rounds else "completed", None, True

    def _left(self, status: str) -> list[str]:
        """The measures that are computed once all rounds are done."""
        lasting = [probe.kind for probe in self.plan.experiment.measure if probe.lasting]
        return lasting if status == "completed" else []

    def _summary(
        self, status: str, failure: BaseException | None, whole: bool
    ) -> tuple[dict[str, Any], torch.nn.Module]:
        """Writes `summary.json`; what it holds, and the model."""
        try:
            summary = _finish(self.call, status, failure, whole)
            module, form = _module(self.plan, summary.pop("model"))
            by_process = {"driver": peak_rss_mb(), **summary["peak_rss_mb"]}
            summary["peak_rss_mb_by_process"] = by_process
            summary["peak_rss_mb"] = max(by_process.values())
            summary["ray"] = self.launcher.summary()
            summary["versions"] = versions()
            summary["reason"] = str(failure) if failure else self.early
            summary["wall_seconds"] = time.monotonic() - self.began
            left = self._left(status)
            if left:  # it may take longer than the run, which is whole without it
                summary |= {kind: None for kind in left}
                summary["reason"] = MISSING.format(", ".join(left))
            export.write_model(self.folder, module, form, summary)
            write_json(self.folder / "summary.json", summary)
        except RunError:
            if status == "failed" and failure:
                raise failure from None
            raise
        return summary, module


def _senders(plan: Plan, folder: Path, done: int, fresh_noise: bool) -> list[Sender]:
    """What hands the rows of a run, of which so many rounds are done, to its trackers; see
    `raydpfl.tracking.sender.senders`.
    """
    trackers = plan.experiment.track
    if not trackers:
        return []
    table = read_log(folder, "rounds") if done else None
    rows = [] if table is None else table.slice(0, done).to_pylist()
    place = storage.origin(folder) or str(folder.resolve())
    parts = place.rstrip("/").split("/")
    group = parts[-3] if parts[-2:-1] == ["trials"] else ""
    name = f"{group}/{parts[-1]}".strip("/")
    config = flat(plan.experiment.to_dict())
    return senders(trackers, Tracked(folder, place, name, group, config), done, rows, fresh_noise)


def _measured_after(
    call: Call, folder: Path, kinds: list[str], on_measure: Callable[[int, int], object]
) -> dict:
    """What is measured of the finished run, a second at a time. An interrupt ends it at once."""
    try:
        done, of = call("measure_after", 0.0)
        while done < of:
            on_measure(done, of)
            signals.check()
            done, of = call("measure_after")
        on_measure(done, of)
        return call("measured_after")
    except KeyboardInterrupt:
        missing = ", ".join(kinds)
        log.warning("the run in %s is whole, but for %s, which --resume computes", folder, missing)
        raise


def _finish(call: Call, status: str, failure: BaseException | None, whole: bool) -> dict:
    try:
        with contained():
            return call("finish", status, whole) | {"model": call("parameters")}
    except Exception:
        if failure and not isinstance(failure, (KeyboardInterrupt, BudgetError)):
            raise failure from None  # the coordinator itself is gone: its end is the news, not ours
        raise


def _same_run(experiment: Experiment, folder: Path) -> None:
    """Raises `ConfigError` when `folder` holds a run that would have computed something else."""
    path = folder / "config.yaml"
    if not os.path.lexists(path):
        raise ConfigError("--resume", str(folder), "the directory of a run; it has no config.yaml")
    stored = read(path, "--resume")
    asked = experiment.to_dict()
    if not isinstance(stored, dict) or not stored:
        problem = "empty" if stored in ({}, [], "") else "no mapping"
        raise ConfigError(
            "--resume", str(folder), f"the directory of a run; its config.yaml is {problem}"
        )
    longer = _longer(experiment, stored, folder)
    for section, value in asked.items():
        before = stored.get(section)
        if section == "rounds" and longer:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            free = FREE.get(section, set()) | (
                {"rounds"} if longer and section == "noise" else set()
            )
            for key in value.keys() | before.keys():
                if value.get(key) != before.get(key) and key not in free:
                    raise ConfigError(
                        f"{section}.{key}",
                        value.get(key),
                        f"{before.get(key)!r}, as in the run to be resumed",
                    )
        elif section not in SHOWS and value != before:
            more = " or more" if section == "rounds" else ""
            raise ConfigError(section, value, f"{before!r}{more}, as in the run to be resumed")


def _longer(experiment: Experiment, stored: dict[str, Any], folder: Path) -> bool:
    """Whether it asks for more rounds than the run to be resumed, of the same noise.

    Raises:
        ConfigError: the noise would be another, as its size is for a number of rounds.
    """
    rounds = stored.get("rounds")
    if not isinstance(rounds, int) or experiment.rounds <= rounds:
        return False
    family = noise.FAMILY, noise.Noise
    before: noise.Noise = choose("noise", stored.get("noise"), *family)
    now = experiment.noise.calibrated_over(experiment.rounds)
    if now == before.calibrated_over(rounds):
        return True
    expected = f"{rounds}, as in the run to be resumed, as noise.epsilon is for all rounds; or "
    override = before.extension(rounds)
    if override is None:
        expected += f"a new run from this one's model, model.init={folder}, with noise of its own: "
        expected += "what both spend adds up, and its guarantees are of its own rounds"
    else:
        expected += f"{override} too: the noise stays as it is, and guarantees say what all "
        expected += "rounds spend"
    raise ConfigError("rounds", experiment.rounds, expected)
