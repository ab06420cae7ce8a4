"""The page of a study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raydpfl.config.yaml import read
from raydpfl.privacy import Guarantee
from raydpfl.report.figures import Missing, Piece, Words, parse
from raydpfl.report.html import Page, PageSection, Tile
from raydpfl.report.labels import accountant, counted, edge, in_print, listed, number, quantity
from raydpfl.report.labels import axis as in_words
from raydpfl.report.pages.base import PageSource, file_text, not_completed, time_tile
from raydpfl.report.pages.run import KINDS
from raydpfl.report.run_reader import LabelledRun, Run, facets, json_of, labels_of, varying
from raydpfl.report.search_results import Tried, tuned
from raydpfl.report.tables import Column, PrintedCell, Table, columns_of

ENDED = ("completed", "budget", "stopped")
OUTCOMES = 6  # panels whose outcome stands at the top


class StudySource(PageSource):
    """A study: study.yaml."""

    name = "study"

    def fits(self, folder: Path) -> bool:
        return (folder / "study.yaml").is_file()

    def page(self, folder: Path) -> Page:
        return _page(Studied(folder))

    def runs(self, folder: Path, name: str) -> list[Run]:
        runs = dict.fromkeys(case.run for case in Studied(folder).cases)
        return [Run(run.folder, f"{name}/{Path(run.name).name}") for run in runs]


class Studied:
    """What the directory of a study holds."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.flaws: list[str] = []
        self.file = read(folder / "study.yaml", "DIR")
        self.about: dict[str, Any] = self.file.get("study") or {}
        self.summary = Run(folder, folder.resolve().name, self.flaws).summary

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """The rows of results.parquet."""
        return self._rows("results.parquet")

    @cached_property
    def tuning(self) -> list[dict[str, Any]]:
        """The rows of tuning.parquet."""
        return self._rows("tuning.parquet")

    def _rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        if not path.is_file():
            return []
        try:
            return pq.read_table(path).to_pylist()
        except (OSError, pa.ArrowException) as error:
            self.flaws.append(f"{name} cannot be read ({' '.join(str(error).split())[:120]})")
            return []

    def axes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """The axes: the columns before the arm."""
        names = [*rows[0]] if rows else ["arm"]
        return [*names[: names.index("arm")], "arm", "accounting"]

    @cached_property
    def cases(self) -> list[LabelledRun]:
        """The final runs that came to an end. One that is the same under every accounting, as it
        has no noise, is there under each.
        """
        labels = dict.fromkeys(row["accounting"] for row in self.results)
        labels.pop(None, None)
        runs: dict[str, Run] = {}
        cases = []
        for row in self.results:
            if row["status"] not in ENDED:
                continue
            place = row["directory"]
            run = runs.setdefault(place, Run(self.folder / place, place, self.flaws))
            given = {axis: row[axis] for axis in self.axes(self.results) if row[axis] is not None}
            every = [{"accounting": name} for name in labels] if not row["accounting"] else []
            for more in every or [{}]:
                cases.append(LabelledRun({**given, **more}, run, row, row["seed"], self.folder))
        return cases

    @property
    def show(self) -> list[Any]:
        return self.file.get("show") or []


def _page(studied: Studied) -> Page:
    about = studied.about
    cases = studied.cases
    shown: list[Piece] = []
    for place, item in enumerate(studied.show):
        shown += parse(item, f"show.{place}").shown(cases)
    sections = [
        PageSection("What it claims and what was chosen", claims(studied)),
        PageSection("Results", shown),
        PageSection("Privacy", [epsilons(cases), words(cases)] if cases else []),
        PageSection("Identities", identities(studied)),
        PageSection("How values were chosen", tuning(studied)),
        PageSection("Runs", [runs(studied)]),
        PageSection("Study", [file_text(studied.folder / "study.yaml", studied.flaws)]),
    ]
    title = f"Study {about.get('id', studied.folder.resolve().name)}"
    if about.get("title"):
        title += f": {about['title']}"
    return Page(title, outcomes(studied), tiles(studied), sections, state(studied), studied.flaws)


def claims(studied: Studied) -> list[Piece]:
    """What the study shows, and what nobody states."""
    about = studied.about
    pieces: list[Piece] = []
    for key, title in (("shows", "The claim"), ("lost", "Not stated, and chosen here")):
        if about.get(key):
            pieces.append(Words(title, [" ".join(str(about[key]).split())]))
    return pieces


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
    if not studied.cases:
        return ["No run has come to an end."]
    named = [name for item in studied.show for name in parse(item, "show").numbers()]
    present = (
        name for name in named if any(case.number(name) is not None for case in studied.cases)
    )
    metric = next(present, None)
    if metric is None:
        return ["What came of it stands in the figures."]
    measured = quantity(metric)
    lines = [f"{measured.words.capitalize()} in the last round, means over the seeds"]
    lines[0] += ", the best first." if measured.better else "."
    panels = facets(studied.cases, ("arm",))
    for panel in panels[:OUTCOMES]:
        means = {arm: _mean(panel.cases, arm, metric) for arm in labels_of(panel.cases, "arm")}
        ranked = [(arm, value) for arm, value in means.items() if value is not None]
        ranked.sort(key=lambda pair: -measured.better * pair[1])
        arms = ", ".join(f"{arm} {number(value, measured.percent)}" for arm, value in ranked)
        lines.append(f"{panel.title}: {arms}." if panel.title else f"{arms}.")
    more = len(panels) - OUTCOMES
    if more > 0:
        lines.append(f"The tables have {counted(more, 'more panel')}.")
    return lines


def _mean(cases: Sequence[LabelledRun], arm: str, name: str) -> float | None:
    values = [case.number(name) for case in cases if case.labels["arm"] == arm]
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None


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
    axes = [axis for axis in varying(cases) if axis != "arm"]
    cells: dict[tuple[str, ...], list[Run]] = {}
    for case in cases:
        key = (*(case.labels.get(axis, "") for axis in axes), case.labels["arm"])
        cells.setdefault(key, []).append(case.run)
    held = [[run.holds[0] for run in runs if run.holds] for runs in cells.values()]
    columns = [
        *columns_of([*map(in_words, axes), "arm"], cells),
        Column("epsilon that holds", [_largest(stated, "epsilon") for stated in held]),
        Column("delta", [_largest(stated, "delta") for stated in held]),
    ]
    stated = [one for case in cases for one in case.run.guarantees]
    for name, kind in dict.fromkeys((one.accountant, one.kind) for one in stated):
        firsts = [[*_first(runs, name, kind)] for runs in cells.values()]
        values = [_largest(first, "epsilon") for first in firsts]
        columns.append(Column(f"{accountant(name)} ({KINDS[kind]})", values))
    columns.append(Column("against", [_against(claim) for claim in held]))
    caption = "The largest over the seeds, as each run states it first. Rigorous ones hold, the "
    caption += "smallest of several; a formula is what a paper prints, whether or not its "
    caption += "conditions hold. Empty: not private, or not accounted for. From the summaries."
    return Table("epsilons", "Epsilon by cell", caption, columns)


def _first(runs: Sequence[Run], name: str, kind: str) -> Iterator[Guarantee]:
    """What each run states first by an accountant."""
    for run in runs:
        yield from [one for one in run.guarantees if (one.accountant, one.kind) == (name, kind)][:1]


def _largest(stated: Sequence[Guarantee], name: str) -> float | None:
    return max((getattr(one, name) for one in stated), default=None)


def _against(held: Sequence[Guarantee]) -> str:
    return listed([*dict.fromkeys(f"one {one.unit}, {one.observer}" for one in held)])


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


def identities(studied: Studied) -> list[Piece]:
    """Arms whose models must be equal."""
    rows = []
    for identity in studied.summary.get("identities", ()):
        place = ", ".join(f"{axis} {label}" for axis, label in identity["at"].items())
        held = {True: "held", False: "BROKEN", None: "not compared"}[identity["held"]]
        shown = PrintedCell(identity["held"], held, identity["held"] is False)
        counts = [
            identity.get("compared"),
            identity.get("one_run"),
            len(identity.get("broken", ())),
        ]
        rows.append([listed(identity["arms"]), place, shown, *counts])
    if not rows:
        return []
    head = ("arms of the same bits", "at", "held", "compared", "of these one run", "broken")
    caption = "Models that must be equal bit by bit. A pair that is one run says nothing. "
    caption += "From summary.json."
    return [Table("identities", "Identities", caption, columns_of(head, rows))]


def tuning(studied: Studied) -> list[Piece]:
    """How values were chosen, in words and by cell."""
    pieces: list[Piece] = []
    choices = studied.summary.get("tuning") or {}
    if choices.get("statement"):
        pieces.append(Words("", [choices["statement"]]))
    judge = choices.get("judge", "")
    if not studied.tuning or judge not in studied.tuning[0]:
        return pieces
    axes = [axis for axis in studied.axes(studied.tuning) if _several(studied.tuning, axis)]
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in studied.tuning:
        cells.setdefault(tuple(row[axis] or "" for axis in axes), []).append(row)
    tries = [*cells.values()]
    scores = [[row[judge] for row in rows if row[judge] is not None] for rows in tries]
    chosen = [next((row for row in rows if row["chosen"]), {}) for rows in tries]
    values = [json_of(row.get("values")) for row in chosen]
    measured = quantity(judge)
    columns = [*columns_of(map(in_words, axes), cells), Column("runs", [*map(len, tries)])]
    for key in dict.fromkeys(key for row in studied.tuning for key in json_of(row["values"])):
        labels = [in_print(value[key]) if key in value else "" for value in values]
        columns.append(Column(key, labels))
    best = [row.get(judge) for row in chosen]
    least = [min(score, default=None) for score in scores]
    largest = [max(score, default=None) for score in scores]
    columns += [
        Column(f"{measured.words}, chosen", best, measured.percent),
        Column("least", least, measured.percent),
        Column("largest", largest, measured.percent),
        Column("at an edge", [_edges(*pair) for pair in zip(values, tries, strict=True)]),
    ]
    caption = "The values that were chosen, and the numbers that all tries of a cell reached, on "
    caption += "rows held out of training, with one seed. At an edge: the value is the least or "
    caption += "the largest that was tried, so that one beyond may be better. From tuning.parquet."
    return [*pieces, *tried(studied, judge), Table("tuning", "Chosen values", caption, columns)]


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
    cases = [
        LabelledRun({axis: row[axis] for axis in axes if row[axis] is not None}, nowhere, row)
        for row in studied.tuning
    ]
    cells = []
    for facet in facets(cases, ("arm",), [axis for axis in axes if axis != "arm"]):
        for arm in labels_of(facet.cases, "arm"):
            inside = [case.numbers for case in facet.cases if case.labels["arm"] == arm]
            cells.append((facet, arm, [_tried(row, judge) for row in inside]))
    sign = {"larger": 1, "smaller": -1}.get(studied.about.get("better") or "")
    return tuned(cells, judge, sign or quantity(judge).better or 1)


def _tried(row: Mapping[str, Any], judge: str) -> Tried:
    values = {key: in_print(value) for key, value in json_of(row["values"]).items()}
    scores = [] if row[judge] is None else [row[judge]]
    return Tried(values, scores, bool(row["chosen"]))


def _several(rows: Sequence[Mapping[str, Any]], axis: str) -> bool:
    return len({row[axis] for row in rows}) > 1 or axis == "arm"


def runs(studied: Studied) -> Piece:
    """Every final run."""
    rows = studied.results
    if not rows:
        return Missing("Runs", "needs results.parquet")
    axes = [axis for axis in studied.axes(rows) if _several(rows, axis)]
    names = ["seed", "status", "test_accuracy", "best_test_accuracy", "test_loss"]
    names = [name for name in names if any(row.get(name) is not None for row in rows)]
    columns = [
        *(Column(axis, [row[axis] for row in rows]) for axis in axes),
        *(Column.of(name, [row[name] for row in rows]) for name in names),
        Column("values", [_values(row) for row in rows]),
        Column("directory", [row["directory"] for row in rows]),
    ]
    caption = "Every final run of every cell. From results.parquet."
    return Table("runs", "Final runs", caption, columns)


def _values(row: Mapping[str, Any]) -> str:
    values = json_of(row.get("values"))
    return ", ".join(f"{key} {in_print(value)}" for key, value in values.items())
