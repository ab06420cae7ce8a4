"""Having Ray Tune run the trials of a source: `drive(source, proposals, room)`.

Each trial holds a placement group, taken whole or not at all, with a bundle for its own process and
one for each of its client actors: so trials that wait hold nothing, and no two share a core.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
from ray import tune

from raydpfl import storage
from raydpfl.errors import FileError
from raydpfl.sweep.directory import said
from raydpfl.sweep.resources import Room
from raydpfl.sweep.searcher import Proposals
from raydpfl.sweep.timeouts import Limits
from raydpfl.sweep.trial import TrialActor, work
from raydpfl.sweep.trial_source import Source, Stop, Trial
from raydpfl.sweep.tune_callback import RETRIES, Watch

TUNE = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # a run keeps its own tables and TensorBoard events
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "1000000000",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}


def proposed(source: Source, room: Room) -> Proposals:
    """What `source` proposes, as Ray Tune asks for it."""
    return Proposals(
        source, lambda trial: work(trial, source, room.bundles(trial.experiment), room.root)
    )


def drive(source: Source, proposals: Proposals, room: Room) -> int:
    """Runs all trials that are proposed, in the `room`; how many processes ran them.

    Afterwards every trial of the source has finished or failed. Raises `ConfigError`, `RunError`.
    """
    watch = Watch(source, proposals, room, _limits(source))
    cut_off = None
    if proposals.waiting():
        room.start()
        cut_off = _tune(source, proposals, watch)
    _settle(source.trials, cut_off)
    source.show()
    return len(watch.processes)


def _limits(source: Source) -> Limits[Trial]:
    """Those that the trials are held to, by the ones that had finished before too."""
    limits: Limits[Trial] = Limits(source.timeout)
    for trial in source.trials:
        if trial.before and trial.summary:
            limits.add(trial.experiment, trial.summary["seconds"])
    return limits


def _settle(trials: Sequence[Trial], cut_off: str | None) -> None:
    """Takes up how every trial ended.

    One that has not, as its node died while it was being stopped or as all was `cut_off`, failed.
    """
    for trial in trials:
        if trial.status == "failed":
            storage.refetch(trial.folder)
        else:
            trial.look()
        if not trial.done:
            trial.status = "failed"
            trial.reason = cut_off or "its process ended before it did; it goes on with --resume"


def _tune(source: Source, proposals: Proposals, watch: Watch) -> str | None:
    """Has Ray Tune run what `proposals` hands out; what cut it off, if anything did.

    Ray Tune's own state is nobody's concern and is removed.
    """
    storage = stopped = cut_off = None
    try:
        storage = tempfile.mkdtemp(prefix=".tune-", dir=source.folder)
        with _quiet(TUNE | {"TUNE_MAX_PENDING_TRIALS_PG": str(_pending())}):
            tune.run(
                TrialActor,
                name="trials",
                search_alg=proposals,
                num_samples=-1,
                scheduler=source.scheduler(),
                max_concurrent_trials=source.concurrent,
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
        cut_off = f"{said(error)}; it goes on with --resume"
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
