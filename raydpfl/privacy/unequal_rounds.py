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

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from raydpfl.privacy import pld
from raydpfl.privacy.pld import CurvePair, LossDistribution

LEVELS = 128
_ORDERS = 24  # of Chernoff bounds on a window


class Rounds:
    """The losses of rounds 1 to T.

    Args:
        curves: the curves of a round by mu, as `SamplingScheme.curves` gives them.
        mus: sensitivity / std of each round, float64 [T], above 0.
        convex: whether the curves are sums with positive weights of `gaussian_delta` at `mu`.
        once: mu of a Gaussian over everyone that is released next to them; 0: none.
    """

    def __init__(
        self,
        curves: Callable[[float], Sequence[CurvePair]],
        mus: np.ndarray,
        convex: bool,
        once: float = 0.0,
    ):
        levels, self._weights = in_levels(np.asarray(mus, float), convex, LEVELS)
        self.levels = len(levels)
        pairs = [curves(mu) for mu in levels.tolist()]
        self.directions = len(pairs[0])
        if once:
            gaussian: CurvePair = (lambda epsilon: pld.gaussian_delta(epsilon, once),) * 2
            pairs.append((gaussian,) * self.directions)
        reaches = [max(pld._reach(curve) for pair in kind for curve in pair) for kind in pairs]
        self._variance = self._weights.sum(axis=0) @ _stds(levels, pairs) ** 2 + once**2
        step = math.sqrt(self._variance / (len(mus) + (once > 0))) / pld._STEPS_PER_STD
        self.step = max(step, max(reaches) / pld._MOST_POINTS)
        sizes = [max(1, math.ceil(reach / self.step)) for reach in reaches]
        # by direction, of every level and, at last, of the Gaussian over everyone
        self._losses = [
            [pld._on_grid(*kind[d], self.step, n) for kind, n in zip(pairs, sizes, strict=True)]
            for d in range(self.directions)
        ]

    @property
    def coarse(self) -> bool:
        """As of `LossDistribution`."""
        return any(loss.coarse for losses in self._losses for loss in losses)

    def deltas(self, direction: int, first: int) -> Iterator[np.ndarray]:
        """Delta at epsilon = 0, step, 2 step, ... after `first`, ..., T rounds, an array each; the
        last value is the mass at infinity.
        """
        from scipy.fft import irfft, next_fast_len

        losses = self._losses[direction]
        levels = self._weights.shape[1]
        upper, lower = self._window(losses, first)
        longest = max(upper.max() - lower.min() + 1, *(len(loss.masses) for loss in losses))
        size = next_fast_len(int(longest), real=True)
        transforms = np.stack([_centred(loss, size) for loss in losses])
        kept = np.array([1.0 - loss.infinite for loss in losses])
        power, others = np.ones(transforms.shape[1], complex), np.zeros(transforms.shape[1])
        finite = 1.0

        def release(weights: np.ndarray, count: int) -> None:
            nonlocal power, others, finite
            some = np.flatnonzero(weights)
            one = sum(weights[i] * transforms[i] for i in some.tolist())
            modulus = np.minimum(np.abs(one), 1.0)
            # the sum over losses of the product of the moduli of all others
            less = np.minimum(np.abs(power), 1.0)
            others = others * modulus**count + less * count * modulus ** (count - 1)
            power = power * one**count
            finite *= (weights[some] @ kept[some]) ** count

        rows = np.pad(self._weights, ((0, 0), (0, len(losses) - levels)))
        if len(losses) > levels:
            release(np.eye(len(losses))[-1], 1)
        same, counts = np.unique(rows[: first - 1], axis=0, return_counts=True)
        for weights, count in zip(same, counts.tolist(), strict=True):
            release(weights, count)
        for place, weights in enumerate(rows[first - 1 :]):
            release(weights, 1)
            top = int(upper[place])
            composed = irfft(power, size)
            loss = LossDistribution(self.step, composed, 0.0)
            off = pld._WINDOW + pld._rounding(2 * others, 0) + (1.0 - finite)
            yield loss._finite(composed[: top + 1], top, top) + off

    def _window(
        self, losses: Sequence[LossDistribution], first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The grid indices that the sums are above, or below, with probability at most 1e-15, after
        `first`, ..., T rounds (Chernoff, by the best of some orders).
        """
        surprise = math.log(1 / pld._WINDOW)
        levels = self._weights.shape[1]
        best = self.step * math.sqrt(2 * surprise / self._variance)  # if the sum were Gaussian
        halves = np.array([len(loss.masses) // 2 for loss in losses])
        least, longest = 1 / halves.max(), 100 / halves.max()
        early = math.sqrt(len(self._weights) / first)
        orders = np.geomspace(min(0.3 * best, least), max(3 * best * early, longest), _ORDERS)
        with np.errstate(divide="ignore"):
            logs = [np.log(loss.masses) for loss in losses]
            shared = np.log(self._weights)
        most = (self._weights > 0) @ halves[:levels]
        largest = most.cumsum()[first - 1 :] + halves[levels:].sum()
        ends = []
        for sign in (1, -1):

            def bound(i: int, sign: int = sign) -> np.ndarray:
                means = np.array(
                    [
                        pld._log_sum(log + sign * orders[i] * np.arange(-half, half + 1))
                        for log, half in zip(logs, halves.tolist(), strict=True)
                    ]
                )
                spent = np.logaddexp.reduce(shared + means[:levels], axis=1).cumsum()
                return (spent[first - 1 :] + means[levels:].sum() + surprise) / orders[i]

            ends.append(np.ceil(np.minimum(pld.least_bound(bound, _ORDERS), largest)).astype(int))
        return np.maximum(ends[0], 1), np.minimum(-ends[1], 0)


def in_levels(mus: np.ndarray, convex: bool, most: int) -> tuple[np.ndarray, np.ndarray]:
    """mu at each of at most `most` levels, float64 [k], and the probability of each level in each
    round, float64 [T, k]. `mus` and `convex` are as those of `Rounds`.
    """
    distinct, place = np.unique(mus, return_inverse=True)
    if len(distinct) <= most:
        return distinct, np.eye(len(distinct))[place.reshape(-1)]
    levels = np.geomspace(distinct[0], distinct[-1], most)
    levels[[0, -1]] = distinct[[0, -1]]
    above = np.clip(np.searchsorted(levels, mus), 1, most - 1)  # the level of less noise
    weights = np.zeros((len(mus), most))
    rounds = np.arange(len(mus))
    share = np.ones(len(mus))
    if convex:
        power = max(1.0, distinct[-1] ** 2 / 4 - 1)
        high, low = levels[above], levels[above - 1]
        share = ((low / mus) ** power - 1) / ((low / high) ** power - 1)
    weights[rounds, above] = share
    weights[rounds, above - 1] = 1 - share
    return levels, weights


def _stds(levels: np.ndarray, pairs: Sequence[Sequence[CurvePair]]) -> np.ndarray:
    """About the std of the loss at each level, from those at five of them."""
    some = np.unique(np.linspace(0, len(levels) - 1, 5).astype(int))
    known = [pld.discretise(*pairs[place][0]).std() for place in some]
    return np.exp(np.interp(np.log(levels), np.log(levels[some]), np.log(known)))


def _centred(loss: LossDistribution, size: int) -> np.ndarray:
    """The Fourier transform of a loss whose entry k stands for the loss k * step, modulo `size`."""
    from scipy.fft import rfft

    masses = np.zeros(size)
    half = len(loss.masses) // 2
    np.add.at(masses, np.arange(-half, half + 1) % size, loss.masses)
    return rfft(masses)
