"""The page of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from raydpfl.models.metric_columns import is_score
from raydpfl.report.comparison import labels
from raydpfl.report.figures import Missing, Piece
from raydpfl.report.figures.base import name_of
from raydpfl.report.figures.curves import Curves
from raydpfl.report.html import Page, Section, Tile
from raydpfl.report.labels import beyond, counted, listed, number, quantity
from raydpfl.report.pages.base import Source, file_text
from raydpfl.report.pages.run import privacy
from raydpfl.report.run_reader import Case, Columns, Run, json_of, named, read_columns, some
from raydpfl.report.search_results import Tried, drawings
from raydpfl.report.tables import Cell, Table

CURVES = 6  # settings whose curves are drawn
WHOLE = ("completed", "budget")  # of a trial that was not stopped for the sake of others


class SweepSource(Source):
    """A sweep: sweep.yaml."""

    name = "sweep"

    def fits(self, folder: Path) -> bool:
        return (folder / "sweep.yaml").is_file()

    def page(self, folder: Path) -> Page:
        return _page(Swept(folder))

    def runs(self, folder: Path, name: str) -> list[Run]:
        trials = Swept(folder).trials
        pairs = zip(trials.get("directory", ()), trials.get("status", ()), strict=True)
        whole = [place for place, status in pairs if status in WHOLE]
        return [Run(folder / place, f"{name}/{Path(place).name}") for place in whole]


class Swept:
    """What the directory of a sweep holds."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.flaws: list[str] = []
        self.summary = Run(folder, folder.resolve().name, self.flaws).summary
        self.metric = self.summary.get("metric", "test_accuracy")
        self.trials = read_columns(folder / "results.parquet", self.flaws)
        self.best = self.summary.get("best") or {}

    @property
    def keys(self) -> list[str]:
        """The dotted keys that were searched: the columns between the setting and the seed."""
        names = [*self.trials]
        return names[1 : names.index("seed")] if "seed" in names else []

    @cached_property
    def labels(self) -> dict[str, list[str]]:
        """By searched key the value of each trial, in print: a section, which the table has as
        JSON, by what tells it from the others.
        """
        found = {}
        for key in self.keys:
            cells = [_python(value) for value in self.trials[key]]
            values = {cell: json_of(cell) or cell for cell in dict.fromkeys(cells)}
            named = dict(zip(values, labels([*values.values()]), strict=True))
            found[key] = [named[cell] for cell in cells]
        return found

    def values(self, row: int) -> dict[str, str]:
        """The searched values of a trial, in print."""
        return {key: self.labels[key][row] for key in self.keys}

    def of(self, setting: int) -> dict[str, str]:
        """The searched values of a setting, in print."""
        rows = self.settings.get(setting)
        return self.values(rows[0]) if rows else {}

    @cached_property
    def settings(self) -> dict[float, list[int]]:
        """The rows of the trials of each setting."""
        found: dict[float, list[int]] = {}
        for row, setting in enumerate(self.trials.get("setting", ())):
            found.setdefault(float(setting), []).append(row)
        return found

    def tried(self) -> list[Tried]:
        """The settings with the metric of their trials."""
        found = []
        for place, rows in self.settings.items():
            scores = self.trials.get(self.metric)
            known = [float(each) for each in (() if scores is None else scores[rows])]
            known = [each for each in known if np.isfinite(each)]
            found.append(Tried(self.values(rows[0]), known, place == self.best.get("setting")))
        return found


def _python(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _page(swept: Swept) -> Page:
    summary = swept.summary
    name = swept.folder.resolve().name
    tried: list[Piece] = [*drawings(swept.tried(), swept.metric, "results.parquet")]
    sections = [
        Section("What was tried", [*best_for(swept), *tried, settings(swept), trials(swept)]),
        Section("Best settings by round", curves(swept)),
        Section("Privacy of the best", best_privacy(swept)),
        Section("Config", [file_text(swept.folder / "sweep.yaml", swept.flaws)]),
    ]
    warnings = []
    if summary.get("status") != "completed":
        status = summary.get("status", "not ended: there is no summary.json")
        reason = summary.get("reason")
        warnings.append(f"The sweep is {status}{f': {reason}' if reason else ''}.")
    edges = beyond(swept.best.get("values", {}), swept.best.get("edges", {}))
    if edges:
        warnings.append(edges)
    lead = [outcome(swept), summary.get("choice", "")]
    return Page(
        f"Sweep {name}",
        [each for each in lead if each],
        tiles(swept),
        sections,
        warnings,
        swept.flaws,
    )


def outcome(swept: Swept) -> str:
    """The best setting in a sentence."""
    best = swept.best
    if not best:
        return "No setting is the best."
    measured = quantity(swept.metric)
    named = ", ".join(f"{key} {value}" for key, value in swept.of(best["setting"]).items())
    score = number(best["mean"], measured.percent)
    over = counted(len(best["seeds"]), "seed")
    return f"The best of the settings is {named}: {measured.words} {score}, the mean over {over}."


def tiles(swept: Swept) -> list[Tile]:
    """The numbers at the top."""
    summary = swept.summary
    best = swept.best
    measured = quantity(swept.metric)
    found = []
    if best:
        spread = best.get("spread")
        note = "one seed"
        if spread is not None:
            note = f"std {number(spread, measured.percent)} over {len(best['seeds'])} seeds"
        shown = number(best["mean"], measured.percent)
        found.append(Tile(f"best {measured.words}", shown, note))
        values = swept.of(best["setting"])
        found += [Tile(key, value, "of the best setting") for key, value in values.items()]
    counts = summary.get("trials", {})
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    found.append(Tile("settings", number(summary.get("settings")), f"trials: {states}"))
    if summary.get("seconds") is not None:
        found.append(Tile("time", f"{number(summary['seconds'])} s", "the whole sweep"))
    return found


def settings(swept: Swept) -> Piece:
    """A row for each setting, the best first."""
    measured = quantity(swept.metric)
    epsilons = [name for name in swept.trials if name.startswith("epsilon_")]
    rows: list[list[Any]] = []
    tried = swept.tried()
    for each, places in zip(tried, swept.settings.values(), strict=True):
        mean = each.mean if each.scores else None
        row: list[Any] = [*(each.values[key] for key in swept.keys)]
        row.append(Cell(mean, number(mean, measured.percent), each.best))
        spread = float(np.std(each.scores, ddof=1)) if len(each.scores) > 1 else None
        row += [spread, len(each.scores), "best" if each.best else ""]
        row += [_most(swept.trials, name, places) for name in epsilons]
        rows.append(row)
    if not rows:
        return Missing("Settings", "needs results.parquet")
    place = len(swept.keys)
    sign = -measured.better
    rows.sort(key=lambda row: (row[place].value is None, sign * (row[place].value or 0.0)))
    head = [*swept.keys, f"{measured.words}, mean", "std", "seeds", "best"]
    head += [quantity(name).label for name in epsilons]
    percents = {place + 1} if measured.percent else set()
    caption = "Means and sample standard deviations over the seeds, of the last round; of epsilon "
    caption += "the largest. From results.parquet."
    return Table("settings", "Settings", caption, head, rows, percents)


def best_for(swept: Swept) -> list[Piece]:
    """A table for each searched key: the best setting for each of its values."""
    measured = quantity(swept.metric)
    epsilons = [name for name in swept.trials if name.startswith("epsilon_")]
    found: list[Piece] = []
    for key, best in (swept.summary.get("best_for") or {}).items():
        others = [name for name in swept.keys if name != key]
        edged = any(each["edges"] for each in best)
        rows: list[list[Any]] = []
        for each in best:
            values = swept.of(each["setting"])
            if not values:
                continue
            places = swept.settings[each["setting"]]
            row = [values[key], each["mean"], each["spread"], len(places)]
            row += [values[name] for name in others]
            row += [listed([*each["edges"]])] if edged else []
            rows.append([*row, *(_most(swept.trials, name, places) for name in epsilons)])
        head = [key, f"{measured.words}, mean", "std", "seeds", *others]
        head += ["at an edge"] if edged else []
        head += [quantity(name).label for name in epsilons]
        caption = f"For each {key}, the setting with the best mean over the seeds and its sample "
        caption += "standard deviation. "
        if edged:
            caption += "At an edge: the value is the smallest or the largest of its grid, so that "
            caption += "one beyond may be better. "
        caption += "From summary.json."
        percents = {1, 2} if measured.percent else set()
        title = f"Best for each {key}"
        found.append(Table(name_of("best-for", key), title, caption, head, rows, percents))
    return found


def _most(trials: Columns, name: str, rows: Sequence[int]) -> float | None:
    known = [float(value) for value in trials[name][rows] if not np.isnan(value)]
    return max(known, default=None)


def trials(swept: Swept) -> Piece:
    """A row for each trial."""
    table = swept.trials
    if not table:
        return Missing("Trials", "needs results.parquet")
    scores = [name for name in table if is_score(name) and some(table[name])]
    names = [*swept.keys, "seed", "status", *scores, "rounds", "seconds", "directory"]
    names = [name for name in names if name in table]
    rows = [
        [
            swept.labels[name][row] if name in swept.keys else _python(table[name][row])
            for name in names
        ]
        for row in range(len(table["setting"]))
    ]
    shown = [quantity(name) for name in names]
    percents = {place for place, each in enumerate(shown) if each.percent}
    head = [each.label if each.name not in swept.keys else each.name for each in shown]
    return Table("trials", "Trials", "Every run. From results.parquet.", head, rows, percents)


def curves(swept: Swept) -> list[Piece]:
    """The metric by round, of the settings with the best means."""
    known = [
        (each, rows)
        for each, rows in zip(swept.tried(), swept.settings.values(), strict=True)
        if each.scores
    ]
    known.sort(key=lambda pair: -quantity(swept.metric).better * pair[0].mean)
    cases = []
    for each, rows in known[:CURVES]:
        label = ", ".join(named(key, each.values[key]) for key in swept.keys)
        for row in rows:
            folder = swept.folder / str(swept.trials["directory"][row])
            cases.append(Case({"setting": label}, Run(folder, label, swept.flaws)))
    item = Curves(of=(swept.metric,), colour="setting")
    if not cases:
        return [Missing(item.headline(), "needs a finished trial")]
    return [*item.make(cases)]


def best_privacy(swept: Swept) -> list[Piece]:
    """The guarantees of the first run of the best setting."""
    for each, rows in zip(swept.tried(), swept.settings.values(), strict=True):
        if each.best:
            folder = swept.folder / str(swept.trials["directory"][rows[0]])
            return privacy(Run(folder, folder.name, swept.flaws))
    return []
