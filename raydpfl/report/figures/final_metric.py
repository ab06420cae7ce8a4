"""The last round of each run over a label of its setting, or over a value that was searched."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Missing, Piece, PlotItem, name_of
from raydpfl.report.labels import Quantity, axis, join_labels, numeric, quantity
from raydpfl.report.plot_style import INK, LOG_SPAN, STAR, Axes, LegendKey, Look, dots, look, scale
from raydpfl.report.run_reader import LabelledRun, Panel, arrange, group_by, labels_of

TICKS = 9  # numbers that each have a tick
MAX_LABELS_LENGTH = 34  # characters of all labels beyond which they are turned


class Points(PlotItem):
    """A number of a run (`of`, in the table of results or the summary) over an axis `x`: a point
    for each run, a line through the means over the seeds. Labels stand where they are as numbers,
    or side by side where any of them is none.
    """

    axis_fields: ClassVar[tuple[str, ...]] = ("x", "colour", "facet")
    number_fields: ClassVar[tuple[str, ...]] = ("of",)
    dodge: ClassVar[float] = 3  # points of print between lines at one label: equal ones are seen

    kind: str = "points"
    of: str = "test_accuracy"
    x: str = "data"
    log: bool | None = None  # the axis of the labels; none: see `label_axis`

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

    def arrange_panels(self, cases: Sequence[LabelledRun]) -> list[Panel]:
        return arrange(cases, self.colour, self.facet, self.x)

    def prepare(self, panels: Sequence[Panel]) -> Any:
        """Where each label stands, and the scores at each place of each line."""
        groups = [group for panel in panels for group in panel.groups]
        cases = [case for group in groups for case in group.cases]
        labels = self.order_labels(labels_of(cases, self.x))
        cells = []
        for group in groups:
            for cell in group_by(group.cases, lambda case: case.labels[self.x]).values():
                cells.append([case.number(self.of) for case in cell])
        numbers = labels if numeric(labels) else range(len(labels))
        return dict(zip(labels, map(float, numbers), strict=True)), cells

    def order_labels(self, labels: list[str]) -> list[str]:
        """Labels in their order side by side."""
        return labels

    def connect(self, axes: Axes, points: np.ndarray, line_look: Look) -> None:
        """Draws the points of a line, float64 [n, 2]."""
        draw_error_bars(axes, points, line_look)

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        from matplotlib.transforms import ScaledTranslation

        places, cells = common
        for rank, group in enumerate(sorted(panel.groups, key=lambda group: group.place)):
            points = [(places[case.labels[self.x]], case.number(self.of)) for case in group.cases]
            prior_artists = {*axes.lines, *axes.collections}
            self.connect(axes, np.array(points, np.float64), look(group.place))
            inches = self.dodge / 72 * (rank - (len(panel.groups) - 1) / 2)
            offset = ScaledTranslation(inches, 0, axes.figure.dpi_scale_trans)
            for artist in {*axes.lines, *axes.collections} - prior_artists:
                artist.set_transform(axes.transData + offset)
        label_axis(axes, self.across(), places, self.log)
        scale(axes, "y", quantity(self.of), [y for cell in cells for y in bar_extents(cell)])

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "A point is a run, a line goes through the means over the seeds."
        if self.of.startswith("best_"):
            text = "A point is a run in its best round, chosen on what is shown, which flatters."
        return f"{text}{error_bar_caption(common)} From the summaries of the runs."


def label_axis(axes: Axes, words: str, places: Mapping[str, float], log: bool | None) -> None:
    """Sets up the axis that labels stand on, with a tick for each where they are few: numbers as
    numbers, logarithmic (or as `log` says) where the largest is `LOG_SPAN` times the smallest; else
    side by side.
    """
    numbers = [*places.values()]
    if not numeric([*places]):
        long_labels = sum(map(len, places)) > MAX_LABELS_LENGTH
        axes.set_xticks(numbers, [*places], rotation=25 if long_labels else 0)
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_xlabel(words)
        return
    wide = min(numbers) > 0 and max(numbers) / min(numbers) >= LOG_SPAN
    scale(axes, "x", Quantity(words, words), numbers, wide if log is None else log)
    if len(places) <= TICKS:
        axes.set_xticks(numbers)
        axes.set_xticks([], minor=True)


def draw_error_bars(axes: Axes, points: np.ndarray, line_look: Look) -> None:
    """Points, float64 [n, 2], a line through the means of those at one place, and at each mean an
    error bar of one sample standard deviation, where there are several points.
    """
    x, y = points.T
    groups = {place: y[x == place] for place in np.unique(x)}
    dots(axes, points, line_look, 0.35 if len(groups) < len(x) else 0.7)
    axes.plot([*groups], [group.mean() for group in groups.values()], **line_look.line)
    for place, group in groups.items():
        bar = group.std(ddof=1) if len(group) > 1 else 0.0
        if bar:
            style: Any = {"fmt": line_look.marker, "capsize": 3, "markersize": 4.5}
            axes.errorbar(place, group.mean(), bar, color=line_look.colour, elinewidth=1.2, **style)


def bar_extents(scores: Sequence[float]) -> list[float]:
    """How far the points and the error bar at one place reach."""
    mean = float(np.mean(scores))
    bar = float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0
    return [*scores, mean - bar, mean + bar]


def error_bar_caption(common: Any) -> str:
    """What the error bars are of what `Points.prepare` gave, for a caption; empty without any."""
    max_seeds = max(map(len, common[1]))
    if max_seeds < 2:
        return ""
    return f" Error bars are one sample standard deviation over the seeds (up to {max_seeds})."


LINES = 7  # combinations of the other values that have a line each
OTHERS_AXIS = "others"  # the axis of these combinations


class Searched(Points):
    """The metric `of` a sweep over a searched value `x`, a line for each combination of the others,
    unless there are too many of them: `loose` then names these values.
    """

    word: ClassVar[str] = "searched"
    best: ClassVar[str] = "best"
    dodge: ClassVar[float] = 0

    kind: str = ""
    colour: str = OTHERS_AXIS
    loose: str = ""

    def across(self) -> str:
        return self.x

    def slug(self) -> str:
        return name_of(self.word, self.x)

    def order_labels(self, labels: list[str]) -> list[str]:
        """Numbers by size, before words."""
        numbers = sorted(filter(lambda label: numeric([label]), labels), key=float)
        return [*numbers, *sorted({*labels} - {*numbers})]

    def connect(self, axes: Axes, points: np.ndarray, line_look: Look) -> None:
        (dots if self.loose else super().connect)(axes, points, line_look)

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
        text += error_bar_caption(common)
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

    def arrange_panels(self, cases: Sequence[LabelledRun]) -> list[Panel]:
        """Without the arms that had one value there; arms keep the looks that they have anyway."""
        panels = []
        for panel in super().arrange_panels(cases):
            groups = [group for group in panel.groups if len(labels_of(group.cases, self.x)) > 1]
            panels += [replace(panel, groups=groups)] if groups else []
        return panels

    def connect(self, axes: Axes, points: np.ndarray, line_look: Look) -> None:
        """Points, and a line through the best at each place."""
        dots(axes, points, line_look, 0.5)
        x, y = points.T
        best = {place: self.sign * (self.sign * y[x == place]).max() for place in np.unique(x)}
        axes.plot([*best], [*best.values()], **line_look.line)

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "A point is one run with rows held out. Lines go through the best at each value, "
        text += "whatever the other values are; the chosen ones are marked."
        return f"{text} From tuning.parquet."


def metric_plots(cases: Sequence[LabelledRun], keys: Sequence[str], metric: str) -> list[Piece]:
    """A figure of the metric, by its name, over each of the searched `keys` that took several
    values; `cases`: those of a sweep with the metric.
    """
    if not cases:
        reason = f"needs a setting with its {metric} in results.parquet"
        return [Missing(f"{quantity(metric).words.capitalize()} over what was searched", reason)]
    varied_keys = [key for key in keys if len(labels_of(cases, key)) > 1]
    pieces: list[Piece] = []
    for key in varied_keys:
        rest = [other for other in varied_keys if other != key]
        combinations = [join_labels({k: case.labels[k] for k in rest}) for case in cases]
        has_lines = len({*combinations}) <= LINES
        labelled_cases = [
            replace(case, labels={key: case.labels[key], OTHERS_AXIS: text if has_lines else ""})
            for case, text in zip(cases, combinations, strict=True)
        ]
        loose = "" if has_lines else ", ".join(rest)
        pieces += Searched(of=metric, x=key, loose=loose).make(labelled_cases)
    return pieces
