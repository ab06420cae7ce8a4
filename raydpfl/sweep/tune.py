"""Ray Tune, which runs the trials of sweeps and studies: `execute(runners, resources, resume)`.

A trial is `raydpfl.runtime.runner.run` in its own directory, in a thread of a `TrialActor`, which
is the coordinator of its client actors. It holds a placement group, taken whole or not at all, with
a bundle for its own process and one for each client actor: so trials that wait hold nothing, and no
two share a core.
"""

import gc
import itertools
import logging
import math
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.search import Searcher

from raydpfl import storage
from raydpfl.data import prepare
from raydpfl.errors import ConfigError, FileError, RunError, traceback_text
from raydpfl.experiment import Experiment
from raydpfl.models import metric_columns
from raydpfl.runtime import runner as runs
from raydpfl.runtime.file_transfer import RemotePreparation
from raydpfl.runtime.session import place
from raydpfl.simulation.user_code import search
from raydpfl.storage.files import cache_root, data_root
from raydpfl.storage.tables import read_log
from raydpfl.sweep.resources import Resources, fits
from raydpfl.sweep.search_runner import SearchRunner, describe
from raydpfl.sweep.timeouts import Timeouts
from raydpfl.sweep.trials import FINISHED_STATUSES, Trial

RETRIES = 2  # of a trial whose process died; it continues from its checkpoint
LOOK = 0.5  # seconds between two looks at the trials and the cluster
SAVE = 5.0  # seconds between two writings of the results so far, at least
SAVE_SHARE = 0.05  # of the time that passes, which these writings may take
# seconds that a cluster may be too small for every waiting trial, before all is given up
MAX_MISFIT_SECONDS = 60.0
SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # a run keeps its own tables and TensorBoard events
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "1000000000",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}

END_TIMEOUT = 300.0  # seconds that a trial may take to end its round after it was asked to stop
VISIBILITY_HINT = "must see what RAYDPFL_CACHE and PYTHONPATH name where it was started from"
PATIENCE = 60.0  # seconds that the processes of a killed sweep may take to release a directory


class StopTune(BaseException):
    """Leaves Ray Tune with an error, in `args`. Its own handling of errors would end the trials in
    good order and so mark them as stopped.
    """


def execute(runners: Sequence[SearchRunner], resources: Resources, resume: bool) -> list[Any]:
    """Runs sweeps or studies to their results, in order. Several take turns, so that while one
    waits for its results the others continue, and the processes of trials are started once.
    Raises `ConfigError` before anything is started or written, `RunError` if all was cut off.
    """
    for runner in runners:
        runner.check_directory(resume)
    with resources, ExitStack() as stack:
        for runner in runners:
            runner.check(resources)
        for runner in runners:
            stack.enter_context(runner.started(resume))
        processes = _run_trials(runners, resources)
        return [runner.finish(processes) for runner in runners]


def _run_trials(runners: Sequence[SearchRunner], resources: Resources) -> int:
    """Runs all trials until each has finished or failed; how many processes ran them."""
    proposals = Proposals(runners, resources)
    watch = Watch(runners, proposals.running, resources)
    problem = None
    if proposals.has_trials():
        resources.start()
        problem = _tune(runners[0], proposals, watch)
    for runner in runners:
        for trial in runner.trials:
            if trial.status == "failed":
                storage.refetch(trial.folder)
            else:
                trial.read(fetch=True)
            if not trial.is_done:  # its node died while it was being stopped, or all was cut off
                trial.fail(problem or "its process ended before it did; it continues with --resume")
        runner.on_change(runner)
    return len(watch.processes)


def take_turns(runners: Sequence[SearchRunner]) -> Iterator[Trial | None]:
    """The trials of all runners: the next of the first that need not wait, None if all wait."""
    proposals = [runner.proposals() for runner in runners]
    while proposals:
        trial: Trial | None = None
        for source in [*proposals]:
            try:
                trial = next(source)
            except StopIteration:
                proposals.remove(source)
            if trial:
                break
        if proposals:
            yield trial


class Proposals(Searcher):
    """Hands the trials of the runners to Ray Tune, one after another."""

    def __init__(self, runners: Sequence[SearchRunner], resources: Resources):
        super().__init__()
        self._trials = take_turns(runners)
        self._runner = runners[0]
        self._resources = resources
        self.running: dict[str, Trial] = {}  # by the id of Ray Tune's trial

    def has_trials(self) -> bool:
        """Whether there is, or may come, a trial to run."""
        head = list(itertools.islice(self._trials, 1))
        self._trials = itertools.chain(head, self._trials)
        return bool(head)

    def suggest(self, trial_id: str) -> Any:  # Ray Tune takes `FINISHED`, a text, for the end
        try:
            trial = next(self._trials)
        except StopIteration:
            return Searcher.FINISHED
        except ConfigError as error:
            raise StopTune(error) from None
        if trial is None:
            return None
        self.running[trial_id] = trial
        return work(trial, self._runner, self._resources)

    def on_trial_complete(self, *_: Any, **__: Any) -> None:
        """Nothing: `Watch` reads its result."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the trials' directories hold all there is."""

    restore = save


class Watch(tune.Callback):
    """Reads what the trials report while Ray Tune runs them, and ends those that hang. The runners
    show what has changed, and more rarely save it.
    """

    def __init__(
        self, runners: Sequence[SearchRunner], trials: dict[str, Trial], resources: Resources
    ):
        self._runners = runners
        self._trials = trials
        self._resources = resources
        self._timeouts = Timeouts(runners[0].timeout)
        for trial in [trial for runner in runners for trial in runner.trials]:
            if trial.before and trial.summary:
                self._timeouts.add(trial.summary["seconds"])
        self._has_changes = False
        self._look_time = self._fit_time = time.monotonic()
        self._next_save_time = self._look_time + SAVE
        self._tune_trials: dict[Trial, Any] = {}  # Ray Tune's own trial
        self._kill_reasons: dict[Trial, str] = {}  # why
        self.processes: set[tuple[str, int]] = set()

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        search_trial = self._trials[trial.trial_id]
        if not search_trial.finished:
            search_trial.status = "running"
            self._tune_trials[search_trial] = trial
            self._timeouts.begin(search_trial)
        self._has_changes = True

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
    ) -> None:
        search_trial = self._trials[trial.trial_id]
        self._has_changes = True
        if "refused" in result:
            error = ConfigError(*result["refused"])
            self._end(search_trial, str(error))
            if self._runners[0].fail_fast:
                raise StopTune(error)
            return
        self.processes.add((result["hostname"], result["pid"]))
        search_trial.report = {
            name: value
            for name, value in result.items()
            if name == "round" or metric_columns.is_score(name) or name.startswith("epsilon_")
        }
        if result.get("over"):
            search_trial.read(fetch=True)
            self._end(search_trial, result.get("failed"))

    def _end(self, search_trial: Trial, failure: str | None = None) -> None:
        if failure is not None:
            search_trial.fail(failure)
        self._timeouts.end(search_trial)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        search_trial = self._trials[trial.trial_id]
        if search_trial.status == "running":
            search_trial.status = "stopped"
        self._end(search_trial)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        search_trial = self._trials[trial.trial_id]
        reason = f"its process died {RETRIES + 1} times; Ray's logs say why"
        self._end(search_trial, self._kill_reasons.get(search_trial, reason))
        self._has_changes = True

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        clock_time = time.monotonic()
        try:
            self._resources.watch()
            if clock_time - self._look_time < LOOK:
                return
            self._look_time = clock_time
            self._check_cluster(trials, clock_time)
        except RunError as error:
            raise StopTune(error) from None
        for search_trial, reason in self._timeouts.overdue_trials():
            tune_trial = self._tune_trials[search_trial]
            actor = tune_trial.temporary_state.ray_actor
            if actor is not None:
                self._kill_reasons[search_trial] = reason
                tune_trial.max_failures = 0  # it would hang again
                ray.kill(actor)
        if self._has_changes:
            self._has_changes = False
            for runner in self._runners:
                runner.on_change(runner)
            if clock_time >= self._next_save_time:
                for runner in self._runners:
                    runner.save()
                seconds = time.monotonic() - clock_time
                self._next_save_time = clock_time + max(SAVE, seconds / SAVE_SHARE)

    def _check_cluster(self, trials: list, clock_time: float) -> None:
        """Raises `RunError` where no trial has fitted the cluster for `MAX_MISFIT_SECONDS`."""
        nodes = self._resources.nodes()
        trials = [trial for trial in trials if trial.status in ("RUNNING", "PENDING")]
        if not trials or any(
            trial.status == "RUNNING" or fits(trial.config["bundles"], nodes) for trial in trials
        ):
            self._fit_time = clock_time
        elif clock_time - self._fit_time > MAX_MISFIT_SECONDS:
            reason = "the cluster has lost nodes and could not hold any of the trials that are left"
            raise RunError(f"{reason}; go on with --resume")


def _tune(runner: SearchRunner, proposals: Proposals, watch: Watch) -> str | None:
    """Has Ray Tune run what `proposals` hands out; what cut it off, if anything did. Its own state
    is of no use afterwards and is removed.
    """
    # enough trials wait for a place that the next one is there when one is free
    max_pending = min(max(2, int(ray.cluster_resources().get("CPU", 1)) + 1), 200)
    os.environ.update(SETTINGS, TUNE_MAX_PENDING_TRIALS_PG=str(max_pending))
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(
            prefix=".tune-", dir=runner.folder, ignore_cleanup_errors=True
        ) as folder:
            tune.run(
                TrialActor,
                name="trials",
                search_alg=proposals,
                num_samples=-1,
                scheduler=runner.scheduler(),
                max_concurrent_trials=runner.max_concurrent,
                reuse_actors=True,
                max_failures=RETRIES,
                raise_on_failed_trial=False,
                callbacks=[watch],
                storage_path=folder,
                verbose=0,
            )
        return None
    except StopTune as stop:
        (error,) = stop.args
    except (OSError, FileError) as disk_error:  # the disk is full
        return f"{describe(disk_error)}; it continues with --resume"
    gc.collect()  # what Ray Tune held of the cluster goes with its objects
    raise error


def work(trial: Trial, runner: SearchRunner, resources: Resources) -> dict[str, Any]:
    address = storage.origin(trial.folder)
    root = resources.root
    return {
        "experiment": trial.experiment.to_dict(),
        "folder": address or str(trial.folder),
        "status": trial.status,
        "bundles": resources.bundles(trial.experiment),
        # a file that shows a node whether it sees the directory of the sweep or study
        "mark": None if address else str(trial.folder.parent.parent / runner.config.name),
        "metric": runner.metric,
        "data_root": str(root) if root else None,
        "pause": runner.pauses,
        "driver": {  # where files are fetched from by nodes that do not see them
            "node": ray.get_runtime_context().get_node_id() if ray.is_initialized() else None,
            "cache": str(cache_root()),
            "root": str(data_root(root).absolute()),
            "home": os.getcwd(),
            "path": [os.path.abspath(entry) for entry in sys.path],
        },
    }


class TrialActor(tune.Trainable):
    """A process that runs trials, one after another: starting one costs seconds of a core, so Ray
    Tune reuses it.

    Each `step` is an evaluation of the model: `round` (rounds done), the metrics, and the epsilons.
    The last has `done` and `over`, and `failed` (a message) or `refused` (the three parts of a
    `ConfigError`) unless the run went well.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory(config["bundles"], strategy="PACK")

    def setup(self, config: dict[str, Any]) -> None:
        self._work = config
        self._reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self._permits: queue.Queue[None] = queue.Queue()
        self._has_stepped = self._is_stopping = False
        self._report: dict[str, Any] = {"round": 0, config["metric"]: math.nan}
        self._thread: threading.Thread | None = None

    def reset_config(self, config: dict[str, Any]) -> bool:
        self.cleanup()
        self.setup(config)
        return True

    def step(self) -> dict[str, Any]:
        # Not before: Ray Tune starts processes for trials that it then has another process run.
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        if self._has_stepped:
            self._permits.put(None)
        self._has_stepped = True
        return self._reports.get()

    def cleanup(self) -> None:
        """Ends a run that still continues: one that the scheduler has stopped."""
        if self._thread is None:
            return
        self._is_stopping = True
        self._permits.put(None)
        self._thread.join(END_TIMEOUT)
        if self._thread.is_alive():  # it hangs: the next trial gets another process
            os._exit(1)

    def _run(self) -> None:
        end: dict[str, Any] = {"done": True, "over": True}
        try:
            self._check_node()
            with storage.open_folder(self._work["folder"], PATIENCE) as folder:
                self._run_in_folder(folder)
        except ConfigError as error:
            expected = error.expected
            if self._is_remote() and "on node" not in expected:
                expected += f" (on node {place()}, which {VISIBILITY_HINT})"
            end["refused"] = [error.field, error.value, expected]
        except RunError as error:
            end["failed"] = str(error)
        except BaseException as error:
            end["failed"] = traceback_text(error)
        self._reports.put({**self._report, **end})

    def _is_remote(self) -> bool:
        """Whether the driver is on another node."""
        node = self._work["driver"]["node"]
        return ray.is_initialized() and ray.get_runtime_context().get_node_id() != node

    def _check_node(self) -> None:
        """Changes to the working directory of the driver. Raises `ConfigError` naming a node that
        does not have it, unless the sweep is at an address: then no node needs to have it.
        """
        home, mark = self._work["driver"]["home"], self._work["mark"]
        requirement = "a directory that all nodes of the cluster see; on node"
        try:
            os.chdir(home)
        except OSError as error:
            if mark:
                expected = f"{requirement} {place()}: {error.strerror}"
                raise ConfigError("working directory", home, expected) from None
        search(self._work["driver"]["path"])
        if mark and not os.path.exists(mark):
            expected = f"{requirement} {place()} it is not what it is where it was started from"
            raise ConfigError("--out", os.path.dirname(mark), expected)

    def _run_in_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with runs.hold_folder(folder, PATIENCE):
            has_config = (folder / "config.yaml").exists()
        rounds_table = read_log(folder, "rounds")
        self._report_rows([] if rounds_table is None else rounds_table.to_pylist())
        if self._work["status"] not in FINISHED_STATUSES:
            experiment = Experiment.from_dict(self._work["experiment"])
            # whether this node sees no disk of the driver's
            is_isolated = self._is_remote() and not self._work["mark"]
            runs.run(
                experiment,
                folder,
                resume=has_config,
                data_root=self._work["data_root"],
                on_rows=self._report_rows,
                prepare=RemotePreparation(**self._work["driver"]) if is_isolated else prepare,
            )

    def _report_rows(self, rows: list[dict[str, Any]]) -> bool:
        """Reports the rows that have been evaluated, once each; whether to stop."""
        for row in rows:
            if self._is_stopping:
                break
            if not metric_columns.is_evaluated(row) or row["round"] < self._report["round"]:
                continue
            scores = {
                key: math.nan if value is None else value
                for key, value in row.items()
                if metric_columns.is_score(key) or key.startswith("epsilon_")
            }
            self._report = {**scores, "round": row["round"] + 1}
            self._reports.put(self._report)
            if self._work["pause"]:
                self._permits.get()
        return self._is_stopping
