"""One number of each cell over another."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import PlotItem, name_of
from raydpfl.report.labels import quantity
from raydpfl.report.plot_style import Axes, dots, look, scale
from raydpfl.report.run_reader import Group, LabelledRun, Panel, group_by, labels_of, values_of
from raydpfl.report.statistics import total


class Scatter(PlotItem):
    """A point for each cell: its number `of` over its number `x`, means over the seeds. With
    `against`, a label of the axis `arm`, the number is the difference to that arm at the same other
    labels, seed by seed: what clipping costs over its bias (000 Theorem 3.1).
    """

    number_fields: ClassVar[tuple[str, ...]] = ("of",)

    kind: str = "scatter"
    of: str = "test_accuracy"
    x: str = "norm_mean"
    against: str = ""

    def labels(self) -> Sequence[tuple[str, str]]:
        return [*super().labels(), *([("arm", self.against)] if self.against else [])]

    def needs(self) -> str:
        return f"{self.of} and {self.x} of finished runs"

    def has(self, case: LabelledRun) -> bool:
        return case.number(self.of) is not None

    def headline(self) -> str:
        against = f", against {self.against}," if self.against else ""
        return f"{quantity(self.of).words.capitalize()}{against} over {quantity(self.x).words}"

    def slug(self) -> str:
        return name_of(self.of, "over", self.x)

    def arrange_panels(self, cases: Sequence[LabelledRun]) -> list[Panel]:
        """One panel, with a group for each label of `colour`, whatever the others are."""
        by_label = group_by(cases, lambda case: case.labels.get(self.colour, ""))
        places = labels_of(cases, self.colour) or [""]
        groups = [Group(label, places.index(label), by_label[label]) for label in by_label]
        return [Panel("", groups)]

    def prepare(self, panels: Sequence[Panel]) -> Any:
        """The points of each group by its place, float64 [n, 2]."""
        cases = [case for group in panels[0].groups for case in group.cases]
        cells = group_by(cases, lambda case: tuple(sorted(case.labels.items())))
        points: dict[int, list[tuple[float, float]]] = {}
        for group in panels[0].groups:
            for labels in dict.fromkeys(tuple(sorted(case.labels.items())) for case in group.cases):
                y = values_of(cells[labels], self.of)
                if self.against:
                    base_labels = {**dict(labels), "arm": self.against}
                    base = cells.get(tuple(sorted(base_labels.items())), ())
                    y = total([(1, y), (-1, values_of(base, self.of))])
                point = values_of(cells[labels], self.x).spread().mean, y.spread().mean
                if self.against != dict(labels).get("arm") and np.isfinite(point).all():
                    points.setdefault(group.place, []).append(point)
        return {place: np.array(group_points) for place, group_points in points.items()} or None

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        for place, points in common.items():
            dots(axes, points, look(place), 0.9, 7)
        x, y = np.concatenate([*common.values()]).T
        scale(axes, "x", quantity(self.x), x)
        scale(axes, "y", quantity(self.of), y, log=False)

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        difference_text = f" less that of {self.against}, seed by seed" if self.against else ""
        return f"A point is a cell, means over the seeds{difference_text}. From results.parquet."
