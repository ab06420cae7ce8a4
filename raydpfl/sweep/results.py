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
from raydpfl.models.metric_columns import CLIENT, TEST, VALIDATION, named, number, set_of
from raydpfl.privacy import Composition, column
from raydpfl.report.labels import counted, edge
from raydpfl.sweep.search_runner import SearchResult
from raydpfl.sweep.spaces import Options
from raydpfl.sweep.sweep import Sweep, text_of
from raydpfl.sweep.trials import SearchSetting, Trial, best_of, trained

_SHOWN = ("completed", "budget", "stopped", "failed")
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
    over: bool,
    facts: dict[str, Any],
    spent: Composition | None = None,
) -> SweepResult:
    """The result so far, or, when the sweep is `over`, the result. `facts` go into the summary, and
    what the search has `spent`. Of a private search the result has the best setting alone.
    """
    trials = [trial for setting in settings for trial in setting.trials]
    failed = [trial for trial in trials if trial.status == "failed"]
    best = _best(settings, sweep)
    private = sweep.search.private
    problem = None
    if over and failed and sweep.search.on_error == "fail":
        problem = f"{len(failed):,} of {counted(len(trials), 'trial')} failed, and no best setting "
        problem += "was chosen; go on with --resume, or choose among the others with "
        problem += "sweep.on_error=choose"
    elif over and best is None and not (private and private.runs == "poisson"):
        problem = "no setting has a result"
    runs = count_runs(trials, folder)
    if private:
        if over and runs.all > runs.own:
            problem = "trials/ has other runs too, which no epsilon covers; take another --out"
            best = None
        best = best if over else None
        settings = [best] if best else []
        trials = [trial for setting in settings for trial in setting.trials]
        failed = []  # as the number of trials, it is of more than the best
        runs = Runs(len(trials), len(trials), len(trials))
    states = [trial.status for trial in trials]
    summary: dict[str, Any] = {
        "status": "running" if not over else "failed" if problem else "completed",
        "reason": problem,
        "settings": len(settings),
        "trials": {state: states.count(state) for state in _SHOWN},
        "metric": sweep.search.metric,
        "better": "larger" if sweep.sign > 0 else "smaller",
        "trained": {"runs": runs.all, "private": runs.private},
        "failed": [{"directory": f"trials/{t.folder.name}", "reason": t.failure()} for t in failed],
        "choice": statement(settings, sweep, runs, best is not None or not over, spent),
    }
    if spent:
        summary |= spent.to_dict(runs=False)
    if best:
        seeds = [trial.seed for trial in best.trials]
        summary["best"] = {"values": best.values, **_reached(best, settings, sweep), "seeds": seeds}
        if over:
            summary["best_for"] = best_for(settings, sweep)
    tables = _trials(settings, sweep), _settings(settings, sweep)
    if not private:  # how long it took says how many trials there were
        summary |= facts
    return SweepResult(folder, summary, problem, *tables, best, list(settings))


def _best(settings: Sequence[SearchSetting], sweep: Sweep) -> SearchSetting | None:
    """See `SweepResult.best`; of the settings so far, while the sweep runs."""
    failed = any(trial.status == "failed" for setting in settings for trial in setting.trials)
    if failed and sweep.search.on_error == "fail":
        return None
    return best_of(settings, sweep.search.metric, sweep.sign)


def best_for(settings: Sequence[SearchSetting], sweep: Sweep) -> dict[str, list[dict[str, Any]]]:
    """The best setting for each value of a field, by the rules of `SweepResult.best`: by each field
    that took several of finitely many values, where others varied too, a row for each value with a
    best setting, in the order of the grid: `value`; the index of the setting in settings.parquet,
    its mean and spread, and the fields at an edge of their grids, without the field itself.
    """
    several = [key for key in sweep.spaces if len({text_of(s.values[key]) for s in settings}) > 1]
    table: dict[str, list[dict[str, Any]]] = {}
    for key in several if len(several) > 1 else ():
        space = sweep.spaces[key]
        for value in space.options if isinstance(space, Options) else ():
            same = [s for s in settings if text_of(s.values[key]) == text_of(value)]
            best = _best(same, sweep)
            if best:
                row = {"value": value, **_reached(best, settings, sweep)}
                row["edges"].pop(key, None)
                table.setdefault(key, []).append(row)
    return table


def _reached(
    setting: SearchSetting, settings: Sequence[SearchSetting], sweep: Sweep
) -> dict[str, Any]:
    """A setting and its score, as the summary has it. `edges`: the fields whose values are the
    smallest or the largest number of their grid, with which of the two, but for those that set the
    privacy. A value beyond may be better.
    """
    metric = sweep.search.metric
    edges = {
        key: which
        for key, space in sweep.spaces.items()
        if isinstance(space, Options) and key not in _PRIVACY
        if (which := edge(setting.values[key], space.options))
    }
    mean, spread = setting.mean(metric), setting.spread(metric)
    return {"setting": settings.index(setting), "mean": mean, "spread": spread, "edges": edges}


def epsilons(trial: Trial) -> dict[str, float]:
    """Epsilon by accountant, of the first guarantee that the run states by it; while it runs, of
    the rounds so far.
    """
    spent: dict[str, float] = {}
    for guarantee in (trial.summary or {}).get("guarantees", ()):
        spent.setdefault(column(guarantee["accountant"]), float(guarantee["epsilon"]))
    return spent or {k: value for k, value in trial.report.items() if k.startswith("epsilon_")}


class Runs(NamedTuple):
    """Numbers of runs that a choice is made among."""

    own: int  # of the settings, without those that failed before their first round
    all: int  # with every other that was ever trained in the directory
    private: int  # of all


def count_runs(trials: Sequence[Trial], folder: Path) -> Runs:
    """Those of a directory with these trials."""
    runs = trained(folder / "trials")
    own = [trial for trial in trials if trial.status != "failed" or trial.folder.name in runs]
    for trial in own:
        runs[trial.folder.name] = trial.experiment.private or runs.get(trial.folder.name, False)
    return Runs(len(own), len(runs), sum(runs.values()))


def statement(
    settings: Sequence[SearchSetting],
    sweep: Sweep,
    runs: Runs,
    chosen: bool = True,
    spent: Composition | None = None,
) -> str:
    """What the choice of the best is worth, in words; `chosen`: there is one; `spent` by all. The
    `runs` are also those of former values, seeds and configs, stopped, or failed.
    """
    metric = sweep.search.metric
    if sweep.search.private:
        return _of_a_private_search(sweep, chosen, spent)
    rows = {VALIDATION: "rows held out of their training", CLIENT: "each client's own rows"}
    on = rows.get(set_of(metric), "one test set")
    by = f"chosen by the {named(metric)} of {counted(runs.own, 'run')} on {on}"
    if chosen:
        text = f"The best of {counted(len(settings), 'setting')} was {by}, which flatters it."
    else:
        text = f"No setting was {by}."
    if chosen and set_of(metric) != TEST:
        if any(experiment.evaluate.test for experiment in sweep.probes):
            text += " The runs were scored on the test set too, which had no part in the choice."
        else:
            unseen = any(not setting.experiment.evaluate.test for setting in settings)
            command = "raydpfl run best.yaml" + (" evaluate.test=true" if unseen else "")
            once = f"{command} does, once (evaluate.validation=0 has it train on all rows)"
            text += f" None of them looked at the test set: {once}."
    if runs.all > runs.own:
        text += f" {counted(runs.all, 'run')} were trained in this directory, counting those of"
        text += " former values, seeds and configs."
    text += choice_is_a_query(runs.private)
    if spent:
        text += f" {spent.words('all of them together')} It is larger than that of one run as all"
        text += " are there to be seen; sweep.private releases the best alone."
        text += leaves_out(metric, sweep.probes[0])
    return text


def leaves_out(metric: str, experiment: Experiment) -> str:
    """What no epsilon of a choice by this metric covers, as a further sentence; empty: nothing."""
    noised = set_of(metric) == CLIENT and experiment.evaluate.histogram is not None
    if set_of(metric) == TEST or noised:
        return ""
    return f" It leaves out the {named(metric)}, exact answers about the clients' rows."


def _of_a_private_search(sweep: Sweep, chosen: bool, spent: Composition | None) -> str:
    """As `statement`."""
    assert sweep.search.private
    runs = sweep.search.private.repetition()
    text = f"The best of {runs}, each with values drawn at random"
    if not chosen:
        text = f"{runs} gave none to release, each with values drawn at random"
    text += f", by the {named(sweep.search.metric)}, for which the test set counts as public."
    if spent:
        text += f" {spent.words('the whole search')}"
    text += " That holds where the best run is all that is shown: trials/ has the others, and how "
    return f"{text[0].upper()}{text[1:]}many there were; keep it to yourself."


def choice_is_a_query(private: int, note: str = "") -> str:
    """What choosing among so many private runs means, as a further sentence; empty for none."""
    if not private:
        return ""
    return (
        f" Choosing among {counted(private, 'private run')}{note} is itself a query on the data:"
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
    reached = {"rounds": pa.int64()} | dict.fromkeys(scores, pa.float64())
    searched = _searched(sweep)
    rows = []
    for place, setting in enumerate(settings):
        for trial in setting.trials:
            facts = trial.summary or {}
            row = _cells(setting, searched) | {"setting": place, "seed": trial.seed}
            row |= {name: facts.get(name) for name in (*reached, *_FACTS)}
            row |= epsilons(trial) if facts else {}
            row |= {"status": trial.status, "reason": trial.reason}
            rows.append(row | {"directory": f"trials/{trial.folder.name}"})
    first = {"setting": pa.int64(), **searched, "seed": pa.uint64(), "status": pa.string()}
    last = {"directory": pa.string(), "reason": pa.string()}
    return table(rows, first | reached | _spent(rows, sweep) | _FACTS | last)


def _settings(settings: Sequence[SearchSetting], sweep: Sweep) -> pa.Table:
    metric = sweep.search.metric
    searched = _searched(sweep)
    mean, spread = f"{metric}_mean", f"{metric}_spread"
    rows = []
    for place, setting in enumerate(settings):
        row = _cells(setting, searched) | {"setting": place, "whole": setting.whole}
        row |= {"trials": len(setting.trials)}
        row |= {mean: setting.mean(metric), spread: setting.spread(metric)}
        for trial in setting.trials:
            for name, value in epsilons(trial).items():
                row[name] = max(value, row.get(name, value))
        rows.append(row)
    columns = {"setting": pa.int64(), **searched, "trials": pa.int64(), "whole": pa.bool_()}
    return table(rows, columns | dict.fromkeys((mean, spread), pa.float64()) | _spent(rows, sweep))


def table(
    rows: Iterable[Mapping[str, Any]],
    columns: Mapping[str, pa.DataType],
    metadata: Mapping[str, str] | None = None,
) -> pa.Table:
    """Rows as a table of these columns."""
    schema = pa.schema(list(columns.items()), metadata=metadata)
    return pa.Table.from_pylist([*map(dict, rows)], schema=schema)


def _spent(rows: Sequence[dict[str, Any]], sweep: Sweep) -> dict[str, pa.DataType]:
    """The columns of epsilons: of every accountant that the config asks for, then of others."""
    asked = [column(name) for e in sweep.probes if e.private for name in e.accountants]
    names = [name for row in rows for name in row if name.startswith("epsilon_")]
    return dict.fromkeys([*asked, *names], pa.float64())


def _searched(sweep: Sweep) -> dict[str, pa.DataType]:
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
