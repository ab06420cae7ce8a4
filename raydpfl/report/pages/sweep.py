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
from raydpfl.report.figures.final_metric import searched
from raydpfl.report.html import Page, PageSection, Tile
from raydpfl.report.labels import as_number, beyond, counted, listed, named, number, quantity
from raydpfl.report.pages.base import PageSource, not_completed, time_tile
from raydpfl.report.pages.comparison import labels
from raydpfl.report.pages.run import privacy
from raydpfl.report.run_reader import LabelledRun, Run, grouped, json_of, read_table
from raydpfl.report.statistics import SeedSpread, SeedValues
from raydpfl.report.tables import PrintedCell, Row, Table, number_cells

CURVES = 6  # settings whose curves are drawn
WHOLE = ("completed", "budget")  # of a trial that was not stopped for the sake of others


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
        stated = {name: [as_number(trial[name]) for trial in self.trials] for name in names}
        return {
            quantity(name): max((one for one in every if one is not None), default=None)
            for name, every in stated.items()
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
        self.measured = quantity(self.metric)
        self.trials = read_table(folder / "results.parquet", self.flaws).to_pylist()
        self.best = self.summary.get("best") or {}
        names = [*self.trials[0]] if self.trials else []
        self.keys = names[1 : names.index("seed")] if "seed" in names else []

    def page(self) -> Page:
        sections = [
            PageSection("What was tried", [*self.best_for(), *self.searched(), *self.tables()]),
            PageSection("Best settings by round", self.curves()),
            PageSection("Privacy of the best", self.privacy()),
            PageSection("Config", [self.file_text(self.file)]),
        ]
        edges = beyond(self.best.get("values", {}), self.best.get("edges", {}))
        warnings = [*not_completed("sweep", self.summary), *([edges] if edges else [])]
        lead = [line for line in (self.outcome(), self.summary.get("choice", "")) if line]
        title = f"Sweep {self.folder.resolve().name}"
        return Page(title, lead, self.tiles(), sections, warnings, self.flaws)

    def runs(self, name: str) -> list[Run]:
        whole = [trial["directory"] for trial in self.trials if trial["status"] in WHOLE]
        return [Run(self.folder / place, f"{name}/{Path(place).name}") for place in whole]

    @cached_property
    def values(self) -> list[dict[str, str]]:
        """The searched values of each trial, in print; of a section what differs from others."""
        values: list[dict[str, str]] = [{} for _ in self.trials]
        for key in self.keys:
            sections = {trial[key]: json_of(trial[key]) or trial[key] for trial in self.trials}
            printed = dict(zip(sections, labels([*sections.values()]), strict=True))
            for value, trial in zip(values, self.trials, strict=True):
                value[key] = printed[trial[key]]
        return values

    @cached_property
    def settings(self) -> dict[int, RankedSetting]:
        """By number, the best mean first, and at the end those without a score."""
        settings = {}
        rows = zip(self.trials, self.values, strict=True)
        for place, inside in grouped(rows, lambda row: row[0]["setting"]).items():
            trials = [trial for trial, _ in inside]
            scores = [as_number(trial.get(self.metric)) for trial in trials]
            # a run that failed has what it had before
            whole = all(trial["status"] != "failed" for trial in trials)
            finite = [score for score in scores if whole and score is not None]
            best = place == self.best.get("setting")
            settings[place] = RankedSetting(inside[0][1], trials, finite, best)

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
        """The best setting in a sentence."""
        if not self.best:
            return "No setting is the best."
        values = ", ".join(f"{key} {value}" for key, value in self.best_values.items())
        score = f"{self.measured.words} {number(self.best['mean'], self.measured.percent)}"
        over = counted(len(self.best["seeds"]), "seed")
        return f"The best of the settings is {values}: {score}, the mean over {over}."

    def tiles(self) -> list[Tile]:
        tiles = []
        if self.best:
            percent = self.measured.percent
            note, spread = "one seed", self.best.get("spread")
            if spread is not None:
                note = f"std {number(spread, percent)} over {len(self.best['seeds'])} seeds"
            shown = number(self.best["mean"], percent)
            tiles.append(Tile(f"best {self.measured.words}", shown, note))
            values = self.best_values.items()
            tiles += [Tile(key, value, "of the best setting") for key, value in values]
        counts = self.summary.get("trials", {})
        states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        tiles.append(Tile("settings", number(self.summary.get("settings")), f"trials: {states}"))
        return [*tiles, *time_tile(self.summary, "the whole sweep")]

    def searched(self) -> list[Piece]:
        """The metric over each searched value."""
        cases = [
            LabelledRun(one.values, self.run(one.trials[0]), {self.metric: score, "best": one.best})
            for _, one in sorted(self.settings.items())
            for score in one.scores
        ]
        return searched(cases, self.keys, self.metric)

    def tables(self) -> list[Piece]:
        """A row for each setting, the best first, and a row for each trial."""
        if not self.trials:
            return [Missing(title, "needs results.parquet") for title in ("Settings", "Trials")]
        words, percent = self.measured.words, self.measured.percent
        rows: list[Row] = []
        for one in self.settings.values():
            mean = as_number(one.spread.mean)
            cell = PrintedCell(mean, number(mean, percent), one.best)
            row: Row = {**one.values, f"{words}, mean": cell}
            row |= number_cells({"std": one.spread.std}, percent)
            row |= {"seeds": one.spread.count, "best": "best" if one.best else ""}
            rows.append({**row, **one.epsilons})
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
            at_edge = any(choice["edges"] for choice in bests)
            rows: list[Row] = []
            for choice in (one for one in bests if one["setting"] in self.settings):
                setting = self.settings[choice["setting"]]
                numbers = {f"{self.measured.words}, mean": choice["mean"], "std": choice["spread"]}
                row: Row = {key: setting.values[key]}
                row |= number_cells(numbers, self.measured.percent)
                row |= {"seeds": len(setting.trials)}
                row |= {other: text for other, text in setting.values.items() if other != key}
                row |= {"at an edge": listed([*choice["edges"]])} if at_edge else {}
                rows.append({**row, **setting.epsilons})
            caption = f"For each {key}, the setting with the best mean over the seeds and its "
            caption += "sample standard deviation. "
            if at_edge:
                caption += "At an edge: the value is the smallest or the largest of its grid, so "
                caption += "that one beyond may be better. "
            caption += "From summary.json."
            pieces.append(Table(name_of("best-for", key), f"Best for each {key}", caption, rows))
        return pieces

    def curves(self) -> list[Piece]:
        """The metric by round, of the settings with the best means."""
        cases = []
        for setting in [one for one in self.settings.values() if one.scores][:CURVES]:
            label = ", ".join(named(key, text) for key, text in setting.values.items())
            runs = [self.run(trial, label) for trial in setting.trials]
            cases += [LabelledRun({"setting": label}, run) for run in runs]
        item = Curves(of=(self.metric,), colour="setting")
        if not cases:
            return [Missing(item.headline(), "needs a finished trial")]
        return [*item.make(cases)]

    def privacy(self) -> list[Piece]:
        """The guarantees of the first run of the best setting."""
        best = [one.trials[0] for one in self.settings.values() if one.best]
        return privacy(self.run(best[0])) if best else []
