"""The last round of each run over a label of its setting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Missing, PanelledItem, Piece, name_of
from raydpfl.report.labels import Quantity, axis, quantity
from raydpfl.report.plot_style import FACTOR, LegendKey, Look, Plot, Subplot, dots, look, scale
from raydpfl.report.run_reader import LabelledRun, facets, labels_of, varying

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
        named = axis(self.x)
        title = self.title or f"{measured.words.capitalize()} over {named}"
        scored = [
            case for case in cases if case.number(self.of) is not None and self.x in case.labels
        ]
        if not scored:
            return [Missing(title, f"needs {self.of} of runs along the axis {self.x}")]
        labels = labels_of(scored, self.x)
        axes = varying(scored)
        groups: dict[tuple[str, ...], list[Any]] = {}
        for case in scored:
            place = tuple(case.labels.get(name, "") for name in axes)
            groups.setdefault(place, []).append(case.number(self.of))
        every = [score for scores in groups.values() for score in reached(scores)]
        colours = labels_of(scored, self.colour)
        common = (labels, colours, every)
        subplots = [
            Subplot(facet.title, partial(self._draw, cases=facet.cases, common=common), facet.place)
            for facet in facets(scored, (self.x, self.colour), self.facet)
        ]
        keys = [LegendKey(name, look(place)) for place, name in enumerate(colours)]
        caption = (
            "A point is a run in its last round, a line goes through the means over the seeds."
        )
        if self.of.startswith("best_"):
            caption = "A point is a run in its best round, chosen on what is shown, which flatters."
        caption += bars_said(max(map(len, groups.values())))
        caption += " From the summaries of the runs."
        name = name_of(self.of, "over", named)
        return [Plot(name, title, caption, subplots, keys if len(keys) > 1 else [])]

    def _draw(self, axes: Axes, cases: Sequence[LabelledRun], common: Any) -> None:
        labels, colours, every = common
        across = dict(zip(labels, positions(labels), strict=True))
        for place, colour in enumerate(colours or [""]):
            points = [
                (across[case.labels[self.x]], case.number(self.of))
                for case in cases
                if case.labels.get(self.colour, "") == colour
            ]
            if points:
                with_bars(axes, points, look(place))
        label_axis(axes, axis(self.x), labels, self.log)
        scale(axes, "y", quantity(self.of), every)


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


def bars_said(most: int) -> str:
    """What the error bars of `with_bars` are, for a caption; `most`: runs at one place."""
    if most < 2:
        return ""
    return f" Error bars are one sample standard deviation over the seeds (up to {most})."


def numeric(labels: Sequence[str]) -> bool:
    """Whether all labels are finite numbers."""
    try:
        return all(np.isfinite(float(label)) for label in labels)
    except ValueError:
        return False


def positions(labels: Sequence[str]) -> np.ndarray:
    """Where labels stand on an axis: their numbers, or side by side, float64 [n]."""
    if numeric(labels):
        return np.array([float(label) for label in labels])
    return np.arange(len(labels), dtype=np.float64)
