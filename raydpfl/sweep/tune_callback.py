"""What happens while Ray Tune runs trials: what they report is taken up, those that hang are ended,
and where the cluster has become too small all is given up.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray import tune

from raydpfl.errors import ConfigError, RunError
from raydpfl.models import metric_columns
from raydpfl.sweep.resources import Room, fits
from raydpfl.sweep.searcher import Proposals
from raydpfl.sweep.timeouts import Limits
from raydpfl.sweep.trial_source import Source, Stop, Trial

RETRIES = 2  # of a trial whose process died; it goes on from its checkpoint
SHOW = 0.25  # seconds between showings of what has changed
EVERY = 5.0  # seconds between looks at the cluster, and between writings of the results so far
# seconds that a cluster may be too small for every waiting trial, before all is given up
LOST = 60.0
LOOK = 1.0  # seconds between looks for trials that hang


class Watch(tune.Callback):
    """Takes up what the trials of `source` report, and ends those that hang.

    The source is asked to show what has changed, and more rarely to save it.
    """

    def __init__(self, source: Source, proposals: Proposals, room: Room, limits: Limits[Trial]):
        self._source = source
        self._trials = proposals.running
        self._room = room
        self._limits = limits
        self._changed = False
        self._shown = self._written = self._looked = self._fitted = time.monotonic()
        self._measured = self._shown
        self._tunes: dict[Trial, Any] = {}  # Ray Tune's own trial
        self._killed: dict[Trial, str] = {}  # why
        self.processes: set[tuple[str, int]] = set()

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        ours = self._trials[trial.trial_id]
        if not ours.finished:
            ours.status = "running"
            self._tunes[ours] = trial
            self._limits.begin(ours, ours.experiment, ours.folder)
        self._changed = True

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
    ) -> None:
        ours = self._trials[trial.trial_id]
        if "refused" in result:
            self._refuse(ours, ConfigError(*result["refused"]))
            return
        self.processes.add((result["hostname"], result["pid"]))
        ours.report = {
            name: value
            for name, value in result.items()
            if name == "round" or metric_columns.is_score(name) or name.startswith("epsilon_")
        }
        if result.get("over"):
            ours.look()
            if "failed" in result:
                ours.status = "failed"
                ours.reason = result["failed"]
            self._limits.end(ours, ours.finished)
        self._changed = True

    def _refuse(self, ours: Trial, error: ConfigError) -> None:
        ours.status = "failed"
        ours.reason = str(error)
        self._limits.end(ours, False)
        self._changed = True
        self._source.refused(ours, error)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        ours = self._trials[trial.trial_id]
        if ours.status == "running":
            ours.status = "stopped"
        self._limits.end(ours, ours.finished)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        ours = self._trials[trial.trial_id]
        died = f"its process died {RETRIES + 1} times; Ray's logs say why"
        ours.status = "failed"
        ours.reason = self._killed.get(ours, died)
        self._changed = True
        self._limits.end(ours, False)

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        try:
            self._room.watch()
        except RunError as error:
            raise Stop(error) from None
        now = time.monotonic()
        if self._changed and now - self._shown > SHOW:
            self._changed = False
            self._shown = now
            self._source.show()
            if now - self._written > EVERY:
                self._source.save()
                self._written = time.monotonic()
        if now - self._measured > LOOK:
            self._measured = now
            self._kill_overdue()
        if now - self._looked > EVERY:
            self._looked = now
            self._check_room(trials)

    def _kill_overdue(self) -> None:
        for ours, reason in self._limits.overdue():
            theirs = self._tunes[ours]
            actor = theirs.temporary_state.ray_actor
            if actor is None:
                continue
            self._killed[ours] = reason
            theirs.max_failures = 0  # it would hang again
            ray.kill(actor)

    def _check_room(self, trials: list) -> None:
        """Gives up when the cluster has been too small for any trial for `LOST` seconds."""
        now = time.monotonic()
        nodes = self._room.nodes()
        alive = [trial for trial in trials if trial.status in ("RUNNING", "PENDING")]
        held = [each.status == "RUNNING" or fits(each.config["bundles"], nodes) for each in alive]
        if not alive or any(held):
            self._fitted = now
        elif now - self._fitted > LOST:
            lost = "the cluster has lost nodes and could not hold any of the trials that are left"
            raise Stop(RunError(f"{lost}; go on with --resume"))
