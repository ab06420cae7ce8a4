"""Having Ray Tune run the trials of sweeps and studies: `execute(runners, resources, resume)`.

Each trial holds a placement group, taken whole or not at all, with a bundle for its own process and
one for each of its client actors: so trials that wait hold nothing, and no two share a core.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from ray import tune
from ray.tune.search import Searcher

from raydpfl import storage
from raydpfl.errors import ConfigError, FileError, RunError
from raydpfl.models import metric_columns
from raydpfl.sweep.resources import Resources, fits
from raydpfl.sweep.search_runner import SearchRunner, describe
from raydpfl.sweep.timeouts import Timeouts
from raydpfl.sweep.trial_actor import TrialActor, work
from raydpfl.sweep.trials import Trial

RETRIES = 2  # of a trial whose process died; it continues from its checkpoint
SHOW = 0.25  # seconds between displays of what has changed
EVERY = 5.0  # seconds between checks of the cluster, and between writings of the results so far
# seconds that a cluster may be too small for every waiting trial, before all is given up
LOST = 60.0
LOOK = 1.0  # seconds between checks for trials that hang
TUNE = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # a run keeps its own tables and TensorBoard events
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "1000000000",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}


class StopTune(BaseException):
    """Leaves Ray Tune, whose own handling of errors would end the trials in good order and so mark
    them as stopped.
    """

    def __init__(self, error: Exception):
        self.error = error


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
            stack.enter_context(runner.started())
        processes = _drive(runners, resources)
        return [runner.finish(processes) for runner in runners]


def _drive(runners: Sequence[SearchRunner], resources: Resources) -> int:
    """Runs all trials that are proposed; how many processes ran them.

    Afterwards every trial has finished or failed. Raises `ConfigError`, `RunError`.
    """
    proposals = Proposals(runners, resources)
    watch = Watch(runners, proposals.running, resources)
    cut_off = None
    if proposals.waiting():
        resources.start()
        cut_off = _tune(runners[0], proposals, watch)
    for trial in [trial for runner in runners for trial in runner.trials]:
        if trial.status == "failed":
            storage.refetch(trial.folder)
        else:
            trial.read(fetch=True)
        if not trial.done:  # its node died while it was being stopped, or all was cut off
            trial.fail(cut_off or "its process ended before it did; it continues with --resume")
    for runner in runners:
        runner.show()
    return len(watch.processes)


def take_turns(runners: Sequence[SearchRunner]) -> Iterator[Trial | None]:
    """The trials of all runners: the next of the first that need not wait, None if all wait."""
    proposals = [runner.proposals() for runner in runners]
    over = object()
    while proposals:
        ready = None
        for source in [*proposals]:
            trial = next(source, over)
            if trial is over:
                proposals.remove(source)
            elif isinstance(trial, Trial):
                ready = trial
                break
        if proposals:
            yield ready


class Proposals(Searcher):
    """Hands the trials of the runners to Ray Tune, one after another."""

    def __init__(self, runners: Sequence[SearchRunner], resources: Resources):
        super().__init__()
        self._trials = take_turns(runners)
        self._runner = runners[0]
        self._resources = resources
        self.running: dict[str, Trial] = {}  # by the id of Ray Tune's trial

    def waiting(self) -> bool:
        """Whether there is, or may come, a trial to run."""
        first = list(itertools.islice(self._trials, 1))
        self._trials = itertools.chain(first, self._trials)
        return bool(first)

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

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        """Nothing: `Watch` reads its result."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the trials' directories hold all there is."""

    restore = save


class Watch(tune.Callback):
    """Reads what the trials report while Ray Tune runs them, and ends those that hang.

    The runners show what has changed, and more rarely save it.
    """

    def __init__(
        self, runners: Sequence[SearchRunner], running: dict[str, Trial], resources: Resources
    ):
        self._runners = runners
        self._trials = running
        self._resources = resources
        self._timeouts = Timeouts(runners[0].timeout)
        for trial in [trial for runner in runners for trial in runner.trials]:
            if trial.before and trial.summary:
                self._timeouts.add(trial.experiment, trial.summary["seconds"])
        self._changed = False
        now = time.monotonic()
        self._next = dict.fromkeys((SHOW, LOOK, EVERY), now)
        self._saved = self._fitted = now
        self._tunes: dict[Trial, Any] = {}  # Ray Tune's own trial
        self._killed: dict[Trial, str] = {}  # why
        self.processes: set[tuple[str, int]] = set()

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        ours = self._trials[trial.trial_id]
        if not ours.finished:
            ours.status = "running"
            self._tunes[ours] = trial
            self._timeouts.begin(ours, ours.experiment, ours.folder)
        self._changed = True

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
    ) -> None:
        ours = self._trials[trial.trial_id]
        if "refused" in result:
            error = ConfigError(*result["refused"])
            self._fail(ours, str(error))
            if self._runners[0].all_or_none:
                raise StopTune(error)
            return
        self.processes.add((result["hostname"], result["pid"]))
        ours.report = {
            name: value
            for name, value in result.items()
            if name == "round" or metric_columns.is_score(name) or name.startswith("epsilon_")
        }
        if result.get("over"):
            ours.read(fetch=True)
            if "failed" in result:
                ours.fail(result["failed"])
            self._timeouts.end(ours, ours.finished)
        self._changed = True

    def _fail(self, ours: Trial, reason: str) -> None:
        ours.fail(reason)
        self._timeouts.end(ours, False)
        self._changed = True

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        ours = self._trials[trial.trial_id]
        if ours.status == "running":
            ours.status = "stopped"
        self._timeouts.end(ours, ours.finished)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        ours = self._trials[trial.trial_id]
        died = f"its process died {RETRIES + 1} times; Ray's logs say why"
        self._fail(ours, self._killed.get(ours, died))

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        try:
            self._resources.watch()
        except RunError as error:
            raise StopTune(error) from None
        if self._changed and self._due(SHOW):
            self._changed = False
            save = time.monotonic() - self._saved > EVERY
            for runner in self._runners:
                runner.show()
                if save:
                    runner.save()
                    self._saved = time.monotonic()
        if self._due(LOOK):
            self._kill_overdue()
        if self._due(EVERY):
            self._check_cluster(trials)

    def _due(self, seconds: float) -> bool:
        """Whether so many seconds have passed since this was last true."""
        now = time.monotonic()
        due = now - self._next[seconds] > seconds
        if due:
            self._next[seconds] = now
        return due

    def _kill_overdue(self) -> None:
        for ours, reason in self._timeouts.overdue():
            theirs = self._tunes[ours]
            actor = theirs.temporary_state.ray_actor
            if actor is None:
                continue
            self._killed[ours] = reason
            theirs.max_failures = 0  # it would hang again
            ray.kill(actor)

    def _check_cluster(self, trials: list) -> None:
        """Gives up when the cluster has been too small for any trial for `LOST` seconds."""
        nodes = self._resources.nodes()
        alive = [trial for trial in trials if trial.status in ("RUNNING", "PENDING")]
        fitting = [
            trial.status == "RUNNING" or fits(trial.config["bundles"], nodes) for trial in alive
        ]
        if not alive or any(fitting):
            self._fitted = time.monotonic()
        elif time.monotonic() - self._fitted > LOST:
            lost = "the cluster has lost nodes and could not hold any of the trials that are left"
            raise StopTune(RunError(f"{lost}; go on with --resume"))


def _tune(runner: SearchRunner, proposals: Proposals, watch: Watch) -> str | None:
    """Has Ray Tune run what `proposals` hands out; what cut it off, if anything did.

    Ray Tune's own state is of no use afterwards and is removed.
    """
    folder = error = cut_off = None
    try:
        folder = tempfile.mkdtemp(prefix=".tune-", dir=runner.folder)
        # enough trials wait for a place that the next one is there when one is free
        pending = min(max(2, int(ray.cluster_resources().get("CPU", 1)) + 1), 200)
        with _quiet(TUNE | {"TUNE_MAX_PENDING_TRIALS_PG": str(pending)}):
            tune.run(
                TrialActor,
                name="trials",
                search_alg=proposals,
                num_samples=-1,
                scheduler=runner.scheduler(),
                max_concurrent_trials=runner.concurrent,
                reuse_actors=True,
                max_failures=RETRIES,
                raise_on_failed_trial=False,
                callbacks=[watch],
                storage_path=folder,
                verbose=0,
            )
    except StopTune as stop:
        error = stop.error
    except (OSError, FileError) as full:  # the disk is full
        cut_off = f"{describe(full)}; it continues with --resume"
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    if error:
        gc.collect()  # what Ray Tune held of the cluster goes with its objects
        raise error
    return cut_off


@contextmanager
def _quiet(environment: dict[str, str]) -> Iterator[None]:
    """Sets environment variables, and silences Ray Tune's logger."""
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
