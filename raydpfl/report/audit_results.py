"""The figures of an audit: bounds next to claims, and canaries' scores."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from raydpfl.report.figures import Missing, Piece, Plot
from raydpfl.report.labels import Quantity, number
from raydpfl.report.plot_style import CHARACTERS, INK, LegendKey, Look, Subplot, look, scale
from raydpfl.report.run_reader import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROVEN = Look(look(1).colour, "none", "s")
ESTIMATED = Look(look(0).colour, "-", "o")
CLAIM = Look(INK, "--", "")
INSIDE = look(1)
OUTSIDE = look(0)
BINS = 40


def bounds(views: Sequence[dict[str, Any]]) -> Piece:
    """Of every observer: the epsilon that is claimed, the least that is proven, the estimate."""
    if not views:
        return Missing("Bounds against claims", "needs the views of audit.json")
    subplots = [Subplot(observer(view), partial(_bounds, view=view)) for view in views]
    caption = (
        "Proven: the least epsilon that the canaries' guesses leave possible, with the confidence "
        "of the audit. Estimated: what their scores look like, with its interval. The claim should "
        "lie to the right of what is proven. From audit.json."
    )
    keys = [
        LegendKey("claimed", CLAIM),
        LegendKey("proven at least", PROVEN, "point"),
        LegendKey("estimated", ESTIMATED, "line"),
    ]
    return Plot("bounds", "Bounds against claims", caption, subplots, keys, height=2.1)


def observer(view: dict[str, Any]) -> str:
    """Against whom, in a few words."""
    claimed = view["claimed"]
    text = f"{claimed['observer']} ({claimed['sampling'].split(';')[0]})"
    return textwrap.shorten(text, 2 * CHARACTERS - 4, placeholder=" ...")


def _bounds(axes: Axes, view: dict[str, Any]) -> None:
    claimed = float(view["claimed"]["epsilon"])
    estimate = view["estimate"]
    axes.axvline(claimed, color=CLAIM.colour, linestyle=CLAIM.dash, linewidth=1.3)
    axes.plot([view["lower"]], [1], color=PROVEN.colour, marker=PROVEN.marker, markersize=7)
    axes.plot([0, view["lower"]], [1, 1], color=PROVEN.colour, linewidth=3, alpha=0.5)
    ends = [estimate["low"], estimate["high"]]
    axes.plot(ends, [0, 0], color=ESTIMATED.colour, linewidth=2)
    axes.plot([estimate["epsilon"]], [0], color=ESTIMATED.colour, marker=ESTIMATED.marker)
    values = [claimed, view["lower"], estimate["high"]]
    finite = [value for value in values if np.isfinite(value)]
    most = 1.15 * max(finite, default=1.0) or 1.0
    for height, value, words in ((1, view["lower"], "at least "), (0, estimate["epsilon"], "")):
        side = "right" if most / 3 < value < claimed else "left"
        style: Any = {"textcoords": "offset points", "ha": side, "fontsize": 9}
        axes.annotate(f"{words}{number(value)}", (value, height), (0, 8), **style)
    axes.set_yticks([1, 0], [f"proven ({view['confidence']:.0%})", "estimated"])
    axes.set_ylim(-0.6, 1.8)
    axes.grid(axis="y", visible=False)
    label = Quantity("e", f"epsilon at delta {view['claimed']['delta']:g}; claimed {claimed:.4g}")
    scale(axes, "x", label, finite)
    axes.set_xlim(0, most)


def scores(views: Sequence[dict[str, Any]], table: Columns) -> list[Piece]:
    """The scores of canaries, by their coins; scores.parquet has them with `view`, the place of the
    observer among the views.
    """
    title = "Scores of canaries"
    if not {"view", "inside", "score"} <= table.keys():
        return [Missing(title, "needs view, inside and score in scores.parquet")]
    subplots = []
    for place, view in enumerate(views):
        here = table["view"] == place
        draw = partial(_histogram, values=table["score"][here], inside=table["inside"][here])
        subplots.append(Subplot(observer(view), draw))
    caption = (
        "How many canaries have which score, those that a coin put in and those that it left out. "
        "The further apart the two lie, the more the observer can tell. From scores.parquet."
    )
    keys = [LegendKey("inside", INSIDE, "bar"), LegendKey("outside", OUTSIDE, "bar")]
    return [Plot("scores", title, caption, subplots, keys)]


def _histogram(axes: Axes, values: np.ndarray, inside: np.ndarray) -> None:
    edges = np.histogram_bin_edges(values, BINS)
    tops = [0]
    for drawn, there in ((INSIDE, 1.0), (OUTSIDE, 0.0)):
        counts, _ = np.histogram(values[inside == there], edges)
        tops.append(int(counts.max(initial=0)))
        axes.stairs(counts, edges, color=drawn.colour, fill=True, alpha=0.35)
        axes.stairs(counts, edges, linewidth=1.4, **drawn.line)
    middles = (edges[1:] + edges[:-1]) / 2
    scale(axes, "x", Quantity("score", "score", "stds of the noise"), middles)
    scale(axes, "y", Quantity("count", "canaries"), tops)
    axes.set_ylim(bottom=0)
