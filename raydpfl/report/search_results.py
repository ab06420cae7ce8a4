"""What was tried: a metric over each value that was searched, in a sweep (`searched`) or by the
arms of a study (`tuned`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from raydpfl.report.figures import Missing, Piece, Plot
from raydpfl.report.figures.base import name_of
from raydpfl.report.figures.final_metric import (
    bars_said,
    label_axis,
    numeric,
    positions,
    reached,
    with_bars,
)
from raydpfl.report.labels import quantity
from raydpfl.report.plot_style import INK, LegendKey, Look, Subplot, dots, look, scale
from raydpfl.report.run_reader import Facet, named

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = 7  # combinations of the other values that have a line each
BEST = Look(INK, "none", "*")


@dataclass(frozen=True)
class Tried:
    """A setting: its searched values by key, in print; the metric of each run; whether it is the
    best.
    """

    values: Mapping[str, str]
    scores: Sequence[float]
    best: bool = False

    @property
    def mean(self) -> float:
        return float(np.mean(self.scores)) if self.scores else math.nan


def searched(tried: Sequence[Tried], metric: str, source: str) -> list[Piece]:
    """A figure of the metric over each searched value that took several.

    Args:
        tried: the settings.
        metric: the name of what they are judged by.
        source: the file it is read from.
    """
    known = [each for each in tried if each.scores]
    words = quantity(metric).words.capitalize()
    if not known:
        why = f"needs a setting with its {metric} in {source}"
        return [Missing(f"{words} over what was searched", why)]
    several = _varying(known)
    found: list[Piece] = []
    for key in several:
        others = [each for each in several if each != key]
        lines = [*dict.fromkeys(_others(each, others) for each in known)]
        if not others or len(lines) > LINES:
            lines = []
        legend = [LegendKey(name, look(place)) for place, name in enumerate(lines)]
        if any(each.best for each in known):
            legend.append(LegendKey("best", BEST, "point"))
        caption = "A point is a run in its last round."
        if lines or not others:
            caption += " Lines go through the means over the seeds, other values being equal."
            caption += bars_said(max(len(each.scores) for each in known))
        else:
            caption += f" Other values vary among the points: {', '.join(others)}."
        caption += f" The best mean is marked. From {source}."
        draw = partial(_draw_searched, tried=known, key=key, others=others, lines=lines)
        subplot = Subplot("", partial(draw, metric=metric))
        found.append(
            Plot(name_of("searched", key), f"{words} over {key}", caption, [subplot], legend)
        )
    return found


def _varying(tried: Sequence[Tried]) -> list[str]:
    """The keys of which several values were tried."""
    keys = dict.fromkeys(key for each in tried for key in each.values)
    return [key for key in keys if len({each.values.get(key) for each in tried}) > 1]


def _others(each: Tried, keys: Sequence[str]) -> str:
    return ", ".join(named(key, each.values.get(key, "")) for key in keys)


def _draw_searched(
    axes: Axes,
    tried: Sequence[Tried],
    key: str,
    others: Sequence[str],
    lines: list[str],
    metric: str,
) -> None:
    labels, across = _across(tried, key)
    by_line: dict[str, list[Tried]] = {}
    for each in tried:
        by_line.setdefault(_others(each, others) if lines else "", []).append(each)
    draw = with_bars if lines or not others else dots
    for name, inside in by_line.items():
        points = [(across[each.values[key]], score) for each in inside for score in each.scores]
        draw(axes, points, look(lines.index(name) if lines else 0))
    for each in tried:
        if each.best:
            place = across[each.values[key]]
            axes.plot(place, each.mean, marker="*", markersize=15, color=INK, zorder=5)
    label_axis(axes, key, labels)
    scale(axes, "y", quantity(metric), [y for each in tried for y in reached(each.scores)])


def _across(tried: Iterable[Tried], key: str) -> tuple[list[str], dict[str, float]]:
    """The values of a key in their order, numbers by size and before words, and where each is on
    the axis.
    """

    def order(label: str) -> tuple[bool, float, str]:
        return (False, float(label), label) if numeric([label]) else (True, 0.0, label)

    labels = sorted(dict.fromkeys(each.values.get(key, "") for each in tried), key=order)
    return labels, dict(zip(labels, positions(labels), strict=True))


Tuned = tuple[Facet, str, Sequence[Tried]]  # a cell of a study: its facet, its arm, what was tried


def tuned(cells: Sequence[Tuned], metric: str, sign: int) -> list[Piece]:
    """A figure of the metric over each value that any cell of a study chose among: a panel for each
    facet, a line for each arm.

    Args:
        cells: of the study.
        metric: the name of what they are judged by.
        sign: that which makes more of it better.
    """
    arms = list(dict.fromkeys(arm for _, arm, _ in cells))
    found: list[Piece] = []
    for key in dict.fromkeys(key for _, _, tried in cells for one in tried for key in one.values):
        inside = [
            (facet, arm, [one for one in tried if one.scores and key in one.values])
            for facet, arm, tried in cells
        ]
        known = [each for each in inside if len({one.values[key] for one in each[2]}) > 1]
        if known:
            found.append(_tuned(known, key, arms, metric, sign))
    return found


def _tuned(cells: Sequence[Tuned], key: str, arms: list[str], metric: str, sign: int) -> Plot:
    every = [one for _, _, tried in cells for one in tried]
    draw = partial(_draw_tuned, every=every, key=key, metric=metric, sign=sign)
    subplots = []
    for title, facet in {facet.title: facet for facet, _, _ in cells}.items():
        lines = [(arms.index(arm), tried) for one, arm, tried in cells if one.title == title]
        subplots.append(Subplot(title, partial(draw, lines=lines), facet.place))
    caption = "A point is one run with rows held out. Lines go through the best at each value, "
    caption += "whatever the other values are; the chosen ones are marked. From tuning.parquet."
    drawn = [place for place, arm in enumerate(arms) if arm in {arm for _, arm, _ in cells}]
    legend = [LegendKey(arms[place], look(place)) for place in drawn]
    legend.append(LegendKey("chosen", BEST, "point"))
    title = f"{quantity(metric).words.capitalize()} over {key}"
    return Plot(name_of("tuned", key), title, caption, subplots, legend)


def _draw_tuned(
    axes: Axes,
    lines: Sequence[tuple[int, Sequence[Tried]]],
    every: Sequence[Tried],
    key: str,
    metric: str,
    sign: int,
) -> None:
    labels, across = _across(every, key)
    for place, tried in lines:
        drawn = look(place)
        points = [(across[one.values[key]], one.mean) for one in tried]
        dots(axes, points, drawn, 0.5)
        best: dict[float, float] = {}
        for x, mean in points:
            best[x] = sign * max(sign * best.get(x, mean), sign * mean)
        axes.plot(*zip(*sorted(best.items()), strict=True), **drawn.line)
        for one in tried:
            if one.best:
                star = Look(drawn.colour, "none", BEST.marker)
                dots(axes, [(across[one.values[key]], one.mean)], star, 1.0, 12)
    label_axis(axes, key, labels)
    scale(axes, "y", quantity(metric), [one.mean for one in every])
