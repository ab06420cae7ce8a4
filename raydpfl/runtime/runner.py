"""One run from an experiment to its directory: `run(experiment)`.

Everything that can be refused is refused first; then Ray is started or joined (not at all for
`client.actors: 0`), the coordinator takes over, and this process only shows progress. Ctrl-C leaves
a checkpoint and no process behind.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from filelock import Timeout

from raydpfl import storage, tracking
from raydpfl.core import device, signals
from raydpfl.core.hardware import peak_rss_mb, single_blas
from raydpfl.data import Shards, prepare
from raydpfl.errors import BudgetError, ConfigError, FileError, RunError, wrap_user_errors
from raydpfl.experiment import Experiment
from raydpfl.models import metric_columns
from raydpfl.privacy import Guarantee
from raydpfl.runtime.launcher import Call, Launcher
from raydpfl.simulation import export
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.provenance import versions
from raydpfl.simulation.resolution import resolve
from raydpfl.simulation.resume import check_repeatable, check_same_run, restore_resolved_keys
from raydpfl.simulation.user_code import CODE_FOLDER, store_code
from raydpfl.storage.files import LOCK, folder_lock
from raydpfl.storage.run_files import make_folder, replace_file, write_json
from raydpfl.storage.tables import read_log
from raydpfl.tracking import Tracked
from raydpfl.tracking.sender import FILE, PATIENCE, Book, Sender, senders

log = logging.getLogger("raydpfl")
# what is done before there are rows, in words
PREPARING = "preparing data and noise"
FIRST = "first round"
RUSHED = 5.0  # seconds that a tracker may take to end once the run is to stop
# files that a run has before it has recorded anything
WRITTEN = ("config.yaml", "trajectory.bin", "optimum.bin", "rounds.parquet", "clients.parquet")
MISSING = "interrupted before its measures ({}) were computed; --resume computes them"


@dataclass(frozen=True)
class RunResult:
    """A finished run. `out` is its directory, or the address of that; `experiment` is complete, as
    its config is written; `rounds` is the rounds table, `summary` what `summary.json` holds,
    `guarantees` what it says of privacy, `model` the trained module.
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
    on_stage: Callable[[str], object] = lambda text: None,
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
        on_stage: is given what is done before and after the rounds, in words.
        on_start: is given the plan.
        on_rows: is given the rows that each round completed, one or more; True ends the run.
        on_measure: is given the steps done, of how many, of measures after the last round.
        prepare: in place of `raydpfl.data.prepare`, where this node lacks the source files.

    Raises `ConfigError` with nothing started or written, `RunError` for a run that failed, and
    `KeyboardInterrupt` by Ctrl-C or SIGTERM, with everything saved once there was a round.
    """
    place = out if out is not None else storage.new("run")
    root = Path(data_root) if data_root else None
    with signals.handle_signals(), storage.open_folder(place) as folder:
        if fresh_noise and not resume:
            raise ConfigError("--fresh-noise", True, "--resume as well, for a run that has begun")
        _check_folder(folder, resume)
        if resume:
            experiment = restore_resolved_keys(experiment, folder)
        with single_blas(), Launcher(experiment.client, address, on_stage) as launcher:
            on_stage(PREPARING)
            with wrap_user_errors():
                plan = resolve(experiment, root, prepare)
                plan.check_guarantees()
            if resume:
                check_same_run(plan.experiment, folder)
                check_repeatable(plan.experiment, fresh_noise)
            tracking.check_installed(plan.experiment.track)
            plan = launcher.decide(plan)
            signals.check()
            with _take_folder(folder, resume):
                if not resume:
                    _write_config(plan.experiment, folder)
                on_start(plan)
                start_time = time.monotonic()
                call = launcher.coordinator(plan, str(folder), resume, fresh_noise)
                if resume:  # which has not been refused
                    _write_config(plan.experiment, folder, fresh_noise)
                on_stage(FIRST)
                drive = _Drive(call, plan, folder, start_time, launcher.summary())
                drive.carry_out(fresh_noise, on_rows)
                drive.measure_after(on_measure)
            signals.check()
        return drive.result(storage.location(place))


def _check_folder(folder: Path, resume: bool) -> None:
    """Raises `ConfigError` unless a run can write to `folder`, or to one that it makes there."""
    if not folder.exists():
        return
    # what a kill leaves of a run that had not begun
    prefixes = (".config.yaml", LOCK)
    is_empty = folder.is_dir() and all(file.name.startswith(prefixes) for file in folder.iterdir())
    if not is_empty and not (resume and folder.is_dir()):
        expected = "a new or empty directory, or --resume to go on with the run in it"
        raise ConfigError("--out", str(folder), expected)


@contextmanager
def _take_folder(folder: Path, resume: bool) -> Iterator[None]:
    """Holds the run directory, which is made, and restores threads and GPU settings."""
    is_new = not folder.exists()
    make_folder(folder)
    threads = torch.get_num_threads()
    try:
        with hold_folder(folder):
            _check_folder(folder, resume)  # again: another run may have ended there
            for part in folder.glob(f".{FILE}.*"):  # of a run that was killed
                part.unlink(missing_ok=True)
            with _clean_up(folder, is_new, resume), device.preserve_settings():
                yield
    finally:
        torch.set_num_threads(threads)


def _write_config(experiment: Experiment, folder: Path, fresh: bool = False) -> None:
    """Writes the config of a run, and the user-defined modules that it names, to its directory;
    `fresh`: over those modules that are stored there.
    """
    config = experiment.to_yaml().encode()
    replace_file(folder / "config.yaml", lambda file: file.write(config))
    store_code([experiment], folder, fresh)


@contextmanager
def _clean_up(folder: Path, is_new: bool, resume: bool) -> Iterator[None]:
    """Removes the files of a fresh run that ends before it has recorded or saved anything, as by
    Ctrl-C while it starts, so that it can be asked for again; a new directory is removed too.
    """
    try:
        yield
    except BaseException as error:
        checkpoints = {path.name for path in folder.glob("checkpoints/round-*")}
        checkpoints.discard("round-00000000.npz")
        record_files = [
            name for name in ("ledger.jsonl", "summary.json") if os.path.lexists(folder / name)
        ]
        if not resume and not checkpoints and not record_files:
            for name in ("tensorboard", "checkpoints", CODE_FOLDER):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in (*WRITTEN, FILE, LOCK):
                (folder / name).unlink(missing_ok=True)
            if is_new:
                with suppress(OSError):  # something else is in it by now
                    folder.rmdir()
        elif isinstance(error, FileError):
            raise FileError(f"{error}; when that is mended, go on with --resume") from None
        raise


@contextmanager
def hold_folder(folder: Path, patience: float = 1.0) -> Iterator[None]:
    """Holds the run directory, so that no two runs write to it; a killed run holds it no longer
    (waits `patience` seconds: a process that it was forking holds it until it is another program).
    Raises `ConfigError` when another run holds it, or it cannot be held.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(folder, patience))
        except Timeout:
            expected = "a directory that no other run is writing to"
            raise ConfigError("--out", str(folder), expected) from None
        except OSError as error:
            expected = f"a directory that can be written to ({error.strerror})"
            raise ConfigError("--out", str(folder), expected) from None
        yield


@dataclass
class _Drive:
    """All rounds of a run and its summary; however it ends, the directory says how."""

    call: Call  # calls a method of the coordinator
    plan: Plan
    folder: Path
    start_time: float  # `time.monotonic`
    ray: Mapping[str, Any]  # what the summary says of Ray
    status: str = "completed"
    failure: BaseException | None = None  # what has ended it early
    reason: str | None = None  # why it ends before its last round, in words

    def carry_out(self, fresh_noise: bool, on_rows: Callable[[list[dict]], object]) -> None:
        """Does the rounds that are left, and writes the results; raises what ended it early."""
        t = self.call("position")
        self.summary: dict[str, Any] = {}
        # the measures that are computed once all rounds are done
        probes = self.plan.experiment.measure
        self.final_measures = [probe.kind for probe in probes if probe.has_summary]
        senders = _senders(self.plan, self.folder, t, fresh_noise)
        try:
            with signals.defer_signals():
                whole = self._rounds(t, senders, on_rows)
                self._summarise(whole)
        finally:
            for sender in senders:
                sender.close(self.summary, RUSHED if signals.is_stop_requested() else PATIENCE)
        if self.status != "completed":
            self.final_measures = []
        if self.failure and self.status != "budget":
            raise self.failure

    def _rounds(
        self, t: int, senders: Sequence[Sender], on_rows: Callable[[list[dict]], object]
    ) -> bool:
        """Does the rounds from `t` on; whether the last one is whole."""
        rounds = self.plan.experiment.rounds
        is_stopped = False
        try:
            self.reason = self.call("stop_reason")
            if t < rounds and not self.reason:  # what an earlier end wrote holds no longer
                (self.folder / "summary.json").unlink(missing_ok=True)
                storage.push(self.folder)
            while t < rounds and not (signals.is_stop_requested() or is_stopped or self.reason):
                with wrap_user_errors():
                    row = self.call("round")
                t += 1
                for sender in senders:
                    sender.put(row)
                is_stopped = on_rows([row]) is True
                self.reason = self.call("stop_reason") if metric_columns.is_evaluated(row) else None
        except BudgetError as error:
            self.status, self.failure = "budget", error
        except Exception as error:
            self.status = "failed"
            self.failure = FileError(str(error)) if isinstance(error, OSError) else error
            return False
        else:
            if t < rounds and not self.reason:
                self.status = "interrupted" if signals.is_stop_requested() else "stopped"
                if signals.is_stop_requested():
                    self.failure = KeyboardInterrupt("interrupted by a signal")
        return True

    def _summarise(self, whole: bool) -> None:
        """Writes the model and `summary.json`."""
        try:
            with wrap_user_errors():
                summary = self.call("finish", self.status, whole)
                parameters = self.call("parameters")
        except Exception:
            if self.failure and not isinstance(self.failure, (KeyboardInterrupt, BudgetError)):
                raise self.failure from None  # the coordinator is gone: its end is the news
            raise
        by_process = {"driver": peak_rss_mb(), **summary["peak_rss_mb"]}
        self.summary = summary = summary | {
            "peak_rss_mb_by_process": by_process,
            "peak_rss_mb": max(by_process.values()),
            "ray": self.ray,
            "versions": versions(),
            "reason": str(self.failure) if self.failure else self.reason,
            "wall_seconds": time.monotonic() - self.start_time,
        }
        if self.final_measures and self.status == "completed":
            # it may take longer than the run, which is whole without it
            missing_text = MISSING.format(", ".join(self.final_measures))
            summary = summary | dict.fromkeys(self.final_measures) | {"reason": missing_text}
        form = Shards.open(self.plan.shards).form(self.plan.experiment.data.task)
        self.module = self.plan.trained(form, parameters)
        try:
            export.write_model(self.folder, self.module, form, summary)
            write_json(self.folder / "summary.json", summary)
        except RunError:
            if self.status == "failed" and self.failure:
                raise self.failure from None
            raise

    def measure_after(self, on_measure: Callable[[int, int], object]) -> None:
        """Measures the finished run, a second at a time. An interrupt ends it at once."""
        if not self.final_measures:
            return
        try:
            completed_steps, total_steps = self.call("measure_after", 0.0)
            while completed_steps < total_steps:
                on_measure(completed_steps, total_steps)
                signals.check()
                completed_steps, total_steps = self.call("measure_after")
            on_measure(completed_steps, total_steps)
            measures = self.call("measured_after")
        except KeyboardInterrupt:
            text = "the run in %s is whole, but for %s, which --resume computes"
            log.warning(text, self.folder, ", ".join(self.final_measures))
            raise
        self.summary |= {**measures, "reason": self.reason}
        self.summary["wall_seconds"] = time.monotonic() - self.start_time
        write_json(self.folder / "summary.json", self.summary)

    def result(self, out: Path | str) -> RunResult:
        path = self.folder / "rounds.parquet"
        # a run that released nothing has no rows
        empty_table = pa.Table.from_batches([], pa.schema([]))
        rounds = pq.ParquetFile(path).read() if path.exists() else empty_table
        guarantees = [Guarantee.from_dict(guarantee) for guarantee in self.summary["guarantees"]]
        return RunResult(out, self.plan.experiment, rounds, self.summary, guarantees, self.module)


def _senders(plan: Plan, folder: Path, completed_rounds: int, fresh_noise: bool) -> list[Sender]:
    """See `raydpfl.tracking.sender.senders`; of the run, `completed_rounds` rounds are done."""
    trackers = plan.experiment.track
    if not trackers:
        return []
    table = read_log(folder, "rounds") if completed_rounds else None
    rows = [] if table is None else table.slice(0, completed_rounds).to_pylist()
    place = storage.origin(folder) or str(folder.resolve())
    parts = place.rstrip("/").split("/")
    group = parts[-3] if parts[-2:-1] == ["trials"] else ""
    name = f"{group}/{parts[-1]}".strip("/")
    run = Tracked(folder, place, name, group, plan.experiment.to_dict())
    return senders(trackers, run, Book(folder), completed_rounds, rows, fresh_noise)
