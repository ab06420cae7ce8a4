"""A cohort cut into lanes, and the lanes dealt to whoever trains them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raydpfl.rounds import Lane
from raydpfl.selection import Cohort


def lanes(
    cohort: Cohort,
    weights: np.ndarray,
    sizes: np.ndarray,
    width: int,
    stds: np.ndarray | None = None,
) -> list[Lane]:
    """The cohort cut into lanes of `width`, in client order, the last one filled up with empty
    slots.

    `weights` float64 [r], `sizes` int64 [r] (rows used) and `stds` float64 [r] (noise of local
    steps) are those of the cohort's clients; a lane's rows are those of its largest.
    """
    if not len(cohort):
        return []
    count = -(-len(cohort) // width)
    clients = _cut(cohort.clients, count, width, -1)
    draws = _cut(cohort.draws, count, width)
    weighted = _cut(weights, count, width)
    noised = [None] * count if stds is None else _cut(stds, count, width)
    rows = np.maximum(_cut(sizes, count, width).max(axis=1), 1).tolist()
    parts = zip(clients, draws, weighted, rows, noised, strict=True)
    return [Lane(*each[:4], stds=each[4]) for each in parts]


def _cut(values: np.ndarray, count: int, width: int, fill: int = 0) -> np.ndarray:
    """[r] as [count, width], the last row filled up."""
    found = np.full(count * width, fill, values.dtype)
    found[: len(values)] = values
    return found.reshape(count, width)


def shares(lanes: Sequence[Lane], actors: int) -> list[list[Lane]]:
    """The lanes dealt to at most `actors` shares, in order, each with about the same number of
    rows.
    """
    cost = np.array([lane.rows * int((lane.clients >= 0).sum()) for lane in lanes], float)
    middle = np.cumsum(cost) - cost / 2
    owner = (middle / max(cost.sum(), 1.0) * actors).astype(int)
    dealt: list[list[Lane]] = [[] for _ in range(actors)]
    for lane, actor in zip(lanes, owner, strict=True):
        dealt[actor].append(lane)
    return [share for share in dealt if share]


def singles(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """A share for every client of the cohort, in client order."""
    return [
        [lane.alone(slot)] for lane in lanes for slot in np.flatnonzero(lane.clients >= 0).tolist()
    ]
