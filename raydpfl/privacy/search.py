"""Roots from the safe side: an epsilon, a noise or a number of rounds that is enough, hardly more.

>>> safe_end(lambda x: 2.0 - x * x, 0.0, 2.0, xtol=1e-9) ** 2 >= 2.0
True
>>> squares = np.array([2.0, 3.0, 9.0])
>>> bisect_brackets(lambda x: x * x < squares, np.zeros(3), np.full(3, 4.0), times=50)
array([1.41421356, 1.73205081, 3.        ])
>>> largest_count(lambda n: n * n <= 150, limit=100)
12

Noise depends on `bisect_brackets`, `narrow_bracket` and `near_guess`, which must not change by a
bit: the key of a run's noise is a digest of its std. The latter two are for costly functions.
"""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

_MIN_FLOAT = float(np.finfo(np.float64).tiny)
_MIN_RTOL = 4 * float(np.finfo(np.float64).eps)  # the least relative tolerance of scipy
_TURNS = 200  # after which a search gives up
Point = tuple[float, float]  # (x, excess)


def safe_end(
    excess: Callable[[float], float], low: float, high: float, xtol: float, rtol: float = _MIN_RTOL
) -> float:
    """A safe point next to the root of `excess`, which is at most 0 where x is safe and changes
    sign once from `low` to `high`: less than xtol + rtol |x| from the root. Raises `ValueError` if
    both ends are safe, or neither.
    """
    from scipy.optimize import brentq

    evaluations: dict[float, float] = {}

    def cached_excess(x: float) -> float:
        if x not in evaluations:
            evaluations[x] = excess(x) or -_MIN_FLOAT  # 0 is safe, and no reason to stop
        return evaluations[x]

    is_rising = cached_excess(low) <= 0
    if is_rising == (cached_excess(high) <= 0):
        raise ValueError(f"no root between {low} and {high}")
    brentq(cached_excess, low, high, xtol=max(xtol, _MIN_FLOAT), rtol=rtol)
    safe = [x for x, value in evaluations.items() if value <= 0]
    return max(safe) if is_rising else min(safe)


def bisect_brackets(
    unsafe: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray, times: int
) -> np.ndarray:
    """Bisection of many brackets at once, from `low`, the unsafe ends, to `high`, the safe ones,
    float64 [...]: the upper ends after so many halvings; `high` where everything is unsafe.
    """
    for _ in range(times):
        middle = (low + high) / 2
        above = unsafe(middle)
        low = np.where(above, middle, low)
        high = np.where(above, high, middle)
    return high


def narrow_bracket(excess: Callable[[float], float], low: Point, high: Point, xtol: float) -> float:
    """The safe end of a bracket, at most `xtol` wide, of the root of a falling function, from
    (x, excess) at the unsafe end `low` and the safe end `high`.
    """
    for turn in range(_TURNS):
        width = high[0] - low[0]
        if width <= xtol:
            break
        share = low[1] / (low[1] - high[1]) if turn % 4 < 3 else 0.5
        x = low[0] + share * width
        # A little past the root as seen from the nearer bound, which closes that side; the next
        # turn closes the other.
        x += 0.4 * xtol if share < 0.5 else -0.4 * xtol
        value = excess(x)
        if value > 0:
            low = (x, value)
        else:
            high = (x, value)
    return high[0]


def near_guess(
    excess: Callable[[float], float], x: float, slope: float, xtol: float
) -> float | None:
    """A safe point, at most `xtol` above the root of a falling function that has this slope near x,
    about its root; None if there is none.
    """
    low: Point | None = None  # too little
    high: Point | None = None  # and enough
    x += xtol / 4
    for turn in range(_TURNS):
        value = excess(x)
        if value > 0:
            low = (x, value)
        else:
            high = (x, value)
        if high and low:
            slope = (high[1] - low[1]) / (high[0] - low[0])
        # the root is within xtol below `high`, as the slope says or as the bracket shows
        if high and (high[1] >= xtol / 2 * slope or (low and high[0] - low[0] <= xtol)):
            return high[0]
        if low is None or high is None:
            x -= min(max(value / slope, -1.0), 1.0) - xtol / 4
        elif turn % 4 < 3:
            past = max(high[0] - high[1] / slope + xtol / 4, low[0] + xtol / 4)
            x = min(past, high[0] - xtol / 4)
        else:
            x = (low[0] + high[0]) / 2
    return None


def largest_count(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n from 1 to `limit` that fits, as all smaller ones do; 0 if 1 does not. Small
    numbers, which cost less, are tried first.
    """
    low = 0
    high = 1
    while high <= limit and fits(high):
        low = high
        high = 2 * high
    rest = range(low + 1, min(high, limit + 1))
    return low + bisect_left(rest, True, key=lambda n: not fits(n))
