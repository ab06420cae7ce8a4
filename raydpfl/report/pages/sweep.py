"""The page of a sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from raydpfl.models.metric_columns import is_score
from raydpfl.report.figures import Missing, Piece
from raydpfl.report.figures.base import name_of
from raydpfl.report.figures.curves import Curves
from raydpfl.report.figures.final_metric import metric_plots
from raydpfl.report.html import Page, PageSection, Tile
from raydpfl.report.labels import (
    count_text,
    edge_warning,
    float_or_none,
    join_names,
    number,
    qualified_label,
    quantity,
)
from raydpfl.report.pages.base import PageSource, status_warnings, time_tile
from raydpfl.report.pages.comparison import labels
from raydpfl.report.pages.run import privacy
from raydpfl.report.run_reader import LabelledRun, Run, group_by, json_of, read_table
from raydpfl.report.statistics import SeedSpread, SeedValues
from raydpfl.report.tables import PrintedCell, Row, Table, number_cells

MAX_CURVES = 6  # settings whose curves are drawn
COMPLETE_STATUSES = ("completed", "budget")  # of a trial that no scheduler stopped


@dataclass(frozen=True, eq=False)
class RankedSetting:
    """A setting that was tried: its searched values by key, in print; the rows of its trials; the
    metric of those that have it; whether it is the best.
    """

    values: Mapping[str, str]
    trials: Sequence[Mapping[str, Any]]
    scores: Sequence[float]
    best: bool

    @property
    def spread(self) -> SeedSpread:
        return SeedValues(dict(enumerate(self.scores))).spread()

    @property
    def epsilons(self) -> Row:
        """The largest epsilon by each accountant."""
        names = [name for name in self.trials[0] if name.startswith("epsilon_")]
        columns = {name: [float_or_none(trial[name]) for trial in self.trials] for name in names}
        return {
            quantity(name): max((value for value in values if value is not None), default=None)
            for name, values in columns.items()
        }


class SweepSource(PageSource):
    """A sweep: sweep.yaml. `trials`: the rows of its table; `keys`: the dotted keys that were
    searched, its columns between the setting and the seed.
    """

    name: ClassVar[str] = "sweep"
    file: ClassVar[str] = "sweep.yaml"

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.summary = Run(folder, folder.resolve().name, self.flaws).summary
        self.metric = self.summary.get("metric", "test_accuracy")
        self.quantity = quantity(self.metric)
        self.trials = read_table(folder / "results.parquet", self.flaws).to_pylist()
        self.best = self.summary.get("best") or {}
        names = [*self.trials[0]] if self.trials else []
        self.keys = names[1 : names.index("seed")] if "seed" in names else []

    def page(self) -> Page:
        sections = [
            PageSection("What was tried", [*self.best_for(), *self.search_plots(), *self.tables()]),
            PageSection("Best settings by round", self.curves()),
            PageSection("Privacy of the best run alone", self.privacy()),
            PageSection("Config", [self.file_text(self.file)]),
        ]
        edges = edge_warning(self.best.get("values", {}), self.best.get("edges", {}))
        warnings = [*status_warnings("sweep", self.summary), *([edges] if edges else [])]
        lead = [line for line in (self.outcome(), self.summary.get("choice", "")) if line]
        title = f"Sweep {self.folder.resolve().name}"
        return Page(title, lead, self.tiles(), sections, warnings, self.flaws)

    def runs(self, name: str) -> list[Run]:
        paths = [t["directory"] for t in self.trials if t["status"] in COMPLETE_STATUSES]
        return [Run(self.folder / place, f"{name}/{Path(place).name}") for place in paths]

    @cached_property
    def values(self) -> list[dict[str, str]]:
        """The searched values of each trial, in print; of a section what differs from others."""
        values: list[dict[str, str]] = [{} for _ in self.trials]
        for key in self.keys:
            sections = {trial[key]: json_of(trial[key]) or trial[key] for trial in self.trials}
            printed_labels = dict(zip(sections, labels([*sections.values()]), strict=True))
            for value, trial in zip(values, self.trials, strict=True):
                value[key] = printed_labels[trial[key]]
        return values

    @cached_property
    def settings(self) -> dict[int, RankedSetting]:
        """By number, the best mean first, and at the end those without a score."""
        settings = {}
        rows = zip(self.trials, self.values, strict=True)
        for place, setting_rows in group_by(rows, lambda row: row[0]["setting"]).items():
            trials = [trial for trial, _ in setting_rows]
            scores = [float_or_none(trial.get(self.metric)) for trial in trials]
            # a run that failed has what it had before
            is_complete = all(trial["status"] != "failed" for trial in trials)
            finite = [score for score in scores if is_complete and score is not None]
            best = place == self.best.get("setting")
            settings[place] = RankedSetting(setting_rows[0][1], trials, finite, best)

        sign = -1 if self.summary.get("better") == "smaller" else 1

        def rank(pair: tuple[int, RankedSetting]) -> tuple[bool, float]:
            scores = pair[1].scores
            return not scores, -sign * pair[1].spread.mean if scores else 0.0

        return dict(sorted(settings.items(), key=rank))

    @property
    def best_values(self) -> Mapping[str, str]:
        best = self.settings.get(self.best.get("setting", -1))
        return best.values if best else {}

    def run(self, trial: Mapping[str, Any], name: str = "") -> Run:
        folder = self.folder / str(trial["directory"])
        return Run(folder, name or folder.name, self.flaws)

    def outcome(self) -> str:
        if not self.best:
            return "No setting is the best."
        values = ", ".join(f"{key} {value}" for key, value in self.best_values.items())
        score = f"{self.quantity.words} {number(self.best['mean'], self.quantity.percent)}"
        seed_count = count_text(len(self.best["seeds"]), "seed")
        return f"The best of the settings is {values}: {score}, the mean over {seed_count}."

    def tiles(self) -> list[Tile]:
        tiles = []
        if self.best:
            percent = self.quantity.percent
            note, spread = "one seed", self.best.get("spread")
            if spread is not None:
                note = f"std {number(spread, percent)} over {len(self.best['seeds'])} seeds"
            mean_text = number(self.best["mean"], percent)
            tiles.append(Tile(f"best {self.quantity.words}", mean_text, note))
            values = self.best_values.items()
            tiles += [Tile(key, value, "of the best setting") for key, value in values]
        counts = self.summary.get("trials", {})
        states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        tiles.append(Tile("settings", number(self.summary.get("settings")), f"trials: {states}"))
        return [*tiles, *time_tile(self.summary, "the whole sweep")]

    def search_plots(self) -> list[Piece]:
        cases = [
            LabelledRun(s.values, self.run(s.trials[0]), {self.metric: score, "best": s.best})
            for _, s in sorted(self.settings.items())
            for score in s.scores
        ]
        return metric_plots(cases, self.keys, self.metric)

    def tables(self) -> list[Piece]:
        """A row for each setting, the best first, and a row for each trial."""
        if not self.trials:
            return [Missing(title, "needs results.parquet") for title in ("Settings", "Trials")]
        words, percent = self.quantity.words, self.quantity.percent
        rows: list[Row] = []
        for setting in self.settings.values():
            mean = float_or_none(setting.spread.mean)
            cell = PrintedCell(mean, number(mean, percent), setting.best)
            row: Row = {**setting.values, f"{words}, mean": cell}
            row |= number_cells({"std": setting.spread.std}, percent)
            row |= {"seeds": setting.spread.count, "best": "best" if setting.best else ""}
            rows.append({**row, **setting.epsilons})
        caption = "Means and sample standard deviations over the seeds, of the last round; of "
        caption += "epsilon the largest. From results.parquet."
        settings = Table("settings", "Settings", caption, rows)
        scores = [name for name in self.trials[0] if is_score(name)]
        scores = [name for name in scores if any(trial[name] is not None for trial in self.trials)]
        names = ["seed", "status", *scores, "rounds", "seconds", "directory"]
        rows = [
            {**values, **{quantity(name): trial[name] for name in names if name in trial}}
            for values, trial in zip(self.values, self.trials, strict=True)
        ]
        return [settings, Table("trials", "Trials", "Every run. From results.parquet.", rows)]

    def best_for(self) -> list[Piece]:
        """A table for each searched key: the best setting for each of its values."""
        pieces: list[Piece] = []
        for key, bests in (self.summary.get("best_for") or {}).items():
            has_edges = any(choice["edges"] for choice in bests)
            rows: list[Row] = []
            for choice in (c for c in bests if c["setting"] in self.settings):
                setting = self.settings[choice["setting"]]
                numbers = {f"{self.quantity.words}, mean": choice["mean"], "std": choice["spread"]}
                row: Row = {key: setting.values[key]}
                row |= number_cells(numbers, self.quantity.percent)
                row |= {"seeds": len(setting.trials)}
                row |= {k: text for k, text in setting.values.items() if k != key}
                row |= {"at an edge": join_names([*choice["edges"]])} if has_edges else {}
                rows.append({**row, **setting.epsilons})
            caption = f"For each {key}, the setting with the best mean over the seeds and its "
            caption += "sample standard deviation. "
            if has_edges:
                caption += "At an edge: the value is the smallest or the largest of its grid, so "
                caption += "that one beyond may be better. "
            caption += "From summary.json."
            pieces.append(Table(name_of("best-for", key), f"Best for each {key}", caption, rows))
        return pieces

    def curves(self) -> list[Piece]:
        """The metric by round, of the settings with the best means."""
        cases = []
        for setting in [s for s in self.settings.values() if s.scores][:MAX_CURVES]:
            label = ", ".join(qualified_label(key, text) for key, text in setting.values.items())
            runs = [self.run(trial, label) for trial in setting.trials]
            cases += [LabelledRun({"setting": label}, run) for run in runs]
        item = Curves(of=(self.metric,), colour="setting")
        if not cases:
            return [Missing(item.headline(), "needs a finished trial")]
        return [*item.make(cases)]

    def privacy(self) -> list[Piece]:
        best = [s.trials[0] for s in self.settings.values() if s.best]
        return privacy(self.run(best[0])) if best else []
