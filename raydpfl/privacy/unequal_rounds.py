"""Composition of rounds whose noise differs: privacy losses of several stds on one grid.

A round whose std lies between two levels a < b of at most 128 is counted as the mixture of the
rounds at a, with probability p, and at b. Its delta is at most that of the mixture at every epsilon
where std^m is the mean of a^m and b^m and mu^2 <= 4 (m + 1), as gaussian_delta is then convex in
std^m (docs/proofs.md, Rounds that differ). Elsewhere it is counted at a. Up to 128 stds are their
own levels.

>>> from raydpfl.privacy.pld import poisson_curves
>>> rounds = Rounds(lambda mu: poisson_curves(0.01, mu), np.array([1.0] * 50 + [0.5] * 50), True)
>>> (last,) = rounds.deltas(0, first=100)
>>> (same,) = Rounds(lambda mu: poisson_curves(0.01, mu), np.ones(100), True).deltas(0, first=100)
>>> bool(last[0] < same[0])
True
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from raydpfl.privacy import pld
from raydpfl.privacy.pld import CurvePair, LossDistribution

LEVELS = 128
_ORDERS = 24  # of Chernoff bounds on a window
_BLOCK = 1 << 22  # rounds times frequencies that are in memory at once
_NEGLIGIBLE_MODULUS = 1e-40  # of a transform, in modulus
_LEAST_MODULUS = 1e-16  # of a transform, below which it is rounding


class Rounds:
    """The losses of rounds 1 to T.

    Args:
        curves: the curves of a round by mu, as `SamplingScheme.curves` gives them.
        mus: sensitivity / std of each round, float64 [T], above 0.
        convex: whether the curves are sums with positive weights of `gaussian_delta` at `mu`.
        once_mu: of a Gaussian over everyone that is released next to them; 0: none.
    """

    def __init__(
        self,
        curves: Callable[[float], Sequence[CurvePair]],
        mus: np.ndarray,
        convex: bool,
        once_mu: float = 0.0,
    ):
        self._mus = np.asarray(mus, float)
        levels, weights = mu_levels(self._mus, convex, LEVELS)
        self.levels = len(levels)
        self._weights = np.pad(weights, ((0, 0), (0, int(once_mu > 0))))
        pairs = [curves(mu) for mu in levels.tolist()]
        self.directions = len(pairs[0])
        # about the std of the loss at each level, from those at five of them
        sample_index = np.unique(np.linspace(0, len(levels) - 1, 5).astype(int))
        sample_stds = [pld.discretise(*pairs[place][0]).std() for place in sample_index]
        stds = np.exp(np.interp(np.log(levels), np.log(levels[sample_index]), np.log(sample_stds)))
        self._variance = weights.sum(axis=0) @ stds**2 + once_mu**2
        # a loss reaches less than in proportion to mu; what is beyond counts as infinite
        furthest = int(levels.argmax())
        reaches = levels / levels[furthest] * _reach(pairs[furthest])
        if once_mu:
            gaussian: CurvePair = (lambda epsilon: pld.gaussian_delta(epsilon, once_mu),) * 2
            pairs.append((gaussian,) * self.directions)
            reaches = np.append(reaches, _reach(pairs[-1]))
        step = math.sqrt(self._variance / (len(mus) + (once_mu > 0))) / pld._STEPS_PER_STD
        self.step = max(step, reaches.max() / pld._MOST_POINTS)
        sizes = np.maximum(np.ceil(reaches / self.step), 1).astype(int).tolist()
        self._half = half = max(sizes)
        # by direction, of every level and, at last, of the Gaussian over everyone
        self._masses = np.zeros((self.directions, len(pairs), 2 * half + 1))
        self._finite = np.empty((self.directions, len(pairs)))
        for d, (i, n) in itertools.product(range(self.directions), enumerate(sizes)):
            up, down = pairs[i][d]
            loss = pld._on_grid(up, down, self.step, n)
            self._masses[d, i, half - n : half + n + 1] = loss.masses
            self._finite[d, i] = 1.0 - loss.infinite

    @property
    def coarse(self) -> bool:
        """As of `LossDistribution`."""
        return self._half >= pld._MOST_POINTS

    @cached_property
    def ends(self) -> list[np.ndarray]:
        """`deltas` after all rounds, by direction."""
        return [next(self.deltas(d, len(self._mus))) for d in range(self.directions)]

    def deltas(self, direction: int, first: int) -> Iterator[np.ndarray]:
        """Delta at epsilon = 0, step, 2 step, ... after `first`, ..., T rounds, an array each; the
        last value is the mass at infinity.
        """
        from scipy.fft import irfft, next_fast_len, rfft

        masses = self._masses[direction]
        upper, lower = self._window(masses, first)
        longest = max(upper.max() - lower.min() + 1, masses.shape[1])
        size = next_fast_len(int(longest), real=True)
        # entry k stands for the loss k * step, modulo the size
        transforms = np.empty((len(masses), size // 2 + 1), complex)
        centred_masses = np.zeros(size)
        for row, transform in zip(masses, transforms, strict=True):
            centred_masses[: self._half + 1] = row[self._half :]
            centred_masses[size - self._half :] = row[: self._half]
            transform[:] = rfft(centred_masses)
        # the frequencies at which anything is left of the first rounds, rounding included
        largest = np.abs(transforms[: self.levels]).max(axis=0)
        kept_mask = np.maximum(largest, _LEAST_MODULUS) ** first > _NEGLIGIBLE_MODULUS
        residue = _NEGLIGIBLE_MODULUS * len(kept_mask)
        transforms = transforms[:, kept_mask]
        power, cofactors = np.ones(transforms.shape[1], complex), np.zeros(transforms.shape[1])
        finite = 1.0

        def release(rows: np.ndarray, counts: np.ndarray) -> None:
            nonlocal power, cofactors, finite
            used_levels = np.flatnonzero(rows.any(axis=0))
            spectra = (rows[:, used_levels] @ transforms[used_levels].view(float)).view(complex)
            moduli = np.clip(np.abs(spectra), _LEAST_MODULUS, 1.0)
            # the sum over losses of the product of the moduli of all others
            ratios = (counts[:, None] / moduli).sum(axis=0)
            repeat_mask = counts > 1
            for transform in (spectra, moduli):
                transform[repeat_mask] **= counts[repeat_mask, None]
            cofactors = (cofactors + np.minimum(np.abs(power), 1.0) * ratios) * moduli.prod(axis=0)
            power = power * spectra.prod(axis=0)
            finite *= np.prod((rows @ self._finite[direction]) ** counts)

        if len(masses) > self.levels:
            release(np.eye(len(masses))[-1:], np.ones(1))
        _, place, counts = np.unique(self._mus[: first - 1], return_index=True, return_counts=True)
        block = max(1, _BLOCK // transforms.shape[1])
        for start in range(0, len(place), block):
            release(self._weights[place[start : start + block]], counts[start : start + block])
        for weights, top in zip(self._weights[first - 1 :], upper.tolist(), strict=True):
            release(weights[None], np.ones(1))
            spectrum = np.zeros(len(kept_mask), complex)
            spectrum[kept_mask] = power
            composed_masses = irfft(spectrum, size)
            loss = LossDistribution(self.step, composed_masses, 0.0)
            error = pld._WINDOW + pld._rounding_error(2 * cofactors, 0) + residue + (1.0 - finite)
            yield loss._finite_deltas(composed_masses[: top + 1], top, top) + error

    def _window(self, masses: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
        """The grid indices that the sums are above, or below, with probability at most 1e-15, after
        `first`, ..., T rounds. `masses` float64 [levels, and the Gaussian over everyone, 2n + 1].
        """
        surprise = math.log(1 / pld._WINDOW)
        rounds = len(self._weights)
        best = self.step * math.sqrt(2 * surprise / self._variance)  # if the sum were Gaussian
        largest = (np.arange(first, rounds + 1) + (len(masses) - self.levels)) * self._half
        growth = math.sqrt(rounds / first)
        low, high = min(0.3 * best, 1 / self._half), max(3 * best * growth, 100 / self._half)
        # no e^(order index) overflows
        orders = np.geomspace(low, min(high, 600 / self._half), _ORDERS)
        index = np.arange(-self._half, self._half + 1)
        ends = []
        for sign in (1, -1):

            def bound(i: int, sign: int = sign) -> np.ndarray:
                means = masses @ np.exp(sign * orders[i] * index)
                logs = np.log(self._weights[:, : self.levels] @ means[: self.levels]).cumsum()
                once_log = np.log(means[self.levels :]).sum()
                return (logs[first - 1 :] + once_log + surprise) / orders[i]

            ends.append(np.ceil(np.minimum(pld.min_bound(bound, _ORDERS), largest)).astype(int))
        return np.maximum(ends[0], 1), np.minimum(-ends[1], 0)


def mu_levels(mus: np.ndarray, convex: bool, max_levels: int) -> tuple[np.ndarray, np.ndarray]:
    """mu at each of at most `max_levels` levels, float64 [k], and the probability of each level in
    each round, float64 [T, k]. `mus` and `convex` are as those of `Rounds`.
    """
    distinct, place = np.unique(mus, return_inverse=True)
    if len(distinct) <= max_levels:
        return distinct, np.eye(len(distinct))[place.reshape(-1)]
    levels = np.geomspace(distinct[0], distinct[-1], max_levels)
    levels[[0, -1]] = distinct[[0, -1]]
    above = np.clip(np.searchsorted(levels, mus), 1, max_levels - 1)  # the level of less noise
    weights = np.zeros((len(mus), max_levels))
    rounds = np.arange(len(mus))
    share = np.ones(len(mus))
    if convex:
        power = max(1.0, distinct[-1] ** 2 / 4 - 1)
        high, low = levels[above], levels[above - 1]
        share = ((low / mus) ** power - 1) / ((low / high) ** power - 1)
    weights[rounds, above] = share
    weights[rounds, above - 1] = 1 - share
    return levels, weights


def _reach(pairs: Sequence[CurvePair]) -> float:
    """The largest loss, of all directions."""
    return max(pld._reach(curve) for pair in pairs for curve in pair)
