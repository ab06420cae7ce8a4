"""The page of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raydpfl.config.yaml import read
from raydpfl.privacy import Guarantee
from raydpfl.report.figures import Missing, Piece, Words, parse
from raydpfl.report.html import Page, Section, Tile
from raydpfl.report.labels import accountant, counted, edge, in_print, listed, number, quantity
from raydpfl.report.labels import axis as in_words
from raydpfl.report.pages.base import Source, file_text
from raydpfl.report.pages.run import KINDS
from raydpfl.report.run_reader import Case, Run, facets, json_of, labels_of, varying
from raydpfl.report.search_results import Tried, tuned
from raydpfl.report.tables import Cell, Table

ENDED = ("completed", "budget", "stopped")
OUTCOMES = 6  # panels whose outcome stands at the top


class StudySource(Source):
    """A study: study.yaml."""

    name = "study"

    def fits(self, folder: Path) -> bool:
        return (folder / "study.yaml").is_file()

    def page(self, folder: Path) -> Page:
        return _page(Studied(folder))

    def runs(self, folder: Path, name: str) -> list[Run]:
        found = dict.fromkeys(case.run for case in Studied(folder).cases)
        return [Run(run.folder, f"{name}/{Path(run.name).name}") for run in found]


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
    def cases(self) -> list[Case]:
        """The final runs that came to an end. One that is the same under every accounting, as it
        has no noise, is there under each.
        """
        labels = dict.fromkeys(row["accounting"] for row in self.results)
        labels.pop(None, None)
        runs: dict[str, Run] = {}
        found = []
        for row in self.results:
            if row["status"] not in ENDED:
                continue
            place = row["directory"]
            run = runs.setdefault(place, Run(self.folder / place, place, self.flaws))
            given = {axis: row[axis] for axis in self.axes(self.results) if row[axis] is not None}
            spread = (
                [{}] if row["accounting"] or not labels else [{"accounting": x} for x in labels]
            )
            found += [
                Case({**given, **each}, run, row, row["seed"], self.folder) for each in spread
            ]
        return found

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
        Section("What it claims and what was chosen", claims(studied)),
        Section("Results", shown),
        Section("Privacy", [epsilons(cases), words(cases)] if cases else []),
        Section("Identities", identities(studied)),
        Section("How values were chosen", tuning(studied)),
        Section("Runs", [runs(studied)]),
        Section("Study", [file_text(studied.folder / "study.yaml", studied.flaws)]),
    ]
    title = f"Study {about.get('id', studied.folder.resolve().name)}"
    if about.get("title"):
        title += f": {about['title']}"
    return Page(title, outcomes(studied), tiles(studied), sections, state(studied), studied.flaws)


def claims(studied: Studied) -> list[Piece]:
    """What the study shows, and what nobody states."""
    about = studied.about
    found: list[Piece] = []
    for key, title in (("shows", "The claim"), ("lost", "Not stated, and chosen here")):
        if about.get(key):
            found.append(Words(title, [" ".join(str(about[key]).split())]))
    return found


def state(studied: Studied) -> list[str]:
    """What to know before reading on."""
    found = []
    status = studied.summary.get("status")
    if status != "completed":
        reason = studied.summary.get("reason")
        said = f": {reason}" if reason else ""
        found.append(f"The study is {status or 'not ended: there is no summary.json'}{said}.")
    scale = studied.about.get("scale")
    if scale and scale != "paper":
        found.append(
            f"This is the scale {scale}, not the paper's own: it shows whether the study runs and "
            "what its curves look like here, not the paper's numbers."
        )
    broken = [each for each in studied.summary.get("identities", ()) if each["held"] is False]
    if broken:
        what = "An identity is" if len(broken) == 1 else f"{len(broken)} identities are"
        found.append(f"{what} broken; see Identities.")
    return found


def outcomes(studied: Studied) -> list[str]:
    """The arms by their means, in sentences; the number is that of the first table or figure."""
    if not studied.cases:
        return ["No run has come to an end."]
    named = [name for item in studied.show for name in parse(item, "show").numbers()]
    known = (name for name in named if any(case.number(name) is not None for case in studied.cases))
    metric = next(known, None)
    if metric is None:
        return ["What came of it stands in the figures."]
    measured = quantity(metric)
    found = [f"{measured.words.capitalize()} in the last round, means over the seeds"]
    found[0] += ", the best first." if measured.better else "."
    panels = facets(studied.cases, ("arm",))
    for panel in panels[:OUTCOMES]:
        inside = panel.cases
        title = panel.title
        means = {arm: _mean(inside, arm, metric) for arm in labels_of(inside, "arm")}
        ranked = [(arm, value) for arm, value in means.items() if value is not None]
        ranked.sort(key=lambda pair: -measured.better * pair[1])
        told = ", ".join(f"{arm} {number(value, measured.percent)}" for arm, value in ranked)
        found.append(f"{title}: {told}." if title else f"{told}.")
    more = len(panels) - OUTCOMES
    if more > 0:
        found.append(f"The tables have {counted(more, 'more panel')}.")
    return found


def _mean(cases: Sequence[Case], arm: str, name: str) -> float | None:
    values = [case.number(name) for case in cases if case.labels["arm"] == arm]
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def tiles(studied: Studied) -> list[Tile]:
    """The numbers at the top."""
    summary = studied.summary
    seeds = summary.get("seeds", ())
    final = summary.get("final", {})
    tried = summary.get("tried", {})
    found = [
        Tile("scale", str(studied.about.get("scale", "")), counted(len(seeds), "seed")),
        Tile("final runs", number(final.get("runs")), counted(summary.get("cells"), "cell")),
    ]
    if tried.get("runs"):
        found.append(
            Tile("runs to choose by", number(tried["runs"]), "on rows held out of training")
        )
    claimed = summary.get("identities", ())
    if claimed:
        held = sum(each["held"] is True for each in claimed)
        found.append(Tile("identities that held", f"{held} of {len(claimed)}", "bit by bit"))
    if summary.get("seconds") is not None:
        found.append(Tile("time", f"{number(summary['seconds'])} s", "the whole study"))
    return found


def epsilons(cases: Sequence[Case]) -> Piece:
    """What holds in each cell, beside every formula."""
    axes = [axis for axis in varying(cases) if axis != "arm"]
    cells: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        key = (*(case.labels.get(axis, "") for axis in axes), case.labels["arm"])
        cells.setdefault(key, []).append(case)
    stated = [one for case in cases for one in case.run.guarantees]
    names = dict.fromkeys((one.accountant, one.kind) for one in stated)
    rows = []
    for key, inside in cells.items():
        held = [case.run.holds[0] for case in inside if case.run.holds]
        row: list[Any] = [*key, _worst(held), max((one.delta for one in held), default=None)]
        for name, kind in names:
            row.append(_worst(_first(case.run.guarantees, name, kind) for case in inside))
        rows.append([*row, _against(held)])
    heads = [in_words(axis) for axis in axes]
    head = [*heads, "arm", "epsilon that holds", "delta"]
    head += [f"{accountant(name)} ({KINDS[kind]})" for name, kind in names]
    caption = "The largest over the seeds, as each run states it first. Rigorous ones hold, the "
    caption += "smallest of several; a formula is what a paper prints, whether or not its "
    caption += "conditions hold. Empty: not private, or not accounted for. From the summaries."
    return Table("epsilons", "Epsilon by cell", caption, [*head, "against"], rows)


def _first(found: Sequence[Guarantee], name: str, kind: str) -> Guarantee | None:
    return next((one for one in found if (one.accountant, one.kind) == (name, kind)), None)


def _worst(found: Any) -> float | None:
    return max((one.epsilon for one in found if one is not None), default=None)


def _against(held: Sequence[Guarantee]) -> str:
    told = [f"one {one.unit}, {one.observer}" for one in held]
    return listed([*dict.fromkeys(told)])


def words(cases: Sequence[Case]) -> Words:
    """What holds of each arm, in words, as its first run says it."""
    told = []
    for arm in labels_of(cases, "arm"):
        run = next(case.run for case in cases if case.labels["arm"] == arm)
        if run.holds:
            told.append(f"{arm}: {run.holds[0].brief().sentence()}")
        elif run.guarantees:
            told.append(f"{arm}: no rigorous guarantee holds.")
        else:
            told.append(f"{arm}: not private.")
    return Words("What holds, in words, of the first run of each arm", told)


def identities(studied: Studied) -> list[Piece]:
    """Arms whose models must be equal."""
    rows = []
    for each in studied.summary.get("identities", ()):
        place = ", ".join(f"{axis} {label}" for axis, label in each["at"].items())
        held = {True: "held", False: "BROKEN", None: "not compared"}[each["held"]]
        shown = Cell(each["held"], held, each["held"] is False)
        counts = [each.get("compared"), each.get("one_run"), len(each.get("broken", ()))]
        rows.append([listed(each["arms"]), place, shown, *counts])
    if not rows:
        return []
    head = ("arms of the same bits", "at", "held", "compared", "of these one run", "broken")
    caption = "Models that must be equal bit by bit. A pair that is one run says nothing. "
    return [Table("identities", "Identities", f"{caption}From summary.json.", head, rows)]


def tuning(studied: Studied) -> list[Piece]:
    """How values were chosen, in words and by cell."""
    found: list[Piece] = []
    said = studied.summary.get("tuning") or {}
    if said.get("statement"):
        found.append(Words("", [said["statement"]]))
    judge = said.get("judge", "")
    if not studied.tuning or judge not in studied.tuning[0]:
        return found
    axes = [axis for axis in studied.axes(studied.tuning) if _several(studied.tuning, axis)]
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in studied.tuning:
        cells.setdefault(tuple(row[axis] or "" for axis in axes), []).append(row)
    keys = dict.fromkeys(key for row in studied.tuning for key in json_of(row["values"]))
    rows = [[*labels, *_choice(inside, [*keys], judge)] for labels, inside in cells.items()]
    measured = quantity(judge)
    heads = [in_words(axis) for axis in axes]
    head = [*heads, "runs", *keys, f"{measured.words}, chosen", "least", "largest", "at an edge"]
    first = len(head) - 4
    percents = {first, first + 1, first + 2} if measured.percent else set()
    caption = "The values that were chosen, and the numbers that all tries of a cell reached, on "
    caption += (
        "rows held out of training, with one seed. At an edge: the value is the least or the "
    )
    caption += "largest that was tried, so that one beyond may be better. From tuning.parquet."
    table = Table("tuning", "Chosen values", caption, head, rows, percents)
    return [*found, *tried(studied, judge), table]


def _choice(tries: Sequence[Mapping[str, Any]], keys: Sequence[str], judge: str) -> list[Any]:
    """What a cell tried and chose, from its rows of tuning.parquet."""
    chosen = next((row for row in tries if row["chosen"]), None)
    values = json_of(chosen["values"]) if chosen else {}
    known = [row[judge] for row in tries if row[judge] is not None]
    every = [json_of(row["values"]) for row in tries]
    found: list[Any] = [len(tries)]
    found += [in_print(values[key]) if key in values else "" for key in keys]
    found += [chosen[judge] if chosen else None, min(known, default=None), max(known, default=None)]
    edges = [key for key in values if edge(values[key], [each.get(key) for each in every])]
    return [*found, listed(edges)]


def tried(studied: Studied, judge: str) -> list[Piece]:
    """The number that values were chosen by, over each of them."""
    nowhere = Run(studied.folder, "", studied.flaws)
    axes = studied.axes(studied.tuning)
    cases = [
        Case({axis: row[axis] for axis in axes if row[axis] is not None}, nowhere, row)
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
    names = [*axes, "seed", "status", "test_accuracy", "best_test_accuracy", "test_loss"]
    names = [name for name in names if any(row.get(name) is not None for row in rows)]
    cells = [[*(row[name] for name in names), _values(row), row["directory"]] for row in rows]
    shown = [quantity(name) for name in names]
    percents = {place for place, each in enumerate(shown) if each.percent}
    head = [name if name in axes else quantity(name).label for name in names]
    head += ["values", "directory"]
    caption = "Every final run of every cell. From results.parquet."
    return Table("runs", "Final runs", caption, head, cells, percents)


def _values(row: Mapping[str, Any]) -> str:
    values = json_of(row.get("values"))
    return ", ".join(f"{key} {in_print(value)}" for key, value in values.items())
