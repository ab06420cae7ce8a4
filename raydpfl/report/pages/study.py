"""The page of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from raydpfl.config.yaml import read
from raydpfl.privacy import Guarantee
from raydpfl.report.figures import Missing, Piece, Words, parse
from raydpfl.report.html import Page, PageSection, Tile
from raydpfl.report.labels import accountant, counted, edge, in_print, listed, number, quantity
from raydpfl.report.labels import axis as in_words
from raydpfl.report.pages.base import PageSource, file_text, not_completed, time_tile
from raydpfl.report.pages.run import KINDS
from raydpfl.report.run_reader import (
    LabelledRun,
    Run,
    facets,
    grouped,
    json_of,
    labels_of,
    read_table,
    varying,
)
from raydpfl.report.search_results import Tried, tuned
from raydpfl.report.statistics import over_seeds
from raydpfl.report.tables import Column, PrintedCell, Table, columns_of

ENDED = ("completed", "budget", "stopped")
OUTCOMES = 6  # panels whose outcome stands at the top


class StudySource(PageSource):
    """A study: study.yaml."""

    name = "study"

    def fits(self, folder: Path) -> bool:
        return (folder / "study.yaml").is_file()

    def page(self, folder: Path) -> Page:
        studied = Studied(folder)
        about = studied.about
        cases = studied.cases
        shown: list[Piece] = []
        for place, item in enumerate(studied.show):
            shown += parse(item, f"show.{place}").shown(cases)
        sections = [
            PageSection("What it claims and what was chosen", claims(about)),
            PageSection("Results", shown),
            PageSection("Privacy", [epsilons(cases), words(cases)] if cases else []),
            PageSection("Identities", identities(studied.summary)),
            PageSection("How values were chosen", tuning(studied)),
            PageSection("Runs", [runs(studied)]),
            PageSection("Study", [file_text(folder / "study.yaml", studied.flaws)]),
        ]
        title = f"Study {about.get('id', folder.resolve().name)}"
        title += f": {about['title']}" if about.get("title") else ""
        return Page(
            title, outcomes(studied), tiles(studied), sections, state(studied), studied.flaws
        )

    def runs(self, folder: Path, name: str) -> list[Run]:
        runs = dict.fromkeys(case.run for case in Studied(folder).cases)
        return [Run(run.folder, f"{name}/{Path(run.name).name}") for run in runs]


class Studied:
    """What the directory of a study holds: `results` and `tuning` are the rows of its tables."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.flaws: list[str] = []
        self.file = read(folder / "study.yaml", "DIR")
        self.about: dict[str, Any] = self.file.get("study") or {}
        self.show: list[Any] = self.file.get("show") or []
        self.summary = Run(folder, folder.resolve().name, self.flaws).summary
        self.results = self._rows("results.parquet")
        self.tuning = self._rows("tuning.parquet")

    def _rows(self, name: str) -> list[dict[str, Any]]:
        table = read_table(self.folder / name, self.flaws)
        return [] if table is None else table.to_pylist()

    def axes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """The axes: the columns before the arm."""
        names = [*rows[0]] if rows else ["arm"]
        return [*names[: names.index("arm")], "arm", "accounting"]

    @cached_property
    def cases(self) -> list[LabelledRun]:
        """The final runs that came to an end. One that is the same under every accounting, as it
        has no noise, is there under each.
        """
        accountings = [
            name for name in dict.fromkeys(row["accounting"] for row in self.results) if name
        ]
        runs: dict[str, Run] = {}
        cases = []
        for row in self.results:
            if row["status"] not in ENDED:
                continue
            place = row["directory"]
            run = runs.setdefault(place, Run(self.folder / place, place, self.flaws))
            labels = labels_in(row, self.axes(self.results))
            every = [{"accounting": name} for name in accountings if not row["accounting"]]
            for more in every or [{}]:
                cases.append(LabelledRun({**labels, **more}, run, row, row["seed"], self.folder))
        return cases


def labels_in(row: Mapping[str, Any], axes: Sequence[str]) -> dict[str, str]:
    """The labels of a row, by axis."""
    return {axis: row[axis] for axis in axes if row[axis] is not None}


def claims(about: Mapping[str, Any]) -> list[Piece]:
    """What the study shows, and what was chosen for it."""
    titles = {"shows": "The claim", "lost": "Not stated, and chosen here"}
    return [
        Words(title, [" ".join(str(about[key]).split())])
        for key, title in titles.items()
        if about.get(key)
    ]


def state(studied: Studied) -> list[str]:
    """What to know before reading on."""
    problems = not_completed("study", studied.summary)
    scale = studied.about.get("scale")
    if scale and scale != "paper":
        problems.append(
            f"This is the scale {scale}, not the paper's own: it shows whether the study runs and "
            "what its curves look like here, not the paper's numbers."
        )
    broken = [
        identity for identity in studied.summary.get("identities", ()) if identity["held"] is False
    ]
    if broken:
        what = "An identity is" if len(broken) == 1 else f"{len(broken)} identities are"
        problems.append(f"{what} broken; see Identities.")
    return problems


def outcomes(studied: Studied) -> list[str]:
    """The arms by their means, in sentences; the number is that of the first table or figure."""
    cases = studied.cases
    if not cases:
        return ["No run has come to an end."]
    named = [name for item in studied.show for name in parse(item, "show").numbers()]
    named = [name for name in named if any(case.number(name) is not None for case in cases)]
    if not named:
        return ["What came of it stands in the figures."]
    measured = quantity(named[0])
    lines = [f"{measured.words.capitalize()} in the last round, means over the seeds"]
    lines[0] += ", the best first." if measured.better else "."
    panels = facets(cases, ("arm",))
    for panel in panels[:OUTCOMES]:
        means = {
            arm: over_seeds({at: case.number(named[0]) for at, case in enumerate(inside)}).mean
            for arm, inside in grouped(panel.cases, lambda case: case.labels["arm"]).items()
        }
        ranked = [pair for pair in means.items() if pair[1] == pair[1]]
        ranked.sort(key=lambda pair: -measured.better * pair[1])
        arms = ", ".join(f"{arm} {number(mean, measured.percent)}" for arm, mean in ranked)
        lines.append(f"{panel.title}: {arms}." if panel.title else f"{arms}.")
    more = len(panels) - OUTCOMES
    if more > 0:
        lines.append(f"The tables have {counted(more, 'more panel')}.")
    return lines


def tiles(studied: Studied) -> list[Tile]:
    """The numbers at the top."""
    summary = studied.summary
    seeds = summary.get("seeds", ())
    final = summary.get("final", {})
    tried = summary.get("tried", {})
    tiles = [
        Tile("scale", str(studied.about.get("scale", "")), counted(len(seeds), "seed")),
        Tile("final runs", number(final.get("runs")), counted(summary.get("cells"), "cell")),
    ]
    if tried.get("runs"):
        note = "on rows held out of training"
        tiles.append(Tile("runs to choose by", number(tried["runs"]), note))
    claimed = summary.get("identities", ())
    if claimed:
        held = sum(claim["held"] is True for claim in claimed)
        tiles.append(Tile("identities that held", f"{held} of {len(claimed)}", "bit by bit"))
    return [*tiles, *time_tile(summary, "the whole study")]


def epsilons(cases: Sequence[LabelledRun]) -> Piece:
    """What holds in each cell, next to every formula."""
    axes = [*(axis for axis in varying(cases) if axis != "arm"), "arm"]
    groups = grouped(cases, lambda case: case.at(axes))
    cells = [[case.run for case in inside] for inside in groups.values()]
    held = [[run.holds[0] for run in runs if run.holds] for runs in cells]
    columns = [
        *columns_of(map(in_words, axes), groups),
        Column("epsilon that holds", [_largest(stated, "epsilon") for stated in held]),
        Column("delta", [_largest(stated, "delta") for stated in held]),
    ]
    stated = [one for case in cases for one in case.run.guarantees]
    for name, kind in dict.fromkeys((one.accountant, one.kind) for one in stated):
        values = []
        for runs in cells:
            by_run = [
                [one for one in run.guarantees if (one.accountant, one.kind) == (name, kind)]
                for run in runs
            ]
            values.append(_largest([of_run[0] for of_run in by_run if of_run], "epsilon"))
        columns.append(Column(f"{accountant(name)} ({KINDS[kind]})", values))
    against = [dict.fromkeys(f"one {one.unit}, {one.observer}" for one in claim) for claim in held]
    columns.append(Column("against", [listed([*observers]) for observers in against]))
    caption = "The largest over the seeds, as each run states it first. Rigorous ones hold, the "
    caption += "smallest of several; a formula is what a paper prints, whether or not its "
    caption += "conditions hold. Empty: not private, or not accounted for. From the summaries."
    return Table("epsilons", "Epsilon by cell", caption, columns)


def _largest(stated: Sequence[Guarantee], name: str) -> float | None:
    return max((getattr(one, name) for one in stated), default=None)


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


def identities(summary: Mapping[str, Any]) -> list[Piece]:
    """Arms whose models must be equal."""
    rows = []
    for identity in summary.get("identities", ()):
        place = ", ".join(f"{axis} {label}" for axis, label in identity["at"].items())
        held = {True: "held", False: "BROKEN", None: "not compared"}[identity["held"]]
        shown = PrintedCell(identity["held"], held, identity["held"] is False)
        counts = (identity.get("compared"), identity.get("one_run"))
        broken = len(identity.get("broken", ()))
        rows.append([listed(identity["arms"]), place, shown, *counts, broken])
    if not rows:
        return []
    head = ("arms of the same bits", "at", "held", "compared", "of these one run", "broken")
    caption = "Models that must be equal bit by bit. A pair that is one run says nothing. "
    caption += "From summary.json."
    return [Table("identities", "Identities", caption, columns_of(head, rows))]


def tuning(studied: Studied) -> list[Piece]:
    """How values were chosen, in words and by cell."""
    choices = studied.summary.get("tuning") or {}
    pieces: list[Piece] = [Words("", [text]) for text in [choices.get("statement")] if text]
    judge = choices.get("judge", "")
    rows = studied.tuning
    if not rows or judge not in rows[0]:
        return pieces
    axes = _varying(rows, studied.axes(rows))
    cells = grouped(rows, lambda row: tuple(row[axis] or "" for axis in axes))
    tries = [*cells.values()]
    chosen = [next((row for row in inside if row["chosen"]), {}) for inside in tries]
    values = [json_of(row.get("values")) for row in chosen]
    scores = [[row[judge] for row in inside if row[judge] is not None] for inside in tries]
    measured = quantity(judge)
    columns = [*columns_of(map(in_words, axes), cells), Column("runs", [*map(len, tries)])]
    for key in dict.fromkeys(key for row in rows for key in json_of(row["values"])):
        labels = [in_print(value[key]) if key in value else "" for value in values]
        columns.append(Column(key, labels))
    for head, numbers in (
        (f"{measured.words}, chosen", [row.get(judge) for row in chosen]),
        ("least", [min(score, default=None) for score in scores]),
        ("largest", [max(score, default=None) for score in scores]),
    ):
        columns.append(Column(head, numbers, measured.percent))
    edges = [_edges(*pair) for pair in zip(values, tries, strict=True)]
    columns.append(Column("at an edge", edges))
    caption = "The values that were chosen, and the numbers that all tries of a cell reached, on "
    caption += "rows held out of training, with one seed. At an edge: the value is the least or "
    caption += "the largest that was tried, so that one beyond may be better. From tuning.parquet."
    return [*pieces, *tried(studied, judge), Table("tuning", "Chosen values", caption, columns)]


def _varying(rows: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> list[str]:
    """The axes with several labels, and the arm."""
    return [axis for axis in axes if len({row[axis] for row in rows}) > 1 or axis == "arm"]


def _edges(values: Mapping[str, Any], tries: Sequence[Mapping[str, Any]]) -> str:
    """The keys whose chosen values are at an edge of what a cell tried."""
    every = [json_of(row["values"]) for row in tries]
    return listed(
        [key for key in values if edge(values[key], [setting.get(key) for setting in every])]
    )


def tried(studied: Studied, judge: str) -> list[Piece]:
    """The number that values were chosen by, over each of them."""
    nowhere = Run(studied.folder, "", studied.flaws)
    axes = studied.axes(studied.tuning)
    cases = [LabelledRun(labels_in(row, axes), nowhere, row) for row in studied.tuning]
    cells = []
    for facet in facets(cases, ("arm",), [axis for axis in axes if axis != "arm"]):
        for arm, inside in grouped(facet.cases, lambda case: case.labels["arm"]).items():
            cells.append((facet, arm, [_tried(case.numbers, judge) for case in inside]))
    sign = {"larger": 1, "smaller": -1}.get(studied.about.get("better") or "")
    return tuned(cells, judge, sign or quantity(judge).better or 1)


def _tried(row: Mapping[str, Any], judge: str) -> Tried:
    values = {key: in_print(value) for key, value in json_of(row["values"]).items()}
    scores = [] if row[judge] is None else [row[judge]]
    return Tried(values, scores, bool(row["chosen"]))


def runs(studied: Studied) -> Piece:
    """Every final run."""
    rows = studied.results
    if not rows:
        return Missing("Runs", "needs results.parquet")
    names = ["seed", "status", "test_accuracy", "best_test_accuracy", "test_loss"]
    names = [name for name in names if any(row.get(name) is not None for row in rows)]
    values = [json_of(row.get("values")).items() for row in rows]
    texts = [", ".join(f"{key} {in_print(value)}" for key, value in pairs) for pairs in values]
    columns = [
        *(Column(axis, [row[axis] for row in rows]) for axis in _varying(rows, studied.axes(rows))),
        *(Column.of(name, [row[name] for row in rows]) for name in names),
        Column("values", texts),
        Column("directory", [row["directory"] for row in rows]),
    ]
    caption = "Every final run of every cell. From results.parquet."
    return Table("runs", "Final runs", caption, columns)
