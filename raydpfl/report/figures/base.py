"""The base of the items of a report: figures, and the tables that a study asks for."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from raydpfl.config.registry import Member
from raydpfl.report.labels import join_names
from raydpfl.report.plot_style import Axes, LegendKey, Plot, Subplot, look
from raydpfl.report.run_reader import MAX_GRID_COLUMNS, LabelledRun, Panel, Run, arrange
from raydpfl.report.tables import Table


@dataclass(frozen=True)
class Need:
    """Columns of a file of a run, with numbers in them, that something is drawn from. `hint`: how a
    run comes to have them, in words.
    """

    table: str
    columns: tuple[str, ...] = ()
    hint: str = ""

    def __str__(self) -> str:
        suffix = "bin" if self.table == "trajectory" else "parquet"
        columns = f"{join_names(self.columns)} in " if self.columns else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{columns}{self.table}.{suffix}{hint}"


@dataclass(frozen=True)
class Missing:
    """What is left out, and why."""

    title: str
    reason: str


@dataclass(frozen=True)
class Words:
    """A heading and paragraphs; `preformatted`: a text whose lines stay as they are."""

    title: str
    paragraphs: Sequence[str]
    preformatted: str = ""


Piece = Plot | Table | Missing | Words


def _tuple_of(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _labels(value: Any) -> Any:
    """Labels by axis as a study has them, which are texts as YAML writes them."""
    if not isinstance(value, dict):
        return value
    tuples = {
        str(axis): labels if isinstance(labels, (list, tuple)) else (labels,)
        for axis, labels in value.items()
    }
    return {
        axis: tuple(label if isinstance(label, str) else json.dumps(label) for label in labels)
        for axis, labels in tuples.items()
    }


Names = Annotated[tuple[str, ...], BeforeValidator(_tuple_of)]  # one name, or a list of them
Only = Annotated[dict[str, tuple[str, ...]], BeforeValidator(_labels)]


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

    axis_fields: ClassVar[tuple[str, ...]] = ()  # the fields that name axes
    number_fields: ClassVar[tuple[str, ...]] = ()  # those that name numbers of a run

    only: Only = Field(default_factory=dict)
    title: str = ""
    note: str = ""

    def axes(self) -> Iterable[str]:
        """The axes of the cases that the item names."""
        for name in self.axis_fields:
            yield from _tuple_of(getattr(self, name))
        yield from self.only

    def labels(self) -> Iterable[tuple[str, str]]:
        """The labels that the item names, each with its axis."""
        return [(axis, label) for axis, labels in self.only.items() for label in labels]

    def numbers(self) -> Iterable[str]:
        """The numbers of a run that the item names."""
        for name in self.number_fields:
            yield from _tuple_of(getattr(self, name))

    def shown(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        """The item, of those of these runs that it shows."""
        filters = self.only.items()
        cases = [c for c in cases if all(c.labels.get(axis) in labels for axis, labels in filters)]
        return [
            replace(piece, caption=f"{piece.caption} {self.note}")
            if self.note and isinstance(piece, (Plot, Table))
            else piece
            for piece in self.make(cases)
        ]

    def make(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        """The item, of these runs. It reads their directories and nothing else."""
        raise NotImplementedError


class PlotItem(ReportItem):
    """Base of figures with a panel for each label of the facets, and in it a group for each colour
    (a line, say). With `per_group` every group has a panel, across where there are several of both.
    A run that lacks any of `need` is left out.

    `colour` is the axis of the lines of a panel (arms, or the runs that are compared), and `facet`
    the axes that make panels; any other axis that varies makes panels too, so that nothing but
    seeds is ever averaged. Where there are several, the last that `facet` names goes across, and
    the others go down.
    """

    axis_fields: ClassVar[tuple[str, ...]] = ("colour", "facet")
    need: ClassVar[Need]
    heading: ClassVar[str] = ""
    per_group: ClassVar[bool] = False

    colour: str = "arm"
    facet: Names = ()

    def needs(self) -> Need | str:
        """What it is drawn from; what it lacks without, in words."""
        return self.need

    def has(self, case: LabelledRun) -> bool:
        """Whether a run has what is needed."""
        need = self.needs()
        return isinstance(need, str) or case.run.has(need.table, need.columns)

    def headline(self) -> str:
        """The title, where the item has no other."""
        return self.heading

    def slug(self) -> str:
        """What its files are named by."""
        return name_of(type(self).model_fields["kind"].default)

    def arrange_panels(self, cases: Sequence[LabelledRun]) -> list[Panel]:
        """The panels of these runs."""
        panels = arrange(cases, self.colour, self.facet)
        return _split_groups(panels) if self.per_group else panels

    def prepare(self, panels: Sequence[Panel]) -> Any:
        """What all panels have in common, computed once; None: there is nothing to draw."""
        return True

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        """Draws one panel. `common`: what `prepare` gave."""
        raise NotImplementedError

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        """The legend: by default a line for each group, where there are several."""
        return [] if self.per_group else group_keys(panels)

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        """What is shown and from which file."""
        raise NotImplementedError

    def make(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        title = self.title or self.headline()
        drawn_cases = [case for case in cases if self.has(case)]
        if not drawn_cases:
            return [Missing(title, f"needs {self.needs()}")]
        panels = self.arrange_panels(drawn_cases)
        common = self.prepare(panels)
        if common is None:
            return [Missing(title, "there is nothing to draw: no points of it are known")]
        subplots = [
            Subplot(panel.title, partial(self.draw, panel=panel, common=common), panel.place)
            for panel in panels
        ]
        caption = self.caption(panels, common)
        drawn_labels = {case.labels.get(self.colour) for case in drawn_cases}
        all_labels = dict.fromkeys(case.labels.get(self.colour) for case in cases)
        if names := [label for label in all_labels if label and label not in drawn_labels]:
            caption += f" Without {join_names(names)}, of which none of it is known."
        return [Plot(self.slug(), title, caption, subplots, self.keys(panels, common))]


def _split_groups(panels: Sequence[Panel]) -> list[Panel]:
    """A panel for each group, named by it where there are several."""
    is_grid = len(panels) > 1 and max(len(panel.groups) for panel in panels) > 1
    facets = []
    for row, panel in enumerate(panels):
        if len(panel.groups) == 1 and not panel.title:
            facets.append(panel)
            continue
        for group in panel.groups:
            title = ": ".join(part for part in (panel.title, group.label) if part)
            place = (row, group.place) if is_grid and group.place < MAX_GRID_COLUMNS else None
            facets.append(Panel(title, [group], place))
    return facets


def group_places(panels: Sequence[Panel]) -> list[tuple[int, str]]:
    """The place of each group of any panel, with its label."""
    return sorted({(group.place, group.label) for panel in panels for group in panel.groups})


def group_keys(panels: Sequence[Panel], shape: str = "line") -> list[LegendKey]:
    """A line for each group of any panel; none where there is only one."""
    groups = group_places(panels)
    return [LegendKey(label, look(place), shape) for place, label in groups if len(groups) > 1]


def runs_of(panels: Sequence[Panel]) -> list[Run]:
    return [run for panel in panels for group in panel.groups for run in group.runs]


def seed_note(panels: Sequence[Panel], note: str = " Of several seeds, the first.") -> str:
    """What is said where a group has several runs."""
    has_seeds = any(len(group.runs) > 1 for panel in panels for group in panel.groups)
    return note if has_seeds else ""
