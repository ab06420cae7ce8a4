"""What a whole search spends: the composition over all of its trials, which are there to be seen;
less where the best of a random number of trials is released alone (`sweep.private`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raydpfl.config.yaml import read
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.privacy import Composition, RunRelease
from raydpfl.report.labels import count_text
from raydpfl.simulation.composed_runs import StoredRun, best_of_trials, compose_trials
from raydpfl.sweep.spaces import Interval
from raydpfl.sweep.sweep import Sweep
from raydpfl.sweep.trials import Trial, has_rounds, override_text, trained_runs

UNREADABLE = "a run in trials/ cannot be read ({})"


def private_search_composition(sweep: Sweep, data_root: Path | None) -> Composition:
    """What a private search spends, before it begins: its trials are drawn among `Sweep.support`.
    Raises `ConfigError` for several relations or deltas, and for an interval that the noise of a
    trial depends on.
    """
    assert sweep.search.private
    values, trials = zip(*sweep.support(), strict=True)
    names = [override_text(point) or "every trial" for point in values]
    runs = [StoredRun(*run_fields) for run_fields in zip(names, trials, strict=True)]
    composition = best_of_trials(sweep.search.private.repetition(), runs, data_root)
    for key, space in sweep.spaces.items():
        if isinstance(space, Interval) and key in values[0]:
            releases: dict[Any, set[tuple[str, int]]] = {}
            for point, run in zip(values, composition.runs, strict=True):
                assert isinstance(run, RunRelease)
                releases.setdefault(point[key], set()).add((run.mechanism.digest(), run.rounds))
            if len({*map(frozenset, releases.values())}) > 1:
                expected = "a grid with sweep.private, which accounts for the noise of each value"
                raise ConfigError(key, [space.low, space.high], expected)
    return composition


def search_composition(
    trials: Sequence[Trial], folder: Path, sweep: Sweep, data_root: Path | None, is_changed: bool
) -> Composition | None:
    """What all runs in the directory of a search have spent together; None: none was private.
    `is_changed`: whether its settings ever were when there were runs.
    """
    try:
        former = former_runs(trials, folder)
    except ConfigError as error:
        return Composition(notes=(UNREADABLE.format(error),))
    # proposals depend on the results, and so does a change of the config
    adaptive = sweep.search.search == "optuna" or bool(former) or is_changed
    runs = [*((trial.folder, trial.experiment) for trial in trials), *former]
    return compose_search(runs, data_root, adaptive)


def former_runs(trials: Sequence[Trial], folder: Path) -> list[tuple[Path, Experiment]]:
    """What was tried in the directory of a search before its config was changed. Raises
    `ConfigError`.
    """
    names = trained_runs(folder / "trials").keys() - {trial.folder.name for trial in trials}
    paths = [folder / "trials" / name for name in sorted(names)]
    return [(path, Experiment.from_dict(read(path / "config.yaml"))) for path in paths]


def compose_search(
    runs: Sequence[tuple[Path, Experiment]], data_root: Path | None, adaptive: bool = False
) -> Composition | None:
    """What runs spend together, those that have begun: (directory, experiment) of each. None: none
    of them was private.
    """
    try:
        started_runs = [
            StoredRun.of(path.name, experiment, path)
            for path, experiment in runs
            if experiment.private
        ]
    except ConfigError as error:
        return Composition(notes=(UNREADABLE.format(error),))
    empty = {run.name for run in started_runs if not run.ledger}
    lost = [path.name for path, _ in runs if path.name in empty and has_rounds(path, False)]
    if lost:
        reason = f"the ledger of {lost[0]} has no whole line"
        return Composition(notes=(UNREADABLE.format(reason),))
    # runs that differ in nothing that they release are one, as long as the longest
    started_runs.sort(key=lambda run: run.experiment.rounds)
    # common noise is that of other releases too, and that of scores has a key of its own
    longest_runs = {
        (
            *(run.keys[-1], run.segments[:-1]),
            run.name if run.experiment.noise.has_common_noise else "",
            run.experiment.evaluate.model_dump_json() if run.experiment.evaluate.survey else "",
        ): run
        for run in started_runs
        if run.ledger
    }
    if not longest_runs:
        return None
    without_noise = sum(not experiment.private and has_rounds(path) for path, experiment in runs)
    if without_noise:
        return Composition(notes=(f"{count_text(without_noise, 'run')} without noise",))
    try:
        compositions = compose_trials([*longest_runs.values()], data_root, adaptive)
    except ConfigError as error:
        return Composition(notes=(error.expected,))
    return _worst_composition(compositions)


def _worst_composition(compositions: Sequence[Composition]) -> Composition:
    """Of the clients of each seed that divides the rows in its own way, those of which the largest
    epsilon is stated, or none.
    """
    worst_case = max(
        compositions,
        key=lambda one: one.epsilon.epsilon if one.epsilon else math.inf,
    )
    notes = worst_case.notes
    if len(compositions) > 1:
        notes += (
            f"that is of the clients of one seed, as each of {len(compositions)} divides the rows "
            "in its own way (data.seed: the same)",
        )
    return replace(worst_case, notes=notes)
