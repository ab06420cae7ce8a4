"""What a sweep leaves behind: a row per trial and per setting, the best setting as a config, and
what choosing it means.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raydpfl.privacy import column
from raydpfl.tracking import clear, replace_file, write_json
from raydpfl.tune.folder import trained
from raydpfl.tune.sweep import Setting, Sweep, Trial

_SHOWN = ("completed", "budget", "stopped", "failed")


@dataclass(frozen=True)
class Result:
    """A finished sweep. `trials` has a row per trial, `settings` one per setting, both in the order
    of the sweep; `summary` is its summary.json.

    `best` is the setting with the best mean among those whose trials all ran to their end (among
    all, if none did); None if there is none, or if a trial failed and `sweep.on_error` is fail.
    `all` are the settings themselves. `problem` says in one line why the sweep did not come to its
    end, and is None if it did.
    """

    out: Path
    trials: pa.Table
    settings: pa.Table
    best: Setting | None
    summary: dict[str, Any]
    all: list[Setting]
    problem: str | None = None


def failures(settings: Sequence[Setting]) -> list[Trial]:
    """The trials that failed, in the order of the sweep."""
    return [trial for setting in settings for trial in setting.trials if trial.status == "failed"]


def best_of(settings: Sequence[Setting], sweep: Sweep) -> Setting | None:
    """See `Result.best`; of the settings so far, while the sweep runs."""
    if sweep.search.on_error == "fail" and failures(settings):
        return None
    known = [
        setting
        for setting in settings
        if setting.done and setting.mean(sweep.search.metric) is not None
    ]
    known = [setting for setting in known if setting.whole] or known
    return max(
        known, key=lambda setting: sweep.sign * setting.mean(sweep.search.metric), default=None
    )


def epsilons(trial: Trial) -> dict[str, float]:
    """Epsilon by accountant, of a whole client's or sample's guarantee as the run states it first;
    while it runs, of the rounds so far.
    """
    found: dict[str, float] = {}
    for guarantee in (trial.summary or {}).get("guarantees", ()):
        found.setdefault(column(guarantee["accountant"]), float(guarantee["epsilon"]))
    return found or {
        key: value for key, value in trial.report.items() if key.startswith("epsilon_")
    }


def statement(settings: Sequence[Setting], sweep: Sweep, chosen: bool = True) -> str:
    """What the choice of the best is worth, in words; `chosen`: there is one.

    It counts all runs that the settings ask for and all others that were ever trained in the
    directory: of values, seeds and configs that it has no more, stopped, or failed on the way.
    """
    runs = counted(settings)
    metric = sweep.search.metric.replace("_", " ")
    by = f"chosen by the {metric} of {_count(runs.own, 'run')} on one test set"
    told = f"No setting was {by}."
    if chosen:
        told = f"The best of {_count(len(settings), 'setting')} was {by}, which flatters it."
    if runs.all > runs.own:
        told += f" {_count(runs.all, 'run')} were trained in this directory, counting those of"
        told += " former values, seeds and configs."
    if not runs.private:
        return told
    among = _count(runs.private, "private run")
    return (
        f"{told} Choosing among {among} is itself a query on the data:"
        " each epsilon here holds for its own run alone, and none covers the choice, nor what the"
        " other runs have shown."
    )


@dataclass(frozen=True)
class Runs:
    """Runs that a choice is made among: of the settings, but for those that failed before their
    first round; of these and of all others that were ever trained in the directory; and, of all,
    the private ones.
    """

    own: int
    all: int
    private: int


def counted(settings: Sequence[Setting]) -> Runs:
    """The trials of these settings, and what else their directory holds."""
    trials = [trial for setting in settings for trial in setting.trials]
    places = {trial.folder.parent for trial in trials}
    runs = {place / name: private for place in places for name, private in trained(place).items()}
    own = [trial for trial in trials if trial.status != "failed" or trial.folder in runs]
    for trial in own:
        runs[trial.folder] = trial.experiment.private or runs.get(trial.folder, False)
    return Runs(len(own), len(runs), sum(runs.values()))


def gather(
    folder: Path, settings: Sequence[Setting], sweep: Sweep, over: bool, more: dict[str, Any]
) -> Result:
    """The result so far, or, when the sweep is `over`, the result. `more` goes into the summary."""
    trials = [trial for each in settings for trial in each.trials]
    failed = failures(settings)
    best = best_of(settings, sweep)
    metric = sweep.search.metric
    problem = None
    if failed and sweep.search.on_error == "fail":
        problem = f"{len(failed):,} of {_count(len(trials), 'trial')} failed, and no best setting"
        problem += " was chosen; go on with --resume, or choose among the others with"
        problem += " sweep.on_error=choose"
    elif best is None:
        problem = "no setting has a result"
    status = "running"
    if over:
        status = "failed" if problem else "completed"
    runs = counted(settings)
    summary: dict[str, Any] = {
        "status": status,
        "reason": problem if over else None,
        "settings": len(settings),
        "trials": {state: sum(trial.status == state for trial in trials) for state in _SHOWN},
        "metric": metric,
        "choice": statement(settings, sweep, best is not None or not over),
        "trained": {"runs": runs.all, "private": runs.private},
        "failed": [
            {"directory": str(trial.folder.relative_to(folder)), "reason": trial.failure()}
            for trial in failed
        ],
    }
    if best:
        summary["best"] = {
            "values": best.values,
            "mean": best.mean(metric),
            "spread": best.spread(metric),
            "seeds": [t.seed for t in best.trials],
        }
    tables = _trials(settings, sweep, folder), _settings(settings, sweep)
    return Result(folder, *tables, best, summary | more, list(settings), problem if over else None)


def write(result: Result, sweep: Sweep) -> None:
    """results.parquet, settings.parquet and summary.json; and best.yaml, if the sweep is over and
    has a best.

    Raises OSError, `FileError`.
    """
    folder = result.out
    best = result.best
    over = result.summary["status"] == "completed"
    if not (over and best):  # none may be left from before a resume
        remove(folder / "best.yaml")
    for name, table in (("results.parquet", result.trials), ("settings.parquet", result.settings)):
        replace_file(folder / name, lambda part, table=table: pq.write_table(table, part))
    if over and best:
        seeds = _count(len(best.trials), "seed")
        metric = sweep.search.metric
        reached = f"{metric} {score(best, metric)} over {seeds}"
        first = f"best of {len(result.all)} settings: {best.named()}"
        head = [first, reached, result.summary["choice"]]
        text = "".join(f"# {line}\n" for line in head) + best.experiment.to_yaml()
        replace_file(folder / "best.yaml", lambda part: part.write(text.encode()))
    write_json(folder / "summary.json", result.summary)


def remove(path: Path) -> None:
    """Removes a file that is there; what is no file is set aside. Raises OSError."""
    clear(path)
    path.unlink(missing_ok=True)


def score(setting: Setting, metric: str) -> str:
    """Mean and spread over the seeds, in print; empty while there is none."""
    mean = setting.mean(metric)
    spread = setting.spread(metric)
    if mean is None:
        return ""
    show = (
        (lambda value: f"{value:.2%}")
        if metric == "test_accuracy"
        else (lambda value: f"{value:.4g}")
    )
    return show(mean) + (f" ± {show(spread)}" if spread is not None else "")


def _trials(settings: Sequence[Setting], sweep: Sweep, folder: Path) -> pa.Table:
    rows = []
    for place, setting in enumerate(settings):
        for trial in setting.trials:
            facts = trial.summary or {}
            row = {"setting": place, **setting.values, "seed": trial.seed, "status": trial.status}
            row |= {name: facts.get(name) for name in ("rounds", "test_accuracy", "test_loss")} | (
                epsilons(trial) if facts else {}
            )
            row |= {name: facts.get(name) for name in ("model_sha256", "seconds")}
            rows.append(
                row | {"directory": str(trial.folder.relative_to(folder)), "reason": trial.reason}
            )
    return _arrow(rows)


def _settings(settings: Sequence[Setting], sweep: Sweep) -> pa.Table:
    metric = sweep.search.metric
    rows = []
    for place, setting in enumerate(settings):
        spent: dict[str, float] = {}
        for trial in setting.trials:
            for name, value in epsilons(trial).items():
                spent[name] = max(value, spent.get(name, value))
        row = {
            "setting": place,
            **setting.values,
            "trials": len(setting.trials),
            "whole": setting.whole,
        }
        rows.append(
            row
            | {f"{metric}_mean": setting.mean(metric), f"{metric}_spread": setting.spread(metric)}
            | spent
        )
    return _arrow(rows)


def _arrow(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """A table whose columns of mixed or nested values are JSON texts."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        kinds = {
            bool if isinstance(v, bool) else float if isinstance(v, (int, float)) else type(v)
            for v in values
            if v is not None
        }
        if len(kinds) > 1 or kinds & {dict, list}:
            values = [
                None if value is None else value if isinstance(value, str) else json.dumps(value)
                for value in values
            ]
        elif kinds == {float} and any(isinstance(value, float) for value in values):
            values = [None if value is None else float(value) for value in values]
        columns[name] = pa.array(values)
    return pa.table(columns)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
