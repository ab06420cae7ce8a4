"""Quadratic objectives as regression data, and what federated averaging makes of them, solved
exactly.

A linear model w without bias on rows x with targets y has the loss 1/2 mean_j (x_j . w - y_j)^2, so
rows and targets of a client are a quadratic f_i of its own, and methods can be checked against
solutions instead of against other runs.

Clients with f_i(x) = 1/2 (a_i x - b_i)^2 (000 sec. 2.1) that make Q full gradient steps with
learning rate eta move from x to

    x + s_i (b_i / a_i - x),    s_i = 1 - (1 - eta a_i^2)^Q,

so where a method stands still is the zero of a piecewise linear function. On 000 eq. 8, with the
optimum 0, one step of clipped SGD (Q = 1) stands off it, and the plain average of many steps stands
further off than the clipped one, which is the second half of Claim 2.2:

>>> a, b = (1, 2, 6), (4, 1, -1)
>>> for steps, bound in ((1, None), (1, 0.01), (1000, None), (1000, 0.01)):
...     print(steps, bound, "{:.4f} {:.4f}".format(*stationary(a, b, steps, lr=0.01, bound=bound)))
1 None 0.0000 0.0000
1 0.01 0.5000 0.5000
1000 None 1.4444 1.4444
1000 0.01 0.5000 0.5000
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import numpy as np


def stationary(
    a: Sequence[float],
    b: Sequence[float],
    steps: int,
    lr: float,
    bound: float | None,
    sends: Literal["update", "model"] = "update",
) -> tuple[float, float]:
    """Where federated averaging of f_i(x) = 1/2 (a_i x - b_i)^2 stands still: the least and the
    greatest such x, mostly one and the same.

    All clients take part, each with `steps` full gradient steps of learning rate `lr`, and what one
    sends is clipped to `bound` (None: not at all): its update, sum_i clip(s_i (b_i/a_i - x), c) = 0
    (000 eq. 8, Table 1); or its model, mean_i clip(x + s_i (b_i/a_i - x), c) = x (000 eq. 5).
    Neither side minus the other ever rises with x, and both are linear between breakpoints; the
    zero is found in fractions, from s_i in float64. The server's learning rate does not matter.

    Raises:
        ValueError: where clients diverge, lr a_i^2 not below 2, or no a_i is other than 0.
    """
    clients = _pulls(a, b, steps, lr)
    if bound is None:
        pulled = float(sum(s * own for s, own in clients) / sum(s for s, _ in clients))
        return pulled, pulled
    c = Fraction(bound)
    if sends == "update":
        points = [own + side / s for s, own in clients if s for side in (c, -c)]
    else:
        turns = [(side - s * own) / (1 - s) for s, own in clients if s != 1 for side in (c, -c)]
        points = [c, -c, *turns]
    points = sorted(set(points))
    values = [_excess(clients, c, sends, x) for x in points]
    zeros = [x for x, value in zip(points, values, strict=True) if value == 0]
    if not zeros:
        after = next(index for index, value in enumerate(values) if value < 0)
        x0, x1 = points[after - 1 : after + 1]
        y0, y1 = values[after - 1 : after + 1]
        zeros = [(x0 * y1 - x1 * y0) / (y1 - y0)]
    return float(zeros[0]), float(zeros[-1])


def _excess(
    clients: Sequence[tuple[Fraction, Fraction]], c: Fraction, sends: str, x: Fraction
) -> Fraction:
    """What clients at x pull it by, all together: where that is 0, averaging stands still."""
    start = x if sends == "model" else Fraction(0)
    each = (min(max(start + s * (own - x), -c), c) - start for s, own in clients)
    return sum(each, Fraction(0))


def _pulls(
    a: Sequence[float], b: Sequence[float], steps: int, lr: float
) -> list[tuple[Fraction, Fraction]]:
    """(s_i, b_i/a_i) of every client: it goes the share s_i of the way to its own optimum."""
    rate = lr * np.square(np.asarray(a, float))
    if not rate.any() or rate.max() >= 2:
        raise ValueError(
            f"some a_i must not be 0, and lr a_i^2 must be below 2; it is {rate.tolist()}"
        )
    small = -np.expm1(steps * np.log1p(-np.minimum(rate, 0.5)))
    pulls = np.where(rate < 0.5, small, 1 - (1 - rate) ** steps)
    return [
        (Fraction(s), Fraction(target) / Fraction(slope) if slope else Fraction(0))
        for s, slope, target in zip(pulls, a, b, strict=True)
    ]


def model_clip_limit(bound: float, steps: int, lr: float) -> float:
    """lambda c / (3 - 2 lambda), lambda = (1 - lr)^Q: where clipping the model converges for a =
    (1, 1, 1), b = (-c/2, -c/2, kc).

    000 Claim 2.1, for k > 4 and lr below 1. The optimum is (k - 1) c / 3, more than `bound`,
    whatever Q and lr are.

    >>> model_clip_limit(1.0, 1, 0.5)
    0.25
    >>> stationary((1, 1, 1), (-0.5, -0.5, 5), 1, 0.5, bound=1.0, sends="model")[0]
    0.25
    """
    kept = (1 - lr) ** steps
    return kept * bound / (3 - 2 * kept)


def harmless_lr(a: Sequence[float], b: Sequence[float], bound: float) -> float:
    """The largest learning rate with which one local step, its update clipped to `bound`, still
    stands still at the optimum: nothing is clipped there (000 Claim 2.2; infinite if no client
    moves there).

    It is c / max_i |f_i'(x*)|. The paper prints 1 / max_i, which is that for c = 1 and too large
    for any smaller c. It must also be below 2 / max_i a_i^2, or clients diverge.
    """
    slopes = np.asarray(a, float)
    targets = np.asarray(b, float)
    optimum = slopes @ targets / (slopes @ slopes)
    steepest = np.abs(slopes * (slopes * optimum - targets)).max()
    return float(bound / steepest) if steepest else math.inf
