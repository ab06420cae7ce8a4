"""The base of the items of a report: figures, and the tables that a study asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, field_validator

from raydpfl.config.registry import Member
from raydpfl.report.labels import listed
from raydpfl.report.plot_style import LegendKey, Plot, Subplot, look
from raydpfl.report.run_reader import ACROSS, Group, LabelledRun, Panel, Run, arrange
from raydpfl.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Need:
    """Columns of a file of a run that something is drawn from. `hint`: how a run comes to have
    them, in words.
    """

    table: str
    columns: tuple[str, ...] = ()
    hint: str = ""

    def met(self, run: Run) -> bool:
        """Whether a run has them, with numbers in them."""
        return run.has(self.table, self.columns)

    def __str__(self) -> str:
        suffix = "bin" if self.table == "trajectory" else "parquet"
        columns = f"{listed(self.columns)} in " if self.columns else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{columns}{self.table}.{suffix}{hint}"


@dataclass(frozen=True)
class Missing:
    """What is left out, and why."""

    title: str
    why: str


@dataclass(frozen=True)
class Words:
    """A heading and paragraphs; `preformatted`: a text whose lines stay as they are."""

    title: str
    paragraphs: Sequence[str]
    preformatted: str = ""


Piece = Plot | Table | Missing | Words


@dataclass(frozen=True)
class Placed:
    """An item that every page of runs has: in which section, with which fields; those of a lower
    `rank` come first.
    """

    section: str
    fields: dict[str, Any]
    rank: int = 0


def _texts(labels: Any) -> tuple[str, ...]:
    """Labels as a study has them, which are texts as YAML writes them."""
    several = labels if isinstance(labels, (list, tuple)) else (labels,)
    return tuple(value if isinstance(value, str) else json.dumps(value) for value in several)


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]  # one name, or a list of them


def name_of(*words: str) -> str:
    """A name for files.

    >>> name_of("curves", "test_accuracy", "by round")
    'curves-test_accuracy-by-round'
    """
    return re.sub(r"[^a-z0-9_.]+", "-", "-".join(words).lower()).strip("-.")[:80]


class ReportItem(Member):
    """Base of the family: an item of a report, with its fields as a study's `show` has them.

    An item of a study is written `{KIND: OF, field: value, ...}`; `OF` is its field `of`, or {}
    where it has none. `only` keeps the cases with these labels, by axis. `title` replaces the
    item's title, `note` is put behind its caption.
    """

    placed: ClassVar[tuple[Placed, ...]] = ()
    axes_named: ClassVar[tuple[str, ...]] = ()  # the fields that name axes

    only: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    title: str = ""
    note: str = ""

    @field_validator("only", mode="before")
    @classmethod
    def _labels(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {str(axis): _texts(labels) for axis, labels in value.items()}

    @classmethod
    def placed_for(cls, columns: Collection[str]) -> tuple[Placed, ...]:
        """Where it stands on the page of runs whose rounds tables have these columns."""
        return cls.placed

    def axes(self) -> Iterable[str]:
        """The axes of the cases that the item names."""
        for name in self.axes_named:
            yield from _one_or_more(getattr(self, name))
        yield from self.only

    def labels(self) -> Iterable[tuple[str, str]]:
        """The labels that the item names, each with its axis."""
        return [(axis, label) for axis, labels in self.only.items() for label in labels]

    def numbers(self) -> Sequence[str]:
        """The numbers of a run that it shows, by name."""
        return ()

    def shown(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        """The item, of those of these runs that it shows."""
        marks = [
            case
            for case in cases
            if all(case.labels.get(axis) in labels for axis, labels in self.only.items())
        ]
        return [
            replace(piece, caption=f"{piece.caption} {self.note}")
            if self.note and isinstance(piece, (Plot, Table))
            else piece
            for piece in self.make(marks)
        ]

    def make(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        """The item, of these runs. It reads their directories and nothing else."""
        raise NotImplementedError

    def unasked(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        """As `make`, for a page that shows the item by itself: left out where it says nothing."""
        return self.make(cases)


class PanelledItem(ReportItem):
    """Base of items with panels.

    `colour` is the axis that tells lines apart (arms, or the runs that are compared), and `facet`
    the axes that make panels; any other axis that varies makes panels too, so that nothing but
    seeds is ever averaged. Where there are several, the last that `facet` names goes across, and
    the others go down.
    """

    axes_named: ClassVar[tuple[str, ...]] = ("colour", "facet")

    colour: str = "arm"
    facet: Names = ()


class PlotItem(PanelledItem):
    """Base of figures with a panel for each label of the facets, and in it a group for each colour
    (a line, say). With `per_group` each group has a panel, across where there are several of both.
    """

    per_group: ClassVar[bool] = False
    heading: ClassVar[str] = ""

    # --- what a figure gives ---

    def needs(self) -> Need:
        """What it reads of a run; one that lacks any of it is left out."""
        raise NotImplementedError

    def headline(self) -> str:
        """The title, where the item has no other."""
        return self.heading

    def slug(self) -> str:
        """What its files are named by."""
        return name_of(type(self).model_fields["kind"].default)

    def prepare(self, panels: Sequence[Panel]) -> Any:
        """What all panels have in common, computed once; None: there is nothing to draw."""
        return True

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        """Draws one panel. `common`: what `prepare` gave."""
        raise NotImplementedError

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        """The legend: by default a line for each group, where there are several."""
        return group_keys(panels)

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        """What is shown and from which file."""
        raise NotImplementedError

    # --- what all have in common ---

    def make(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        title = self.title or self.headline()
        need = self.needs()
        drawn = [case for case in cases if need.met(case.run)]
        if not drawn:
            return [Missing(title, f"needs {need}")]
        panels = arrange(drawn, self.colour, self.facet)
        if self.per_group:
            panels = _per_group(panels)
        common = self.prepare(panels)
        if common is None:
            return [Missing(title, "there is nothing to draw: no points of it are known")]
        subplots = [
            Subplot(panel.title, partial(self.draw, panel=panel, common=common), panel.place)
            for panel in panels
        ]
        caption = self.caption(panels, common) + _without(cases, drawn, self.colour)
        return [Plot(self.slug(), title, caption, subplots, self.keys(panels, common))]


def _per_group(panels: Sequence[Panel]) -> list[Panel]:
    """A panel for each group, named by it where there are several."""
    several = len(panels) > 1 and max(len(panel.groups) for panel in panels) > 1
    facets = []
    for row, panel in enumerate(panels):
        if len(panel.groups) == 1 and not panel.title:
            facets.append(panel)
            continue
        for group in panel.groups:
            title = ": ".join(part for part in (panel.title, group.label) if part)
            place = (row, group.place) if several and group.place < ACROSS else None
            facets.append(Panel(title, [group], place))
    return facets


def _without(cases: Sequence[LabelledRun], drawn: Sequence[LabelledRun], colour: str) -> str:
    """Says which labels have nothing to show."""
    there = {case.labels.get(colour) for case in drawn}
    gone = dict.fromkeys(case.labels[colour] for case in cases if colour in case.labels)
    names = [label for label in gone if label not in there]
    return f" Without {listed(names)}, of which none of it is known." if names else ""


def group_keys(panels: Sequence[Panel]) -> list[LegendKey]:
    """A line for each group of any panel; none where there is only one."""
    groups: dict[str, Group] = {}
    for panel in panels:
        for group in panel.groups:
            groups.setdefault(group.label, group)
    if len(groups) < 2:
        return []
    ordered = sorted(groups.values(), key=lambda group: group.place)
    return [LegendKey(group.label, look(group.place)) for group in ordered]


def runs_of(panels: Sequence[Panel]) -> list[Run]:
    """All runs of these panels, in their order."""
    return [run for panel in panels for group in panel.groups for run in group.runs]


def first_seed(panels: Sequence[Panel]) -> str:
    """What is said where of several runs of a group the first alone is shown."""
    several = any(len(group.runs) > 1 for panel in panels for group in panel.groups)
    return " Of several seeds, the first." if several else ""


def seeds_of(panels: Sequence[Panel]) -> str:
    """What lines and bands are where groups have several runs."""
    counts = sorted({len(group.runs) for panel in panels for group in panel.groups})
    if counts[-1] < 2:
        return ""
    span = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f" Lines are means over {span} seeds; bands reach from the least to the greatest."
