"""From guesses and scores of canaries to an epsilon: the one-run lower bounds and the one-shot
estimate.

>>> round(one_run_bound(canaries=1000, guesses=200, right=180, delta=1e-5), 4)
1.7963
>>> one_run_bound(canaries=1000, guesses=200, right=110, delta=1e-5)  # a coin does as well
0.0
>>> round(curve_bound(canaries=1000, guesses=200, right=180, delta=1e-5), 3)
2.901

The lower bounds are theorems: however the guesses are made, with the confidence asked for, that of
[2] is below the epsilon of any mechanism that is (epsilon, delta)-private for every canary. That of
[3] refutes more of less: trade-off curves of one family, as that of the claimed mechanism at any
noise. Several independent runs with different canaries are one such mechanism, so their canaries
count together. The estimate [1] assumes that scores are Gaussian. It is sharp if they are, and
proves nothing.

References:
[1] Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar. One-shot empirical privacy estimation for
    federated learning. ICLR 2024.
[2] Steinke, Nasr, Jagielski. Privacy auditing with one (1) training run. NeurIPS 2023. Theorem 5.2.
[3] Mahloujifar, Melis, Chaudhuri. Auditing f-differential privacy in one run. ICML 2025. The proof
    for guesses on some of the canaries is in docs/proofs.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.special import expit, ndtr, ndtri
from scipy.stats import binom

from raydpfl.privacy import gaussian_epsilon
from raydpfl.privacy.search import safe_end

_MOST = 700.0  # the largest epsilon that is tried
_NOISE = 1e3  # the most noise that is tried, and the inverse of the least
INTERVAL = 1.96  # standard errors to either side: 95 %

# the least false-negative rate of attacks at a false-positive rate
TradeOffCurve: TypeAlias = Callable[[float], float]
# for an amount of noise above 0, a trade-off curve, which rises with the noise, and its epsilon at
# every delta, which falls
Family: TypeAlias = Callable[[float], tuple[TradeOffCurve, Callable[[float], float]]]


def one_run_p_value(epsilon: float, canaries: int, guesses: int, right: int, delta: float) -> float:
    """The p-value of "(epsilon, delta)-private", after v = `right` of r = `guesses` on the coins of
    m = `canaries` were right ([2], Theorem 5.2):

        P[Bin(r, s) >= v] + 2 m delta max_{1 <= i <= v} P[v > Bin(r, s) >= v - i] / i,

    where s = 1 / (1 + e^-epsilon).
    """
    if right == 0:
        return 1.0
    # P[Bin >= 0], ..., P[Bin >= v]
    tails = binom.sf(np.arange(-1, right), guesses, expit(epsilon))
    slopes = (tails[right - 1 :: -1] - tails[right]) / np.arange(1, right + 1)
    return float(min(1.0, tails[right] + 2 * canaries * delta * slopes.max()))


def one_run_bound(
    canaries: int,
    guesses: int,
    right: int,
    delta: float,
    confidence: float = 0.95,
    tolerance: float = 1e-9,
) -> float:
    """The largest epsilon that `right` of `guesses` on so many canaries refute, with this
    confidence; 0 if they refute none. `guesses` must have been fixed before the scores were seen.

    Args:
        delta: that epsilon is at.
        tolerance: of epsilon.

    Raises:
        ValueError: unless 0 <= right <= guesses <= canaries.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"{right} right of {guesses} guesses on {canaries} canaries")

    def excess(epsilon: float) -> float:
        return one_run_p_value(epsilon, canaries, guesses, right, delta) - (1 - confidence)

    if guesses == 0 or excess(0.0) >= 0:
        return 0.0
    # At s = v / r half of the mass lies at v and above.
    limit = _MOST if right == guesses else math.log(right / (guesses - right))
    return safe_end(excess, 0.0, limit, xtol=tolerance) if excess(limit) > 0 else limit


def refutes(
    curve: TradeOffCurve, canaries: int, guesses: int, right: int, confidence: float = 0.95
) -> bool:
    """Whether so many right guesses refute, with this confidence, that every canary is protected by
    a trade-off curve f ([3], Algorithm 2; docs/proofs.md). With p_j the probability that j guesses
    are right, in shares of the m = `canaries`,

        r_i = sum_(j >= i) j p_j / m,  h_i = sum_(j >= i) (guesses - j) p_j / m,
        h_i >= f(1 - r_(i+1)).

    If v = `right` or more came up with the probability 1 - confidence, then r_0 + h_0, which is
    guesses / m, would be more than that.

    Args:
        curve: f, its own inverse (symmetric), or a lower bound on it.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"{right} right of {guesses} guesses on {canaries} canaries")
    if right == 0:
        return False
    tail = (1 - confidence) / canaries
    r, h = tail * right, tail * (guesses - right)
    if curve(1 - r) < h:  # the least r_0 + h_0 is below then
        return False
    for i in range(right - 1, -1, -1):
        next_h = max(h, curve(1 - r))
        r += i / (guesses - i) * (next_h - h)
        h = next_h
        if r + h > guesses / canaries:
            return True
    return False


def gaussian(noise: float) -> tuple[TradeOffCurve, Callable[[float], float]]:
    """The family of N(0, noise^2) against N(1, noise^2)."""
    mu = 1 / noise
    return gaussian_curve(mu), lambda delta: float(gaussian_epsilon(mu, delta))


def gaussian_curve(mu: float) -> TradeOffCurve:
    """The trade-off curve of N(0, 1) against N(`mu`, 1)."""
    return lambda rate: float(ndtr(-ndtri(rate) - mu))


def curve_bound(
    canaries: int,
    guesses: int,
    right: int,
    delta: float,
    confidence: float = 0.95,
    family: Family = gaussian,
    tolerance: float = 1e-9,
) -> float:
    """The largest epsilon at `delta` of a family's trade-off curves that the guesses refute (see
    `refutes`); 0 if they refute none. The others are those of `one_run_bound`.

    Args:
        family: of curves by their noise; the search begins at 1.
        tolerance: of the noise, relative.
    """

    def refuted(noise: float) -> bool:
        return refutes(family(noise)[0], canaries, guesses, right, confidence)

    high = 1.0
    while not refuted(high):
        high *= 2
        if high > _NOISE:
            return 0.0
    low = high / 2
    while low >= 1 / _NOISE and refuted(low):
        low, high = low / 2, low
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return family(high)[1](delta)


def optimal_guess_count(
    evidence: np.ndarray, canaries: int, delta: float, confidence: float = 0.95
) -> int:
    """On how many canaries to guess, for the largest bound to be expected. It is fixed before
    anything is seen, and the expectation is 1.5 standard deviations low. `evidence` float64 [n] are
    log-likelihood ratios of simulated canaries, if the claim were true: a guess by the sign is
    right with probability 1 / (1 + e^-|evidence|).
    """
    chance = expit(np.sort(np.abs(evidence))[::-1])
    means = np.cumsum(chance)
    variances = np.cumsum(chance * (1 - chance))
    sizes = np.unique(np.geomspace(min(10, canaries), canaries, 30).astype(int))
    epsilons = []
    for r in sizes.tolist():
        place = max(1, round(r / canaries * len(chance))) - 1
        scale = canaries / len(chance)
        hits = min(r, scale * means[place] - 1.5 * math.sqrt(scale * variances[place]))
        epsilons.append(one_run_bound(canaries, r, max(0, int(hits)), delta, confidence, 1e-3))
    return int(sizes[np.argmax(epsilons)])


@dataclass(frozen=True)
class OneShot:
    """An estimate of epsilon with its 95 % interval, for two Gaussians of equal variance. `forward`
    and `backward` are for the Gaussians as fitted, from the world with the canary to that without,
    and back.
    """

    epsilon: float
    low: float
    high: float
    forward: float
    backward: float
    mu: float  # distance of the two worlds in standard deviations
    error: float  # standard error of mu

    def __str__(self) -> str:
        return f"{self.epsilon:.4g} ({self.low:.4g} to {self.high:.4g})"


def one_shot(
    statistics: np.ndarray,
    shifts: np.ndarray,
    inside: np.ndarray,
    mirrored: bool,
    worst: float,
    delta: float,
) -> OneShot:
    """The estimate [1] of epsilon at `delta`, for a canary of exposure `worst`.

    Args:
        statistics: float64 [m], what was released along a canary, in stds: N(0, 1) without it.
        shifts: float64 [m], how far a canary's presence should move it.
        inside: bool [m], the coins.
        mirrored: whether canaries outside send their opposite: the worlds are N(m, s^2) and
            N(-m, s^2), fitted to all. Else they are N(m, s^2), fitted to those inside, and N(0, 1).
    """
    if mirrored:
        x, e = np.where(inside, statistics, -statistics), shifts
    else:
        x, e = statistics[inside], shifts[inside]
    slope = float(e @ x / (e @ e))
    std = math.sqrt(float(((x - slope * e) ** 2).sum()) / max(len(x) - 1, 1))
    gap = 2.0 if mirrored else 1.0
    mean = slope * worst
    mu = gap * slope * worst / std
    error = math.hypot(gap * worst / math.sqrt(e @ e), mu / math.sqrt(2 * len(x)))
    mus = np.maximum([mu, mu - INTERVAL * error, mu + INTERVAL * error], 0.0)
    middle, low, high = gaussian_epsilon(mus, delta).tolist()
    forward = backward = middle
    if not mirrored:
        present, absent = (mean, std), (0.0, 1.0)
        forward = gaussian_pair_epsilon(present, absent, delta)
        backward = gaussian_pair_epsilon(absent, present, delta)
    return OneShot(middle, low, high, forward, backward, mu, error)


def gaussian_pair_epsilon(p: tuple[float, float], q: tuple[float, float], delta: float) -> float:
    """The smallest epsilon >= 0 with P(A) <= e^epsilon Q(A) + delta for all A, for Gaussians P and
    Q as (mean, std); at most 700.

    >>> round(gaussian_pair_epsilon((1.0, 1.0), (0.0, 1.0), 1e-5), 3)
    4.377
    """
    (m, s), (n, t) = p, q
    z = np.linspace(-14.0, 14.0, 1 << 16)
    losses = (((m + s * z - n) / t) ** 2 - z**2) / 2 + math.log(t / s)
    masses = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])

    def excess(epsilon: float) -> float:
        return float(masses @ -np.expm1(np.minimum(epsilon - losses, 0.0))) - delta

    if excess(0.0) <= 0:
        return 0.0
    return safe_end(excess, 0.0, _MOST, xtol=1e-9) if excess(_MOST) <= 0 else _MOST
