"""What a sweep leaves behind: a row per trial and per setting, the best setting as a config, and what choosing it means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raydpfl.tracking import replace_file, write_json
from raydpfl.tune.sweep import Setting, Sweep, Trial

_SHOWN = ("completed", "budget", "stopped", "failed")


@dataclass(frozen=True)
class Result:
    """A finished sweep. `trials` has a row per trial, `settings` one per setting, both in the order of the sweep; `summary` is its summary.json.

    `best` is the setting with the best mean among those whose trials all ran to their end (among all, if none did); None if all
    failed. `all` are the settings themselves.
    """

    out: Path
    trials: pa.Table
    settings: pa.Table
    best: Setting | None
    summary: dict[str, Any]
    all: list[Setting]


def best_of(settings: Sequence[Setting], sweep: Sweep) -> Setting | None:
    known = [setting for setting in settings if setting.done and setting.mean(sweep.search.metric) is not None]
    known = [setting for setting in known if setting.whole] or known
    return max(known, key=lambda setting: sweep.sign * setting.mean(sweep.search.metric), default=None)


def epsilons(trial: Trial) -> dict[str, float]:
    """Epsilon by accountant, of a whole client's or sample's guarantee as the run states it first; while it runs, of the rounds so far."""
    found: dict[str, float] = {}
    for guarantee in (trial.summary or {}).get("guarantees", ()):
        found.setdefault(f"epsilon_{guarantee['accountant']}".replace(" ", "_"), float(guarantee["epsilon"]))
    return found or {key: value for key, value in trial.report.items() if key.startswith("epsilon_")}


def statement(settings: Sequence[Setting], sweep: Sweep) -> str:
    """What the choice of the best is worth, in words."""
    runs, metric = sum(len(setting.trials) for setting in settings), sweep.search.metric.replace("_", " ")
    chosen = f"The best of {_count(len(settings), 'setting')} was chosen by the {metric} of {_count(runs, 'run')} on one test set, which flatters it."
    if not any(setting.experiment.private for setting in settings):
        return chosen
    return (
        f"{chosen} Choosing among {_count(runs, 'private run')} is itself a query on the data: each epsilon here holds for its own run alone, "
        "and none covers the choice, nor what the other runs have shown."
    )


def write(folder: Path, settings: Sequence[Setting], sweep: Sweep, over: bool, more: dict[str, Any]) -> Result:
    """results.parquet, settings.parquet and summary.json; and, when the sweep is over, best.yaml. `more` goes into the summary."""
    trials, groups = _trials(settings, sweep, folder), _settings(settings, sweep)
    for name, table in (("results.parquet", trials), ("settings.parquet", groups)):
        replace_file(folder / name, lambda part, table=table: pq.write_table(table, part))
    best, metric = best_of(settings, sweep), sweep.search.metric
    counts = {status: sum(trial.status == status for setting in settings for trial in setting.trials) for status in _SHOWN}
    summary = {"status": "completed" if over else "running", "settings": len(settings), "trials": counts, "metric": metric}
    summary["choice"] = statement(settings, sweep)
    if best:
        summary["best"] = {"values": best.values, "mean": best.mean(metric), "spread": best.spread(metric), "seeds": [t.seed for t in best.trials]}
    write_json(folder / "summary.json", summary | more)
    if over and best:
        reached = f"{metric} {score(best, metric)} over {_count(len(best.trials), 'seed')}"
        head = [f"best of {len(settings)} settings: {best.named()}", reached, statement(settings, sweep)]
        text = "".join(f"# {line}\n" for line in head) + best.experiment.to_yaml()
        replace_file(folder / "best.yaml", lambda part: part.write(text.encode()))
    return Result(folder, trials, groups, best, summary | more, list(settings))


def score(setting: Setting, metric: str) -> str:
    """Mean and spread over the seeds, in print; empty while there is none."""
    mean, spread = setting.mean(metric), setting.spread(metric)
    if mean is None:
        return ""
    show = (lambda value: f"{value:.2%}") if metric == "test_accuracy" else (lambda value: f"{value:.4g}")
    return show(mean) + (f" ± {show(spread)}" if spread is not None else "")


def _trials(settings: Sequence[Setting], sweep: Sweep, folder: Path) -> pa.Table:
    rows = []
    for place, setting in enumerate(settings):
        for trial in setting.trials:
            facts = trial.summary or {}
            row = {"setting": place, **setting.values, "seed": trial.seed, "status": trial.status}
            row |= {name: facts.get(name) for name in ("rounds", "test_accuracy", "test_loss")} | (epsilons(trial) if facts else {})
            row |= {name: facts.get(name) for name in ("model_sha256", "seconds")}
            rows.append(row | {"directory": str(trial.folder.relative_to(folder)), "reason": trial.reason})
    return _arrow(rows)


def _settings(settings: Sequence[Setting], sweep: Sweep) -> pa.Table:
    metric, rows = sweep.search.metric, []
    for place, setting in enumerate(settings):
        spent: dict[str, float] = {}
        for trial in setting.trials:
            for name, value in epsilons(trial).items():
                spent[name] = max(value, spent.get(name, value))
        row = {"setting": place, **setting.values, "trials": len(setting.trials), "whole": setting.whole}
        rows.append(row | {f"{metric}_mean": setting.mean(metric), f"{metric}_spread": setting.spread(metric)} | spent)
    return _arrow(rows)


def _arrow(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """A table whose columns of mixed or nested values are JSON texts."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        kinds = {bool if isinstance(v, bool) else float if isinstance(v, (int, float)) else type(v) for v in values if v is not None}
        if len(kinds) > 1 or kinds & {dict, list}:
            values = [None if value is None else value if isinstance(value, str) else json.dumps(value) for value in values]
        elif kinds == {float} and any(isinstance(value, float) for value in values):
            values = [None if value is None else float(value) for value in values]
        columns[name] = pa.array(values)
    return pa.table(columns)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
