"""The base of what a report can show: figures, and the tables that a study asks for."""

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
from raydpfl.report.plot_style import Drawing, Key, Part, look
from raydpfl.report.run_reader import ACROSS, Case, Group, Panel, Run, arrange
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
        named = listed(self.columns)
        text = f"{named} in {self.table}.{suffix}" if named else f"{self.table}.{suffix}"
        return f"{text} ({self.hint})" if self.hint else text


@dataclass(frozen=True)
class Missing:
    """What is left out, and why."""

    title: str
    why: str


@dataclass(frozen=True)
class Words:
    """A heading of its own and paragraphs; `preformatted`: a text whose lines stay as they are."""

    title: str
    paragraphs: Sequence[str]
    preformatted: str = ""


Piece = Drawing | Table | Missing | Words


@dataclass(frozen=True)
class Placed:
    """Where a page of runs has an item without being asked: in which section, by which fields;
    those of a lower `rank` come first.
    """

    section: str
    fields: dict[str, Any]
    rank: int = 0


def _texts(labels: Any) -> tuple[str, ...]:
    """Labels as a study has them, which are texts as YAML writes them."""
    several = labels if isinstance(labels, (list, tuple)) else (labels,)
    return tuple(each if isinstance(each, str) else json.dumps(each) for each in several)


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]  # one name, or a list of them


def name_of(*words: str) -> str:
    """A name for files.

    >>> name_of("curves", "test_accuracy", "by round")
    'curves-test_accuracy-by-round'
    """
    return re.sub(r"[^a-z0-9_.]+", "-", "-".join(words).lower()).strip("-.")[:80]


class Shown(Member):
    """Base of the family: an item of a report, with its fields as a study's `show` has them.

    An item of a study is written `{KIND: OF, field: value, ...}`; what stands behind the kind is
    its field `of`, `{KIND: {}, ...}` if it has none. `only` keeps the cases with these labels, by
    axis. `title` replaces the item's own, `note` is put behind its caption.
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
            value = getattr(self, name)
            yield from (value,) if isinstance(value, str) else value
        yield from self.only

    def labels(self) -> Iterable[tuple[str, str]]:
        """The labels that the item names, each with its axis."""
        for axis, labels in self.only.items():
            yield from ((axis, label) for label in labels)

    def numbers(self) -> Sequence[str]:
        """The numbers of a run that it shows, by name."""
        return ()

    def shown(self, cases: Sequence[Case]) -> Sequence[Piece]:
        """The item, of those of these runs that it shows."""
        kept = [
            case
            for case in cases
            if all(case.labels.get(axis) in labels for axis, labels in self.only.items())
        ]
        found = self.make(kept)
        if not self.note:
            return found
        return [
            replace(piece, caption=f"{piece.caption} {self.note}")
            if isinstance(piece, (Drawing, Table))
            else piece
            for piece in found
        ]

    def make(self, cases: Sequence[Case]) -> Sequence[Piece]:
        """The item, of these runs. It reads their directories and nothing else."""
        raise NotImplementedError

    def unasked(self, cases: Sequence[Case]) -> Sequence[Piece]:
        """As `make`, for a page that shows the item by itself: left out where it says nothing."""
        return self.make(cases)


class Panelled(Shown):
    """Base of items with panels.

    `colour` is the axis that tells lines apart (arms, or the runs that are compared), and `facet`
    the axes that make panels; any other axis that varies makes panels too, so that nothing but
    seeds is ever averaged. Where there are several, the last that `facet` names goes across, and
    the others go down.
    """

    axes_named: ClassVar[tuple[str, ...]] = ("colour", "facet")

    colour: str = "arm"
    facet: Names = ()


class Figure(Panelled):
    """Base of figures with a panel for each label of the facets, and in it a group for each colour
    (a line, say).
    """

    # --- what a figure gives ---

    def needs(self) -> Sequence[Need]:
        """What it reads of a run; one that lacks any of it is left out."""
        return ()

    def headline(self) -> str:
        """The title that it has by itself."""
        raise NotImplementedError

    def slug(self) -> str:
        """What its files are named by."""
        return name_of(type(self).model_fields["kind"].default)

    def panels(self, cases: Sequence[Case]) -> list[Panel]:
        """The panels of these runs."""
        return arrange(cases, self.colour, self.facet)

    def prepare(self, panels: Sequence[Panel]) -> Any:
        """What all panels have in common, computed once; None: there is nothing to draw."""
        return True

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        """Draws one panel. `common`: what `prepare` gave."""
        raise NotImplementedError

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[Key]:
        """The legend: by default a line for each group, where there are several."""
        return group_keys(panels)

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        """What is shown and from which file."""
        raise NotImplementedError

    # --- what all have in common ---

    def make(self, cases: Sequence[Case]) -> Sequence[Piece]:
        title = self.title or self.headline()
        kept = [case for case in cases if all(need.met(case.run) for need in self.needs())]
        if not kept:
            return [Missing(title, f"needs {listed([str(need) for need in self.needs()])}")]
        panels = self.panels(kept)
        common = self.prepare(panels)
        if common is None:
            return [Missing(title, "there is nothing to draw: no points of it are known")]
        parts = [
            Part(panel.title, partial(self.draw, panel=panel, common=common), panel.place)
            for panel in panels
        ]
        caption = self.caption(panels, common) + _without(cases, kept, self.colour)
        return [Drawing(self.slug(), title, caption, parts, self.keys(panels, common))]


class Apart(Figure):
    """Base of figures with a panel for each group too, across where there are several of both."""

    def panels(self, cases: Sequence[Case]) -> list[Panel]:
        panels = super().panels(cases)
        several = len(panels) > 1 and max(len(panel.groups) for panel in panels) > 1
        return [apart for row, panel in enumerate(panels) for apart in _apart(panel, row, several)]


def _apart(panel: Panel, row: int, several: bool) -> list[Panel]:
    """A panel for each group, named by it where there are several."""
    if len(panel.groups) == 1 and not panel.title:
        return [panel]
    found = []
    for group in panel.groups:
        title = ": ".join(part for part in (panel.title, group.label) if part)
        place = (row, group.place) if several and group.place < ACROSS else None
        found.append(Panel(title, [group], place))
    return found


def _without(cases: Sequence[Case], kept: Sequence[Case], colour: str) -> str:
    """Says which labels have nothing to show."""
    there = {case.labels.get(colour) for case in kept}
    gone = dict.fromkeys(
        case.labels[colour]
        for case in cases
        if colour in case.labels and case.labels[colour] not in there
    )
    return f" Without {listed([*gone])}, of which none of it is known." if gone else ""


def group_keys(panels: Sequence[Panel]) -> list[Key]:
    """A line for each group of any panel; none where there is only one."""
    found: dict[str, Group] = {}
    for panel in panels:
        for group in panel.groups:
            found.setdefault(group.label, group)
    if len(found) < 2:
        return []
    ordered = sorted(found.values(), key=lambda group: group.place)
    return [Key(group.label, look(group.place)) for group in ordered]


def first_seed(panels: Sequence[Panel]) -> str:
    """What is said where of several runs of a group the first alone is shown."""
    several = any(len(group.runs) > 1 for panel in panels for group in panel.groups)
    return " Of several seeds, the first." if several else ""


def seeds_of(panels: Sequence[Panel]) -> str:
    """What lines and bands are where groups have several runs."""
    counts = {len(group.runs) for panel in panels for group in panel.groups}
    if max(counts, default=1) < 2:
        return ""
    least = min(counts)
    most = max(counts)
    of = f"{most} seeds" if least == most else f"{least} to {most} seeds"
    return f" Lines are means over {of}; bands reach from the least to the greatest."
