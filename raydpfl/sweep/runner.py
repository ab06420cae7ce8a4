"""Running a sweep: `run(sweep, out)`. All that can be refused is refused before Ray Tune runs the
trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.tune.schedulers import AsyncHyperBandScheduler, MedianStoppingRule, TrialScheduler

from raydpfl import storage
from raydpfl.core import signals
from raydpfl.errors import ConfigError
from raydpfl.models.metric_columns import score_set
from raydpfl.privacy import Composition
from raydpfl.report.labels import count_text
from raydpfl.simulation import user_code
from raydpfl.simulation.resolution import resolve
from raydpfl.simulation.resume import restore_resolved_keys
from raydpfl.storage.run_files import replace_file
from raydpfl.sweep.optuna import Dashboard, optuna, propose_settings
from raydpfl.sweep.resources import Resources
from raydpfl.sweep.results import SweepResult, gather, score
from raydpfl.sweep.search_privacy import private_search_composition, search_composition
from raydpfl.sweep.search_runner import SearchRunner, remove_file
from raydpfl.sweep.sweep import Sweep
from raydpfl.sweep.trials import SearchSetting, override_text
from raydpfl.sweep.tune import execute
from raydpfl.tracking import check_installed


def run(
    sweep: Sweep,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    data_root: str | Path | None = None,
    address: str | None = None,
    on_change: Callable[[SweepRunner], object] = lambda runner: None,
) -> SweepResult:
    """Runs all trials of a sweep. The result's `problem` says what went wrong, such as trials that
    failed; such a sweep continues with `resume`.

    Args:
        sweep: what to try.
        out: the directory, a path or an address; None: a new one under `runs/`.
        resume: continues the sweep in `out`, from nothing if it had not been started: finished
            trials are not run again, the others continue from their checkpoints.
        data_root: where data sets lie; None: the variable RAYDPFL_DATA.
        address: of a running Ray cluster to join, whose nodes must all see `out`, unless that is an
            address. A Ray that this process had started is used, and left running.
        on_change: called, now and then, with the runner, which has all `settings` so far.

    Raises:
        ConfigError: the sweep cannot be run; nothing has been started or written.
        RunError: it was cut off.
    """
    place = out if out is not None else storage.new("sweep")
    with signals.handle_signals(), storage.open_folder(place) as folder:
        runner = SweepRunner(sweep, folder, on_change)
        resources = Resources(data_root, address, sweep.search.cpus)
        (result,) = execute([runner], resources, resume)
        return result


class SweepRunner(SearchRunner):
    """One run of a sweep."""

    kind = "sweep"
    fail_fast = True

    def __init__(self, sweep: Sweep, folder: Path, on_change: Callable[[SweepRunner], object]):
        super().__init__(sweep, folder, on_change)
        self.sweep = sweep
        self.metric = sweep.search.metric
        self.max_concurrent = sweep.search.concurrent
        self.timeout = sweep.search.timeout
        self.pauses = sweep.search.scheduler != "none"
        self.settings: list[SearchSetting] = []
        self._proposal_iterator = propose_settings(sweep, self._add)
        self._root: Path | None = None
        self._composition: Composition | None = None  # of the whole search
        self._dashboard: Dashboard | None = None

    def check(self, resources: Resources) -> None:
        sweep = self.sweep
        if sweep.search.search == "optuna":
            optuna()
        first_probe = sweep.probes[0]
        for experiment in sweep.probes:
            resources.check(experiment)
        check_installed(first_probe.track)
        for data in {probe.data.model_dump_json(): probe.data for probe in sweep.probes}.values():
            data.identity(resources.root)
        resolve(first_probe, resources.root)
        self._root = resources.root
        if sweep.search.private:
            self._composition = private_search_composition(sweep, self._root)
        task = first_probe.data.task
        if self.metric.partition("_")[2] == "accuracy" and "accuracy" not in task.scores():
            expected = f"{score_set(self.metric)}_loss; a {task.kind} has no accuracy"
            raise ConfigError("sweep.metric", self.metric, expected)
        if sweep.search.storage is not None:
            place = storage.origin(self.folder) or str(self.folder.absolute())
            self._dashboard = Dashboard(sweep, place, self.config.exists())

    def advance(self) -> bool:
        """Adds all trials of a setting before the next."""
        if self.sweep.search.search == "optuna":
            return next(self._proposal_iterator, self) is not self
        for values in [] if self.settings else self.sweep.setting_values():
            self._add(values)
        return False

    def copy_inputs(self) -> None:
        user_code.store_code(self.sweep.probes, self.folder)

    def _add(self, values: dict[str, Any]) -> SearchSetting:
        sweep = self.sweep
        setting = sweep.setting(values)
        experiment = sweep.trial(setting.experiment)
        for seed in sweep.seeds(len(self.settings)):
            trial_experiment = experiment.model_copy(update={"seed": seed})
            setting.trials.append(self.add(override_text(values), trial_experiment, sweep.spaces))
        self.settings.append(setting)
        return setting

    def scheduler(self) -> TrialScheduler:
        search = self.sweep.search
        options: dict[str, Any] = {
            "time_attr": "round",
            "metric": search.metric,
            "mode": "max" if self.sweep.sign > 0 else "min",
            "grace_period": search.grace,
        }
        if search.scheduler == "asha":
            options |= {"reduction_factor": search.reduction, "stop_last_trials": False}
            rounds = max(experiment.rounds for experiment in self.sweep.probes)
            return AsyncHyperBandScheduler(**options, max_t=rounds)
        if search.scheduler == "median":
            time_slice: Any = math.inf  # no trial is paused; Ray Tune compares it with a float
            return MedianStoppingRule(**options, min_time_slice=time_slice)
        return super().scheduler()

    def gather(self, is_over: bool, **facts: Any) -> SweepResult:
        if is_over and self._composition is None:
            self._composition = search_composition(
                self.trials, self.folder, self.sweep, self._root, self.is_adaptive
            )
        return gather(self.folder, self.settings, self.sweep, is_over, facts, self._composition)

    def write(self, result: SweepResult) -> None:
        """The tables, summary.json, and best.yaml, if the sweep is over and has a best."""
        path = self.folder / "best.yaml"
        best = result.best if result.summary["status"] == "completed" else None
        if best:
            seeds = count_text(len(best.trials), "seed")
            private = self.sweep.search.private  # of which the run itself is the best
            scope = "" if private else f" of {result.summary['settings']} settings"
            title = f"best{scope}: {override_text(best.values)}"
            score_line = f"{self.metric} {score(best, self.metric)} over {seeds}"
            head = "".join(f"# {line}\n" for line in (title, score_line, result.summary["choice"]))
            experiment = best.experiment
            if private:
                # the noise of a run is keyed by what it has resolved
                (trial,) = best.trials
                experiment = restore_resolved_keys(trial.experiment, trial.folder)
            text = head + experiment.to_yaml()
            replace_file(path, lambda file: file.write(text.encode()))
        else:  # none may be left from before a resume
            remove_file(path)
        super().write(result)
        if self._dashboard:
            self._dashboard.show(self.settings, is_over=result.summary["status"] != "running")
