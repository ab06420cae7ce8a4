"""Sums without order.

What a client sends is rounded once to multiples of a power of two, the grid. Multiples of the grid
below 2^53 of it add exactly in float64, in any order and any grouping, so the total is the same
bits whoever trained whom.

>>> grid = Grid.of(5, bound=None)
>>> sent = [snap(np.array([0.1 * k]), grid) for k in range(5)]
>>> sum(sent) == sum(sent[::-1])
array([ True])

With a bound c and a client's noise of std s the grid is below 1e-9 (c + 40 s) for cohorts of up to
two million, so rounding to it changes no printed digit of a sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from raydpfl import native
from raydpfl.errors import RunError
from raydpfl.rounds import Grid, LaneResult

NOTHING = np.empty(0)


def add(
    total: np.ndarray,
    rows: np.ndarray,
    grid: Grid,
    factors: np.ndarray | None = None,
    noise: np.ndarray | None = None,
) -> None:
    """Adds what clients send, on the grid: rows[i], or factors[i] rows[i] (+ noise[i]), where every
    product and sum is rounded to float64 before.

    Args:
        total: float64 [d], multiples of the grid; changed in place.
        rows: float64 [k, d], or float32 with factors.
        grid: of the round.
        factors: float64 [k].
        noise: float64 [k, d].

    Raises:
        RunError: a coordinate is out of range, or not a number.
    """
    if not native.add(total, rows, grid.step, grid.most, factors, noise):
        check_range(math.inf, grid)


def snap(vectors: np.ndarray, grid: Grid) -> np.ndarray:
    """Rounds what clients send to multiples of the grid, halves to even ones.

    Args:
        vectors: float64 [d] or [k, d], changed in place.
        grid: of the round.

    Raises:
        RunError: as `add`.
    """
    check_range(float(np.abs(vectors).max(initial=0.0)), grid)
    vectors /= grid.step
    np.rint(vectors, out=vectors)
    vectors *= grid.step
    return vectors


def snapped(vectors: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """As `snap`, where the vectors are, without a look at them: these on the grid, changed in
    place, and the size of the largest coordinate before, for `check_range`.
    """
    largest = vectors.abs().max()
    return vectors.div_(grid.step).round_().mul_(grid.step), largest


def check_range(largest: float, grid: Grid) -> None:
    """Raises `RunError` for a client's vector with a coordinate of this size, that the grid does
    not hold.
    """
    if not largest <= grid.most:
        raise RunError(
            f"the updates diverged: a coordinate of one exceeds {grid.most:g} in size; "
            "lower local.lr, or bound the updates"
        )


def gathered(
    arriving: Iterable[tuple[int, LaneResult]], d: int
) -> tuple[np.ndarray, list[LaneResult]]:
    """What actors have returned, added up while others are at work.

    Args:
        arriving: each result as it arrives, and its place among them.
        d: parameters of the model.

    Returns:
        The exact sum, float64 [d], whatever the order of arrival, and the results by place.
    """
    found: dict[int, LaneResult] = {}
    total = np.zeros(d)
    for place, result in arriving:
        found[place] = result
        total += result.total
        result.total = NOTHING
    return total, [found[place] for place in sorted(found)]
