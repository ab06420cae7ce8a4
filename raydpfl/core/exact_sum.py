"""Sums without order.

What a client sends is rounded once to multiples of a power of two, the grid. Multiples of the grid
below 2^53 of it add exactly in float64, in any order and any grouping, so the total is the same
bits on any assignment of clients.

>>> sent = np.array([[0.1], [0.2], [0.3]])
>>> forward, back = np.zeros((2, 1))
>>> for client in (0, 1, 2):
...     add(forward, sent[[client]], Grid.of(3, bound=1.0))
...     add(back, sent[[2 - client]], Grid.of(3, bound=1.0))
>>> forward == back, 0.1 + 0.2 + 0.3 == 0.3 + 0.2 + 0.1
(array([ True]), False)

With a bound c and noise of std s on each client the grid is below 1e-9 (c + 40 s) for cohorts of up
to a million. Rounding moves a vector of d numbers by at most sqrt(d) / 2 of it, which changes no
printed digit of a sensitivity.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch

from raydpfl.core import native
from raydpfl.core.messages import ChunkResult, Grid
from raydpfl.errors import RunError


def add(
    total: np.ndarray,
    rows: np.ndarray,
    grid: Grid,
    factors: np.ndarray | None = None,
    noise: np.ndarray | None = None,
) -> None:
    """Adds what clients send, on the grid, as `raydpfl.core.native.add`. Raises `RunError` for a
    coordinate that is out of range, or not a number.
    """
    if not native.add(total, rows, grid.step, grid.most, factors, noise):
        check_range(math.inf, grid)


def snap_to_grid(vectors: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """What clients send, float64 [k, d], rounded in place to the grid as `add` does it, without a
    wait for the device, and the size of the largest coordinate before, for `check_range`.
    """
    largest = vectors.abs().max()
    return vectors.div_(grid.step).round_().mul_(grid.step), largest


def check_range(largest: float, grid: Grid) -> None:
    """Raises `RunError` for a coordinate of this size, if the grid does not hold it."""
    if not largest <= grid.most:
        raise RunError(
            f"the updates diverged: a coordinate of one exceeds {grid.most:g} in size; "
            "lower local.lr, or bound the updates"
        )


def sum_results(
    indexed_results: Iterable[tuple[int, ChunkResult]], d: int
) -> tuple[np.ndarray, list[ChunkResult]]:
    """The exact sum of what actors have returned, float64 [d], added up as (place, result) arrive,
    in whatever order, and the results by place.
    """
    results: dict[int, ChunkResult] = {}
    total = np.zeros(d)
    for place, result in indexed_results:
        results[place] = result
        total += result.total
        result.total = np.empty(0)
    return total, [results[place] for place in sorted(results)]
