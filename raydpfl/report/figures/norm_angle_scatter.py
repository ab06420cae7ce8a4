"""Clients' updates as points: angle to the last global update, and norm (000 Figs 1, 2, 5-11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Apart, Need, Placed, first_seed
from raydpfl.report.labels import quantity
from raydpfl.report.plot_style import INK, REFERENCE, Key, Look, dots, look, scale, thin
from raydpfl.report.run_reader import Panel, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 450  # points of each part of a run
ALL = 6000  # points of a figure
PARTS = 3  # parts of a run that are told apart
DOT = Look(INK, "none", "*")


@dataclass(frozen=True)
class Part:
    """The first, middle or last rounds of a run.

    `name`: which these are, in words. `points`: those that are drawn, float64 [n, 2], of `total`.
    `dot`: where the mean update is, None where it is not known.
    """

    name: str
    points: np.ndarray
    total: int
    dot: tuple[float, float] | None


class Cloud(Apart):
    """A point for each client and round, `of` (an angle) across and `y` (a norm) up, of the first,
    middle and last rounds; and the dot of the mean update in each part.

    Points are left out evenly where there are many. The mean update's dot is at the median of
    `update_angle` and `update_norm` over the rounds of a part; there is none where clients send
    something else than updates, whose norms are not of its kind.
    """

    placed: ClassVar[tuple[Placed, ...]] = (Placed("Bounding and noise", {}, 4),)

    kind: str = "cloud"
    of: str = "angle"
    y: str = "norm"

    def needs(self) -> Sequence[Need]:
        return (Need("clients", (self.of, self.y), "measure: [clients, bounding]"),)

    def headline(self) -> str:
        return "Norms and angles of clients' updates"

    def prepare(self, panels: Sequence[Panel]) -> Any:
        most = min(MOST, ALL // (PARTS * len(panels)))
        runs = [panel.groups[0].runs[0] for panel in panels]
        return {run: parts_of(run, self.of, self.y, most) for run in runs}

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        run = panel.groups[0].runs[0]
        parts = common[run]
        for place, part in enumerate(parts):
            dots(axes, part.points, look(place), alpha=0.45, size=3)
        for place, part in enumerate(parts):
            if part.dot is not None:
                star: Any = {"marker": "*", "markeredgewidth": 0}
                axes.plot(*part.dot, markersize=15, color=INK, zorder=4, **star)
                axes.plot(*part.dot, markersize=9, color=look(place).colour, zorder=5, **star)
        bound = run.series("bound")
        if not run.per_sample and bound is not None and np.isfinite(bound).any():
            axes.axhline(bound[np.isfinite(bound)][-1], color=INK, linestyle=REFERENCE.dash)
        every = [part for each in common.values() for part in each]
        reach = [part.points for part in every]
        reach += [np.array([part.dot]) for part in every if part.dot is not None]
        scale(axes, "x", quantity(self.of), np.concatenate(reach)[:, 0])
        scale(axes, "y", quantity(self.y), np.concatenate(reach)[:, 1])

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[Key]:
        names = [[part.name for part in parts] for parts in common.values()]
        alike = all(each == names[0] for each in names)
        shown = names[0] if alike else ["first rounds", "middle rounds", "last rounds"]
        keys = [Key(name, look(place), "point") for place, name in enumerate(shown)]
        if any(part.dot is not None for parts in common.values() for part in parts):
            keys.append(Key("mean update", DOT, "point"))
        if any(not run.per_sample and run.has("rounds", ("bound",)) for run in common):
            keys.append(Key("last bound", REFERENCE))
        return keys

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        every = [part for parts in common.values() for part in parts]
        text = "A point is what one client would send in one round without a bound."
        drawn = sum(len(part.points) for part in every)
        total = sum(part.total for part in every)
        if drawn < total:
            text += f" {drawn:,} of {total:,} points, evenly chosen."
        if any(part.dot is not None for part in every):
            text += " The mean update has its noise in it."
        elif all(run.sends_updates for run in common):
            text += " The mean update has no dot: rounds.parquet has no column update_angle."
        if not all(run.sends_updates for run in common):
            text += " Where clients send no updates but models, gradients or differences to what"
            text += " they remember, norms are of these, and the mean update has no dot."
        return f"{text}{first_seed(panels)} From clients.parquet and rounds.parquet."


def parts_of(run: Run, x: str, y: str, most: int) -> list[Part]:
    """The parts of a run, with so many points each at most, of these columns of its clients."""
    clients = run.table("clients")
    known = np.isfinite(clients[x]) & np.isfinite(clients[y])
    rounds = clients["round"][known]
    points = np.stack([clients[x][known], clients[y][known]], 1)
    found = []
    for part in np.array_split(np.unique(rounds), PARTS):
        if not len(part):
            continue
        inside = points[(rounds >= part[0]) & (rounds <= part[-1])]
        name = f"round {part[0] + 1:.0f}"
        if len(part) > 1:
            name = f"rounds {part[0] + 1:.0f} to {part[-1] + 1:.0f}"
        dot = _dot(run, part[0], part[-1], x, y)
        found.append(Part(name, inside[thin(len(inside), most)], len(inside), dot))
    return found


def _dot(run: Run, first: float, last: float, x: str, y: str) -> tuple[float, float] | None:
    if not run.sends_updates:
        return None
    rounds = run.table("rounds")
    across = rounds.get(f"update_{x}")
    up = rounds.get(f"update_{y}")
    if across is None or up is None:
        return None
    inside = (rounds["round"] >= first) & (rounds["round"] <= last)
    inside &= np.isfinite(across) & np.isfinite(up)
    if not inside.any():
        return None
    return float(np.median(across[inside])), float(np.median(up[inside]))
