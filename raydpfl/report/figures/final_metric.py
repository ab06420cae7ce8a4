"""The last round of each run over a label of its setting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Missing, PanelledItem, Piece, name_of
from raydpfl.report.labels import Quantity, axis, numeric, quantity
from raydpfl.report.plot_style import FACTOR, LegendKey, Look, Plot, Subplot, dots, look, scale
from raydpfl.report.run_reader import LabelledRun, facets, grouped, labels_of, varying

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TICKS = 9  # numbers that each have a tick
LONG = 34  # characters of all labels beyond which they are turned


class Points(PanelledItem):
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

    def make(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        measured = quantity(self.of)
        title = self.title or f"{measured.words.capitalize()} over {axis(self.x)}"
        cases = [case for case in cases if case.number(self.of) is not None]
        cases = [case for case in cases if self.x in case.labels]
        if not cases:
            return [Missing(title, f"needs {self.of} of runs along the axis {self.x}")]
        axes = varying(cases)
        cells = [self._scores(cell) for cell in grouped(cases, lambda case: case.at(axes)).values()]
        labels = labels_of(cases, self.x)
        colours = labels_of(cases, self.colour)
        reach = [score for scores in cells for score in reached(scores)]
        draw = partial(self._draw, labels=labels, colours=colours, reach=reach)
        subplots = [
            Subplot(facet.title, partial(draw, cases=facet.cases), facet.place)
            for facet in facets(cases, (self.x, self.colour), self.facet)
        ]
        keys = [LegendKey(name, look(place)) for place, name in enumerate(colours)]
        caption = (
            "A point is a run in its last round, a line goes through the means over the seeds."
        )
        if self.of.startswith("best_"):
            caption = "A point is a run in its best round, chosen on what is shown, which flatters."
        caption += f"{bars_in_words(max(map(len, cells)))} From the summaries of the runs."
        name = name_of(self.of, "over", axis(self.x))
        return [Plot(name, title, caption, subplots, keys if len(keys) > 1 else [])]

    def _scores(self, cases: Sequence[LabelledRun]) -> list[float]:
        return [score for case in cases if (score := case.number(self.of)) is not None]

    def _draw(
        self,
        axes: Axes,
        cases: Sequence[LabelledRun],
        labels: Sequence[str],
        colours: Sequence[str],
        reach: Sequence[float],
    ) -> None:
        across = dict(zip(labels, positions(labels), strict=True))
        inside = grouped(cases, lambda case: case.labels.get(self.colour, ""))
        for place, colour in enumerate(colours or [""]):
            if points := [
                (across[case.labels[self.x]], case.number(self.of))
                for case in inside.get(colour, ())
            ]:
                with_bars(axes, points, look(place))
        label_axis(axes, axis(self.x), labels, self.log)
        scale(axes, "y", quantity(self.of), reach)


def label_axis(axes: Axes, words: str, labels: Sequence[str], log: bool | None = None) -> None:
    """Sets up the axis that labels stand on, with a tick for each where they are few: numbers where
    they are, logarithmic (or as `log` says) where the largest is `FACTOR` times the smallest; else
    side by side.
    """
    places = positions(labels)
    if not numeric(labels):
        axes.set_xticks(places, labels, rotation=25 if sum(map(len, labels)) > LONG else 0)
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.set_xlabel(words)
        return
    wide = bool(places.min() > 0 and places.max() / places.min() >= FACTOR)
    scale(axes, "x", Quantity(words, words), places, wide if log is None else log)
    if len(places) <= TICKS:
        axes.set_xticks(places)
        axes.set_xticks([], minor=True)


def with_bars(axes: Axes, points: Any, drawn: Look) -> None:
    """Points (pairs of numbers), a line through the means of those at one place, and at each mean
    an error bar of one sample standard deviation, where there are several points.
    """
    x, y = np.array(points, np.float64).T
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


def bars_in_words(most: int) -> str:
    """What the error bars of `with_bars` are, for a caption; `most`: runs at one place."""
    if most < 2:
        return ""
    return f" Error bars are one sample standard deviation over the seeds (up to {most})."


def positions(labels: Sequence[str]) -> np.ndarray:
    """Where labels stand on an axis: their numbers, or side by side, float64 [n]."""
    return np.array(labels if numeric(labels) else range(len(labels)), np.float64)
