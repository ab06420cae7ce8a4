"""Delta of what was accounted for, from below, computed without the accountants.

A client that sends as much as it may, always in the same direction, is seen through a
one-dimensional pair: with it a round is a mixture P of N(k mu, 1), k being how often it is in the
cohort, without it Q = N(0, 1); mu is sensitivity / std. They are neighbours, so delta(epsilon) >=
sup_A P(A) - e^epsilon Q(A) over the rounds, and the same with P and Q exchanged. Under replace_one
with a hidden cohort of fixed size it may be a tenth below the accountants, who count both
directions at once.

>>> once = delta_lower_bound(4.377, 1.0, CERTAIN, 1)  # exact: Balle and Wang 2018
>>> poisson = delta_lower_bound(2.1246, 1.0, presence(0.01), 1000)  # 1e-6 by the accountants
>>> f"{once:.3g} {poisson:.2g}"
'1e-05 7.4e-07'
"""

import math
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import log_ndtr, logsumexp, ndtr
from scipy.stats import binom

from raydpfl.privacy import Guarantee

_CELLS = 1 << 16  # of the table from which a loss is inverted
_FAR = 9.0  # standard deviations beyond which a round's loss is left out, of mass 1e-19
_POINTS = 1 << 21  # of the grid of composed losses at most
_ORDERS = np.geomspace(1e-3, 1e4, 40)  # of the moments that bound what the grid leaves out
_GAP = 1e-3  # of epsilon: what rounding all losses down may cost
_LOST = 1e-15  # of probability: what may lie outside of the grid on either side
_ERROR = 1e-13  # of probability: the same, and the rounding of the Fourier transforms

# a claim, and the least delta that the mechanism has at its epsilon; None: unknown
ClaimDelta: TypeAlias = tuple[Guarantee, float | None]
Presence: TypeAlias = tuple[float, ...]  # see `presence`
CERTAIN: Presence = (0.0, 1.0)  # of a client in every cohort once


def presence(q: float, draws: int = 1) -> Presence:
    """The probabilities that a client comes up 0, 1, ... times in `draws` draws."""
    max_draws = int(binom.isf(1e-12, draws, q)) + 1
    pmf = binom.pmf(np.arange(min(max_draws, draws) + 1), draws, q)
    return tuple((pmf / pmf.sum()).tolist())


@lru_cache(maxsize=256)
def delta_lower_bound(epsilon: float, mu: float, presence: Presence, rounds: float) -> float:
    """The least delta, from 0 to 1, at `epsilon` >= 0 of a mechanism that contains `rounds` rounds
    of mu = sensitivity / std in which the client is drawn 0, 1, ... times with the probabilities
    `presence`; below the true delta of the pair by some per mille of epsilon at most. Where it is
    in all of them, `rounds` may be no whole number.
    """
    if presence == CERTAIN:
        total_mu = mu * math.sqrt(rounds)  # one Gaussian: Balle and Wang 2018, Theorem 8
        log_p = log_ndtr(total_mu / 2 - epsilon / total_mu)
        log_scaled_q = epsilon + log_ndtr(-total_mu / 2 - epsilon / total_mu)
        return float(-math.exp(log_p) * math.expm1(min(log_scaled_q - log_p, 0.0)))
    return max(_delta(epsilon, mu, presence, int(rounds), forward) for forward in (True, False))


def _delta(epsilon: float, mu: float, presence: Presence, rounds: int, forward: bool) -> float:
    """As `delta_lower_bound`, of P against Q (`forward`), or of Q against P."""
    times = np.flatnonzero(presence)
    weights = np.array(presence)[times]
    x = np.linspace(-_FAR, _FAR + times[-1] * mu, _CELLS)
    loss = logsumexp(
        np.log(weights)[:, None] + times[:, None] * mu * x - (times[:, None] * mu) ** 2 / 2, axis=0
    )
    if not forward:
        x, loss = x[::-1], -loss[::-1]
    step = max(_GAP * max(epsilon, 0.1) / rounds, (loss[-1] - loss[0]) / _CELLS)
    while True:
        first_index = math.floor(loss[0] / step)
        grid = step * np.arange(first_index, math.ceil(loss[-1] / step) + 1)
        points = np.interp(grid, loss, x)
        cdf = sum(w * ndtr(points - k * mu * forward) for k, w in zip(times, weights, strict=True))
        masses = np.abs(np.diff(cdf))  # of the losses from one grid point up to the next
        low, high = _window(grid[:-1], masses, rounds)
        if (high - low) / step < _POINTS:
            break
        step *= 2 * (high - low) / step / _POINTS
    size = next_fast_len(int((high - low) / step) + 2, real=True)
    places = (first_index + np.arange(len(masses))) % size
    composed_masses = irfft(rfft(np.bincount(places, masses, size)) ** rounds, size)
    tail_indices = np.arange(math.floor(epsilon / step) + 1, math.floor(high / step) + 1)
    mass = -np.expm1(epsilon - step * tail_indices)
    return max(0.0, float(composed_masses[tail_indices % size] @ mass) - _ERROR)


def _window(losses: np.ndarray, masses: np.ndarray, rounds: int) -> tuple[float, float]:
    """Numbers that a sum of losses is between, but for a mass of `_LOST` on either side."""
    is_positive = masses > 0
    logs = np.log(masses[is_positive])
    ends = []
    for sign in (-1, 1):
        moments = logsumexp(logs + sign * _ORDERS[:, None] * losses[is_positive], axis=1)
        ends.append(sign * float(((rounds * moments - math.log(_LOST)) / _ORDERS).min()))
    return ends[0], ends[1]
