"""Renyi divergences of a Gaussian sum, over everyone, over a uniform subset of fixed size or over a
Poisson sample, at all orders at once.

>>> # 002 on MNIST, at the noise that exact accounting asks for
>>> one_step = fixed_size(q=10 / 600, mu=2 / 3.43)
>>> epsilons(one_step, delta=1e-2, counts=[1, 300]).round(3)  # the exact epsilon is 0.3
array([0.028, 0.789])

dp-accounting has the same bound for fixed sizes ([1] Theorem 27), order by order in Python: 60 ms a
mechanism. The moments in it are integrals of positive functions here, which lose nothing to
cancellation. Its bounds for Poisson samples, 0.1 s a mechanism there, are the same here.

[1] Wang, Balle, Kasiviswanathan. Subsampled Renyi differential privacy and analytical moments
accountant. AISTATS 2019.
[2] Canonne, Kamath, Steinke. The discrete Gaussian for differential privacy. NeurIPS 2020.
Proposition 12.
[3] Mironov, Talwar, Zhang. Renyi differential privacy of the sampled Gaussian mechanism. 2019.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

# dp-accounting's own
ORDERS = np.array([*(1 + k / 10 for k in range(1, 100)), *range(11, 64), 128, 256, 512, 1024])
_FLOORS = np.floor(ORDERS).astype(int)
_CEILS = np.ceil(ORDERS).astype(int)
_WHOLE_ORDERS = np.unique(np.concatenate([_FLOORS, _CEILS]))
_MAX_EXACT_ORDER = 256  # above it the simpler bound on all moments is taken, as in dp-accounting
_TERMS = (125, 250, 500, 1000)  # of the series of Poisson samples, until they are enough
_POINTS = 400  # of the trapezoidal rule, whose error is below 1e-13 for these integrands


def gaussian(mu: float) -> np.ndarray:
    """Divergences of N(mu, 1) and N(0, 1) at `ORDERS`, float64 [orders]: alpha mu^2 / 2."""
    return ORDERS * (mu * mu / 2)


def fixed_size(q: float, mu: float) -> np.ndarray:
    """Bounds on the divergences at `ORDERS` of one step on a uniform subset of fraction q, 0 < q <
    1, under replace-one ([1] Theorem 27), float64 [orders]; mu is 2c/std of the sum. Between whole
    orders the log-moments are interpolated ([1] Corollary 10).
    """
    i = np.arange(_WHOLE_ORDERS[-1] + 1)
    # The logarithm of what [1] has for the i-th moment of L - 1: 2 E L^i or, if that is less, 4
    # times the moment, an odd one bounded by its neighbours.
    simple = math.log(2) + i * (i - 1) * (mu * mu / 2)
    even_moments = _even_moments(mu)
    exact = i[2 : _MAX_EXACT_ORDER + 1]
    moment_bounds = simple.copy()
    neighbours = (even_moments[exact // 2] + even_moments[(exact + 1) // 2]) / 2
    moment_bounds[exact] = np.minimum(simple[exact], math.log(4) + neighbours)
    simple[2] = moment_bounds[2]
    moments = np.where(_WHOLE_ORDERS[:, None] <= _MAX_EXACT_ORDER, moment_bounds, simple)
    return _amplified_divergences(q, moments)


def fixed_size_of(q: float, renyi: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Bounds on the divergences at `ORDERS` of one step of any mechanism on a uniform subset of
    fraction q, under replace-one ([1] Theorem 9), float64 [orders], of the function that gives
    those over everyone at whole orders from 2 on.

    Of the i-th moment of (p - r) / s, for the outputs p, r, s of three neighbours, it has 2 E L^i
    or 2^i E |L - 1|^i, the triangle inequality. E |L - 1|^i is at most, for every k >= i, a^((k -
    i) / (k - 2)) b^((i - 2) / (k - 2)) by Lyapunov's inequality, a = E (L - 1)^2 and b = E L^k + 1,
    which is above E |L - 1|^k.
    """
    i = np.arange(_WHOLE_ORDERS[-1] + 1)
    divergences = renyi(i[2:].astype(float))
    large = (i[2:] - 1) * divergences  # log E L^i
    second = math.log(math.expm1(large[0])) if large[0] < 700 else large[0]
    k = i[3:]
    share = (i[2:, None] - 2) / (k - 2)
    central = (1 - share) * second + share * np.logaddexp(large[1:], 0.0)
    central = np.where(share <= 1, central, np.inf).min(axis=1)
    moments = np.zeros(len(i))
    moments[2:] = np.minimum(math.log(2) + large, i[2:] * math.log(2) + central)
    return _amplified_divergences(q, np.broadcast_to(moments, (len(_WHOLE_ORDERS), len(i))))


def poisson(q: float, mu: float) -> np.ndarray:
    """Divergences at `ORDERS` of one step on a Poisson sample of rate q, 0 < q <= 1, under
    add_remove ([3]), float64 [orders]; mu is sensitivity / std of the sum.

    They are log E (1 + y)^alpha / (alpha - 1), y = q (L - 1): at whole orders a binomial sum, of
    which 1 is taken away first, at others the bound of dp-accounting, see `_series`.
    """
    if q == 1:
        return gaussian(mu)
    i = np.arange(_WHOLE_ORDERS[-1] + 1)
    terms = _log_binomials() + i * math.log(q) + (_WHOLE_ORDERS[:, None] - i) * math.log1p(-q)
    with np.errstate(divide="ignore"):
        excess = _log_sums((terms + _log_expm1(i * (i - 1) * (mu * mu / 2)))[1:])  # from order 2
    moments = np.empty(len(ORDERS))
    moments[_FLOORS < ORDERS] = _series(q, mu)
    whole = ORDERS[_FLOORS == ORDERS]
    moments[_FLOORS == ORDERS] = np.logaddexp(0, excess[np.searchsorted(_WHOLE_ORDERS[1:], whole)])
    return moments / (ORDERS - 1)


def _series(q: float, mu: float) -> np.ndarray:
    """Bounds on log E (1 + y)^alpha between whole orders, float64 [orders]: [3] section 3.3 with
    the absolute values of the terms, as dp-accounting has it; infinite where these are too few.
    """
    orders = ORDERS[_FLOORS < ORDERS]
    moments = np.full(len(orders), np.inf)
    for count in _TERMS:
        mask = np.isinf(moments)
        if mask.any():
            moments[mask] = _partial_sums(q, mu, orders[mask, None], np.arange(count))
    return moments


def _partial_sums(q: float, mu: float, order: np.ndarray, i: np.ndarray) -> np.ndarray:
    """Those of the terms `i`, float64 [orders]; `order` float64 [orders, 1]."""
    from scipy.special import gammaln, log_ndtr

    j = order - i
    middle = math.log(1 / q - 1) / mu**2 + 0.5  # where both parts of the mixture are alike
    binomials = gammaln(order + 1) - gammaln(i + 1) - gammaln(j + 1)
    log_q, log_rest = math.log(q), math.log1p(-q)
    below = i * log_q + j * log_rest + i * (i - 1) * (mu * mu / 2) + log_ndtr((middle - i) * mu)
    above = j * log_q + i * log_rest + j * (j - 1) * (mu * mu / 2) + log_ndtr((j - middle) * mu)
    terms = np.stack([below, above]) + binomials
    sums = np.logaddexp(*np.logaddexp.accumulate(terms, axis=2))
    small = (np.diff(terms) < 0).all(0) & (terms.max(0) < sums - 30)[:, 1:]
    first_index = small.argmax(1) + 1
    return np.where(small.any(1), sums[np.arange(len(order)), first_index], np.inf)


def _amplified_divergences(q: float, moments: np.ndarray) -> np.ndarray:
    """Divergences at `ORDERS` from log-bounds on the moments of L - 1, float64 [orders, i]."""
    i = np.arange(_WHOLE_ORDERS[-1] + 1)
    terms = moments + i * math.log(q) + _log_binomials()
    terms[:, 0] = 0.0
    terms[:, 1] = -np.inf
    moments = _log_sums(terms)
    share = ORDERS - _FLOORS
    below, above = (moments[np.searchsorted(_WHOLE_ORDERS, order)] for order in (_FLOORS, _CEILS))
    return ((1 - share) * below + share * above) / (ORDERS - 1)


def mixture(parts: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
    """Divergences at `ORDERS` of a step that is one of several and says which, from their
    probabilities and divergences; what is missing from 1 shows nothing.
    """
    logs = [math.log(weight) + (ORDERS - 1) * divergences for weight, divergences in parts]
    nothing = 1 - sum(weight for weight, _ in parts)
    logs += [np.full(len(ORDERS), math.log(nothing))] if nothing > 0 else []
    return np.logaddexp.reduce(logs) / (ORDERS - 1)


def epsilons(
    one_step: np.ndarray, delta: float, counts: ArrayLike, offset: np.ndarray | float = 0.0
) -> np.ndarray:
    """Epsilon float64 [...] after `counts` [...] steps, by the conversion of [2] as dp-accounting
    has it, from divergences of one step and of what is spent once (`offset`), float64 [orders].
    """
    divergences = np.asarray(counts, float)[..., None] * one_step + offset
    epsilon = divergences + np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1)
    # The total variation distance is at most sqrt(1 - e^-KL), and KL is at most any of these.
    return np.where(-np.expm1(-divergences) < delta**2, 0.0, epsilon).min(axis=-1).clip(min=0.0)


def _even_moments(mu: float) -> np.ndarray:
    """log E (L - 1)^(2k), 2k = 0, ..., _MAX_EXACT_ORDER, L = e^(mu x - mu^2/2), x ~ N(0, 1)."""
    i = np.arange(0, _MAX_EXACT_ORDER + 1, 2)[:, None]
    # The integrand peaks near i mu, and near +-sqrt(i) if mu is small; 40 below a large i mu it has
    # no weight.
    low = np.maximum(-np.sqrt(i) - 10, i * mu - 40)
    high = np.maximum(np.sqrt(i), i * mu) + 10 + np.sqrt(i)
    x = low + (high - low) * np.linspace(0, 1, _POINTS)
    loss = mu * x - mu * mu / 2
    with np.errstate(divide="ignore"):
        logs = i * np.where(i > 0, _log_expm1(loss), 0.0) - x * x / 2
    step = (high - low)[:, 0] / (_POINTS - 1)
    return _log_sums(logs) + np.log(step / math.sqrt(2 * math.pi))


def _log_expm1(x: np.ndarray) -> np.ndarray:
    """log |e^x - 1|."""
    small = np.log(np.abs(np.expm1(np.minimum(x, 1))))
    return np.where(x > 1, x + np.log1p(-np.exp(-np.maximum(x, 1))), small)


def _log_sums(logs: np.ndarray) -> np.ndarray:
    """The logarithms of the sums of the exponentials of each row."""
    top = logs.max(axis=1)
    return top + np.log(np.exp(logs - top[:, None]).sum(axis=1))


@lru_cache
def _log_binomials() -> np.ndarray:
    """Logarithms of binomial coefficients (order over i), float64 [whole orders, i]."""
    from scipy.special import gammaln

    order = _WHOLE_ORDERS[:, None]
    i = np.arange(_WHOLE_ORDERS[-1] + 1)
    return gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)
