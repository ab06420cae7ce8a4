"""Renyi divergences of a Gaussian sum, over everyone or over a uniform subset of fixed size, at all
orders at once.

>>> # 002 on MNIST, at the noise that exact accounting asks for
>>> one_step = fixed_size(q=10 / 600, mu=2 / 3.43)
>>> epsilons(one_step, delta=1e-2, counts=[1, 300]).round(3)  # the exact epsilon is 0.3
array([0.028, 0.789])

dp-accounting has the same bound ([1] Theorem 27), order by order in Python: 60 ms a mechanism. The
moments in it are integrals of positive functions here, which lose nothing to cancellation.

[1] Wang, Balle, Kasiviswanathan. Subsampled Renyi differential privacy and analytical moments
accountant. AISTATS 2019.
[2] Canonne, Kamath, Steinke. The discrete Gaussian for differential privacy. NeurIPS 2020.
Proposition 12.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

# dp-accounting's own
ORDERS = np.array([*(1 + k / 10 for k in range(1, 100)), *range(11, 64), 128, 256, 512, 1024])
_LOW = np.floor(ORDERS).astype(int)
_HIGH = np.ceil(ORDERS).astype(int)
_WHOLE = np.unique(np.concatenate([_LOW, _HIGH]))
_EXACT = 256  # orders above it take the simpler bound on all moments, as dp-accounting does
_POINTS = 400  # of the trapezoidal rule, whose error is below 1e-13 for these integrands


def gaussian(mu: float) -> np.ndarray:
    """Divergences of N(mu, 1) and N(0, 1) at `ORDERS`, float64 [orders]: alpha mu^2 / 2."""
    return ORDERS * (mu * mu / 2)


def fixed_size(q: float, mu: float) -> np.ndarray:
    """Bounds on the divergences at `ORDERS` of one step on a uniform subset of fraction q, 0 < q <
    1, under replace-one ([1] Theorem 27), float64 [orders]; mu is sensitivity / std of the sum,
    2c/std. Between whole orders the log-moments are interpolated ([1] Corollary 10).
    """
    i = np.arange(_WHOLE[-1] + 1)
    # The logarithm of what [1] has for the i-th moment of L - 1: 2 E L^i or, if that is less, 4
    # times the moment, an odd one bounded by its neighbours.
    simple = math.log(2) + i * (i - 1) * (mu * mu / 2)
    even = _even_moments(mu)
    exact = i[2 : _EXACT + 1]
    least = simple.copy()
    neighbours = (even[exact // 2] + even[(exact + 1) // 2]) / 2
    least[exact] = np.minimum(simple[exact], math.log(4) + neighbours)
    simple[2] = least[2]
    terms = np.where(_WHOLE[:, None] <= _EXACT, least, simple) + i * math.log(q) + _log_binomials()
    terms[:, 0] = 0.0
    terms[:, 1] = -np.inf
    top = terms.max(axis=1)
    moments = top + np.log(np.exp(terms - top[:, None]).sum(axis=1))
    share = ORDERS - _LOW
    below, above = (moments[np.searchsorted(_WHOLE, order)] for order in (_LOW, _HIGH))
    return ((1 - share) * below + share * above) / (ORDERS - 1)


def epsilons(
    one_step: np.ndarray, delta: float, counts: ArrayLike, once: np.ndarray | float = 0.0
) -> np.ndarray:
    """Epsilon float64 [...] after `counts` [...] steps, by the conversion of [2] as dp-accounting
    has it, from divergences of one step at `ORDERS`, float64 [orders], and of what is spent `once`
    in all.
    """
    spent = np.asarray(counts, float)[..., None] * one_step + once
    epsilon = spent + np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1)
    # The total variation distance is at most sqrt(1 - e^-KL), and KL is at most any of these.
    return np.where(-np.expm1(-spent) < delta**2, 0.0, epsilon).min(axis=-1).clip(min=0.0)


def _even_moments(mu: float) -> np.ndarray:
    """log E (L - 1)^(2k), k = 0, ..., _EXACT / 2, L = e^(mu x - mu^2/2) for x ~ N(0, 1)."""
    i = np.arange(0, _EXACT + 1, 2)[:, None]
    # The integrand peaks near i mu, and near +-sqrt(i) if mu is small; 40 below a large i mu it has
    # no weight.
    low = np.maximum(-np.sqrt(i) - 10, i * mu - 40)
    high = np.maximum(np.sqrt(i), i * mu) + 10 + np.sqrt(i)
    x = low + (high - low) * np.linspace(0, 1, _POINTS)
    loss = mu * x - mu * mu / 2
    with np.errstate(divide="ignore"):
        small = np.log(np.abs(np.expm1(np.minimum(loss, 1))))
        size = np.where(loss > 1, loss + np.log1p(-np.exp(-np.maximum(loss, 1))), small)
        logs = i * np.where(i > 0, size, 0.0) - x * x / 2
    top = logs.max(axis=1)
    step = (high - low)[:, 0] / (_POINTS - 1)
    sums = np.log(np.exp(logs - top[:, None]).sum(axis=1))
    return top + sums + np.log(step / math.sqrt(2 * math.pi))


@lru_cache
def _log_binomials() -> np.ndarray:
    """Logarithms of binomial coefficients (order over i), float64 [whole orders, i]."""
    from scipy.special import gammaln

    order = _WHOLE[:, None]
    i = np.arange(_WHOLE[-1] + 1)
    return gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
