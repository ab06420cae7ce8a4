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
from raydpfl.report.labels import counted
from raydpfl.simulation.provenance import COMPILED, commit, versions
from raydpfl.sweep.results import choice_is_a_query, epsilons, leaves_out, table
from raydpfl.sweep.study.cell_progress import CellProgress
from raydpfl.sweep.study.cells import StudyCell, label
from raydpfl.sweep.study.claims import key, verdicts
from raydpfl.sweep.study.identities import compare, words
from raydpfl.sweep.study.schema import Study
from raydpfl.sweep.trials import SearchSetting, Trial, numbers, trained

MACHINE = ("seconds", "wall_seconds", "clients_per_second", "peak_rss_mb", "replaced_actors")
WHOLE = ("rounds", "parameters", "population", "repeated_rounds", "replaced_actors")
OMITTED = ("seed", "epsilon_quantiles", "peak_rss_mb_by_process", "versions")  # no columns
FIRST = {"arm": pa.string(), "accounting": pa.string(), "seed": pa.uint64(), "status": pa.string()}
LAST = {"directory": pa.string(), "reason": pa.string(), "model_sha256": pa.string()}
SPENT = "all_tries_epsilon"  # that all runs of a cell that values were chosen by spend together
STATES = ("completed", "budget", "stopped", "failed", "running", "waiting")


def final(study: Study, progress: Sequence[CellProgress]) -> pa.Table:
    """A row per final run and cell, in the order of the cells and seeds."""
    cells = [(cell, cell.final) for cell in progress if cell.final]
    rows = [_final_row(cell, setting, trial) for cell, setting in cells for trial in setting.trials]
    return _table(study, rows)


def resampled(study: Study, progress: Sequence[CellProgress]) -> pa.Table:
    """A row per final run, cell and resample of the tuning seeds, which `tuning_seeds` lists."""
    first = study.tuning_seeds().start
    rows = [
        _final_row(cell, setting, trial)
        | {"tuning_seeds": " ".join(str(first + place) for place in resample)}
        for cell in progress
        for resample, setting in cell.resampled.items()
        for trial in setting.trials
    ]
    return _table(study, rows, {"tuning_seeds": pa.string()})


def _final_row(cell: CellProgress, setting: SearchSetting, trial: Trial) -> dict[str, Any]:
    summary = trial.summary or {}
    facts = numbers({key: summary[key] for key in summary if key not in OMITTED})
    facts |= epsilons(trial) if summary else {}
    return {**facts, **_row(cell, setting, trial)}


def tuning(study: Study, progress: Sequence[CellProgress]) -> pa.Table:
    """A row per run that was tried and cell, in the order of the cells and their grids."""
    judge = study.about.judge
    rows = []
    for cell in progress:
        held = cell.spent and cell.spent.epsilon
        for setting, trial in ((one, trial) for one in cell.tries for trial in one.trials):
            row = _row(cell, setting, trial) | epsilons(trial)
            row |= {SPENT: held.epsilon if held else None}
            row |= {judge: trial.value(judge), "chosen": setting is cell.chosen}
            rows.append(row | {"seconds": (trial.summary or {}).get("seconds")})
    columns = {judge: pa.float64(), "chosen": pa.bool_(), "seconds": pa.float64()}
    return _table(study, rows, columns | {SPENT: pa.float64()}, {"judge": judge})


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
    every = {**axes, **FIRST, "values": pa.string(), **columns, **LAST}
    names = [*dict.fromkeys(name for row in rows for name in row if name not in every)]
    for name in sorted(names, key=lambda name: name.startswith("epsilon_")):
        whole = name in WHOLE or name.endswith("_round")
        every[name] = pa.int64() if whole else pa.float64()
    facts = {"rigorous": RIGOROUS, "machine": MACHINE}
    listed = {key: json.dumps([name for name in every if name in of]) for key, of in facts.items()}
    return table(rows, every, {**listed, **metadata})


def summary(
    study: Study, progress: Sequence[CellProgress], folder: Path, over: bool
) -> dict[str, Any]:
    """summary.json: how it ended, how values were chosen, and which identities hold; all but the
    seconds it took.
    """
    # the directory and the digest of the model of every final run, by cell and seed
    models = {one.cell: {trial.seed: _model(trial) for trial in one.finals} for one in progress}
    values = {key(one.cell.place): one.values for one in progress}
    identities = [compare(identity, models) for identity in study.same_bits]
    failed = _failed(progress)
    reason = _problem(failed, identities) if over else None
    runs = trained(folder / "trials")
    return {
        "status": "running" if not over else "failed" if reason else "completed",
        "reason": reason,
        "study": study.about.id,
        "scale": study.scale,
        "seeds": [*study.final_seeds()],
        "cells": len(progress),
        "tried": _states(trial for one in progress for trial in one.tried),
        "final": _states(trial for one in progress for trial in one.finals),
        "trained": {"runs": len(runs), "private": sum(runs.values())},
        "failed": failed,
        "identities": identities,
        "claims": verdicts(study.claims, study.labels, values),
        "equal_arms": _equal_arms(models),
        "computed_by": {**versions(), "compiled": COMPILED, "commit": commit()},
        "tuning": _choice(study, progress, runs),
    }


def _model(trial: Trial) -> tuple[str, str] | None:
    digest = (trial.summary or {}).get("model_sha256")
    return (trial.folder.name, digest) if trial.finished and digest else None


def _equal_arms(models: Mapping[StudyCell, Mapping[int, Any]]) -> list[dict[str, Any]]:
    """The arms of a panel whose models are the same bits in all seeds."""
    groups: dict[tuple[Any, ...], list[StudyCell]] = {}
    for cell, by_seed in models.items():
        digests = tuple(model and model[1] for model in by_seed.values())
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


def _failed(progress: Sequence[CellProgress]) -> list[dict[str, str]]:
    """Final runs and cells without a result, and why."""
    failed: dict[str, dict[str, str]] = {}
    for one in progress:
        name = one.cell.named()
        if one.problem:
            failed[name] = {"cell": name, "reason": one.problem}
        for trial in [trial for trial in one.finals if trial.status == "failed"]:
            place = f"trials/{trial.folder.name}"
            failed[place] = {"directory": place, "cell": trial.named(), "reason": trial.failure()}
    return list(failed.values())


def _problem(
    failed: Sequence[Mapping[str, str]], identities: Sequence[Mapping[str, Any]]
) -> str | None:
    """Why a study that is over has not succeeded, in one line."""
    problems = []
    if failed:
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        first = f"{failed[0]['cell']}: {failed[0]['reason']}"
        problems.append(f"without a result: {first}{more}; go on with --resume")
    broken = [words(identity) for identity in identities if identity["held"] is False]
    if broken:
        problems.append("an identity is broken: " + "; ".join(broken))
    return "; ".join(problems) or None


def _choice(
    study: Study, progress: Sequence[CellProgress], runs: Mapping[str, bool]
) -> dict[str, Any]:
    """How many settings each arm tried in a cell, and what their choice is worth, in words. `runs`:
    every run of the directory, by name, and whether it was private.
    """
    counts: dict[str, list[int]] = {}
    for one in progress:
        counts.setdefault(one.cell.arm, []).append(len(one.tries) or one.cell.settings)
    ranges = {arm: [min(numbers), max(numbers)] for arm, numbers in counts.items()}
    # private runs, of which the study no longer has some: of former values, arms and seeds
    tried = {trial.folder.name: trial for one in progress for trial in one.tried}
    final = {trial.folder.name for one in progress for trial in one.finals}
    former = sum(private for name, private in runs.items() if name not in {*tried, *final})
    private = former + sum(trial.experiment.private for trial in tried.values())
    return {
        "judge": study.about.judge,
        "validation": study.about.validation,
        "seeds": [*study.tuning_seeds()],
        "at": {axis: label(name) for axis, name in study.about.chosen_at.items()},
        "settings": ranges,
        "equal": len({*map(tuple, ranges.values())}) == 1,
        "statement": _statement(study, ranges, private, former) + _spent(study, progress),
    }


def _spent(study: Study, progress: Sequence[CellProgress]) -> str:
    """What tuning has cost, as a further sentence; empty where it has cost no privacy."""
    spent = [(one.cell.named(), one.spent) for one in progress if one.spent]
    held = {name: one.epsilon.epsilon for name, one in spent if one.epsilon}
    text = ""
    if held:
        most = max(held, key=held.__getitem__)
        words = f"all runs tried in {most} together (no other cell spends more)"
        text += f" {dict(spent)[most].words(words)} It is spent next to that of the final runs."
        tried = next(one.tries[0].experiment for one in progress if one.tries)
        text += leaves_out(study.about.judge, tried)
    without = [(name, one) for name, one in spent if name not in held]
    if without:
        name, one = without[0]
        more = f", and of {len(without) - 1} more" if len(without) > 1 else ""
        text += f" {one.words(f'the runs tried in {name}{more}')}"
    return text


def _statement(study: Study, ranges: Mapping[str, Sequence[int]], private: int, former: int) -> str:
    if not any(most for _, most in ranges.values()):
        return "No value was chosen by looking at results."
    about = study.about
    numbers = ", ".join(
        f"{arm} {least}" if least == most else f"{arm} {least} to {most}"
        for arm, (least, most) in ranges.items()
    )
    where = "".join(f" at {axis}={label(name)}" for axis, name in about.chosen_at.items())
    runs = counted(len(study.tuning_seeds()), "run")
    by = f"the mean {about.judge.replace('_', ' ')} of {runs} per setting"
    text = f"Values were chosen in each cell{where} by {by}"
    if about.validation:
        text += f", on {about.validation:.0%} of every client's rows, held out of training"
    text += f"; the test set was not looked at. Settings tried in a cell, by arm: {numbers}."
    if study.grow:
        text += " Where an arm chose an end of a grid, the grids of all arms of its panel grew "
        text += f"there, by {counted(study.grow, 'value')} at most."
    text += " The final runs have other seeds, and all rows."
    note = f", {former:,} of which are of former settings or arms," if former else ""
    return text + choice_is_a_query(private, note)
