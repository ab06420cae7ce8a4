"""Clients' updates as points: angle to the last global update, and norm (000 Figs 1, 2, 5-11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Apart, Need, Placed
from raydpfl.report.reading import Panel, Run
from raydpfl.report.style import INK, REFERENCE, Key, Look, look, scale, thin
from raydpfl.report.words import quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 450  # points of each part of the run
PARTS = 3  # parts of a run that are told apart
DOT = Look(INK, "none", "*")


class Cloud(Apart):
    """A point for each client and round, `of` (an angle) across and `y` (a norm) up, of the first,
    middle and last rounds; and the dot of the mean update in each part.

    Points are left out evenly where there are many. The mean update's dot is at the median of
    `update_angle` and `update_norm` over the rounds of a part.
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
        found = []
        for panel in panels:
            for _, points, dot in parts_of(panel.groups[0].runs[0], self.of, self.y):
                found += [points] if dot is None else [points, np.array([dot])]
        every = np.concatenate(found)
        return every if len(every) else None

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        run = panel.groups[0].runs[0]
        parts = parts_of(run, self.of, self.y)
        for place, (_, points, _) in enumerate(parts):
            drawn = look(place)
            axes.plot(
                *points.T,
                linestyle="none",
                marker=drawn.marker,
                markersize=3,
                color=drawn.colour,
                alpha=0.45,
                markeredgewidth=0,
            )
        for place, (_, _, dot) in enumerate(parts):
            if dot is not None:
                axes.plot(*dot, marker="*", markersize=15, color=INK, markeredgewidth=0, zorder=4)
                axes.plot(*dot, marker="*", markersize=9, color=look(place).colour, zorder=5)
        bound = run.series("bound")
        if not run.per_sample and bound is not None and np.isfinite(bound).any():
            axes.axhline(bound[np.isfinite(bound)][-1], color=INK, linestyle=REFERENCE.dash)
        scale(axes, "x", quantity(self.of), common[:, 0])
        scale(axes, "y", quantity(self.y), common[:, 1])

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[Key]:
        runs = [panel.groups[0].runs[0] for panel in panels]
        parts = parts_of(runs[0], self.of, self.y)
        names = [name for name, _, _ in parts]
        if any([name for name, _, _ in parts_of(run, self.of, self.y)] != names for run in runs):
            names = ["first rounds", "middle rounds", "last rounds"]
        keys = [Key(name, look(place), "point") for place, name in enumerate(names)]
        if any(dot is not None for run in runs for _, _, dot in parts_of(run, self.of, self.y)):
            keys.append(Key("mean update", DOT, "point"))
        if any(not run.per_sample and run.has("rounds", ("bound",)) for run in runs):
            keys.append(Key("last bound", REFERENCE))
        return keys

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        runs = [panel.groups[0].runs[0] for panel in panels]
        text = "A point is the update of one client in one round, before bounding."
        drawn = [
            (len(points), total) for run in runs for total, points in _counts(run, self.of, self.y)
        ]
        if any(kept < total for kept, total in drawn):
            kept = sum(each for each, _ in drawn)
            text += f" {kept:,} of {sum(total for _, total in drawn):,} points, evenly chosen."
        if not any(dot is not None for run in runs for _, _, dot in parts_of(run, self.of, self.y)):
            text += " The mean update has no dot: rounds.parquet has no column update_angle."
        else:
            text += " The mean update has its noise in it."
        if any(len(panel.groups[0].runs) > 1 for panel in panels):
            text += " Of several seeds, the first."
        return f"{text} From clients.parquet and rounds.parquet."


Parted = tuple[str, np.ndarray, tuple[float, float] | None]


def parts_of(run: Run, x: str, y: str) -> list[Parted]:
    """The parts of a run: rounds in words, points float64 [n, 2] (thinned), and the dot of the mean
    update, None where it is not known.
    """
    found: list[Parted] = []
    for first, last, points in _pieces(run, x, y):
        name = f"round {first + 1:.0f}" if first == last else f"rounds {first + 1:.0f} to "
        name += "" if first == last else f"{last + 1:.0f}"
        kept = points[thin(len(points), MOST)]
        found.append((name, kept, _dot(run, first, last, x, y)))
    return found


def _counts(run: Run, x: str, y: str) -> list[tuple[int, np.ndarray]]:
    """How many points each part has, and those that are drawn."""
    pieces = [points for _, _, points in _pieces(run, x, y)]
    return [(len(points), points[thin(len(points), MOST)]) for points in pieces]


def _pieces(run: Run, x: str, y: str) -> list[tuple[float, float, np.ndarray]]:
    """First and last round of each part, and all of its points."""
    clients = run.table("clients")
    known = np.isfinite(clients[x]) & np.isfinite(clients[y])
    rounds = clients["round"][known]
    points = np.stack([clients[x][known], clients[y][known]], 1)
    found = []
    for part in np.array_split(np.unique(rounds), PARTS):
        if len(part):
            inside = (rounds >= part[0]) & (rounds <= part[-1])
            found.append((part[0], part[-1], points[inside]))
    return found


def _dot(run: Run, first: float, last: float, x: str, y: str) -> tuple[float, float] | None:
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
