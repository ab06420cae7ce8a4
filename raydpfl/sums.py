"""Sums without order.

The contributions of a lane of clients are added in float64 in its order, and the lane's sum is
rounded once to a multiple of a power of two, the grid. Multiples of the grid below 2^53 grid add
exactly in float64, in any order and any grouping, so the total is the same bits whoever ran which
lane.

>>> lanes = [snap(np.array([0.1 * k]), 2.0**-40) for k in range(5)]
>>> sum(lanes) == sum(lanes[::-1])
array([ True])

With a bound c and a client's noise of std s the grid is below 1e-9 (c + 40 s) for cohorts of up to
four million, so rounding to it changes no printed digit of a sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import torch

from raydpfl import native
from raydpfl.errors import RunError
from raydpfl.rounds import Lane, LaneResult

# no coordinate of a round's sum may exceed this when nothing bounds the updates
UNBOUNDED = 2.0**20
NOTHING = np.empty(0)
TAIL = 40.0  # no Gaussian of float64 precision lies this many standard deviations out


def grid(cohort: int, bound: float | None, std: float = 0.0) -> float:
    """The power of two to whose multiples lane sums of a round are rounded.

    Args:
        cohort: how many contributions are added.
        bound: the L2 norm of one client's contribution, weight included; None: unbounded.
        std: of the noise that each client adds to its own.

    Returns:
        The grid: 2^52 of it cover the largest sum that such contributions can reach.
    """
    largest = UNBOUNDED
    if bound is not None:
        largest = max(1, cohort) * (bound + TAIL * std)
    return 2.0 ** (math.ceil(math.log2(largest)) - 52)


def snap(total: np.ndarray, step: float) -> np.ndarray:
    """A lane's sum rounded to multiples of the grid.

    Args:
        total: float64 [d], changed in place.
        step: the grid, as `grid` gives it.

    Raises:
        RunError: a coordinate is out of range, or not a number.
    """
    check_range(float(np.abs(total).max(initial=0.0)), step)
    total /= step
    np.rint(total, out=total)
    total *= step
    return total


def add_snapped(total: np.ndarray, step: float, found: np.ndarray) -> None:
    """Adds a lane's sum, rounded to multiples of the grid, to `found`, and leaves zeros in it.

    Args:
        total: float64 [d], contiguous.
        step: the grid, as `grid` gives it.
        found: float64 [d], contiguous, changed in place.

    Raises:
        RunError: as `snap`.
    """
    fits = native.snap(total, step, found)
    if fits is None:
        found += snap(total, step)
        total.fill(0)
    elif not fits:
        check_range(math.inf, step)


def snapped(total: torch.Tensor, step: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `snap`, where the tensor is, without a look at it: the sum on the grid, changed in place,
    and the size of its largest coordinate before, for `check_range`.
    """
    largest = total.abs().max()
    return total.div_(step).round_().mul_(step), largest


def check_range(largest: float, step: float) -> None:
    """Raises `RunError` for a sum with a coordinate of this size, that a grid does not hold."""
    limit = step * 2.0**52
    if not largest <= limit:
        raise RunError(
            f"the updates diverged: a coordinate of their sum exceeds {limit:g} in size; "
            "lower local.lr, or bound the updates"
        )


def gathered(
    arriving: Iterable[tuple[int, LaneResult]],
    d: int,
    grid: float,
    lanes: Sequence[Lane] | None = None,
) -> tuple[np.ndarray, list[LaneResult]]:
    """What actors have returned, added up while others are at work.

    Args:
        arriving: each result as it arrives, and its place among them.
        d: parameters of the model.
        grid: of the round.
        lanes: None: totals are sums of lanes, on the grid already. Else each is the contribution of
            one client of these lanes, in turn, whose sums are formed here.

    Returns:
        The exact sum, float64 [d], whatever the order of arrival, and the results by place.
    """
    found: dict[int, LaneResult] = {}
    total = np.zeros(d)
    for place, result in arriving:
        found[place] = result
        if lanes is None:
            total += result.total
            result.total = NOTHING
    results = [found[place] for place in range(len(found))]
    in_turn = iter(results)
    for lane in lanes or ():
        own = np.zeros(d)
        for result in islice(in_turn, int((lane.clients >= 0).sum())):
            own += result.total
        total += snap(own, grid)
    return total, results
