"""What a sweep leaves behind: a row per trial and per setting, the best setting as a config, and
what choosing it means.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raydpfl import storage
from raydpfl.models.metric_columns import CLIENT, TEST, VALIDATION, named, number, set_of
from raydpfl.privacy import column
from raydpfl.report.labels import edge
from raydpfl.storage.run_files import clear, replace_file, write_json
from raydpfl.sweep.spaces import Interval, Space
from raydpfl.sweep.sweep import Setting, Sweep, text_of
from raydpfl.sweep.trial_folders import trained
from raydpfl.sweep.trial_source import Trial

_SHOWN = ("completed", "budget", "stopped", "failed")
# Fields that set how much privacy is spent: of these more is better without a search.
_PRIVACY = ("noise.epsilon", "noise.delta", "noise.multiplier", "noise.std", "privacy.budget")
# What a row of results.parquet has of the trial's summary after the epsilons.
_FACTS = {"model_sha256": pa.string(), "seconds": pa.float64()}


@dataclass(frozen=True)
class Result:
    """A finished sweep. `trials` has a row per trial, `settings` one per setting, both in the order
    of the sweep; `summary` is its summary.json.

    `best` is the setting with the best mean among those whose trials all ran to their end (among
    all, if none did); None if there is none, or if a trial failed and `sweep.on_error` is fail.
    `all` are the settings themselves. `problem` says in one line why the sweep did not come to its
    end, and is None if it did.
    """

    out: Path | str
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
    means = [(setting, setting.mean(sweep.search.metric)) for setting in settings if setting.done]
    known = [(sweep.sign * mean, setting) for setting, mean in means if mean is not None]
    known = [(score, setting) for score, setting in known if setting.whole] or known
    return max(known, key=lambda pair: pair[0], default=(0.0, None))[1]


def best_for(settings: Sequence[Setting], sweep: Sweep) -> dict[str, list[dict[str, Any]]]:
    """The best setting for each value of a field, by the rules of `Result.best`.

    Returns:
        By each field that took several of finitely many values, where others varied too, a row for
        each value with a best setting, in the order of the grid: `value`; the place of the setting
        in settings.parquet, its mean and spread, and the fields at an edge of their grids
        (`at_edges`), but for the field itself.
    """
    took: dict[str, dict[str, list[Setting]]] = {key: {} for key in sweep.spaces}
    for setting in settings:
        for key, value in setting.values.items():
            took[key].setdefault(text_of(value), []).append(setting)
    several = [key for key, inside in took.items() if len(inside) > 1]
    found: dict[str, list[dict[str, Any]]] = {}
    for key in several if len(several) > 1 else ():
        space = sweep.spaces[key]
        if isinstance(space, Interval):
            continue
        for value in space.options:
            best = best_of(took[key].get(text_of(value), ()), sweep)
            if best:
                row = {"value": value, **_reached(best, settings, sweep)}
                row["edges"].pop(key, None)
                found.setdefault(key, []).append(row)
    return found


def _reached(setting: Setting, settings: Sequence[Setting], sweep: Sweep) -> dict[str, Any]:
    """What a setting came to, as the summary has it."""
    metric = sweep.search.metric
    return {
        "setting": settings.index(setting),
        "mean": setting.mean(metric),
        "spread": setting.spread(metric),
        "edges": at_edges(setting, sweep),
    }


def at_edges(setting: Setting, sweep: Sweep) -> dict[str, str]:
    """The fields of a setting whose values are the smallest or the largest number of their grid, so
    that one beyond may be better, each with which of the two; but for what sets the privacy.
    """
    found = {}
    for key, value in setting.values.items():
        space = sweep.spaces[key]
        if not isinstance(space, Interval) and key not in _PRIVACY:
            found[key] = edge(value, space.options)
    return {key: which for key, which in found.items() if which}


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
    told = _chosen(settings, sweep, runs.own, chosen)
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


def _chosen(settings: Sequence[Setting], sweep: Sweep, runs: int, chosen: bool) -> str:
    """By what, and on which rows, the best setting was chosen, if one was."""
    metric = sweep.search.metric
    held_out = set_of(metric) == VALIDATION
    rows = "rows held out of their training" if held_out else "one test set"
    if set_of(metric) == CLIENT:
        rows = "each client's own rows"
    by = f"chosen by the {named(metric)} of {_count(runs, 'run')} on {rows}"
    if not chosen:
        return f"No setting was {by}."
    told = f"The best of {_count(len(settings), 'setting')} was {by}, which flatters it."
    if set_of(metric) == TEST:
        return told
    if any(experiment.evaluate.test for experiment in sweep.probes):
        return f"{told} The runs were scored on the test set too, which had no part in the choice."
    unseen = any(not setting.experiment.evaluate.test for setting in settings)
    command = "raydpfl run best.yaml" + (" evaluate.test=true" if unseen else "")
    once = f"{command} does, once (evaluate.validation=0 has it train on all rows)"
    return f"{told} None of them looked at the test set: {once}."


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
    best = best_of(settings, sweep)
    problem = _problem(settings, sweep, best) if over else None
    status = "running"
    if over:
        status = "failed" if problem else "completed"
    summary = {"status": status, "reason": problem} | _summary(settings, sweep, folder)
    summary["choice"] = statement(settings, sweep, best is not None or not over)
    if best:
        seeds = [trial.seed for trial in best.trials]
        summary["best"] = {"values": best.values, **_reached(best, settings, sweep), "seeds": seeds}
        if over:
            summary["best_for"] = best_for(settings, sweep)
    tables = _trials(settings, sweep, folder), _settings(settings, sweep)
    return Result(folder, *tables, best, summary | more, list(settings), problem)


def _problem(settings: Sequence[Setting], sweep: Sweep, best: Setting | None) -> str | None:
    """Why a sweep that is over did not come to its end, in one line."""
    failed = len(failures(settings))
    if failed and sweep.search.on_error == "fail":
        trials = _count(sum(len(setting.trials) for setting in settings), "trial")
        return (
            f"{failed:,} of {trials} failed, and no best setting was chosen; go on with --resume,"
            " or choose among the others with sweep.on_error=choose"
        )
    return "no setting has a result" if best is None else None


def _summary(settings: Sequence[Setting], sweep: Sweep, folder: Path) -> dict[str, Any]:
    """What summary.json says of the trials, whichever setting is chosen."""
    states = [trial.status for setting in settings for trial in setting.trials]
    runs = counted(settings)
    return {
        "settings": len(settings),
        "trials": {state: states.count(state) for state in _SHOWN},
        "metric": sweep.search.metric,
        "trained": {"runs": runs.all, "private": runs.private},
        "failed": [
            {"directory": str(trial.folder.relative_to(folder)), "reason": trial.failure()}
            for trial in failures(settings)
        ],
    }


def write(result: Result, sweep: Sweep) -> None:
    """results.parquet, settings.parquet and summary.json; and best.yaml, if the sweep is over and
    has a best.

    Raises OSError, `FileError`.
    """
    folder = Path(result.out)
    best = result.best
    over = result.summary["status"] == "completed"
    if not (over and best):  # none may be left from before a resume
        remove(folder / "best.yaml")
    for name, table in (("results.parquet", result.trials), ("settings.parquet", result.settings)):
        replace_file(folder / name, functools.partial(pq.write_table, table))
    if over and best:
        seeds = _count(len(best.trials), "seed")
        metric = sweep.search.metric
        reached = f"{metric} {score(best, metric)} over {seeds}"
        first = f"best of {len(result.all)} settings: {best.named()}"
        head = [first, reached, result.summary["choice"]]
        text = "".join(f"# {line}\n" for line in head) + best.experiment.to_yaml()
        replace_file(folder / "best.yaml", lambda part: part.write(text.encode()))
    write_json(folder / "summary.json", result.summary)
    storage.push(folder)


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
    return number(metric, mean) + (f" ± {number(metric, spread)}" if spread is not None else "")


def _scores(sweep: Sweep) -> dict[str, pa.DataType]:
    """What a row of results.parquet has of the trial's summary before the epsilons."""
    asked = (name for experiment in sweep.probes for name in experiment.scores)
    return {"rounds": pa.int64()} | {name: pa.float64() for name in dict.fromkeys(asked)}


def _trials(settings: Sequence[Setting], sweep: Sweep, folder: Path) -> pa.Table:
    rows = []
    reached = _scores(sweep)
    for place, setting in enumerate(settings):
        for trial in setting.trials:
            facts = trial.summary or {}
            row = _cells(setting, sweep) | {"setting": place, "seed": trial.seed}
            row |= {name: facts.get(name) for name in (*reached, *_FACTS)}
            row |= epsilons(trial) if facts else {}
            directory = str(trial.folder.relative_to(folder))
            rows.append(
                row | {"status": trial.status, "directory": directory, "reason": trial.reason}
            )
    first = {"setting": pa.int64(), **_searched(sweep), "seed": pa.uint64(), "status": pa.string()}
    last = {"directory": pa.string(), "reason": pa.string()}
    return _table(rows, first | reached | _spent(rows, sweep) | _FACTS | last)


def _settings(settings: Sequence[Setting], sweep: Sweep) -> pa.Table:
    metric = sweep.search.metric
    rows = []
    for place, setting in enumerate(settings):
        row = _cells(setting, sweep)
        row |= {"setting": place, "trials": len(setting.trials), "whole": setting.whole}
        row |= {f"{metric}_mean": setting.mean(metric), f"{metric}_spread": setting.spread(metric)}
        for trial in setting.trials:
            for name, value in epsilons(trial).items():
                row[name] = max(value, row.get(name, value))
        rows.append(row)
    columns = {"setting": pa.int64(), **_searched(sweep), "trials": pa.int64(), "whole": pa.bool_()}
    columns |= {f"{metric}_mean": pa.float64(), f"{metric}_spread": pa.float64()}
    return _table(rows, columns | _spent(rows, sweep))


def _table(rows: list[dict[str, Any]], columns: dict[str, pa.DataType]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=pa.schema(list(columns.items())))


def _spent(rows: Sequence[dict[str, Any]], sweep: Sweep) -> dict[str, pa.DataType]:
    """The columns of epsilons: of every accountant that the config asks for, and of those that a
    run has besides, such as a rigorous one beside the paper's."""
    asked = [e.accountants for e in sweep.probes if e.private]
    names = [column(name) for name in dict.fromkeys(itertools.chain(*asked))]
    found = [name for row in rows for name in row if name.startswith("epsilon_")]
    return dict.fromkeys([*names, *found], pa.float64())


def _searched(sweep: Sweep) -> dict[str, pa.DataType]:
    """The columns of searched values."""
    return {key: _kind(space) for key, space in sweep.spaces.items()}


def _kind(space: Space) -> pa.DataType:
    """How a column holds the values of a space: those of several kinds, or of nested ones, as JSON
    texts.
    """
    if isinstance(space, Interval):
        return pa.float64()
    values = [value for value in space.options if value is not None]
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int} and all(-(1 << 63) <= value < 1 << 63 for value in values):
        return pa.int64()
    return pa.float64() if kinds and kinds <= {int, float} else pa.string()


def _cells(setting: Setting, sweep: Sweep) -> dict[str, Any]:
    """A setting's values, as their columns hold them."""
    return {key: _cell(value, _kind(sweep.spaces[key])) for key, value in setting.values.items()}


def _cell(value: Any, kind: pa.DataType) -> Any:
    if value is None or isinstance(value, str):
        return value
    if kind == pa.string():
        return json.dumps(value)
    return float(value) if kind == pa.float64() else value


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
