"""The last round of each run over a label of its setting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Missing, Panelled, Piece, name_of
from raydpfl.report.reading import Case, facets, labels_of
from raydpfl.report.style import Drawing, Key, Part, dots, look, scale
from raydpfl.report.words import Quantity, axis, quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONG = 34  # characters of all labels beyond which they are turned


class Points(Panelled):
    """A number of a run (`of`, in the table of results or the summary) over an axis `x`: a point
    for each run, a line through the means over the seeds. Labels stand where they are as numbers,
    or side by side where any of them is none.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"of": "test_accuracy", "x": "data"},)
    axes_named: ClassVar[tuple[str, ...]] = ("x", "colour", "facet")

    kind: str = "points"
    of: str = "test_accuracy"
    x: str = "data"
    log: bool | None = None  # the axis of the labels; none: logarithmic where they span decades

    def numbers(self) -> Sequence[str]:
        return (self.of,)

    def make(self, cases: Sequence[Case]) -> Sequence[Piece]:
        measured = quantity(self.of)
        named = axis(self.x)
        title = self.title or f"{measured.words.capitalize()} over {named}"
        known = [
            case for case in cases if case.number(self.of) is not None and self.x in case.labels
        ]
        if not known:
            return [Missing(title, f"needs {self.of} of runs along the axis {self.x}")]
        labels = labels_of(known, self.x)
        every = [case.number(self.of) for case in known]
        common = (labels, labels_of(known, self.colour), every)
        parts = [
            Part(each.title, partial(self._draw, cases=each.cases, common=common), each.place)
            for each in facets(known, (self.x, self.colour), self.facet)
        ]
        keys = [Key(name, look(place)) for place, name in enumerate(common[1])]
        caption = (
            "A point is a run in its last round, a line goes through the means over the seeds."
        )
        if self.of.startswith("best_"):
            caption = "A point is a run in its best round, chosen on what is shown, which flatters."
        return [
            Drawing(
                name_of(self.of, "over", named),
                title,
                f"{caption} From the summaries of the runs.",
                parts,
                keys if len(keys) > 1 else [],
            )
        ]

    def _draw(self, axes: Axes, cases: Sequence[Case], common: Any) -> None:
        labels, colours, every = common
        places = positions(labels)
        across = dict(zip(labels, places, strict=True))
        for place, colour in enumerate(colours or [""]):
            drawn = look(place)
            mine = [case for case in cases if case.labels.get(self.colour, "") == colour]
            points = [(across[case.labels[self.x]], case.number(self.of)) for case in mine]
            if not points:
                continue
            x, y = np.array(points, np.float64).T
            means = [(each, y[x == each].mean()) for each in np.unique(x)]
            axes.plot(*zip(*means, strict=True), color=drawn.colour, linestyle=drawn.dash)
            dots(axes, points, drawn)
        named = axis(self.x)
        if numeric(labels):
            scale(axes, "x", Quantity(self.x, named, wide=True), places, self.log)
        else:
            long = sum(map(len, labels)) > LONG
            axes.set_xticks(places, labels, rotation=25 if long else 0)
            axes.set_xlim(-0.5, len(labels) - 0.5)
            axes.set_xlabel(named)
        scale(axes, "y", quantity(self.of), every)


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
