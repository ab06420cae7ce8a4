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
    scored = [setting for setting in tried if setting.scores]
    words = quantity(metric).words.capitalize()
    if not scored:
        why = f"needs a setting with its {metric} in {source}"
        return [Missing(f"{words} over what was searched", why)]
    several = _varying(scored)
    pieces: list[Piece] = []
    for key in several:
        others = [other for other in several if other != key]
        lines = [*dict.fromkeys(_others(setting, others) for setting in scored)]
        if not others or len(lines) > LINES:
            lines = []
        legend = [LegendKey(name, look(place)) for place, name in enumerate(lines)]
        if any(setting.best for setting in scored):
            legend.append(LegendKey("best", BEST, "point"))
        caption = "A point is a run in its last round."
        if lines or not others:
            caption += " Lines go through the means over the seeds, other values being equal."
            caption += bars_said(max(len(setting.scores) for setting in scored))
        else:
            caption += f" Other values vary among the points: {', '.join(others)}."
        caption += f" The best mean is marked. From {source}."
        draw = partial(_draw_searched, tried=scored, key=key, others=others, lines=lines)
        subplot = Subplot("", partial(draw, metric=metric))
        pieces.append(
            Plot(name_of("searched", key), f"{words} over {key}", caption, [subplot], legend)
        )
    return pieces


def _varying(tried: Sequence[Tried]) -> list[str]:
    """The keys of which several values were tried."""
    keys = dict.fromkeys(key for setting in tried for key in setting.values)
    return [key for key in keys if len({setting.values.get(key) for setting in tried}) > 1]


def _others(setting: Tried, keys: Sequence[str]) -> str:
    return ", ".join(named(key, setting.values.get(key, "")) for key in keys)


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
    for setting in tried:
        by_line.setdefault(_others(setting, others) if lines else "", []).append(setting)
    draw = with_bars if lines or not others else dots
    for name, inside in by_line.items():
        points = [
            (across[setting.values[key]], score) for setting in inside for score in setting.scores
        ]
        draw(axes, points, look(lines.index(name) if lines else 0))
    for setting in tried:
        if setting.best:
            place = across[setting.values[key]]
            axes.plot(place, setting.mean, marker="*", markersize=15, color=INK, zorder=5)
    label_axis(axes, key, labels)
    scale(axes, "y", quantity(metric), [y for setting in tried for y in reached(setting.scores)])


def _across(tried: Iterable[Tried], key: str) -> tuple[list[str], dict[str, float]]:
    """The values of a key in their order, numbers by size and before words, and where each is on
    the axis.
    """

    def order(label: str) -> tuple[bool, float, str]:
        return (False, float(label), label) if numeric([label]) else (True, 0.0, label)

    labels = sorted(dict.fromkeys(setting.values.get(key, "") for setting in tried), key=order)
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
    pieces: list[Piece] = []
    for key in dict.fromkeys(key for _, _, tried in cells for one in tried for key in one.values):
        inside = [
            (facet, arm, [one for one in tried if one.scores and key in one.values])
            for facet, arm, tried in cells
        ]
        varied = [part for part in inside if len({one.values[key] for one in part[2]}) > 1]
        if varied:
            pieces.append(_tuned(varied, key, arms, metric, sign))
    return pieces


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
