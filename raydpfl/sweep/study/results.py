"""The results of a study: results.parquet, a row per final run of every cell; resamples.parquet,
such a row for every resample of the tuning seeds, with the setting that these choose;
tuning.parquet, a row per run that values were chosen by, with the epsilon of all of the cell's; and
summary.json.

A run that several cells share has a row in each. Axes and labels are text. The metadata of the
schemas say which columns are epsilons by a rigorous accountant (`rigorous`), which are measured of
the machine and differ from one run to another (`machine`), and, in tuning.parquet, the `judge`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from raydpfl.privacy import RIGOROUS
from raydpfl.report.labels import count_text
from raydpfl.report.run_reader import numbers
from raydpfl.report.statistics import SeedValues
from raydpfl.simulation.provenance import COMPILED_DIGEST, commit, versions
from raydpfl.sweep.results import choice_warning, epsilons, exclusion_note, table
from raydpfl.sweep.study.cell_progress import CellProgress
from raydpfl.sweep.study.cells import StudyCell, label
from raydpfl.sweep.study.claims import CellKey, key, verdicts
from raydpfl.sweep.study.identities import compare, words
from raydpfl.sweep.study.schema import Study
from raydpfl.sweep.trials import SearchSetting, Trial, trained_runs

MACHINE = ("seconds", "wall_seconds", "clients_per_second", "peak_rss_mb", "replaced_actors")
INTEGER_COLUMNS = ("rounds", "parameters", "population", "repeated_rounds", "replaced_actors")
OMITTED_KEYS = ("seed", "epsilon_quantiles", "peak_rss_mb_by_process", "versions")  # no columns
HEAD = {"arm": pa.string(), "accounting": pa.string(), "seed": pa.uint64(), "status": pa.string()}
TAIL = {"directory": pa.string(), "reason": pa.string(), "model_sha256": pa.string()}
TUNING_EPSILON = "all_tries_epsilon"  # of all runs together that the values of a cell are chosen by
STATES = ("completed", "budget", "stopped", "failed", "running", "waiting")
Progress = Sequence[CellProgress]  # of all cells of a study, in its order


def final_table(study: Study, progress: Progress) -> pa.Table:
    """A row per final run and cell, in the order of the cells and seeds."""
    cells = [(cell, cell.final_setting) for cell in progress if cell.final_setting]
    rows = [_final_row(cell, setting, trial) for cell, setting in cells for trial in setting.trials]
    return _table(study, rows)


def resample_table(study: Study, progress: Progress) -> pa.Table:
    """A row per final run, cell and resample of the tuning seeds, which `tuning_seeds` lists."""
    first_seed = study.tuning_seeds().start
    rows = [
        _final_row(cell, setting, trial)
        | {"tuning_seeds": " ".join(str(first_seed + place) for place in resample)}
        for cell in progress
        for resample, setting in cell.resample_settings.items()
        for trial in setting.trials
    ]
    return _table(study, rows, {"tuning_seeds": pa.string()})


def _final_row(cell: CellProgress, setting: SearchSetting, trial: Trial) -> dict[str, Any]:
    summary = trial.summary or {}
    facts = numbers({key: summary[key] for key in summary if key not in OMITTED_KEYS})
    facts |= epsilons(trial) if summary else {}
    return {**facts, **_row(cell, setting, trial)}


def tuning_table(study: Study, progress: Progress) -> pa.Table:
    """A row per run that was tried and cell, in the order of the cells and their grids."""
    judge = study.about.judge
    rows = []
    for cell in progress:
        guarantee = cell.composition and cell.composition.epsilon
        for setting, trial in ((s, trial) for s in cell.tries for trial in s.trials):
            row = _row(cell, setting, trial) | epsilons(trial)
            row |= {TUNING_EPSILON: guarantee.epsilon if guarantee else None}
            row |= {judge: trial.value(judge), "chosen": setting is cell.chosen}
            rows.append(row | {"seconds": (trial.summary or {}).get("seconds")})
    columns = {judge: pa.float64(), "chosen": pa.bool_(), "seconds": pa.float64()}
    return _table(study, rows, columns | {TUNING_EPSILON: pa.float64()}, {"judge": judge})


def _row(cell: CellProgress, setting: SearchSetting, trial: Trial) -> dict[str, Any]:
    return {
        **cell.cell.place,
        "seed": trial.seed,
        "status": trial.status,
        "values": json.dumps(setting.values),
        "directory": f"trials/{trial.folder.name}",
        "reason": trial.failure() if trial.status == "failed" else None,
        "model_sha256": (trial.summary or {}).get("model_sha256"),
    }


def _table(
    study: Study,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, pa.DataType] = {},
    metadata: Mapping[str, str] = {},
) -> pa.Table:
    """The rows with these columns, and those of numbers that runs have, epsilons last."""
    axes = dict.fromkeys(study.axes, pa.string())
    schema = {**axes, **HEAD, "values": pa.string(), **columns, **TAIL}
    names = [*dict.fromkeys(name for row in rows for name in row if name not in schema)]
    for name in sorted(names, key=lambda name: name.startswith("epsilon_")):
        is_integer = name in INTEGER_COLUMNS or name.endswith("_round")
        schema[name] = pa.int64() if is_integer else pa.float64()
    facts = {"rigorous": RIGOROUS, "machine": MACHINE}
    lists = {key: json.dumps([c for c in schema if c in group]) for key, group in facts.items()}
    return table(rows, schema, {**lists, **metadata})


def summary(study: Study, progress: Progress, folder: Path, is_over: bool) -> dict[str, Any]:
    """summary.json: how it ended, how values were chosen, and which identities hold; all but the
    seconds it took.
    """
    # the directory and the digest of the model of every final run, by cell and seed
    models = {cell.cell: {trial.seed: _model(trial) for trial in cell.finals} for cell in progress}
    values: dict[CellKey, Any] = {key(place): _no_values for place in study.planned_places}
    values |= {key(cell.cell.place): cell.values for cell in progress}
    identities = [compare(identity, models) for identity in study.same_bits]
    failures = _failures(progress)
    reason = _problem(failures, identities) if is_over else None
    runs = trained_runs(folder / "trials")
    return {
        "status": "running" if not is_over else "failed" if reason else "completed",
        "reason": reason,
        "study": study.about.id,
        "scale": study.scale,
        "seeds": [*study.final_seeds()],
        "cells": len(progress),
        "tried": _states(trial for cell in progress for trial in cell.tuning_trials),
        "final": _states(trial for cell in progress for trial in cell.finals),
        "trained": {"runs": len(runs), "private": sum(runs.values())},
        "failed": failures,
        "identities": identities,
        "claims": verdicts(study.claims, study.labels, values),
        "equal_arms": _equal_arms(models),
        "computed_by": {**versions(), "compiled": COMPILED_DIGEST, "commit": commit()},
        "tuning": _choice(study, progress, runs),
    }


def _no_values(name: str) -> SeedValues:
    """Those of a cell that --only leaves out."""
    return SeedValues({})


def _model(trial: Trial) -> tuple[str, str] | None:
    digest = (trial.summary or {}).get("model_sha256")
    return (trial.folder.name, digest) if trial.finished and digest else None


def _equal_arms(models: Mapping[StudyCell, Mapping[int, Any]]) -> list[dict[str, Any]]:
    """The arms of a panel whose models are the same bits in all seeds."""
    groups: dict[tuple[Any, ...], list[StudyCell]] = {}
    for cell, seed_models in models.items():
        digests = tuple(model and model[1] for model in seed_models.values())
        if digests and None not in digests:
            place = (*cell.labels.items(), ("accounting", cell.accounting))
            groups.setdefault((place, digests), []).append(cell)
    return [
        {"arms": [cell.arm for cell in cells], "at": {a: name for a, name in place if name}}
        for (place, _), cells in groups.items()
        if len(cells) > 1
    ]


def _states(trials: Iterable[Trial]) -> dict[str, int]:
    """How many runs are in which state; `runs`: all, each counted once."""
    states = [*{trial.folder: trial.status for trial in trials}.values()]
    return {"runs": len(states), **{state: states.count(state) for state in STATES}}


def _failures(progress: Progress) -> list[dict[str, str]]:
    """Final runs and cells without a result, and why; also those of resampled choices."""
    failures: dict[str, dict[str, str]] = {}
    for cell in progress:
        name = cell.cell.display_name()
        if cell.problem:
            failures[name] = {"cell": name, "reason": cell.problem}
        trials = [*cell.finals, *(t for s in cell.resample_settings.values() for t in s.trials)]
        for trial in [trial for trial in trials if trial.status == "failed"]:
            place = f"trials/{trial.folder.name}"
            name = trial.display_name()
            failures[place] = {"directory": place, "cell": name, "reason": trial.failure()}
    return list(failures.values())


def _problem(
    failures: Sequence[Mapping[str, str]], identities: Sequence[Mapping[str, Any]]
) -> str | None:
    """Why a study that is over has not succeeded, in one line."""
    problems = []
    if failures:
        rest_note = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        first_failure = f"{failures[0]['cell']}: {failures[0]['reason']}"
        problems.append(f"without a result: {first_failure}{rest_note}; go on with --resume")
    broken_identities = [words(identity) for identity in identities if identity["held"] is False]
    if broken_identities:
        problems.append("an identity is broken: " + "; ".join(broken_identities))
    return "; ".join(problems) or None


def _choice(study: Study, progress: Progress, runs: Mapping[str, bool]) -> dict[str, Any]:
    """How many settings each arm tried in a cell, and what their choice is worth, in words. `runs`:
    every run of the directory, by name, and whether it was private.
    """
    counts: dict[str, list[int]] = {}
    for cell in progress:
        counts.setdefault(cell.cell.arm, []).append(len(cell.tries) or cell.cell.settings)
    ranges = {arm: [min(numbers), max(numbers)] for arm, numbers in counts.items()}
    # private runs, of which the study no longer has some: of former values, arms and seeds
    tuning_trials = {trial.folder.name: trial for cell in progress for trial in cell.tuning_trials}
    settings = [setting for cell in progress for setting in cell.resample_settings.values()]
    settings += [cell.final_setting for cell in progress if cell.final_setting]
    final_names = {trial.folder.name for setting in settings for trial in setting.trials}
    names = tuning_trials.keys() | final_names
    former_count = sum(private for name, private in runs.items() if name not in names)
    private_count = former_count + sum(trial.experiment.private for trial in tuning_trials.values())
    return {
        "judge": study.about.judge,
        "validation": study.about.validation,
        "seeds": [*study.tuning_seeds()],
        "at": {axis: label(name) for axis, name in study.about.chosen_at.items()},
        "settings": ranges,
        "equal": len({*map(tuple, ranges.values())}) == 1,
        "statement": _statement(study, ranges, private_count, former_count)
        + _cost(study, progress),
    }


def _cost(study: Study, progress: Progress) -> str:
    """What tuning has cost, as a further sentence; empty where it has cost no privacy."""
    pairs = [(cell.cell.display_name(), cell.composition) for cell in progress if cell.composition]
    bounds = {
        name: composition.epsilon.epsilon for name, composition in pairs if composition.epsilon
    }
    text = ""
    if bounds:
        name = max(bounds, key=bounds.__getitem__)
        subject = f"all runs tried in {name} together (no other cell spends more)"
        text += f" {dict(pairs)[name].words(subject)} It is spent next to that of the final runs."
        experiment = next(cell.tries[0].experiment for cell in progress if cell.tries)
        text += exclusion_note(study.about.judge, experiment)
    unbounded_cells = [(name, composition) for name, composition in pairs if name not in bounds]
    if unbounded_cells:
        name, composition = unbounded_cells[0]
        rest_note = f", and of {len(unbounded_cells) - 1} more" if len(unbounded_cells) > 1 else ""
        text += f" {composition.words(f'the runs tried in {name}{rest_note}')}"
    return text


def _statement(
    study: Study, ranges: Mapping[str, Sequence[int]], private_count: int, former_count: int
) -> str:
    if not any(high for _, high in ranges.values()):
        return "No value was chosen by looking at results."
    about = study.about
    numbers = ", ".join(
        f"{arm} {low}" if low == high else f"{arm} {low} to {high}"
        for arm, (low, high) in ranges.items()
    )
    choice_labels = "".join(f" at {axis}={label(name)}" for axis, name in about.chosen_at.items())
    runs = count_text(len(study.tuning_seeds()), "run")
    criterion = f"the mean {about.judge.replace('_', ' ')} of {runs} per setting"
    text = f"Values were chosen in each cell{choice_labels} by {criterion}"
    if about.validation:
        text += f", on {about.validation:.0%} of every client's rows, held out of training"
    text += f"; the test set was not looked at. Settings tried in a cell, by arm: {numbers}."
    if study.grow:
        text += " Where an arm chose an end of a grid, the grids of all arms of its panel grew "
        text += f"there, by {count_text(study.grow, 'value')} at most."
    text += " The final runs have other seeds, and all rows."
    note = f", {former_count:,} of which are of former settings or arms," if former_count else ""
    return text + choice_warning(private_count, note)
