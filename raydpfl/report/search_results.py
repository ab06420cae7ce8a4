"""What was tried: a metric over each value that was searched, in a sweep (`searched`) or by the
arms of a study (`tuned`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from raydpfl.report.figures import Missing, Piece, Plot
from raydpfl.report.figures.base import name_of
from raydpfl.report.figures.final_metric import (
    bars_in_words,
    label_axis,
    positions,
    reached,
    with_bars,
)
from raydpfl.report.labels import numeric, quantity
from raydpfl.report.plot_style import INK, LegendKey, Look, Subplot, dots, look, scale
from raydpfl.report.run_reader import Facet, grouped, in_words

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


Line = tuple[int, Sequence[Tried]]  # the place that gives its look, and the settings on it
TunedCell = tuple[Facet, str, Sequence[Tried]]  # of a study: its facet, its arm, what was tried


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
    keys = dict.fromkeys(key for setting in scored for key in setting.values)
    several = [key for key in keys if len({setting.values.get(key) for setting in scored}) > 1]
    pieces: list[Piece] = []
    for key in several:
        others = [other for other in several if other != key]
        lines = grouped(scored, partial(_others, keys=others))
        joined = len(lines) <= LINES
        if not others or not joined:
            lines = {"": scored}
        legend = [LegendKey(name, look(place)) for place, name in enumerate(lines) if name]
        if any(setting.best for setting in scored):
            legend.append(LegendKey("best", BEST, "point"))
        caption = "A point is a run in its last round."
        if joined:
            caption += " Lines go through the means over the seeds, other values being equal."
            caption += bars_in_words(max(len(setting.scores) for setting in scored))
        else:
            caption += f" Other values vary among the points: {', '.join(others)}."
        caption += f" The best mean is marked. From {source}."
        draw = partial(
            _draw, every=scored, key=key, metric=metric, lines=[*enumerate(lines.values())]
        )
        subplot = Subplot("", partial(draw, connect=with_bars if joined else dots, star=BEST))
        name = name_of("searched", key)
        pieces.append(Plot(name, f"{words} over {key}", caption, [subplot], legend))
    return pieces


def _others(setting: Tried, keys: Sequence[str]) -> str:
    return in_words({key: setting.values.get(key, "") for key in keys})


def tuned(cells: Sequence[TunedCell], metric: str, sign: int) -> list[Piece]:
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


def _tuned(cells: Sequence[TunedCell], key: str, arms: list[str], metric: str, sign: int) -> Plot:
    every = [one for _, _, tried in cells for one in tried]
    draw = partial(_draw, every=every, key=key, metric=metric, connect=partial(_best, sign=sign))
    subplots = []
    for title, inside in grouped(cells, lambda cell: cell[0].title).items():
        lines = [(arms.index(arm), tried) for _, arm, tried in inside]
        subplots.append(Subplot(title, partial(draw, lines=lines), inside[-1][0].place))
    caption = "A point is one run with rows held out. Lines go through the best at each value, "
    caption += "whatever the other values are; the chosen ones are marked. From tuning.parquet."
    drawn = {arm for _, arm, _ in cells}
    legend = [LegendKey(arm, look(place)) for place, arm in enumerate(arms) if arm in drawn]
    legend.append(LegendKey("chosen", BEST, "point"))
    title = f"{quantity(metric).words.capitalize()} over {key}"
    return Plot(name_of("tuned", key), title, caption, subplots, legend)


def _best(axes: Axes, points: Sequence[tuple[float, float]], drawn: Look, sign: int) -> None:
    """Points, and a line through the best at each place."""
    dots(axes, points, drawn, 0.5)
    by_place = grouped(points, lambda point: point[0])
    best = {x: sign * max(sign * y for _, y in inside) for x, inside in by_place.items()}
    axes.plot(*zip(*sorted(best.items()), strict=True), **drawn.line)


def _draw(
    axes: Axes,
    lines: Sequence[Line],
    every: Sequence[Tried],
    key: str,
    metric: str,
    connect: Callable[..., None],
    star: Look | None = None,
) -> None:
    """The metric over the values of a key. `every`: all settings of the figure; `connect`: draws
    the points of a line; `star`: the look of the best, None: that of its line.
    """

    def order(label: str) -> tuple[bool, float, str]:
        """Numbers by size, before words."""
        return (False, float(label), label) if numeric([label]) else (True, 0.0, label)

    labels = sorted({setting.values.get(key, "") for setting in every}, key=order)
    across = dict(zip(labels, positions(labels), strict=True))
    for place, tried in lines:
        points = [(across[one.values[key]], score) for one in tried for score in one.scores]
        connect(axes, points, look(place))
        for one in tried:
            if one.best:
                style: Any = {"zorder": 5, "markersize": 15}
                if star is None:
                    style = {"linestyle": "none", "markersize": 12, "markeredgewidth": 0}
                colour = (star or look(place)).colour
                axes.plot(across[one.values[key]], one.mean, marker="*", color=colour, **style)
    label_axis(axes, key, labels)
    scale(axes, "y", quantity(metric), [y for one in every for y in reached(one.scores)])
