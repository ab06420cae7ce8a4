"""What was tried: a metric over each value that was searched, in a sweep or by the arms of a study.

A case is a run that was tried, with its searched values among its labels; its number `best` says
whether its setting is the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from raydpfl.report.figures import Missing, Piece
from raydpfl.report.figures.base import name_of
from raydpfl.report.figures.final_metric import Points, bars_in_words
from raydpfl.report.labels import in_words, numeric, quantity
from raydpfl.report.plot_style import INK, Axes, LegendKey, Look, dots, look
from raydpfl.report.run_reader import LabelledRun, Panel, labels_of

LINES = 7  # combinations of the other values that have a line each
OTHERS = "others"  # the axis of these combinations
STAR = Look(INK, "none", "*")


class Searched(Points):
    """The metric `of` a sweep over a searched value `x`, a line for each combination of the others,
    unless there are too many of them: `loose` then names these values.
    """

    best: ClassVar[str] = "best"

    kind: str = "searched"
    colour: str = OTHERS
    loose: str = ""

    def across(self) -> str:
        return self.x

    def slug(self) -> str:
        return name_of(self.kind, self.x)

    def ordered(self, labels: list[str]) -> list[str]:
        """Numbers by size, before words."""
        numbers = sorted(filter(lambda label: numeric([label]), labels), key=float)
        return [*numbers, *sorted({*labels} - {*numbers})]

    def connect(self, axes: Axes, points: np.ndarray, drawn: Look) -> None:
        (dots if self.loose else super().connect)(axes, points, drawn)

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        super().draw(axes, panel, common)
        for group in panel.groups:
            best = [case for case in group.cases if case.numbers["best"]]
            if best:
                mean = np.mean([case.numbers[self.of] for case in best])
                style: Any = {"color": look(group.place).colour, "markeredgecolor": INK}
                x = common[0][best[0].labels[self.x]]
                axes.plot(x, mean, marker="*", markersize=14, zorder=5, linestyle="none", **style)

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        keys = [*super().keys(panels, common)]
        cases = [case for panel in panels for group in panel.groups for case in group.cases]
        if any(case.numbers["best"] for case in cases):
            keys.append(LegendKey(self.best, STAR, "point"))
        return keys

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "Lines go through the means over the seeds, other values being equal."
        text += bars_in_words(common)
        if self.loose:
            text = f"Other values vary among the points: {self.loose}."
        text = f"A point is a run in its last round. {text} The best mean is marked."
        return f"{text} From results.parquet."


class Tuned(Searched):
    """The number that a study judges by, over a value `x` that its arms chose among; `sign`: that
    which makes more of it better.
    """

    best: ClassVar[str] = "chosen"

    kind: str = "tuned"
    colour: str = "arm"
    sign: int = 1

    def arranged(self, cases: Sequence[LabelledRun]) -> list[Panel]:
        """Without the arms that had one value there; arms keep the looks that they have anyway."""
        panels = []
        for panel in super().arranged(cases):
            groups = [one for one in panel.groups if len(labels_of(one.cases, self.x)) > 1]
            panels += [replace(panel, groups=groups)] if groups else []
        return panels

    def connect(self, axes: Axes, points: np.ndarray, drawn: Look) -> None:
        """Points, and a line through the best at each place."""
        dots(axes, points, drawn, 0.5)
        x, y = points.T
        best = {place: self.sign * (self.sign * y[x == place]).max() for place in np.unique(x)}
        axes.plot([*best], [*best.values()], **drawn.line)

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "A point is one run with rows held out. Lines go through the best at each value, "
        text += "whatever the other values are; the chosen ones are marked."
        return f"{text} From tuning.parquet."


def searched(cases: Sequence[LabelledRun], keys: Sequence[str], metric: str) -> list[Piece]:
    """A figure of the metric over each searched value that took several.

    Args:
        cases: of a sweep, those with the metric.
        keys: that were searched.
        metric: its name.
    """
    if not cases:
        why = f"needs a setting with its {metric} in results.parquet"
        return [Missing(f"{quantity(metric).words.capitalize()} over what was searched", why)]
    several = [key for key in keys if len(labels_of(cases, key)) > 1]
    pieces: list[Piece] = []
    for key in several:
        others = [other for other in several if other != key]
        combinations = [in_words({other: case.labels[other] for other in others}) for case in cases]
        joined = len({*combinations}) <= LINES
        labelled = [
            replace(case, labels={key: case.labels[key], OTHERS: text if joined else ""})
            for case, text in zip(cases, combinations, strict=True)
        ]
        loose = "" if joined else ", ".join(others)
        pieces += Searched(of=metric, x=key, loose=loose).make(labelled)
    return pieces
