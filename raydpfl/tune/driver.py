"""Carrying out a sweep: `run(sweep, out)`.

Everything that can be refused is refused first: a config that is no experiment, data that are not there, a trial that no node of the
cluster could ever hold. Then Ray Tune runs the trials. Each holds a placement group, taken whole or not at all, with a bundle for
its own process and one for each of its client actors: so trials that wait hold nothing, and no two share a core.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from raydpfl import data
from raydpfl.config import Experiment, read
from raydpfl.data import Shards
from raydpfl.errors import ConfigError, RunError
from raydpfl.placement import capacity, cores
from raydpfl.plan import Plan
from raydpfl.runner import alone, connect
from raydpfl.tracking import make_folder, replace_file
from raydpfl.tune.proposals import Guided, Listed, Proposals, optuna
from raydpfl.tune.results import Result, write
from raydpfl.tune.sweep import Setting, Sweep, Trial
from raydpfl.tune.trial import TrialActor, work

RETRIES = 2  # of a trial whose process died; it goes on from its checkpoint
SHOW = 0.25  # seconds between showings of what has changed
EVERY = 5.0  # seconds between looks at the cluster, and between writings of the results so far
LOST = 60.0  # seconds that a cluster may be too small for every waiting trial, before the sweep gives up
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

    `resume` goes on with the sweep in `out`, from nothing if it had not begun: finished trials are not run again, the others go on from their
    checkpoints. `data_root` is where data sets lie (default: the variable RAYDPFL_DATA). `address` joins a running Ray cluster, whose
    nodes must all see `out`. `on_change` is called, now and then, with all settings so far.

    Raises `ConfigError` before anything is started or written when the sweep cannot be run, `RunError` when every trial failed.
    A Ray that this process had already started is used, and left running.
    """
    folder = Path(out) if out is not None else Path("runs") / time.strftime("sweep-%Y%m%d-%H%M%S")
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not resume)):
        raise ConfigError("--out", str(folder), "a new or empty directory, or --resume to go on with the sweep in it")
    root, began, search = Path(data_root).absolute() if data_root else None, time.monotonic(), sweep.search
    if resume:
        _same_sweep(sweep, folder)
    if search.search == "optuna":
        optuna()
    settings: list[Setting] = []

    def add(values: dict[str, Any]) -> Setting:
        setting = sweep.setting(values)
        sweep.add_trials(setting, folder / "trials")
        settings.append(setting)
        return setting

    with _Cluster(sweep, root, address) as cluster:
        for experiment in sweep.probes:
            cluster.check(experiment)
        _check_metric(sweep, Plan.make(sweep.probes[0], root))
        make_folder(folder)
        with alone(folder):
            for left in _left_over(folder):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            replace_file(folder / "sweep.yaml", lambda file: file.write(sweep.to_yaml().encode()))
            source = Guided(sweep, add) if search.search == "optuna" else Listed([add(values) for values in sweep.listed()])
            over = bool(settings) and all(trial.finished for setting in settings for trial in setting.trials)

            def skip(trial: Trial) -> bool:  # as long as any runs, a scheduler must hear of the finished ones too
                return trial.finished and (over or search.scheduler == "none")

            def told(trial: Trial) -> dict[str, Any]:
                return work(trial, cluster.bundles(trial.experiment), search.metric, root, pause=search.scheduler != "none")

            proposals = Proposals(source, skip, told)
            watch = _Watch(proposals, cluster, lambda: on_change(settings), lambda: write(folder, settings, sweep, False, {}))
            if proposals.waiting():
                cluster.start()
                _tune(sweep, folder, proposals, watch)
            _settle(settings)
            on_change(settings)
            found = write(folder, settings, sweep, True, {"seconds": time.monotonic() - began, "processes": len(watch.processes)})
    if found.best is None:
        reasons = [trial.reason for setting in settings for trial in setting.trials if trial.reason]
        raise RunError(f"no setting has a result; the first trial that failed: {reasons[0] if reasons else 'unknown'}")
    return found


def _check_metric(sweep: Sweep, plan: Plan) -> None:
    if sweep.search.metric == "test_accuracy" and Shards.open(plan.shards).classes == 0:
        raise ConfigError("sweep.metric", sweep.search.metric, "test_loss; a regression has no accuracy")


def _same_sweep(sweep: Sweep, folder: Path) -> None:
    """Raises `ConfigError` when `folder` holds another sweep."""
    path = folder / "sweep.yaml"
    if not path.exists():
        if folder.exists() and {*folder.iterdir()} - {*_left_over(folder)}:
            raise ConfigError("--resume", str(folder), "the directory of a sweep; it has no sweep.yaml")
    elif difference := sweep.differs(read(path)):
        field, here, there = difference
        raise ConfigError(field, here, f"{there!r}, as in the sweep to be resumed")


def _left_over(folder: Path) -> list[Path]:
    """What a kill has left half written."""
    names = ("sweep.yaml", "results.parquet", "settings.parquet", "summary.json", "best.yaml")
    return [left for pattern in (".tune-*", *(f".{name}.*" for name in names)) for left in folder.glob(pattern)]


def _settle(settings: Sequence[Setting]) -> None:
    """Takes up how every trial ended; one that was cut off, as by the death of its node while it was being stopped, is interrupted."""
    for setting in settings:
        for trial in setting.trials:
            trial.look()
            if trial.summary is None and trial.status != "failed":
                trial.status = "interrupted"


class _Cluster:
    """The Ray that the trials run on: started here, joined by address, or found running in this process."""

    def __init__(self, sweep: Sweep, root: Path | None, address: str | None):
        self.sweep, self.root, self.address, self.started = sweep, root, address, False

    def __enter__(self) -> _Cluster:
        if self.address:
            connect(self.address)
            self.started = True
        self.elastic = not ray.is_initialized()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.started:
            ray.shutdown()

    def start(self) -> None:
        if self.elastic:
            connect("local", num_cpus=cores(), include_dashboard=False)
            self.started = True

    def nodes(self) -> list[dict[str, float]]:
        if not ray.is_initialized():
            return [{"CPU": cores(), "GPU": torch.cuda.device_count()}]
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def bundles(self, experiment: Experiment) -> list[dict[str, float]]:
        """What a trial holds: a bundle for its own process, which may be empty, and one for each client actor."""
        client, cpus = experiment.client, self.sweep.search.cpus
        each = {"CPU": client.num_cpus, "GPU": client.num_gpus}
        if client.actors == 0:
            return [{"CPU": 1.0 if cpus is None else cpus, "GPU": client.num_gpus}]
        count = client.actors
        if count == "per-client":
            count = experiment.data.clients or len(Shards.open(data.prepare(experiment.data, experiment.seed, self.root)).sizes)
        return [{"CPU": cpus or 0.0}, *[each] * count]

    def check(self, experiment: Experiment) -> None:
        """Raises `ConfigError` for a trial that the cluster could never hold."""
        bundles, client = self.bundles(experiment), experiment.client
        if not any(bundles[-1].values()):
            field, value = ("client.num_cpus", client.num_cpus) if len(bundles) > 1 else ("sweep.cpus", self.sweep.search.cpus)
            raise ConfigError(field, value, "above 0, so that trials that run at once can be counted")
        if client.num_gpus > 1 and client.num_gpus != int(client.num_gpus):
            raise ConfigError("client.num_gpus", client.num_gpus, "a fraction of one GPU, or a whole number")
        if not fits(bundles, nodes := self.nodes()):
            held = ", ".join(f"{node.get('CPU', 0):g} CPU and {node.get('GPU', 0):g} GPU" for node in nodes[:4]) + (", ..." if len(nodes) > 4 else "")
            own = f"{bundles[0].get('CPU', 0):g} CPU" + (f" and {client.num_gpus:g} GPU" if len(bundles) == 1 and client.num_gpus else "")
            wants = f"a trial takes {own} for its own process"
            if len(bundles) == 1:
                field, value = ("client.num_gpus", client.num_gpus) if client.num_gpus else ("sweep.cpus", self.sweep.search.cpus)
            else:
                field, value = "client.actors", client.actors
                wants += f", and {client.num_cpus:g} CPU and {client.num_gpus:g} GPU for each of {len(bundles) - 1} client actors"
            raise ConfigError(field, value, f"a trial that fits the cluster at all: {wants}; the nodes have {held}")


def fits(bundles: Sequence[dict[str, float]], nodes: Sequence[dict[str, float]]) -> bool:
    """Whether empty nodes hold a trial: its first bundle, and the others, which are alike.

    >>> fits([{"CPU": 0}, {"CPU": 1}, {"CPU": 1}], [{"CPU": 1}, {"CPU": 1}, {"CPU": 1}])
    True
    >>> fits([{"CPU": 1}, {"CPU": 2}], [{"CPU": 2}])
    False
    """
    head, *others = bundles
    for place, node in enumerate(nodes):
        left = {name: node.get(name, 0) - head.get(name, 0) for name in ("CPU", "GPU")}
        if min(left.values()) < 0:
            continue
        if not others or capacity(others[0].get("CPU", 0), others[0].get("GPU", 0), [*nodes[:place], left, *nodes[place + 1 :]]) >= len(others):
            return True
    return False


def _tune(sweep: Sweep, folder: Path, proposals: Proposals, watch: _Watch) -> None:
    """Has Ray Tune run what `proposals` hands out. Its own state is nobody's concern and is removed."""
    storage, stopped = tempfile.mkdtemp(prefix=".tune-", dir=folder), None
    try:
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
    except _Stop as stop:
        stopped = stop.error
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    if stopped:
        gc.collect()  # what Ray Tune held of the cluster goes with its objects
        raise stopped


def _pending() -> int:
    """How many trials may wait for their place at once: enough that a place that falls free finds the next one waiting."""
    return min(max(2, int(ray.cluster_resources().get("CPU", 1)) + 1), 200)


def scheduler(sweep: Sweep) -> TrialScheduler:
    """Ray Tune's, comparing trials at the same number of rounds."""
    search = sweep.search
    compared: dict[str, Any] = {"time_attr": "round", "metric": search.metric, "mode": "max" if sweep.sign > 0 else "min", "grace_period": search.grace}
    if search.scheduler == "asha":
        rounds = max(experiment.rounds for experiment in sweep.probes)
        return AsyncHyperBandScheduler(**compared, max_t=rounds, reduction_factor=search.reduction, stop_last_trials=False)
    if search.scheduler == "median":
        return MedianStoppingRule(**compared, min_time_slice=float("inf"))  # a trial is never paused
    return FIFOScheduler()


@contextmanager
def _quiet(environment: dict[str, str]) -> Iterator[None]:
    before, logger = {name: os.environ.get(name) for name in environment}, logging.getLogger("ray.tune")
    level = logger.level
    os.environ.update(environment)
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class _Stop(BaseException):
    """Leaves Ray Tune, whose own handling of errors would end the trials in good order and so mark them as stopped."""

    def __init__(self, error: Exception):
        self.error = error


class _Watch(tune.Callback):
    """Takes up what the trials report. `show` is called when something has changed, `write` more rarely."""

    def __init__(self, proposals: Proposals, cluster: _Cluster, show: Callable[[], object], write: Callable[[], object]):
        self._trials, self._cluster = proposals.running, cluster
        self._show, self._write, self._changed = show, write, False
        self._shown = self._written = self._looked = self._fitted = time.monotonic()
        self.processes: set[tuple[str, int]] = set()

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        ours = self._trials[trial.trial_id]
        if not ours.finished:
            ours.status = "running"
        self._changed = True

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        ours = self._trials[trial.trial_id]
        if refused := result.get("refused"):
            raise _Stop(ConfigError(*refused))
        self.processes.add((result["hostname"], result["pid"]))
        ours.report = {name: value for name, value in result.items() if name == "round" or name.startswith(("test_", "epsilon_"))}
        if result.get("over"):
            ours.look()
            if "failed" in result:
                ours.status, ours.reason = "failed", result["failed"]
        self._changed = True

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        ours = self._trials[trial.trial_id]
        if ours.status == "running":
            ours.status = "stopped"

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        ours = self._trials[trial.trial_id]
        ours.status, ours.reason, self._changed = "failed", f"its process died {RETRIES + 1} times; Ray's logs say why", True

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        now = time.monotonic()
        if self._changed and now - self._shown > SHOW:
            self._changed, self._shown = False, now
            self._show()
            if now - self._written > EVERY:
                self._write()
                self._written = time.monotonic()
        if now - self._looked > EVERY:
            self._looked, nodes = now, self._cluster.nodes()
            alive = [trial for trial in trials if trial.status in ("RUNNING", "PENDING")]
            if not alive or any(trial.status == "RUNNING" or fits(trial.config["bundles"], nodes) for trial in alive):
                self._fitted = now
            elif now - self._fitted > LOST:
                raise _Stop(RunError("the cluster has lost nodes and could not hold any of the trials that are left; go on with --resume"))
