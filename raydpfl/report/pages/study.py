"""The page of a study."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from raydpfl.config.yaml import read
from raydpfl.report.figures import Missing, Piece, Words, parse
from raydpfl.report.figures.final_metric import Tuned
from raydpfl.report.figures.table import REPETITION
from raydpfl.report.html import Page, PageSection, Tile
from raydpfl.report.labels import (
    accountant,
    count_text,
    edge,
    format_mean,
    format_value,
    join_names,
    number,
    quantity,
)
from raydpfl.report.pages.base import PageSource, status_warnings, time_tile
from raydpfl.report.pages.run import KINDS
from raydpfl.report.run_reader import (
    LabelledRun,
    Run,
    arrange,
    find_varying_axes,
    group_by,
    json_of,
    labels_of,
    read_table,
    stated_epsilons,
    values_of,
)
from raydpfl.report.statistics import Resample, SeedValues
from raydpfl.report.tables import PrintedCell, Row, Table, axes_row, number_cells

ENDED_STATUSES = ("completed", "budget", "stopped")
CELL_OUTCOMES = {"hold": "holds", "reversed": "reversed", "equal": "equal"}
MAX_OUTCOMES = 6  # panels whose outcome stands at the top
ResultRow = Mapping[str, Any]  # of results.parquet or tuning.parquet


class StudySource(PageSource):
    """A study: study.yaml. `results`, `resamples` and `tuning` are the rows of its tables."""

    name: ClassVar[str] = "study"
    file: ClassVar[str] = "study.yaml"

    def __init__(self, folder: Path):
        super().__init__(folder)
        tree = read(folder / self.file, "DIR")
        self.about: dict[str, Any] = tree.get("study") or {}
        self.show: list[Any] = tree.get("show") or []
        self.summary = Run(folder, folder.resolve().name, self.flaws).summary
        self.results = read_table(folder / "results.parquet", self.flaws).to_pylist()
        self.resamples = read_table(folder / "resamples.parquet", self.flaws).to_pylist()
        self.tuning = read_table(folder / "tuning.parquet", self.flaws).to_pylist()

    def page(self) -> Page:
        cases = self.cases
        items = [parse(item, f"show.{place}") for place, item in enumerate(self.show)]
        pieces_by_heading: dict[str, list[Piece]] = {
            "What it shows and what was chosen": self.about_pieces(),
            "Claims": self.claims(),
            "Results": [piece for item in items for piece in item.shown(cases)],
            "Privacy": [epsilons(cases), words(cases)] if cases else [],
            "Identities": self.identities(),
            "How values were chosen": self.choices(),
            "Runs": [self.final_runs()],
            "Study": [self.file_text(self.file)],
        }
        sections = [
            PageSection(heading, [*map(self.add_provenance, pieces)])
            for heading, pieces in pieces_by_heading.items()
        ]
        title = f"Study {self.about.get('id', self.folder.resolve().name)}"
        title += f": {self.about['title']}" if self.about.get("title") else ""
        lead = outcomes(cases, [name for item in items for name in item.numbers()])
        return Page(title, lead, self.tiles(), sections, self.warnings(), self.flaws)

    def runs(self, name: str) -> list[Run]:
        runs = dict.fromkeys(case.run for case in self.cases)
        return [Run(run.folder, f"{name}/{Path(run.name).name}") for run in runs]

    def add_provenance(self, piece: Piece) -> Piece:
        """A piece that says, where it is a table, what it was computed by."""
        facts = self.summary.get("computed_by")
        if not facts or not isinstance(piece, Table):
            return piece
        commit = f" at commit {facts['commit']}" if facts.get("commit") else ""
        names = ", ".join(f"{n} {facts[n]}" for n in ("torch", "numpy", "ray") if n in facts)
        text = f"Computed by raydpfl {facts['raydpfl']}{commit}, compiled code "
        text += f"{facts['compiled']}, {names}."
        return replace(piece, caption=f"{piece.caption} {text}")

    @cached_property
    def cases(self) -> list[LabelledRun]:
        """The final runs that have ended; one without noise is there under each accounting."""
        accountings = [*dict.fromkeys(row["accounting"] for row in self.results)]
        runs: dict[str, Run] = {}
        cases = []
        resamples: dict[tuple[Any, ...], dict[Resample, LabelledRun | None]] = {}

        def run_of(row: ResultRow) -> Run:
            place = row["directory"]
            return runs.setdefault(place, Run(self.folder / place, place, self.flaws))

        for row in self.resamples:
            seeds = tuple(map(int, row["tuning_seeds"].split()))
            has_ended = row["status"] in ENDED_STATUSES
            resampled_run = LabelledRun({}, run_of(row), row) if has_ended else None
            resamples.setdefault(place_of(row), {})[seeds] = resampled_run
        for row in self.results:
            if row["status"] not in ENDED_STATUSES:
                continue
            run = run_of(row)
            names = [row["accounting"]] if row["accounting"] else [*filter(None, accountings)]
            for accounting in names or [None]:
                labels = labels_in({**row, "accounting": accounting})
                choices = resamples.get(place_of(row), {})
                cases.append(LabelledRun(labels, run, row, row["seed"], self.folder, choices))
        return cases

    def claims(self) -> list[Piece]:
        """The verdict on each claim, and the arms that are one."""
        rows: list[Row] = []
        for claim in self.summary.get("claims", ()):
            score = quantity(claim["of"])
            percent = score.percent
            level = claim.get("level")
            numbers = {"difference": claim.get("difference"), "from": claim.get("low")}
            numbers |= {"to": claim.get("high"), "by": claim.get("within") or claim["by"] or None}
            row: Row = {"claim": claim["says"], "verdict": claim["verdict"]}
            row |= {"of": score.words + (", points" if percent else "")}
            row |= {head: points_cell(value, percent) for head, value in numbers.items()}
            row |= {"level": level and f"{level:.2%}", "seeds": claim.get("seeds")}
            row |= {"cells": claim["cells"]}
            row |= {f"of them {name}": claim.get(key) for name, key in CELL_OUTCOMES.items()}
            rows.append(row)
        caption = "The difference that each claim is about, paired by seed: the mean over its "
        caption += "cells, or for a claim of every cell that of the cell that decides. By: what it "
        caption += "has to exceed, or to lie within, in place of 0. The interval includes tuning; "
        caption += "its level is corrected for the number of claims, and of cells where one "
        caption += "decides. From summary.json."
        pieces: list[Piece] = [Table("claims", "Claims", caption, rows)] if rows else []
        equal = []
        for group in self.summary.get("equal_arms", ()):
            label_text = ", ".join(f"{axis} {name}" for axis, name in group["at"].items())
            arms = f"{join_names(group['arms'])} are the same bits in all seeds"
            equal.append(f"{arms}{f' at {label_text}' if label_text else ''}.")
        return [*pieces, Words("Arms that are one", equal)] if equal else pieces

    def about_pieces(self) -> list[Piece]:
        titles = {"shows": "The claim", "lost": "Not stated, and chosen here"}
        return [
            Words(title, [" ".join(str(self.about[key]).split())])
            for key, title in titles.items()
            if self.about.get(key)
        ]

    def warnings(self) -> list[str]:
        problems = status_warnings("study", self.summary)
        scale = self.about.get("scale")
        if scale and scale != "paper":
            problems.append(
                f"This is the scale {scale}, not the paper's own: it shows whether the study runs "
                "and what its curves look like here, not the paper's numbers."
            )
        count = sum(row["held"] is False for row in self.summary.get("identities", ()))
        if count:
            subject = "An identity is" if count == 1 else f"{count} identities are"
            problems.append(f"{subject} broken; see Identities.")
        return problems

    def tiles(self) -> list[Tile]:
        summary = self.summary
        seeds = count_text(len(summary.get("seeds", ())), "seed")
        cells = count_text(summary.get("cells"), "cell")
        tiles = [Tile("scale", str(self.about.get("scale", "")), seeds)]
        tiles.append(Tile("final runs", number(summary.get("final", {}).get("runs")), cells))
        if runs := summary.get("tried", {}).get("runs"):
            tiles.append(Tile("runs to choose by", number(runs), "on rows held out of training"))
        if claims := [claim["verdict"] for claim in summary.get("claims", ())]:
            names = ("reversed", "equal", "not resolved", "not run")
            counts = {name: claims.count(name) for name in names}
            other_verdicts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
            claim_counts = f"{claims.count('holds')} of {len(claims)}"
            tiles.append(Tile("claims that hold", claim_counts, other_verdicts))
        if identities := summary.get("identities", ()):
            count = sum(identity["held"] is True for identity in identities)
            value = f"{count} of {len(identities)}"
            tiles.append(Tile("identities that held", value, "bit by bit"))
        return [*tiles, *time_tile(summary, "the whole study")]

    def identities(self) -> list[Piece]:
        rows: list[Row] = []
        for identity in self.summary.get("identities", ()):
            verdict = {True: "held", False: "BROKEN", None: "not compared"}[identity["held"]]
            rows.append(
                {
                    "arms of the same bits": join_names(identity["arms"]),
                    "at": ", ".join(f"{axis} {label}" for axis, label in identity["at"].items()),
                    "held": PrintedCell(identity["held"], verdict, identity["held"] is False),
                    "compared": identity.get("compared"),
                    "of these one run": identity.get("one_run"),
                    "broken": len(identity.get("broken", ())),
                }
            )
        caption = "Models that must be equal bit by bit. A pair that is one run says nothing. "
        caption += "From summary.json."
        return [Table("identities", "Identities", caption, rows)] if rows else []

    def choices(self) -> list[Piece]:
        """How values were chosen: in words, by the number that judged each, and by cell."""
        choices = self.summary.get("tuning") or {}
        pieces: list[Piece] = [Words("", [text]) for text in [choices.get("statement")] if text]
        judge = choices.get("judge", "")
        rows = self.tuning
        if not rows or judge not in rows[0]:
            return pieces
        sign = {"larger": 1, "smaller": -1}.get(self.about.get("better") or "")
        sign = sign or quantity(judge).better or 1
        facet = tuple(axis for axis in axes_of(rows[0]) if axis != "arm")
        empty_run = Run(self.folder, "", self.flaws)
        for key in keys_of(rows):
            cases = []
            for row in rows:
                values = json_of(row["values"])
                if key in values and row[judge] is not None:
                    labels = {**labels_in(row), key: format_value(values[key])}
                    numbers = {judge: row[judge], "best": row["chosen"]}
                    cases.append(LabelledRun(labels, empty_run, numbers))
            item = Tuned(of=judge, x=key, facet=facet, sign=sign)
            pieces += item.make(cases) if item.arrange_panels(cases) else []
        return [*pieces, chosen_values(rows, judge)]

    def final_runs(self) -> Piece:
        rows = self.results
        if not rows:
            return Missing("Runs", "needs results.parquet")
        names = ["seed", "status", "test_accuracy", "best_test_accuracy", "test_loss"]
        names = [name for name in names if any(row.get(name) is not None for row in rows)]
        table_rows: list[Row] = []
        for row in rows:
            values = json_of(row.get("values")).items()
            values_text = ", ".join(f"{key} {format_value(value)}" for key, value in values)
            cells: Row = {axis: row[axis] for axis in varying_axes(rows)}
            cells |= {quantity(name): row[name] for name in names}
            table_rows.append({**cells, "values": values_text, "directory": row["directory"]})
        caption = "Every final run of every cell. From results.parquet."
        return Table("runs", "Final runs", caption, table_rows)


def axes_of(row: ResultRow) -> list[str]:
    """The axes: the columns before the arm, the arm, and the accounting."""
    names = [*row]
    return [*names[: names.index("arm")], "arm", "accounting"]


def points_cell(value: float | None, percent: bool) -> PrintedCell | None:
    """A difference in print, that of percentages in points; None for none."""
    if value is None:
        return None
    text = f"{100 * value:+.2f}" if percent else f"{'+' if value > 0 else ''}{number(value)}"
    return PrintedCell(value, text)


def place_of(row: ResultRow) -> tuple[Any, ...]:
    """The cell of a row, and its seed."""
    return (*(row[axis] for axis in axes_of(row)), row["seed"])


def labels_in(row: ResultRow) -> dict[str, str]:
    """The labels of a row, by axis."""
    return {axis: row[axis] for axis in axes_of(row) if row[axis] is not None}


def varying_axes(rows: Sequence[ResultRow]) -> list[str]:
    """The axes with several labels, and the arm."""
    axes = axes_of(rows[0])
    return [axis for axis in axes if len({row[axis] for row in rows}) > 1 or axis == "arm"]


def keys_of(rows: Sequence[ResultRow]) -> list[str]:
    """The keys of the values that were tried."""
    return [*dict.fromkeys(key for row in rows for key in json_of(row["values"]))]


def outcomes(cases: Sequence[LabelledRun], numbers: Sequence[str]) -> list[str]:
    """The arms by their means of the first of these numbers that any run has, in sentences."""
    if not cases:
        return ["No run has come to an end."]
    names = [name for name in numbers if any(case.number(name) is not None for case in cases)]
    if not names:
        return ["What came of it stands in the figures."]
    score = quantity(names[0])
    lines = [f"{score.words.capitalize()} in the last rounds, {REPETITION.removesuffix('.')}"]
    lines[0] += ", the best first." if score.better else "."
    panels = arrange(cases, "arm")
    for panel in panels[:MAX_OUTCOMES]:
        spreads = [(arm.label, values_of(arm.cases, names[0]).spread()) for arm in panel.groups]
        ranked_arms = [pair for pair in spreads if pair[1].count]
        ranked_arms.sort(key=lambda pair: -score.better * pair[1].mean)
        arms = ", ".join(
            f"{arm} {format_mean(spread.mean, spread.repetition(), score.percent)}"
            for arm, spread in ranked_arms
        )
        lines.append(f"{panel.title}: {arms}." if panel.title else f"{arms}.")
    extra_panels = len(panels) - MAX_OUTCOMES
    if extra_panels > 0:
        lines.append(f"The tables have {count_text(extra_panels, 'more panel')}.")
    return lines


def epsilons(cases: Sequence[LabelledRun]) -> Piece:
    """What holds in each cell, next to every formula."""
    axes = [*(axis for axis in find_varying_axes(cases) if axis != "arm"), "arm"]
    all_guarantees = [g for case in cases for g in case.run.guarantees]
    names = dict.fromkeys((g.accountant, g.kind) for g in all_guarantees)
    rows: list[Row] = []
    for labels, cell in group_by(cases, lambda case: case.at(axes)).items():
        runs = [case.run for case in cell]
        guarantees = [run.holds[0] for run in runs] if all(run.holds for run in runs) else []
        row = axes_row(axes, labels)
        row["epsilon that holds"] = max((g.epsilon for g in guarantees), default=None)
        row["delta"] = max((g.delta for g in guarantees), default=None)
        largest_epsilons = stated_epsilons(runs)
        for name, kind in names:
            row[f"{accountant(name)} ({KINDS[kind]})"] = largest_epsilons.get((name, kind))
        observers = dict.fromkeys(f"one {g.unit}, {g.observer}" for g in guarantees)
        rows.append({**row, "against": join_names([*observers])})
    caption = "The largest over the seeds, as each run states it first. Rigorous ones hold, the "
    caption += "smallest of several; a formula is what a paper prints, whether or not its "
    caption += "conditions hold. Empty: not private, or not accounted for. From the summaries."
    return Table("epsilons", "Epsilon by cell", caption, rows)


def words(cases: Sequence[LabelledRun]) -> Words:
    """What holds of each arm, in words, as its first run says it."""
    paragraphs = []
    for arm in labels_of(cases, "arm"):
        run = next(case.run for case in cases if case.labels["arm"] == arm)
        text = "no rigorous guarantee holds." if run.guarantees else "not private."
        if run.holds:
            text = run.holds[0].brief().sentence()
        paragraphs.append(f"{arm}: {text}")
    return Words("What holds, in words, of the first run of each arm", paragraphs)


def chosen_values(rows: Sequence[ResultRow], judge: str) -> Table:
    """The values that were chosen, a row for each cell, by the number `judge` of all tries."""
    axes = varying_axes(rows)
    metric_quantity = quantity(judge)
    table_rows: list[Row] = []
    cells = group_by(rows, lambda row: tuple(row[axis] or "" for axis in axes))
    for labels, tries in cells.items():
        settings = group_by(tries, lambda row: row["values"])
        all_values = [json_of(text) for text in settings]
        chosen_row = next((row for row in tries if row["chosen"]), {})
        values = json_of(chosen_row.get("values"))
        means = {
            text: SeedValues({row["seed"]: row[judge] for row in runs}).spread()
            for text, runs in settings.items()
        }
        scores = [spread.mean for spread in means.values() if spread.count]
        row = {**axes_row(axes, labels), "settings": len(settings), "runs": len(tries)}
        row |= {key: format_value(values[key]) if key in values else "" for key in keys_of(rows)}
        best = means[chosen_row["values"]].mean if chosen_row else None
        numbers = {f"{metric_quantity.words}, chosen": best}
        numbers |= {"least": min(scores, default=None), "largest": max(scores, default=None)}
        row |= number_cells(numbers, metric_quantity.percent)
        row["epsilon of all tries"] = tries[0].get("all_tries_epsilon")
        edges = [key for key in values if edge(values[key], [v.get(key) for v in all_values])]
        table_rows.append({**row, "at an edge": join_names(edges)})
    caption = "The values that were chosen, and the means over the tuning seeds that all settings "
    caption += "of a cell reached, on rows held out of training. At an edge: the value is the "
    caption += "least or the largest that was tried, so that one beyond may be better. Epsilon of "
    caption += "all tries: what they spend together, next to the final runs. From tuning.parquet."
    return Table("tuning", "Chosen values", caption, table_rows)
