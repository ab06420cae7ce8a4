"""What a sweep leaves behind: a row per trial and per setting, the best setting, and what choosing
it means.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa

from raydpfl.experiment import Experiment
from raydpfl.models.metric_columns import CLIENT, TEST, VALIDATION, number, score_label, score_set
from raydpfl.privacy import Composition, column
from raydpfl.report.labels import count_text, edge
from raydpfl.sweep.search_runner import SearchResult
from raydpfl.sweep.spaces import Options
from raydpfl.sweep.sweep import Sweep, text_of
from raydpfl.sweep.trials import SearchSetting, Trial, best_of, trained_runs

_STATUSES = ("completed", "budget", "stopped", "failed")
# Fields that set how much privacy is spent: of these more is better without a search.
_PRIVACY = ("noise.epsilon", "noise.delta", "noise.multiplier", "noise.std", "privacy.budget")
# Columns of results.parquet from the trial's summary that follow the epsilons.
_FACTS = {"model_sha256": pa.string(), "seconds": pa.float64()}


@dataclass(frozen=True)
class SweepResult(SearchResult):
    """A sweep, finished or running. `best` is the setting with the best mean among those whose
    trials all ran to their end (among all, if none did); None if there is none, or if a trial
    failed and `sweep.on_error` is fail.
    """

    trials: pa.Table  # a row per trial, in the order of the sweep
    settings: pa.Table  # a row per setting, in the order of the sweep
    best: SearchSetting | None
    all: list[SearchSetting]  # the settings

    def tables(self) -> dict[str, pa.Table]:
        return {"results.parquet": self.trials, "settings.parquet": self.settings}

    def failed(self, problem: str) -> Self:
        return replace(super().failed(problem), best=None)


def gather(
    folder: Path,
    settings: Sequence[SearchSetting],
    sweep: Sweep,
    is_over: bool,
    facts: dict[str, Any],
    composition: Composition | None = None,
) -> SweepResult:
    """The result so far, or, with `is_over`, the final one. The summary gets `facts`, and
    `composition`, what the search has spent. Of a private search it has the best setting alone.
    """
    trials = [trial for setting in settings for trial in setting.trials]
    failures = [trial for trial in trials if trial.status == "failed"]
    best = _best(settings, sweep)
    private = sweep.search.private
    problem = None
    if is_over and failures and sweep.search.on_error == "fail":
        problem = f"{len(failures):,} of {count_text(len(trials), 'trial')} failed, and no best"
        problem += " setting was chosen; go on with --resume, or choose among the others with"
        problem += " sweep.on_error=choose"
    elif is_over and best is None and not (private and private.runs == "poisson"):
        problem = "no setting has a result"
    runs = count_runs(trials, folder)
    if private:
        if is_over and runs.all > runs.own:
            problem = "trials/ has other runs too, which no epsilon covers; take another --out"
            best = composition = None
        best = best if is_over else None
        settings = [best] if best else []
        trials = [trial for setting in settings for trial in setting.trials]
        failures = []  # as the number of trials, it is of more than the best
        runs = Runs(len(trials), len(trials), len(trials))
    states = [trial.status for trial in trials]
    failed = [{"directory": f"trials/{t.folder.name}", "reason": t.failure()} for t in failures]
    summary: dict[str, Any] = {
        "status": "running" if not is_over else "failed" if problem else "completed",
        "reason": problem,
        "settings": len(settings),
        "trials": {state: states.count(state) for state in _STATUSES},
        "metric": sweep.search.metric,
        "better": "larger" if sweep.sign > 0 else "smaller",
        "trained": {"runs": runs.all, "private": runs.private},
        "failed": failed,
        "choice": statement(settings, sweep, runs, best is not None or not is_over, composition),
    }
    if composition:
        summary |= composition.to_dict(runs=False)
    if best:
        seeds = [trial.seed for trial in best.trials]
        summary["best"] = {"values": best.values, **_entry(best, settings, sweep), "seeds": seeds}
        if is_over:
            summary["best_for"] = best_for(settings, sweep)
    tables = _trials(settings, sweep), _settings(settings, sweep)
    if not private:  # how long it took says how many trials there were
        summary |= facts
    return SweepResult(folder, summary, problem, *tables, best, list(settings))


def _best(settings: Sequence[SearchSetting], sweep: Sweep) -> SearchSetting | None:
    """See `SweepResult.best`; of the settings so far, while the sweep runs."""
    has_failures = any(trial.status == "failed" for setting in settings for trial in setting.trials)
    if has_failures and sweep.search.on_error == "fail":
        return None
    return best_of(settings, sweep.search.metric, sweep.sign)


def best_for(settings: Sequence[SearchSetting], sweep: Sweep) -> dict[str, list[dict[str, Any]]]:
    """The best setting for each value of a field, by the rules of `SweepResult.best`: by each field
    that took several of finitely many values, where others varied too, a row for each value with a
    best setting, in the order of the grid: `value`; the index of the setting in settings.parquet,
    its mean and spread, and the fields at an edge of their grids, without the field itself.
    """
    keys = [key for key in sweep.spaces if len({text_of(s.values[key]) for s in settings}) > 1]
    table: dict[str, list[dict[str, Any]]] = {}
    for key in keys if len(keys) > 1 else ():
        space = sweep.spaces[key]
        for value in space.options if isinstance(space, Options) else ():
            value_settings = [s for s in settings if text_of(s.values[key]) == text_of(value)]
            best = _best(value_settings, sweep)
            if best:
                row = {"value": value, **_entry(best, settings, sweep)}
                row["edges"].pop(key, None)
                table.setdefault(key, []).append(row)
    return table


def _entry(
    setting: SearchSetting, settings: Sequence[SearchSetting], sweep: Sweep
) -> dict[str, Any]:
    """A setting and its score, as the summary has it. `edges`: the fields whose values are the
    smallest or the largest number of their grid, with which of the two, but for those that set the
    privacy. A value beyond may be better.
    """
    metric = sweep.search.metric
    edges = {
        key: edge_name
        for key, space in sweep.spaces.items()
        if isinstance(space, Options) and key not in _PRIVACY
        if (edge_name := edge(setting.values[key], space.options))
    }
    mean, spread = setting.mean(metric), setting.spread(metric)
    return {"setting": settings.index(setting), "mean": mean, "spread": spread, "edges": edges}


def epsilons(trial: Trial) -> dict[str, float]:
    """Epsilon by accountant, of the first guarantee that the run states by it; while it runs, of
    the rounds so far.
    """
    values: dict[str, float] = {}
    for guarantee in (trial.summary or {}).get("guarantees", ()):
        values.setdefault(column(guarantee["accountant"]), float(guarantee["epsilon"]))
    return values or {k: value for k, value in trial.report.items() if k.startswith("epsilon_")}


class Runs(NamedTuple):
    """Numbers of runs that a choice is made among."""

    own: int  # of the settings, without those that failed before their first round
    all: int  # with every other that was ever trained in the directory
    private: int  # of all


def count_runs(trials: Sequence[Trial], folder: Path) -> Runs:
    """Those of a directory with these trials."""
    runs = trained_runs(folder / "trials")
    own_trials = [t for t in trials if t.status != "failed" or t.folder.name in runs]
    for trial in own_trials:
        runs[trial.folder.name] = trial.experiment.private or runs.get(trial.folder.name, False)
    return Runs(len(own_trials), len(runs), sum(runs.values()))


def statement(
    settings: Sequence[SearchSetting],
    sweep: Sweep,
    runs: Runs,
    has_best: bool = True,
    composition: Composition | None = None,
) -> str:
    """What the choice of the best is worth, in words. `has_best`: whether there is one; `runs`:
    also those of former values, seeds and configs, stopped or failed; `composition`: of all.
    """
    metric = sweep.search.metric
    if sweep.search.private:
        return _private_statement(sweep, has_best, composition)
    rows = {VALIDATION: "rows held out of their training", CLIENT: "each client's own rows"}
    score_rows = rows.get(score_set(metric), "one test set")
    basis = f"chosen by the {score_label(metric)} of {count_text(runs.own, 'run')} on {score_rows}"
    if has_best:
        text = f"The best of {count_text(len(settings), 'setting')} was {basis}, which flatters it."
    else:
        text = f"No setting was {basis}."
    if has_best and score_set(metric) != TEST:
        if any(experiment.evaluate.test for experiment in sweep.probes):
            text += " The runs were scored on the test set too, which had no part in the choice."
        else:
            is_untested = any(not setting.experiment.evaluate.test for setting in settings)
            command = "raydpfl run best.yaml" + (" evaluate.test=true" if is_untested else "")
            test_hint = f"{command} does, once (evaluate.validation=0 has it train on all rows)"
            text += f" None of them looked at the test set: {test_hint}."
    if runs.all > runs.own:
        text += f" {count_text(runs.all, 'run')} were trained in this directory, counting those of"
        text += " former values, seeds and configs."
    text += choice_warning(runs.private)
    if composition:
        text += f" {composition.words('all of them together')} It is larger than that of one run as"
        text += " all are there to be seen; sweep.private releases the best alone."
        text += exclusion_note(metric, sweep.probes[0])
    return text


def exclusion_note(metric: str, experiment: Experiment) -> str:
    """What no epsilon of a choice by this metric covers, as a further sentence; empty: nothing."""
    is_noised = score_set(metric) == CLIENT and experiment.evaluate.histogram is not None
    if is_noised or (score_set(metric) == TEST and not experiment.data.tests_clients):
        return ""
    return f" It leaves out the {score_label(metric)}, exact answers about the clients' rows."


def _private_statement(sweep: Sweep, has_best: bool, composition: Composition | None) -> str:
    """As `statement`."""
    assert sweep.search.private
    runs = sweep.search.private.repetition()
    if not has_best and composition is None:
        return "No run is released."
    subject = f"The best of {runs}" if has_best else f"{runs} gave none to release"
    text = f"{subject}, each with values drawn at random, by the "
    metric = sweep.search.metric
    public_note = ", for which the test set counts as public" * (score_set(metric) == TEST)
    text += f"{score_label(metric)}{public_note}."
    if composition:
        text += f" {composition.words('the whole search')}"
    text += " That holds where the best run is all that is shown: trials/ has the others, and how "
    text += "many there were; keep it to yourself."
    if has_best:
        text += " The epsilon of the best run alone does not cover the choice."
    return f"{text[0].upper()}{text[1:]}"


def choice_warning(private: int, note: str = "") -> str:
    """What choosing among so many private runs means, as a further sentence; empty for none."""
    if not private:
        return ""
    return (
        f" Choosing among {count_text(private, 'private run')}{note} is itself a query on the data:"
        " each epsilon here holds for its own run alone, and none covers the choice, nor what the"
        " other runs have shown."
    )


def score(setting: SearchSetting, metric: str) -> str:
    """Mean and spread over the seeds, in print; empty while there is none."""
    mean = setting.mean(metric)
    spread = setting.spread(metric)
    if mean is None:
        return ""
    return number(metric, mean) + (f" ± {number(metric, spread)}" if spread is not None else "")


def _trials(settings: Sequence[SearchSetting], sweep: Sweep) -> pa.Table:
    scores = dict.fromkeys(name for experiment in sweep.probes for name in experiment.scores)
    score_columns = {"rounds": pa.int64()} | dict.fromkeys(scores, pa.float64())
    value_columns = _value_columns(sweep)
    rows = []
    for place, setting in enumerate(settings):
        for trial in setting.trials:
            facts = trial.summary or {}
            row = _cells(setting, value_columns) | {"setting": place, "seed": trial.seed}
            row |= {name: facts.get(name) for name in (*score_columns, *_FACTS)}
            row |= epsilons(trial) if facts else {}
            row |= {"status": trial.status, "reason": trial.reason}
            rows.append(row | {"directory": f"trials/{trial.folder.name}"})
    head = {"setting": pa.int64(), **value_columns, "seed": pa.uint64(), "status": pa.string()}
    tail = {"directory": pa.string(), "reason": pa.string()}
    return table(rows, head | score_columns | _epsilon_columns(rows, sweep) | _FACTS | tail)


def _settings(settings: Sequence[SearchSetting], sweep: Sweep) -> pa.Table:
    metric = sweep.search.metric
    value_columns = _value_columns(sweep)
    mean, spread = f"{metric}_mean", f"{metric}_spread"
    rows = []
    for place, setting in enumerate(settings):
        row = _cells(setting, value_columns) | {"setting": place, "whole": setting.whole}
        row |= {"trials": len(setting.trials)}
        row |= {mean: setting.mean(metric), spread: setting.spread(metric)}
        for trial in setting.trials:
            for name, value in epsilons(trial).items():
                row[name] = max(value, row.get(name, value))
        rows.append(row)
    columns = {"setting": pa.int64(), **value_columns, "trials": pa.int64(), "whole": pa.bool_()}
    columns |= dict.fromkeys((mean, spread), pa.float64())
    return table(rows, columns | _epsilon_columns(rows, sweep))


def table(
    rows: Iterable[Mapping[str, Any]],
    columns: Mapping[str, pa.DataType],
    metadata: Mapping[str, str] | None = None,
) -> pa.Table:
    """Rows as a table of these columns."""
    schema = pa.schema(list(columns.items()), metadata=metadata)
    return pa.Table.from_pylist([*map(dict, rows)], schema=schema)


def _epsilon_columns(rows: Sequence[dict[str, Any]], sweep: Sweep) -> dict[str, pa.DataType]:
    """The columns of epsilons: of every accountant that the config asks for, then of others."""
    config_columns = [column(name) for e in sweep.probes if e.private for name in e.accountants]
    names = [name for row in rows for name in row if name.startswith("epsilon_")]
    return dict.fromkeys([*config_columns, *names], pa.float64())


def _value_columns(sweep: Sweep) -> dict[str, pa.DataType]:
    """The columns of searched values; those of several types, and nested ones, are JSON texts."""
    columns = {}
    for key, space in sweep.spaces.items():
        values = [value for value in space.probes if value is not None]
        types = {type(value) for value in values}
        if types == {bool}:
            columns[key] = pa.bool_()
        elif types == {int} and all(abs(value) < 1 << 63 for value in values):
            columns[key] = pa.int64()
        else:
            columns[key] = pa.float64() if types and types <= {int, float} else pa.string()
    return columns


def _cells(setting: SearchSetting, columns: Mapping[str, pa.DataType]) -> dict[str, Any]:
    """A setting's values, as their columns hold them."""
    cells = dict(setting.values)
    for key, value in cells.items():
        if columns[key] == pa.string() and not (value is None or isinstance(value, str)):
            cells[key] = json.dumps(value)
        elif columns[key] == pa.float64() and value is not None:
            cells[key] = float(value)
    return cells
