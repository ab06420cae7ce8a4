"""The page of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from raydpfl.models.metric_columns import is_score
from raydpfl.report.comparison import labels
from raydpfl.report.figures import Missing, Piece
from raydpfl.report.figures.base import name_of
from raydpfl.report.figures.curves import Curves
from raydpfl.report.html import Page, PageSection, Tile
from raydpfl.report.labels import beyond, counted, listed, number, quantity
from raydpfl.report.pages.base import PageSource, file_text, not_completed, time_tile
from raydpfl.report.pages.run import privacy
from raydpfl.report.run_reader import (
    LabelledRun,
    Run,
    arrays_of,
    as_number,
    grouped,
    json_of,
    named,
    read_table,
    some,
)
from raydpfl.report.search_results import Tried, searched
from raydpfl.report.statistics import over_seeds
from raydpfl.report.tables import Column, PrintedCell, Table

CURVES = 6  # settings whose curves are drawn
WHOLE = ("completed", "budget")  # of a trial that was not stopped for the sake of others


class SweepSource(PageSource):
    """A sweep: sweep.yaml."""

    name = "sweep"

    def fits(self, folder: Path) -> bool:
        return (folder / "sweep.yaml").is_file()

    def page(self, folder: Path) -> Page:
        swept = Swept(folder)
        tried = searched([setting for setting, _ in swept.tried], swept.metric, "results.parquet")
        tables = [settings(swept), trials(swept)]
        sections = [
            PageSection("What was tried", [*best_for(swept), *tried, *tables]),
            PageSection("Best settings by round", curves(swept)),
            PageSection("Privacy of the best", best_privacy(swept)),
            PageSection("Config", [file_text(folder / "sweep.yaml", swept.flaws)]),
        ]
        edges = beyond(swept.best.get("values", {}), swept.best.get("edges", {}))
        warnings = [*not_completed("sweep", swept.summary), *([edges] if edges else [])]
        lead = [line for line in (outcome(swept), swept.summary.get("choice", "")) if line]
        title = f"Sweep {folder.resolve().name}"
        return Page(title, lead, tiles(swept), sections, warnings, swept.flaws)

    def runs(self, folder: Path, name: str) -> list[Run]:
        trials = Swept(folder).trials
        pairs = zip(trials.get("directory", ()), trials.get("status", ()), strict=True)
        whole = [place for place, status in pairs if status in WHOLE]
        return [Run(folder / place, f"{name}/{Path(place).name}") for place in whole]


class Swept:
    """What the directory of a sweep holds. `trials`: its table, by column; `keys`: the dotted keys
    that were searched, its columns between the setting and the seed.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.flaws: list[str] = []
        self.summary = Run(folder, folder.resolve().name, self.flaws).summary
        self.metric = self.summary.get("metric", "test_accuracy")
        self.measured = quantity(self.metric)
        self.trials = arrays_of(read_table(folder / "results.parquet", self.flaws))
        self.best = self.summary.get("best") or {}
        names = [*self.trials]
        self.keys = names[1 : names.index("seed")] if "seed" in names else []

    @cached_property
    def labels(self) -> dict[str, list[str]]:
        """By searched key the value of each trial, in print: a section, which the table has as
        JSON, by what differs from the others.
        """
        every = {}
        for key in self.keys:
            cells = self.trials[key].tolist()
            values = {cell: json_of(cell) or cell for cell in dict.fromkeys(cells)}
            named = dict(zip(values, labels([*values.values()]), strict=True))
            every[key] = [named[cell] for cell in cells]
        return every

    def values(self, setting: float) -> dict[str, str]:
        """The searched values of a setting, in print."""
        rows = self.settings.get(setting, ())
        return {key: self.labels[key][row] for row in rows[:1] for key in self.keys}

    @cached_property
    def settings(self) -> dict[float, list[int]]:
        """The rows of the trials of each setting."""
        numbers = self.trials.get("setting", ())
        return grouped(range(len(numbers)), lambda row: float(numbers[row]))

    @cached_property
    def tried(self) -> list[tuple[Tried, list[int]]]:
        """The settings with the metric of their trials, and the rows of these."""
        pairs = []
        for setting, rows in self.settings.items():
            scores = self.trials[self.metric][rows] if self.metric in self.trials else np.empty(0)
            finite = [float(score) for score in scores if np.isfinite(score)]
            best = setting == self.best.get("setting")
            pairs.append((Tried(self.values(setting), finite, best), rows))
        return pairs

    def run(self, row: int, name: str = "") -> Run:
        """The run of a trial."""
        folder = self.folder / str(self.trials["directory"][row])
        return Run(folder, name or folder.name, self.flaws)

    def epsilon_columns(self, settings: Sequence[Sequence[int]]) -> list[Column]:
        """Of each setting, by the rows of its trials, the largest epsilon by each accountant."""
        columns = []
        for name in (name for name in self.trials if name.startswith("epsilon_")):
            cells = [self.trials[name][rows].tolist() for rows in settings]
            largest = [max((x for x in cell if x == x), default=None) for cell in cells]
            columns.append(Column.of(name, largest))
        return columns


def outcome(swept: Swept) -> str:
    """The best setting in a sentence."""
    best = swept.best
    if not best:
        return "No setting is the best."
    values = ", ".join(f"{key} {value}" for key, value in swept.values(best["setting"]).items())
    score = f"{swept.measured.words} {number(best['mean'], swept.measured.percent)}"
    over = counted(len(best["seeds"]), "seed")
    return f"The best of the settings is {values}: {score}, the mean over {over}."


def tiles(swept: Swept) -> list[Tile]:
    """The numbers at the top."""
    summary = swept.summary
    best = swept.best
    measured = swept.measured
    tiles = []
    if best:
        spread = best.get("spread")
        note = "one seed"
        if spread is not None:
            note = f"std {number(spread, measured.percent)} over {len(best['seeds'])} seeds"
        shown = number(best["mean"], measured.percent)
        tiles.append(Tile(f"best {measured.words}", shown, note))
        values = swept.values(best["setting"])
        tiles += [Tile(key, value, "of the best setting") for key, value in values.items()]
    counts = summary.get("trials", {})
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    tiles.append(Tile("settings", number(summary.get("settings")), f"trials: {states}"))
    return [*tiles, *time_tile(summary, "the whole sweep")]


def ranked(swept: Swept) -> list[tuple[Tried, list[int]]]:
    """The settings with a score, the best mean first, and then the others."""

    def rank(pair: tuple[Tried, list[int]]) -> tuple[bool, float]:
        setting, _ = pair
        return not setting.scores, -swept.measured.better * setting.mean if setting.scores else 0.0

    return sorted(swept.tried, key=rank)


def settings(swept: Swept) -> Piece:
    """A row for each setting, the best first."""
    if not swept.tried:
        return Missing("Settings", "needs results.parquet")
    measured = swept.measured
    every = [setting for setting, _ in ranked(swept)]
    spreads = [over_seeds(dict(enumerate(setting.scores))) for setting in every]
    means = [as_number(spread.mean) for spread in spreads]
    cells = [
        PrintedCell(mean, number(mean, measured.percent), setting.best)
        for mean, setting in zip(means, every, strict=True)
    ]
    columns = [
        *(Column(key, [setting.values[key] for setting in every]) for key in swept.keys),
        Column(f"{measured.words}, mean", cells),
        Column("std", [as_number(spread.std) for spread in spreads], measured.percent),
        Column("seeds", [spread.count for spread in spreads]),
        Column("best", ["best" if setting.best else "" for setting in every]),
        *swept.epsilon_columns([rows for _, rows in ranked(swept)]),
    ]
    caption = "Means and sample standard deviations over the seeds, of the last round; of epsilon "
    return Table("settings", "Settings", f"{caption}the largest. From results.parquet.", columns)


def best_for(swept: Swept) -> list[Piece]:
    """A table for each searched key: the best setting for each of its values."""
    measured = swept.measured
    pieces: list[Piece] = []
    for key, bests in (swept.summary.get("best_for") or {}).items():
        best = [choice for choice in bests if swept.values(choice["setting"])]
        values = [swept.values(choice["setting"]) for choice in best]
        rows = [swept.settings[choice["setting"]] for choice in best]
        means = [choice["mean"] for choice in best]
        columns = [
            Column(key, [value[key] for value in values]),
            Column(f"{measured.words}, mean", means, measured.percent),
            Column("std", [choice["spread"] for choice in best], measured.percent),
            Column("seeds", [len(row) for row in rows]),
            *(Column(k, [value[k] for value in values]) for k in swept.keys if k != key),
        ]
        caption = f"For each {key}, the setting with the best mean over the seeds and its sample "
        caption += "standard deviation. "
        if any(choice["edges"] for choice in bests):
            columns.append(Column("at an edge", [listed([*choice["edges"]]) for choice in best]))
            caption += "At an edge: the value is the smallest or the largest of its grid, so that "
            caption += "one beyond may be better. "
        columns += swept.epsilon_columns(rows)
        name = name_of("best-for", key)
        pieces.append(Table(name, f"Best for each {key}", f"{caption}From summary.json.", columns))
    return pieces


def trials(swept: Swept) -> Piece:
    """A row for each trial."""
    table = swept.trials
    if not table:
        return Missing("Trials", "needs results.parquet")
    scores = [name for name in table if is_score(name) and some(table[name])]
    names = ["seed", "status", *scores, "rounds", "seconds", "directory"]
    columns = [Column(key, swept.labels[key]) for key in swept.keys]
    columns += [Column.of(name, table[name].tolist()) for name in names if name in table]
    return Table("trials", "Trials", "Every run. From results.parquet.", columns)


def curves(swept: Swept) -> list[Piece]:
    """The metric by round, of the settings with the best means."""
    cases = []
    for setting, rows in [pair for pair in ranked(swept) if pair[0].scores][:CURVES]:
        label = ", ".join(named(key, setting.values[key]) for key in swept.keys)
        cases += [LabelledRun({"setting": label}, swept.run(row, label)) for row in rows]
    item = Curves(of=(swept.metric,), colour="setting")
    if not cases:
        return [Missing(item.headline(), "needs a finished trial")]
    return [*item.make(cases)]


def best_privacy(swept: Swept) -> list[Piece]:
    """The guarantees of the first run of the best setting."""
    best = [rows[0] for setting, rows in swept.tried if setting.best]
    return privacy(swept.run(best[0])) if best else []
