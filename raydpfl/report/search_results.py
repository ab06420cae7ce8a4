"""What was tried: a metric over each value that was searched, in a sweep (`drawings`) or by the
arms of a study (`tuned`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from raydpfl.report.figures import Drawing, Missing, Piece
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
from raydpfl.report.plot_style import INK, Key, Look, Part, dots, look, scale
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


def drawings(tried: Sequence[Tried], metric: str, source: str) -> list[Piece]:
    """A figure of the metric over each searched value that took several.

    Args:
        tried: the settings.
        metric: the name of what they are judged by.
        source: the file it is read from.
    """
    known = [each for each in tried if each.scores]
    title = f"{quantity(metric).words.capitalize()} over what was searched"
    if not known:
        return [Missing(title, f"needs a setting with its {metric} in {source}")]
    keys = dict.fromkeys(key for each in known for key in each.values)
    several = [key for key in keys if len({each.values.get(key) for each in known}) > 1]
    return [_drawing(known, key, several, metric, source) for key in several]


def _drawing(
    tried: Sequence[Tried], key: str, several: Sequence[str], metric: str, source: str
) -> Drawing:
    others = [each for each in several if each != key]
    lines = dict.fromkeys(_others(each, others) for each in tried)
    legend: list[Key] = []
    lined = bool(others) and len(lines) <= LINES
    if lined:
        legend = [Key(name, look(place)) for place, name in enumerate(lines)]
    if any(each.best for each in tried):
        legend.append(Key("best", BEST, "point"))
    caption = "A point is a run in its last round."
    if lined or not others:
        caption += " Lines go through the means over the seeds, other values being equal."
        caption += bars_said(max(len(each.scores) for each in tried))
    else:
        caption += f" Other values vary among the points: {', '.join(others)}."
    part = Part("", lambda axes: _draw(axes, tried, key, [*lines] if lined else None, metric))
    return Drawing(
        name_of("searched", key),
        f"{quantity(metric).words.capitalize()} over {key}",
        f"{caption} The best mean is marked. From {source}.",
        [part],
        legend,
    )


def tuned(
    cells: Sequence[tuple[Facet, str, Sequence[Tried]]], metric: str, sign: int
) -> list[Piece]:
    """A figure of the metric over each value that any cell of a study chose among: a panel for each
    facet, a line for each arm.

    Args:
        cells: of each its facet, its arm, and what was tried in it.
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


def _tuned(
    cells: Sequence[tuple[Facet, str, Sequence[Tried]]],
    key: str,
    arms: list[str],
    metric: str,
    sign: int,
) -> Drawing:
    every = [one for _, _, tried in cells for one in tried]
    facets = {facet.title: facet for facet, _, _ in cells}
    parts = []
    for title, facet in facets.items():
        lines = [(arms.index(arm), tried) for one, arm, tried in cells if one.title == title]
        parts.append(Part(title, _tuned_drawer(lines, every, key, metric, sign), facet.place))
    words = quantity(metric).words
    caption = "A point is one run with rows held out. Lines go through the best at each value, "
    caption += "whatever the other values are; the chosen ones are marked. From tuning.parquet."
    drawn = [place for place, arm in enumerate(arms) if arm in {arm for _, arm, _ in cells}]
    legend = [Key(arms[place], look(place)) for place in drawn]
    legend.append(Key("chosen", BEST, "point"))
    name = name_of("tuned", key)
    return Drawing(name, f"{words.capitalize()} over {key}", caption, parts, legend)


def _tuned_drawer(
    lines: Sequence[tuple[int, Sequence[Tried]]],
    every: Sequence[Tried],
    key: str,
    metric: str,
    sign: int,
) -> Any:
    labels = sorted(dict.fromkeys(one.values[key] for one in every), key=_order)
    across = dict(zip(labels, positions(labels), strict=True))

    def draw(axes: Axes) -> None:
        for place, tried in lines:
            drawn = look(place)
            dots(axes, [(across[one.values[key]], one.mean) for one in tried], drawn, 0.5)
            best: dict[float, float] = {}
            for one in tried:
                x = across[one.values[key]]
                best[x] = sign * max(sign * best.get(x, one.mean), sign * one.mean)
            axes.plot(*zip(*sorted(best.items()), strict=True), color=drawn.colour, ls=drawn.dash)
            for one in tried:
                if one.best:
                    star = Look(drawn.colour, "none", BEST.marker)
                    dots(axes, [(across[one.values[key]], one.mean)], star, 1.0, 12)
        label_axis(axes, key, labels)
        scale(axes, "y", quantity(metric), [one.mean for one in every])

    return draw


def _others(each: Tried, keys: Sequence[str]) -> str:
    return ", ".join(named(key, each.values.get(key, "")) for key in keys)


def _draw(
    axes: Axes, tried: Sequence[Tried], key: str, lines: list[str] | None, metric: str
) -> None:
    several = [name for each in tried for name in each.values if name != key]
    values = {name: {each.values.get(name) for each in tried} for name in several}
    kept = [name for name in values if len(values[name]) > 1]
    labels = sorted(dict.fromkeys(each.values.get(key, "") for each in tried), key=_order)
    across = dict(zip(labels, positions(labels), strict=True))
    by_line: dict[str, list[Tried]] = {}
    for each in tried:
        by_line.setdefault(_others(each, kept) if lines else "", []).append(each)
    for name, inside in by_line.items():
        drawn = look(lines.index(name) if lines else 0)
        points = [(across[each.values[key]], score) for each in inside for score in each.scores]
        if lines or not kept:
            with_bars(axes, points, drawn)
        else:
            dots(axes, points, drawn)
    for each in tried:
        if each.best:
            place = across[each.values[key]]
            axes.plot(place, each.mean, marker="*", markersize=15, color=INK, zorder=5)
    label_axis(axes, key, labels)
    scale(axes, "y", quantity(metric), [y for each in tried for y in reached(each.scores)])


def _order(label: str) -> tuple[bool, float, str]:
    """Numbers by size, before words."""
    return (False, float(label), label) if numeric([label]) else (True, 0.0, label)
