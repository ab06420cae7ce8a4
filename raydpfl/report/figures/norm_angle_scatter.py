"""Clients' updates as points: angle to the last global update, and norm (000 Figs 1, 2, 5-11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Need, Placed, PlotItem, first_seed
from raydpfl.report.labels import quantity
from raydpfl.report.plot_style import INK, REFERENCE, LegendKey, Look, dots, look, scale, thin
from raydpfl.report.run_reader import Panel, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 450  # points of each third of a run
ALL = 6000  # points of a figure
THIRDS = ("first", "middle", "last")
STAR = Look(INK, "none", "*")


@dataclass(frozen=True)
class Third:
    """The first, middle or last rounds of a run.

    `name`: which these are, in words. `points`: those that are drawn, float64 [n, 2], of `total`.
    `mean`: the point of the mean update, float64 [n, 2] with n = 0 where it is not known.
    """

    name: str
    points: np.ndarray
    total: int
    mean: np.ndarray


class Cloud(PlotItem):
    """A point for each client and round, `of` (an angle) across and `y` (a norm) up, of the first,
    middle and last rounds; and the mean update in each of these thirds.

    Points are left out evenly where there are many. The mean update is at the median of
    `update_angle` and `update_norm` over the rounds of a third; it is not drawn where clients send
    something else than updates, whose norms are not of its kind.
    """

    placed: ClassVar[tuple[Placed, ...]] = (Placed("Bounding and noise", {}, 4),)
    per_group: ClassVar[bool] = True
    heading: ClassVar[str] = "Norms and angles of clients' updates"

    kind: str = "cloud"
    of: str = "angle"
    y: str = "norm"

    def needs(self) -> Need:
        return Need("clients", (self.of, self.y), "measure: [clients, bounding]")

    def prepare(self, panels: Sequence[Panel]) -> Any:
        most = min(MOST, ALL // (len(THIRDS) * len(panels)))
        return {panel.run: thirds_of(panel.run, self.of, self.y, most) for panel in panels}

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        run = panel.run
        for place, third in enumerate(common[run]):
            dots(axes, third.points, look(place), alpha=0.45, size=3)
        for place, third in enumerate(common[run]):
            star: Any = {"marker": "*", "markeredgewidth": 0}
            axes.plot(*third.mean.T, markersize=15, color=INK, zorder=4, **star)
            axes.plot(*third.mean.T, markersize=9, color=look(place).colour, zorder=5, **star)
        if _has_bound(run):
            bound = run.table("rounds")["bound"]
            axes.axhline(bound[np.isfinite(bound)][-1], color=INK, linestyle=REFERENCE.dash)
        thirds = [third for thirds in common.values() for third in thirds]
        reach = np.concatenate([part for third in thirds for part in (third.points, third.mean)])
        scale(axes, "x", quantity(self.of), reach[:, 0])
        scale(axes, "y", quantity(self.y), reach[:, 1])

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        names = [[third.name for third in thirds] for thirds in common.values()]
        alike = all(name == names[0] for name in names)
        shown = names[0] if alike else [f"{third} rounds" for third in THIRDS]
        keys = [LegendKey(name, look(place), "point") for place, name in enumerate(shown)]
        mean = [LegendKey("mean update", STAR, "point")] if _has_mean(common) else []
        bound = [LegendKey("last bound", REFERENCE)] if any(map(_has_bound, common)) else []
        return [*keys, *mean, *bound]

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        thirds = [third for thirds in common.values() for third in thirds]
        text = "A point is what one client would send in one round without a bound."
        drawn = sum(len(third.points) for third in thirds)
        total = sum(third.total for third in thirds)
        if drawn < total:
            text += f" {drawn:,} of {total:,} points, evenly chosen."
        if _has_mean(common):
            text += " The mean update has its noise in it."
        elif all(run.sends_updates for run in common):
            text += " The mean update is not drawn: rounds.parquet has no column update_angle."
        if not all(run.sends_updates for run in common):
            text += " Where clients send no updates but models, gradients or differences to their"
            text += " state, norms are of these, and the mean update is not drawn."
        return f"{text}{first_seed(panels)} From clients.parquet and rounds.parquet."


def _has_mean(common: dict[Run, list[Third]]) -> bool:
    return any(len(third.mean) for thirds in common.values() for third in thirds)


def _has_bound(run: Run) -> bool:
    return not run.per_sample and run.has("rounds", ("bound",))


def thirds_of(run: Run, x: str, y: str, most: int) -> list[Third]:
    """The thirds of a run, with so many points each at most, of these columns of its clients."""
    rounds, points = _finite(run, "clients", x, y)
    means = (np.empty(0), np.empty((0, 2)))
    if run.sends_updates and run.table("rounds").keys() >= {f"update_{x}", f"update_{y}"}:
        means = _finite(run, "rounds", f"update_{x}", f"update_{y}")
    thirds = []
    for third in np.array_split(np.unique(rounds), len(THIRDS)):
        if not len(third):
            continue
        inside = points[(rounds >= third[0]) & (rounds <= third[-1])]
        updates = means[1][(means[0] >= third[0]) & (means[0] <= third[-1])]
        name = f"round {third[0] + 1:.0f}"
        if len(third) > 1:
            name = f"rounds {third[0] + 1:.0f} to {third[-1] + 1:.0f}"
        mean = np.median(updates, 0)[None] if len(updates) else updates
        thirds.append(Third(name, inside[thin(len(inside), most)], len(inside), mean))
    return thirds


def _finite(run: Run, table: str, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows with both columns: their rounds, float64 [n], and the columns, float64 [n, 2]."""
    columns = run.table(table)
    points = np.stack([columns[x], columns[y]], 1)
    finite = np.isfinite(points).all(1)
    return columns["round"][finite], points[finite]
