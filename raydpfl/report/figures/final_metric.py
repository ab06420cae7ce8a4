"""The last round of each run over a label of its setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import PlotItem, name_of
from raydpfl.report.labels import Quantity, axis, numeric, quantity
from raydpfl.report.plot_style import FACTOR, Axes, Look, dots, look, scale
from raydpfl.report.run_reader import LabelledRun, Panel, arrange, grouped, labels_of

TICKS = 9  # numbers that each have a tick
LONG = 34  # characters of all labels beyond which they are turned


class Points(PlotItem):
    """A number of a run (`of`, in the table of results or the summary) over an axis `x`: a point
    for each run, a line through the means over the seeds. Labels stand where they are as numbers,
    or side by side where any of them is none.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"of": "test_accuracy", "x": "data"},)
    axes_named: ClassVar[tuple[str, ...]] = ("x", "colour", "facet")

    kind: str = "points"
    of: str = "test_accuracy"
    x: str = "data"
    log: bool | None = None  # the axis of the labels; none: see `label_axis`

    def numbers(self) -> Sequence[str]:
        return (self.of,)

    def needs(self) -> str:
        return f"{self.of} of runs along the axis {self.x}"

    def has(self, case: LabelledRun) -> bool:
        return self.x in case.labels and case.number(self.of) is not None

    def across(self) -> str:
        """What the labels are of, in words."""
        return axis(self.x)

    def headline(self) -> str:
        return f"{quantity(self.of).words.capitalize()} over {self.across()}"

    def slug(self) -> str:
        return name_of(self.of, "over", self.across())

    def arranged(self, cases: Sequence[LabelledRun]) -> list[Panel]:
        return arrange(cases, self.colour, self.facet, self.x)

    def prepare(self, panels: Sequence[Panel]) -> Any:
        """Where each label stands, and the scores at each place of each line."""
        groups = [group for panel in panels for group in panel.groups]
        labels = self.ordered(labels_of([case for one in groups for case in one.cases], self.x))
        cells = []
        for group in groups:
            inside = grouped(group.cases, lambda case: case.labels[self.x])
            cells += [[case.number(self.of) for case in cell] for cell in inside.values()]
        numbers = labels if numeric(labels) else range(len(labels))
        return dict(zip(labels, map(float, numbers), strict=True)), cells

    def ordered(self, labels: list[str]) -> list[str]:
        """Labels in their order side by side."""
        return labels

    def connect(self, axes: Axes, points: np.ndarray, drawn: Look) -> None:
        """Draws the points of a line, float64 [n, 2]."""
        with_bars(axes, points, drawn)

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        places, cells = common
        for group in sorted(panel.groups, key=lambda group: group.place):
            points = [(places[case.labels[self.x]], case.number(self.of)) for case in group.cases]
            self.connect(axes, np.array(points, np.float64), look(group.place))
        label_axis(axes, self.across(), places, self.log)
        scale(axes, "y", quantity(self.of), [y for cell in cells for y in reached(cell)])

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "A point is a run in its last round, a line goes through the means over the seeds."
        if self.of.startswith("best_"):
            text = "A point is a run in its best round, chosen on what is shown, which flatters."
        return f"{text}{bars_in_words(common)} From the summaries of the runs."


def label_axis(
    axes: Axes, words: str, places: Mapping[str, float], log: bool | None = None
) -> None:
    """Sets up the axis that labels stand on, with a tick for each where they are few: numbers where
    they are, logarithmic (or as `log` says) where the largest is `FACTOR` times the smallest; else
    side by side.
    """
    numbers = [*places.values()]
    if not numeric([*places]):
        turned = sum(map(len, places)) > LONG
        axes.set_xticks(numbers, [*places], rotation=25 if turned else 0)
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_xlabel(words)
        return
    wide = min(numbers) > 0 and max(numbers) / min(numbers) >= FACTOR
    scale(axes, "x", Quantity(words, words), numbers, wide if log is None else log)
    if len(places) <= TICKS:
        axes.set_xticks(numbers)
        axes.set_xticks([], minor=True)


def with_bars(axes: Axes, points: np.ndarray, drawn: Look) -> None:
    """Points, float64 [n, 2], a line through the means of those at one place, and at each mean an
    error bar of one sample standard deviation, where there are several points.
    """
    x, y = points.T
    groups = {place: y[x == place] for place in np.unique(x)}
    dots(axes, points, drawn, 0.35 if len(groups) < len(x) else 0.7)
    axes.plot([*groups], [group.mean() for group in groups.values()], **drawn.line)
    for place, group in groups.items():
        bar = group.std(ddof=1) if len(group) > 1 else 0.0
        if bar:
            style: Any = {"fmt": drawn.marker, "capsize": 3, "markersize": 4.5}
            axes.errorbar(place, group.mean(), bar, color=drawn.colour, elinewidth=1.2, **style)


def reached(scores: Sequence[float]) -> list[float]:
    """How far the points and the error bar at one place reach."""
    mean = float(np.mean(scores))
    bar = float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0
    return [*scores, mean - bar, mean + bar]


def bars_in_words(common: Any) -> str:
    """What the error bars are of what `Points.prepare` gave, for a caption; empty without any."""
    most = max(map(len, common[1]))
    if most < 2:
        return ""
    return f" Error bars are one sample standard deviation over the seeds (up to {most})."
