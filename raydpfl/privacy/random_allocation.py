"""Random allocation: each client takes part in exactly k of the T rounds of an epoch, drawn afresh
for every epoch. With k = 1 this is balls-in-bins sampling [1].

With a client the rounds of an epoch show N(mu 1_S, I), S a uniform k-subset of the T rounds, and
without it Q = N(0, I). This pair dominates both directions, adaptive updates included ([1], [2];
docs/proofs.md). For k = 1 its likelihood ratio is a mean of independent ones, under Q

    L = (1/T) sum_i exp(mu g_i - mu^2 / 2),  g_i standard normal,

and its curves are E (L - e^eps)+ and E (1 - e^eps L)+. For k > 1 they are at most those of the
product of k such means, over blocks of the T rounds [2]. All of these grow with L in the convex
order. So every ratio, and every sum of two, is split over the two nearest points of a geometric
grid with its mean kept, as in connect-the-dots [3]; a mean of T takes log2 T such sums. All terms
are positive, so that the smallest deltas have relative accuracy. What is cut off goes to 0 and to
infinity with its mean kept, 1e-17 at most.

>>> pair = curves(1.0, rounds=100, participations=1)
>>> loss, _ = pld.distributions((pair, pair[::-1]))
>>> # 1 of 100 rounds, mu 1: the bounds of [2] are 0.844 and 0.874; Poisson sampling has 0.954
>>> round(float(loss.epsilons(1e-6, 1, 1)[0]), 3)
0.858

[1] Chua, Ghazi, Harrison, Leeman, Kamath, Kumar, Manurangsi, Sinha, Zhang. Balls-and-bins sampling
for DP-SGD. AISTATS 2025.
[2] Feldman, Shenfeld. Efficient privacy loss accounting for subsampling and random allocation. ICML
2026. Its package PLD_accounting 2.0 takes 3 s for these bounds, and minutes for some.
[3] Doroshenko, Ghazi, Kamath, Kumar, Manurangsi. Connect the dots. PETS 2022. Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from raydpfl.privacy import pld

_STEPS_PER_STD = 50  # of the logarithm of a ratio: all roundings add some 5e-4 of its variance
_CUT_STDS = 10.4  # standard deviations beyond which one ratio is cut off, of mass 1e-25
_CUT_MASS = 1e-24  # of mass, cut off each sum or product on either side
_MIN_MU, _MAX_MU = 1e-4, 25.0
_MAX_LOST_MASS = 1e-17  # of mass, at most, that may be 0 or infinite
_MAX_LOG = 690.0  # of the logarithms of values


@dataclass(frozen=True, eq=False)
class LikelihoodRatio:
    """A likelihood ratio under Q, from above in the convex order: the masses float64 [n] of the
    values exp(step (low + i) - shift), that of 0, and what infinity adds to the mean, which is 1.
    """

    step: float
    low: int
    shift: float
    masses: np.ndarray
    zero: float
    infinite: float

    @property
    def logs(self) -> np.ndarray:
        """Logarithms of the values, float64 [n]."""
        return self.step * (self.low + np.arange(len(self.masses))) - self.shift

    @property
    def is_representable(self) -> bool:
        """Whether what is cut off is little, and float64 holds the rest."""
        lost_masses = np.array([self.zero, self.infinite])  # which NaN does not pass
        return bool((lost_masses <= _MAX_LOST_MASS).all()) and self.logs[-1] <= _MAX_LOG

    def log_std(self) -> float:
        """Standard deviation of the logarithm, without 0 and infinity."""
        places = np.arange(len(self.masses))
        return self.step * math.sqrt(self.masses @ (places - self.masses @ places) ** 2)

    def finer(self, parts: int) -> LikelihoodRatio:
        """The same on a grid with so many steps in one of this."""
        masses = np.zeros((len(self.masses) - 1) * parts + 1)
        masses[::parts] = self.masses
        return replace(self, step=self.step / parts, low=self.low * parts, masses=masses)

    def coarser(self) -> LikelihoodRatio:
        """From above on a grid of twice the step."""
        masses = np.pad(self.masses, (self.low % 2, 2))
        masses = masses[: len(masses) // 2 * 2]
        odd = masses[1::2]
        up = odd / (1 + math.exp(self.step))
        halves = masses[::2] + (odd - up)
        halves[1:] += up[:-1]
        return replace(self, step=2 * self.step, low=self.low // 2, masses=halves)

    def __add__(self, other: LikelihoodRatio) -> LikelihoodRatio:
        """The mean of both's ratios, on one grid: of as many as e^shift each, all independent."""
        lows = self.low, other.low
        ends = self.low + len(self.masses), other.low + len(other.masses)
        lowest_shift = math.log1p(math.exp(-self.step * abs(lows[0] - lows[1]))) / self.step
        low = max(lows) + math.floor(lowest_shift)
        sums = np.zeros(max(ends) - low + math.ceil(math.log(2) / self.step) + 1)
        _sums(self, other, low, sums)
        if other is self:
            sums *= 2
        else:
            _sums(other, self, low, sums)
        _sums(self, other, low, sums, equal=True)
        zero = self.zero * other.zero
        for one, chance in ((self, other.zero), (other, self.zero)):
            # alone it may be below the grid: it is then split over its lowest place and 0
            places = one.low + np.arange(len(one.masses)) - low
            shares = np.exp(self.step * np.minimum(places, 0))
            np.add.at(sums, np.maximum(places, 0), chance * shares * one.masses)
            zero += chance * float((1 - shares) @ one.masses)
        shift = float(np.logaddexp(self.shift, other.shift))
        infinite = sum(math.exp(one.shift - shift) * one.infinite for one in (self, other))
        return LikelihoodRatio(self.step, low, shift, sums, zero, infinite)._truncate()

    def __mul__(self, other: LikelihoodRatio) -> LikelihoodRatio:
        """The product of independent ratios; the step of one is 2^n times the other's."""
        if self.step > other.step:
            return other * self
        fine = other.finer(round(other.step / self.step))
        product = LikelihoodRatio(
            self.step,
            self.low + other.low * round(other.step / self.step),
            self.shift + other.shift,
            np.convolve(self.masses, fine.masses),
            self.zero + other.zero,
            self.infinite + other.infinite,
        )._truncate()
        while product.log_std() > 2 * _STEPS_PER_STD * product.step:
            product = product.coarser()
        return product

    def __pow__(self, times: int) -> LikelihoodRatio:
        """The product of so many independent ones, at least 1."""
        if times == 1:
            return self
        half = self ** (times // 2)
        return half * half * self if times % 2 else half * half

    def _truncate(self) -> LikelihoodRatio:
        """Without what is below `_CUT_MASS`: what is above goes to infinity by its share in the
        mean and to 0 by its mass, what is below to the lowest value and 0.
        """
        logs = self.logs
        with np.errstate(divide="ignore"):
            log_masses = np.log(self.masses)
        parts = np.exp(log_masses + logs)
        last = int((np.cumsum(parts[::-1])[::-1] > _CUT_MASS).sum())
        first = int((np.cumsum(self.masses) <= _CUT_MASS).sum())
        masses = self.masses[first:last].copy()
        up = max(0.0, -_MAX_LOG - logs[first])  # where float64 has no such values
        mass = np.exp(log_masses[:first] + logs[:first] + up).sum() / math.exp(logs[first] + up)
        masses[0] += mass
        zero = self.zero + self.masses[last:].sum() + (self.masses[:first].sum() - mass)
        infinite = self.infinite + parts[last:].sum()
        low = self.low + first
        return replace(self, low=low, masses=masses, zero=float(zero), infinite=float(infinite))


def _sums(
    larger: LikelihoodRatio,
    smaller: LikelihoodRatio,
    low: int,
    sums: np.ndarray,
    equal: bool = False,
) -> None:
    """Adds to `sums` [n], from the place `low` on, the products of masses of `larger` at higher
    places and of `smaller` at lower ones, or at `equal` places. Values d steps apart add up to the
    larger times 1 + e^(-d step); all d between the same two grid points are taken together.
    """
    step = larger.step
    first_gap = max(1 - equal, larger.low - smaller.low - len(smaller.masses) + 1)
    gaps = np.arange(first_gap, 1 if equal else larger.low + len(larger.masses) - smaller.low)
    if not len(gaps):
        return
    up = np.log1p(np.exp(-step * gaps)) / step
    places = np.floor(up)
    shares = (np.expm1((up - places) * step) / math.expm1(step)).clip(0.0, 1.0)
    starts = np.flatnonzero(np.diff(places, prepend=-1.0))
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(gaps)], strict=True):
        i = max(larger.low, smaller.low + int(gaps[start]))
        for above in (0, 1):
            share = shares[start:end] if above else 1.0 - shares[start:end]
            # entry j: masses of `smaller` that are a gap of this group below the place i + j
            below = np.convolve(smaller.masses, share)[i - smaller.low - int(gaps[start]) :]
            products = larger.masses[i - larger.low :][: len(below)]
            products = products * below[: len(products)]
            sums[i - low + int(places[start]) + above :][: len(products)] += products


def _gaussian_ratio(mu: float, step: float) -> LikelihoodRatio:
    """The ratio of one Gaussian."""
    n = math.ceil((_CUT_STDS * mu + mu * mu / 2) / step)
    # under P, from 1 step on; under Q those of the opposite losses are the same
    losses, rest = pld.dots(lambda epsilon: pld.gaussian_delta(epsilon, mu), step, n)
    above = losses * np.exp(-step * np.arange(1, n + 1))
    centre = max(0.0, 1.0 - rest - losses.sum() - above.sum())
    masses = np.concatenate([losses[::-1], [centre], above])
    return LikelihoodRatio(step, -n, 0.0, masses, rest, rest)


def _means(mu: float, counts: set[int]) -> dict[int, LikelihoodRatio]:
    """The means of `counts` ratios of Gaussians of mu, by count: of one, or two in succession."""
    levels = [counts]
    while max(levels[-1]) > 1:
        levels.append({part for n in levels[-1] for part in (n // 2, n - n // 2) if n > 1})
    means = {1: _gaussian_ratio(mu, mu / _STEPS_PER_STD)}
    for level in reversed(levels[:-1]):
        smallest_mean = means[min(means)]
        # the logarithm of a mean of two has about 0.7 of the std
        parts = round(smallest_mean.step * _STEPS_PER_STD / (0.7 * smallest_mean.log_std()))
        finer = {n: mean.finer(max(1, parts)) for n, mean in means.items()}
        means = {n: finer[n // 2] + finer[n - n // 2] if n > 1 else finer[1] for n in level}
    return means


@lru_cache(maxsize=64)
def epoch(mu: float, rounds: int, participations: int) -> LikelihoodRatio | None:
    """The ratio of the `rounds` of an epoch with so many `participations` of a client: a product
    over blocks whose sizes differ by 1 at most. None where it does not fit in float64.
    """
    if not _MIN_MU <= mu <= _MAX_MU:
        return None
    size, longer = divmod(rounds, participations)
    means = _means(mu, {size, size + 1} if longer else {size})
    product = means[size] ** (participations - longer)
    product = product * means[size + 1] ** longer if longer else product
    return product if product.is_representable else None


def curves(mu: float, rounds: int, participations: int, share: float = 1.0) -> pld.CurvePair:
    """The curves of removing and of adding a client of `epoch` that takes part with probability
    `share`, ratio share L + 1 - share; where that does not fit in float64, those of a client whose
    rounds are known.
    """
    ratio = epoch(mu, rounds, participations)
    if ratio is None:
        known_mu = mu * math.sqrt(participations)
        return (lambda epsilon: pld.gaussian_delta(epsilon, known_mu),) * 2
    values = 1 - share + share * np.exp(ratio.logs)
    steps = np.diff(values)
    above = np.cumsum(ratio.masses[::-1])[::-1]
    below = ratio.zero + np.cumsum(ratio.masses)
    # E (L - x)+ and E (x - L)+ are linear between values
    calls = np.append(np.cumsum((steps * above[1:])[::-1])[::-1], 0.0) + share * ratio.infinite
    puts = np.cumsum([0.0, (values[0] - (1 - share)) * ratio.zero, *(steps * below[:-1])])
    points = np.append(1 - share, values)

    def removal_curve(epsilon: np.ndarray) -> np.ndarray:
        return np.interp(np.exp(np.minimum(epsilon, 700.0)), values, calls)

    def addition_curve(epsilon: np.ndarray) -> np.ndarray:
        up = np.exp(np.minimum(epsilon, 700.0))
        return up * np.interp(1 / up, points, puts)

    return removal_curve, addition_curve
