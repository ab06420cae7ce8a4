"""The last round of each run over a label of its setting, or over a value that was searched."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Missing, Piece, PlotItem, name_of
from raydpfl.report.labels import Quantity, axis, in_words, numeric, quantity
from raydpfl.report.plot_style import FACTOR, INK, STAR, Axes, LegendKey, Look, dots, look, scale
from raydpfl.report.run_reader import LabelledRun, Panel, arrange, grouped, labels_of

TICKS = 9  # numbers that each have a tick
LONG = 34  # characters of all labels beyond which they are turned


class Points(PlotItem):
    """A number of a run (`of`, in the table of results or the summary) over an axis `x`: a point
    for each run, a line through the means over the seeds. Labels stand where they are as numbers,
    or side by side where any of them is none.
    """

    axes_named: ClassVar[tuple[str, ...]] = ("x", "colour", "facet")
    dodge: ClassVar[float] = 3  # points of print between lines at one label: equal ones are seen

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
        from matplotlib.transforms import ScaledTranslation

        places, cells = common
        for rank, group in enumerate(sorted(panel.groups, key=lambda group: group.place)):
            points = [(places[case.labels[self.x]], case.number(self.of)) for case in group.cases]
            others = {*axes.lines, *axes.collections}
            self.connect(axes, np.array(points, np.float64), look(group.place))
            inches = self.dodge / 72 * (rank - (len(panel.groups) - 1) / 2)
            moved = axes.transData + ScaledTranslation(inches, 0, axes.figure.dpi_scale_trans)
            for artist in {*axes.lines, *axes.collections} - others:
                artist.set_transform(moved)
        label_axis(axes, self.across(), places, self.log)
        scale(axes, "y", quantity(self.of), [y for cell in cells for y in reached(cell)])

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "A point is a run, a line goes through the means over the seeds."
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


LINES = 7  # combinations of the other values that have a line each
OTHERS = "others"  # the axis of these combinations


class Searched(Points):
    """The metric `of` a sweep over a searched value `x`, a line for each combination of the others,
    unless there are too many of them: `loose` then names these values.
    """

    word: ClassVar[str] = "searched"
    best: ClassVar[str] = "best"
    dodge: ClassVar[float] = 0

    kind: str = ""
    colour: str = OTHERS
    loose: str = ""

    def across(self) -> str:
        return self.x

    def slug(self) -> str:
        return name_of(self.word, self.x)

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

    word: ClassVar[str] = "tuned"
    best: ClassVar[str] = "chosen"

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
    """A figure of the metric, by its name, over each of the searched `keys` that took several
    values; `cases`: those of a sweep with the metric.
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
