"""One run from an experiment to its directory: `run(experiment)`.

Everything that can be refused is refused first; then Ray is started or joined (not at all for `client.actors: 0`), the
coordinator takes over, and this process only shows progress. Ctrl-C leaves a checkpoint and no process behind.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from raydpfl import models
from raydpfl.client import peak_rss_mb
from raydpfl.config import Experiment, read
from raydpfl.coordinator import Coordinator
from raydpfl.data import Shards
from raydpfl.errors import BudgetError, ConfigError, FileError, RunError, contained, told
from raydpfl.origin import versions
from raydpfl.placement import cores, wanted
from raydpfl.plan import FREE, Plan
from raydpfl.privacy import Guarantee
from raydpfl.tracking import TensorBoard, make_folder, replace_file, write_json

log = logging.getLogger("raydpfl")
START_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AIR_NEW_OUTPUT": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True)
class Result:
    """A finished run. `rounds` is the rounds table, `summary` what `summary.json` holds, `model` the trained module."""

    out: Path
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
    on_start: Callable[[Plan], None] = lambda plan: None,
    on_rows: Callable[[list[dict]], object] = lambda rows: None,
) -> Result:
    """Runs `experiment` into the directory `out` (default: a new one under `runs/`).

    `resume` goes on from the checkpoint in `out`; with `fresh_noise` under noise, and secret cohorts, that the run has not had before,
    so that code, versions or processor may have changed: rounds that were released beyond the checkpoint then count twice.
    `data_root` is where data sets lie (default: the variable RAYDPFL_DATA).
    `address` joins a running Ray cluster. `on_rows` is called after every round with the rows of the rounds table that it completed;
    if it returns True the run ends there, with status "stopped", and can be gone on with.

    Raises `ConfigError` before anything is started or written when the experiment cannot be run, `RunError` when it failed
    on the way. A Ray that this process had already started is used, and left running.
    """
    folder = Path(out) if out is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    if folder.exists() and (not folder.is_dir() or (any(not file.name.startswith(".config.yaml") for file in folder.iterdir()) and not resume)):
        raise ConfigError("--out", str(folder), "a new or empty directory, or --resume to go on with the run in it")
    if fresh_noise and not resume:
        raise ConfigError("--fresh-noise", True, "with --resume, for a run that has begun")
    threads = torch.get_num_threads()
    with _Ray(experiment, address) as cluster:
        with contained():
            plan = Plan.make(experiment, Path(data_root) if data_root else None)
            plan.check_claims()
        actors = cluster.actors(plan)
        if resume:
            _same_run(plan.experiment, folder)
        made = not folder.exists()
        make_folder(folder)
        with alone(folder), _undone(folder, made, resume):
            replace_file(folder / "config.yaml", lambda file: file.write(plan.experiment.to_yaml().encode()))
            cluster.start(plan, actors)
            on_start(plan)
            try:
                summary = _drive(cluster, plan, folder, actors, resume, fresh_noise, on_rows)
            finally:
                torch.set_num_threads(threads)
    module = models.build(plan.experiment.model, (shards := Shards.open(plan.shards)).shape, shards.classes, plan.experiment.seed)
    models.load(module, torch.from_numpy(summary.pop("model").copy()))
    guarantees = [Guarantee.from_dict(each) for each in summary["guarantees"]]
    return Result(folder, pq.read_table(folder / "rounds.parquet"), summary, guarantees, module)


@contextmanager
def _undone(folder: Path, made: bool, resume: bool) -> Iterator[None]:
    """Of a fresh run that ends before it has recorded or saved anything, as by Ctrl-C while it
    starts, nothing is left, so that it can be asked for again; the directory too if it was `made`."""
    try:
        yield
    except BaseException as error:
        saved = {path.name for path in folder.glob("checkpoints/round-*")} - {"round-00000000.npz"}
        ended = [name for name in ("ledger.jsonl", "summary.json") if os.path.lexists(folder / name)]
        if not resume and not saved and not ended:
            for name in ("tensorboard", "checkpoints"):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in ("config.yaml", "trajectory.bin", "rounds.parquet", "clients.parquet"):
                (folder / name).unlink(missing_ok=True)
            if made:
                with suppress(OSError):  # something else is in it by now
                    folder.rmdir()
        elif isinstance(error, FileError):
            raise FileError(f"{error}; when that is mended, go on with --resume") from None
        raise


@contextmanager
def alone(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Holds the run directory, so that no two runs write to it; a killed run holds it no longer. Waits `patience` seconds for it."""
    try:
        descriptor, until = os.open(folder, os.O_RDONLY), time.monotonic() + patience
    except OSError as error:
        accepted = f"a directory that can be read ({error.strerror})"
        raise ConfigError("--out", str(folder), accepted) from None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
            os.close(descriptor)
            raise ConfigError("--out", str(folder), "a directory that no other run is writing to") from None
    try:
        yield
    finally:
        os.close(descriptor)


class _Interrupts:
    """Ctrl-C and SIGTERM end a run after the round that is under way; a second one ends it at once, with nothing more saved."""

    def __enter__(self) -> _Interrupts:
        self.asked, self._before = False, {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        log.warning("stopping after this round; Ctrl-C again stops at once")

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _drive(
    cluster: _Ray,
    plan: Plan,
    folder: Path,
    actors: int,
    resume: bool,
    fresh_noise: bool,
    on_rows: Callable[[list[dict]], object],
) -> dict:
    """All rounds, and the summary; whatever ends the run, the clients stop and the directory says how it ended."""
    began = time.monotonic()
    with contained():
        call = cluster.coordinator(plan, str(folder), actors, resume, fresh_noise)
    board = TensorBoard(folder / "tensorboard", call("position")) if plan.experiment.measure.tensorboard else None
    status, failure, whole, enough = "completed", None, True, False
    try:
        with _Interrupts() as interrupts:
            while call("position") < plan.experiment.rounds and not interrupts.asked and not enough:
                with contained():
                    rows = call("round")
                if board:
                    board.write(rows)
                enough = on_rows(rows) is True
        if interrupts.asked:
            status, failure = "interrupted", KeyboardInterrupt("interrupted by a signal")
        elif enough and call("position") < plan.experiment.rounds:
            status = "stopped"
    except BudgetError as error:
        status, failure = "budget", error
    except OSError as error:
        status, failure, whole = "failed", FileError(str(error)), False
    except Exception as error:
        status, failure, whole = "failed", error, False
    summary = _finish(call, status, failure, whole)
    summary["peak_rss_mb"] = {"driver": peak_rss_mb(), **summary["peak_rss_mb"]}
    summary |= {"wall_seconds": time.monotonic() - began, "versions": versions(), "reason": str(failure) if failure else None}
    model = summary.pop("model")
    summary["peak_rss_mb_by_process"] = summary["peak_rss_mb"]
    summary["peak_rss_mb"] = max(summary["peak_rss_mb_by_process"].values())
    try:
        if board:
            board.close()
        write_json(folder / "summary.json", summary)
    except RunError:
        if status == "failed":
            raise failure from None
        raise
    if failure and status != "budget":
        raise failure
    return summary | {"model": model}


def _finish(call: Callable, status: str, failure: BaseException | None, whole: bool) -> dict:
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
    stored, asked = read(path, "--resume"), experiment.to_dict()
    if not isinstance(stored, dict) or not stored:
        found = "empty" if stored in ({}, [], "") else "no mapping"
        raise ConfigError("--resume", str(folder), f"the directory of a run; its config.yaml is {found}")
    for section, value in asked.items():
        before = stored.get(section)
        if isinstance(value, dict) and isinstance(before, dict):
            for key in value.keys() | before.keys():
                if value.get(key) != before.get(key) and key not in FREE.get(section, ()):
                    raise ConfigError(f"{section}.{key}", value.get(key), f"{before.get(key)!r}, as in the run to be resumed")
        elif value != before:
            raise ConfigError(section, value, f"{before!r}, as in the run to be resumed")


def connect(address: str, **options: Any) -> None:
    """Starts Ray (address local: a cluster of this process's own, whatever else runs here) or joins one. Raises `ConfigError`, `RunError`."""
    for name, value in START_RAY.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        raise ConfigError("--address", address, "none: this process is connected to a Ray cluster already")
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host.rpartition("/")[2], int(port)), timeout=5).close()
        ray.init(address=address, logging_level="ERROR", log_to_driver=False, **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        if address == "local":
            raise RunError(f"Ray could not be started: {error}") from None
        entry = "a running Ray cluster (if it asks for a token, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH give it)"
        raise ConfigError("--address", address, f"the address of {entry}: {error}") from None


class _Ray:
    """Ray for one run: started here, joined by address, or found running in this process; or not used at all.

    A run that finds itself in a placement group (the trial of a sweep) keeps to the group: its coordinator is this process,
    and its clients take the group's bundles.
    """

    def __init__(self, experiment: Experiment, address: str | None):
        self.inline = experiment.client.actors == 0
        if self.inline and address:
            raise ConfigError("--address", address, "client.actors above 0; 0 runs in this process, without Ray")
        self.address, self.started = address, False
        self.client = experiment.client

    def __enter__(self) -> _Ray:
        if self.inline and self.client.num_gpus > 0 and not torch.cuda.is_available():
            raise ConfigError("client.num_gpus", self.client.num_gpus, "0; this machine has no GPU")
        if not self.inline:
            import ray

            if self.address:
                self._connect(self.address)
            self.elastic = not ray.is_initialized()
            self.group = None if self.elastic else ray.util.get_current_placement_group()
            if self.elastic:  # what this machine alone can refuse, before the data are touched
                wanted(self.client, 1, 1, self._nodes(), True)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.started:
            import ray

            ray.shutdown()

    def _connect(self, address: str, **options: Any) -> None:
        connect(address, **options)
        self.started = True

    def _nodes(self) -> list[dict[str, float]]:
        if self.elastic:
            return [{"CPU": cores(), "GPU": torch.cuda.device_count()}]
        if self.group:
            return self.group.bundle_specs
        import ray

        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def actors(self, plan: Plan) -> int:
        """How many client actors the run takes; 0 inline."""
        if self.inline:
            return 0
        experiment = plan.experiment
        most = max(1, round(plan.cohort / experiment.client.lane))
        return wanted(experiment.client, len(plan.population), most, self._nodes(), self.elastic, plan.d)

    def start(self, plan: Plan, actors: int) -> None:
        if not self.inline and self.elastic:
            logical = max(cores(), int(actors * self.client.num_cpus + 0.999))
            self._connect("local", num_cpus=logical, include_dashboard=False)

    def coordinator(self, plan: Plan, out: str, actors: int, resume: bool, fresh_noise: bool) -> Callable:
        """`call(method, *arguments)` on the coordinator, an actor beside this process or a plain object in it."""
        path = tuple(entry for entry in sys.path if entry)
        if self.inline or self.group:
            plain = Coordinator(plan, out, actors, resume, path, fresh_noise)

            def inline(method: str, *arguments: Any) -> Any:
                try:
                    return getattr(plain, method)(*arguments)
                except (RunError, ConfigError, MemoryError, OSError):
                    raise
                except Exception as error:  # an own member may raise anything
                    raise RunError(f"the run failed: {told(error)}") from error

            inline("start")
            return inline
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote = ray.remote(Coordinator).options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
        actor = remote.remote(plan, out, actors, resume, path, fresh_noise)

        def call(method: str, *arguments: Any) -> Any:
            try:
                return ray.get(getattr(actor, method).remote(*arguments))
            except ray.exceptions.RayTaskError as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, OSError):
                    raise FileError(str(cause)) from None
                raise cause if isinstance(cause, (RunError, ConfigError)) else RunError(f"the coordinator failed\n{error}") from None
            except ray.exceptions.RayActorError as error:
                raise RunError(f"the coordinator died: {' '.join(str(error).split())[:300]}; go on with --resume") from None

        call("start")
        return call
