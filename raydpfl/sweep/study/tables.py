"""The tables of a study: a row per final run of every cell, and a row per run that values were
chosen by.

A run that several cells share has a row in each. Axes and labels are text. The metadata of the
schemas say which columns are epsilons by a rigorous accountant (`rigorous`), which are measured of
the machine and differ from one time to another (`machine`), and, of the tried, the `judge`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from raydpfl.privacy import RIGOROUS
from raydpfl.sweep.results import epsilons
from raydpfl.sweep.study.progress import Progress, number, numbers
from raydpfl.sweep.study.schema import Study
from raydpfl.sweep.trial_source import Trial

MACHINE = ("seconds", "wall_seconds", "clients_per_second", "peak_rss_mb", "replaced_actors")
WHOLE = ("rounds", "parameters", "population", "repeated_rounds", "replaced_actors")
APART = ("seed", "epsilon_quantiles", "peak_rss_mb_by_process", "versions")  # no columns
FIRST = {"arm": pa.string(), "accounting": pa.string(), "seed": pa.uint64(), "status": pa.string()}
LAST = {"directory": pa.string(), "reason": pa.string(), "model_sha256": pa.string()}


def results(study: Study, progress: Sequence[Progress]) -> pa.Table:
    """A row per final run and cell, in the order of the cells and seeds."""
    rows = []
    for each in progress:
        for trial in each.finals:
            rows.append({**_numbers(trial), **_row(each, each.values, trial)})
    columns = {**_axes(study), **FIRST, "values": pa.string(), **LAST}
    return _table(rows, columns | _measured(rows, columns), {})


def tuning(study: Study, progress: Sequence[Progress]) -> pa.Table:
    """A row per run that was tried and cell, in the order of the cells and their grids."""
    judge = study.about.judge
    rows = []
    for each in progress:
        for tried in each.tries:
            row = _row(each, tried.values, tried.trial)
            row |= {name: value for name, value in epsilons(tried.trial).items()}
            row |= {judge: number(tried.trial, judge), "chosen": tried is each.chosen}
            row["seconds"] = (tried.trial.summary or {}).get("seconds")
            rows.append(row)
    columns = {**_axes(study), **FIRST, "values": pa.string(), judge: pa.float64()}
    columns |= {"chosen": pa.bool_(), "seconds": pa.float64(), **LAST}
    return _table(rows, columns | _measured(rows, columns), {"judge": judge})


def _row(each: Progress, values: Mapping[str, Any], trial: Trial) -> dict[str, Any]:
    cell = each.cell
    row: dict[str, Any] = {**cell.labels, "arm": cell.arm, "accounting": cell.accounting}
    row |= {"seed": trial.seed, "status": trial.status, "values": json.dumps(values)}
    row["directory"] = f"trials/{trial.folder.name}"
    row["reason"] = trial.failure() if trial.status == "failed" else None
    row["model_sha256"] = (trial.summary or {}).get("model_sha256")
    return row


def _numbers(trial: Trial) -> dict[str, float]:
    summary = trial.summary or {}
    kept = {name: value for name, value in summary.items() if name not in APART}
    return {**numbers(kept), **(epsilons(trial) if summary else {})}


def _axes(study: Study) -> dict[str, pa.DataType]:
    return dict.fromkeys(study.axes, pa.string())


def _measured(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of numbers that runs have, in the order in which they come, epsilons last."""
    names = dict.fromkeys(name for row in rows for name in row if name not in columns)
    spent = [name for name in names if name.startswith("epsilon_")]
    ordered = [*(name for name in names if name not in spent), *spent]
    whole = {name for name in ordered if name in WHOLE or name.endswith("_round")}
    return {name: pa.int64() if name in whole else pa.float64() for name in ordered}


def _table(
    rows: list[dict[str, Any]], columns: Mapping[str, pa.DataType], more: Mapping[str, str]
) -> pa.Table:
    facts = {
        "rigorous": json.dumps([name for name in columns if name in RIGOROUS]),
        "machine": json.dumps([name for name in columns if name in MACHINE]),
        **more,
    }
    return pa.Table.from_pylist(rows, schema=pa.schema(list(columns.items()), metadata=facts))
