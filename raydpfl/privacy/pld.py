"""Privacy loss distributions: the exact Gaussian curve, the curves under sampling, and their
composition.

A curve is delta(epsilon), the hockey-stick divergence of what a round releases with and without one
client. `mu` is sensitivity / std of the sum: 2c/std under replace-one, c/std otherwise. All arrays
are float64.

>>> float(gaussian_epsilon(1.0, 1e-5).round(3))  # exact; Renyi accounting gives 4.729
4.377
>>> curve = fixed_size_curve(q=80 / 1920, mu=0.5)  # replace-one at std = 4c
>>> (one_round,) = distributions(((curve, curve),))
>>> round(float(one_round.epsilons(delta=1e-5, first=100, last=100)[0]), 3)
0.984

dp-accounting has no curve for sampling of fixed size or with replacement, and takes seconds for a
composition. Curves are discretised here by its method (pessimistic connect-the-dots [3], which
never underestimates) on a grid of 1/40 of the standard deviation of one round's loss; every number
of rounds is one inverse FFT of a power of one transform. The mass beyond the window (Chernoff, at
most 1e-15 per number of rounds) and a bound on the rounding of the FFTs are added to the mass at
infinity. The grid costs at most about 1e-4 of epsilon; where it is coarse (sampling rates near 1e-6
at little noise), a hundredth or two.

At a delta that this drowns, the distribution of e^(order loss) / E e^(order loss) is composed in
the place of that of the loss, at the order of the best Chernoff bound [8]: what is lost is then
relative to that bound, and deltas down to 1e-290 are in reach.

[1] Balle, Wang. Improving the Gaussian mechanism for differential privacy. ICML 2018.
[2] Balle, Barthe, Gaboardi. Privacy amplification by subsampling. NeurIPS 2018. Theorems 8-10.
[3] Doroshenko, Ghazi, Kamath, Kumar, Manurangsi. Connect the dots. PETS 2022. Algorithm 1.
[4] Zhu, Dong, Wang. Optimal accounting of differential privacy via characteristic function.
    AISTATS 2022. Theorem 10, Proposition 8.
[5] Lebeda, Regehr, Kamath, Steinke. Avoiding pitfalls for privacy accounting of subsampled
    mechanisms under composition. 2024.
[6] Charles, Ganesh, McKenna, McMahan, Mitchell, Pillutla, Rush. Fine-tuning large language models
    with user-level differential privacy. 2024.
[7] Vadhan. The complexity of differential privacy. 2017.
[8] Alghamdi, Asoodeh, Calmon, Gomez, Kosut, Sankar. The saddle-point method in differential
    privacy. ICML 2023.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate

import numpy as np

from raydpfl.privacy.search import bisect_brackets

# scipy is imported where it is used: every client actor imports this package, and only the
# accounting needs scipy.

Curve = Callable[[np.ndarray], np.ndarray]  # delta at every epsilon >= 0
CurvePair = tuple[Curve, Curve]  # delta(P, Q) and delta(Q, P)
# of some number of rounds: the logarithms of the masses, their grid indices, how many rounds
_Part = tuple[np.ndarray, np.ndarray, np.ndarray]

_STEPS_PER_STD = 40
_MOST_POINTS = 1 << 19  # of one side of the grid; beyond it the grid is coarser, never unsafe
_LONG_GRID = (1 << 18) + 1  # points, above which Chernoff bounds take rare losses in groups
_FREQUENT_POINTS = 1 << 14  # points on both sides of 0 that are none
_GROUP = 64
_SHORT_RECURSION = 4_000_000  # steps of a recursion that Python does while scipy.signal is imported
_FAR_EPSILON = 1e30  # epsilon at which a curve is at its floor
_TAIL = 1e-17  # of one round's loss, moved to infinity
_WINDOW = 1e-15  # of the composed loss, likewise
_DIRECT_DELTA = 5e-13  # deltas below it, a round, are those of tilted distributions
_LEAST_TAIL = 1e-300


def gaussian_delta(epsilon: np.ndarray | float, mu: np.ndarray | float) -> np.ndarray:
    """Delta of the Gaussian mechanism, exact [1]: that of N(0, 1) against N(mu, 1),

        Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu).

    Args:
        epsilon, mu: of any sign [...]; sensitivity / std, above 0 [...].
    """
    from scipy.special import log_ndtr

    above = log_ndtr(mu / 2 - epsilon / mu)
    below = log_ndtr(-mu / 2 - epsilon / mu)
    return -np.exp(above) * np.expm1(np.minimum(epsilon + below - above, 0.0))


def gaussian_epsilon(mu: np.ndarray | float, delta: float) -> np.ndarray:
    """Epsilon of the Gaussian mechanism: the smallest at which `gaussian_delta` is at most `delta`,
    float64 [...], 0 or above, rounded up by one part in 1e12.

    Args:
        mu, delta: sensitivity / std, 0 or above [...]; between 0 and 1.
    """
    mu = np.asarray(mu, float)
    safe = np.where(mu > 0, mu, 1.0)
    high = safe**2 / 2 + safe * math.sqrt(2 * math.log(1 / delta))
    low = np.zeros_like(safe)
    high = bisect_brackets(lambda x: gaussian_delta(x, safe) > delta, low, high, times=60)
    return np.where((mu > 0) & (gaussian_delta(0.0, safe) > delta), high * (1 + 1e-12), 0.0)


@dataclass(frozen=True, eq=False)
class LossDistribution:
    """A pessimistic privacy loss distribution of one round: the probabilities `masses` [2n + 1] of
    the losses -n step, ..., n step, and that of an infinite loss. `also` is the loss, on that grid,
    of what is released in addition: once in all (`once`), else once in `every` rounds, a multiple
    of which is composed.
    """

    step: float
    masses: np.ndarray
    infinite: float
    # where it is tilted, `masses` are those of the losses times e^(order index - log_mean)
    order: float = 0.0
    log_mean: float = 0.0
    also: LossDistribution | None = None
    every: int = 1
    once: bool = False

    def epsilons(self, delta: float, first: int, last: int) -> np.ndarray:
        """Epsilon at `delta` after first, first + every, ..., last rounds, float64 [numbers];
        infinite where delta is out of reach.
        """
        if self.infinite == 1:  # nothing is on the grid
            return np.full(len(range(first, last + 1, self.every)), math.inf)
        is_tilted = is_small(delta, last)
        epsilons: list[float] = []
        while first <= last:
            # numbers of rounds that one order suits
            end = min(last, first + first // (2 * self.every) * self.every) if is_tilted else last
            loss = self._tilted_loss(delta, end) if is_tilted else self
            epsilons += [epsilon_at(delta, self.step, tail) for tail in loss._tails(first, end)]
            first = end + self.every
        return np.array(epsilons)

    def delta(self, epsilon: float, rounds: int, near: float = 1.0) -> float:
        """Delta at `epsilon` after `rounds` rounds; `near` is about what it is, which says how it
        is computed.
        """
        if self.infinite == 1:
            return 1.0
        loss = self._tilted_loss(near, rounds) if is_small(near, rounds) else self
        deltas = loss.deltas(rounds)
        place = epsilon / self.step
        if place >= len(deltas) - 1:
            return float(deltas[-1])
        i = int(place)  # between grid points a discrete curve is linear in e^epsilon
        share = math.exp((place - i - 1) * self.step) * math.expm1((i - place) * self.step)
        share /= math.expm1(-self.step)
        return float(deltas[i] + share * (deltas[i + 1] - deltas[i]))

    def deltas(self, rounds: int) -> np.ndarray:
        """Delta at epsilon = 0, step, ..., then the infinite mass, after `rounds`, float64 [n]."""
        return next(self._tails(rounds, rounds))

    def chernoff(self, epsilon: float, rounds: int) -> float:
        """A bound on delta at `epsilon` that needs no composition; arguments as for `delta`."""
        if self.infinite == 1:
            return 1.0
        log_moment = self._log_moment(rounds)
        place = epsilon / self.step
        order = _best_order(lambda order: log_moment(order) - order * place, self._half)
        return math.exp(min(log_moment(order) - order * place, 0.0))

    def _tilted_loss(self, delta: float, rounds: int) -> LossDistribution:
        """Tilted at the order of the best Chernoff bound on epsilon."""
        log_moment = self._log_moment(rounds)
        surprise = -math.log(delta)
        order = _best_order(lambda order: (log_moment(order) + surprise) / order, self._half)
        return self._tilt(order)

    def _log_moment(self, rounds: int) -> Callable[[float], float]:
        """log E e^(order index) of the sum of the losses, by the order."""
        times = 1 if self.once else rounds // self.every
        parts = [(self, rounds), *([(self.also, times)] if self.also else [])]
        return lambda order: sum(count * loss._log_mean(order) for loss, count in parts)

    @property
    def _half(self) -> int:
        return len(self.masses) // 2

    def _groups(self, sign: int) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of the masses, and indices, for a bound from above (`sign` 1) or below: rare
        losses of a long grid in groups.
        """
        half = self._half
        index = np.arange(-half, half + 1)
        masses = self.masses
        if len(masses) > _LONG_GRID:
            rare = np.arange(0, half - _FREQUENT_POINTS, _GROUP)
            middle = np.arange(half - _FREQUENT_POINTS, half + _FREQUENT_POINTS)
            starts = np.concatenate([rare, middle, rare + half + _FREQUENT_POINTS])
            masses = np.add.reduceat(masses, starts)
            index = index[np.append(starts[1:], 2 * half + 1) - 1 if sign > 0 else starts]
        with np.errstate(divide="ignore"):
            return np.log(masses), index

    @property
    def coarse(self) -> bool:
        """Whether its grid has as many points as it may, and is coarser than suits the loss."""
        return self._half >= _MOST_POINTS or bool(self.also and self.also.coarse)

    def _log_mean(self, order: float) -> float:
        """log E e^(order index) of the finite losses."""
        return _log_sum(self._logs(order))

    def _logs(self, order: float) -> np.ndarray:
        half = self._half
        with np.errstate(divide="ignore"):
            return np.log(self.masses) + order * np.arange(-half, half + 1)

    def _tilt(self, order: float) -> LossDistribution:
        log_mean = self._log_mean(order)
        masses = np.exp(self._logs(order) - log_mean)
        extra_loss = self.also and self.also._tilt(order)
        return replace(self, masses=masses, order=order, log_mean=log_mean, also=extra_loss)

    def std(self) -> float:
        """Standard deviation of the finite loss of one round."""
        losses = self.step * np.arange(-self._half, self._half + 1)
        return math.sqrt(max(self.masses @ losses**2 - (self.masses @ losses) ** 2, 0.0))

    def _tails(self, first: int, last: int) -> Iterator[np.ndarray]:
        """For all numbers of rounds, delta at epsilon = 0, step, ..., up to the infinite mass."""
        from scipy.fft import irfft, next_fast_len

        second = self.also or LossDistribution(self.step, np.ones(1), 0.0)
        half, second_half = self._half, second._half
        rounds = np.arange(first, last + 1, self.every)
        times = np.ones_like(rounds) if self.once else rounds // self.every
        times = times if self.also else 0 * rounds
        upper, lower = self._window(rounds, second, times)
        longest = max((upper - lower).max() + 1, len(self.masses), len(second.masses))
        size = next_fast_len(int(longest), real=True)
        transform, modulus = _transform(self, size)
        second_transform, second_modulus = _transform(second, size)
        power = transform**first
        power = power * second_transform ** int(times[0])
        # of one round, and one of the second, less
        modulus_power = modulus ** (first - 1) * second_modulus ** (int(times[0]) - 1)
        hop, fade = transform**self.every, modulus**self.every  # to the next number of rounds
        if not self.once:
            hop, fade = hop * second_transform, fade * second_modulus
        steps = int(upper.sum())
        for t, c, top in zip(rounds, times, upper, strict=True):
            # now entry k is the loss k * step, modulo size
            masses = np.roll(irfft(power, size), -half * t - second_half * c)
            gap = math.expm1(t * math.log1p(-self.infinite) + c * math.log1p(-second.infinite))
            error = _WINDOW + _rounding_error(modulus_power, int(t + c))
            if self.order:
                logs = t * self.log_mean + c * second.log_mean - self.order * np.arange(top + 1)
                # no mass is above 1: where this is large, nothing is left of what was composed
                scale = np.exp(np.minimum(logs, 600.0))
                masses = np.minimum(masses[: top + 1] * scale, 1.0)
                error *= 1 + self.order * max(half, top)  # rounding of the exponents too
                yield np.minimum(self._finite_deltas(masses, top, steps) + error * scale - gap, 1.0)
            else:
                yield self._finite_deltas(masses, top, steps) + (error - gap)
            power = power * hop
            modulus_power = modulus_power * fade

    def _finite_deltas(self, composed_masses: np.ndarray, top: int, steps: int) -> np.ndarray:
        """Delta at all grid points from 0 on, of the finite losses up to `top`; of `steps` in all.
        scipy takes 0.6 s to import; the bits are the same.
        """
        masses = composed_masses[top::-1].clip(min=0.0)
        above = np.concatenate([[0.0], masses[:-1].cumsum()])
        # delta_i = e^-h delta_(i+1) + (1 - e^-h) P[loss > i h]: positive terms, none overflows
        gain, decay = -math.expm1(-self.step), math.exp(-self.step)
        if steps < _SHORT_RECURSION and "scipy.signal" not in sys.modules:
            terms = (above * gain).tolist()
            return np.array([*accumulate(terms, lambda last, term: term + decay * last)])[::-1]
        from scipy.signal import lfilter

        return lfilter([gain], [1.0, -decay], above)[::-1]

    def _window(
        self, rounds: np.ndarray, second: LossDistribution, times: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The grid indices that the sums are above, or below, with probability at most 1e-15."""
        half, second_half = self._half, second._half
        max_index = half * rounds + second_half * times
        surprise = math.log(1 / _WINDOW)
        variance = self.std() ** 2 + second.std() ** 2 * times[-1] / rounds[-1]
        spread = max(math.sqrt(variance) / self.step, 1e-3)
        # The best order for one round if the loss were Gaussian; about 1 / half suits rare large
        # losses.
        gaussian = math.sqrt(2 * surprise) / spread
        min_order = min(0.3 * gaussian / math.sqrt(rounds[-1]), 1 / half)
        orders = np.geomspace(min_order, max(3 * gaussian, 100 / half), 40)

        def bound(sign: int) -> np.ndarray:
            parts = [(*self._groups(sign), rounds), (*second._groups(sign), times)]
            return np.minimum(max_index, np.ceil(_chernoff(parts, sign, surprise, orders)))

        return np.maximum(bound(1), 1).astype(int), np.minimum(-bound(-1), 0).astype(int)


def _rounding_error(modulus_power: np.ndarray, count: int) -> float:
    """How far rounding can have moved any sum of entries of the inverse of a transform of `count`
    losses, of modulus `modulus_power` with one less. A coefficient is off by a few ulp, its t-th
    power by t times that; Parseval and Cauchy-Schwarz bound the sum.
    """
    return 4 * np.finfo(float).eps * (count + 1) * math.sqrt(2 * (modulus_power @ modulus_power))


def _transform(loss: LossDistribution, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The Fourier transform of a loss, complex128 [size // 2 + 1], and its modulus, at most 1."""
    from scipy.fft import rfft

    transform = rfft(loss.masses, size)
    return transform, np.minimum(np.abs(transform), 1.0)


def _chernoff(parts: Sequence[_Part], sign: int, surprise: float, orders: np.ndarray) -> np.ndarray:
    """What sums of losses are above (`sign` 1) or below (-1; both as a size) with probability at
    most e^-surprise.
    """

    def bound(i: int) -> np.ndarray:
        order = orders[i]
        exponent = sum(n * _log_sum(logs + sign * order * index) for logs, index, n in parts)
        return np.asarray((exponent + surprise) / order)

    return min_bound(bound, len(orders))


def min_bound(bound: Callable[[int], np.ndarray], orders: int) -> np.ndarray:
    """The least of Chernoff bounds for rising numbers of rounds, float64 [numbers], `bound(i)` that
    by order i of `orders`, which rise. (n K(order) + surprise) / order, K convex, first falls and
    then rises with the order, and more rounds are served best by a smaller one.
    """
    bound = cache(bound)
    first, last = sorted(
        bisect_left(
            range(orders - 1), True, key=lambda i: bool(bound(i)[place] <= bound(i + 1)[place])
        )
        for place in (-1, 0)
    )
    return np.min([bound(i) for i in range(first, last + 1)], axis=0)


def _best_order(objective: Callable[[float], float], largest: int) -> float:
    """The order at which an objective of a loss with this largest index is about least."""
    from scipy.optimize import minimize_scalar

    limits = math.log(1e-3 / largest), math.log(1e3)
    optimum = minimize_scalar(
        lambda log_order: objective(math.exp(log_order)),
        bounds=limits, method="bounded", options={"xatol": 0.02},
    )  # fmt: skip
    return math.exp(optimum.x)


def _log_sum(logs: np.ndarray) -> float:
    top = logs.max()
    return float(top + math.log(np.exp(logs - top).sum()))


def epsilon_at(delta: float, step: float, deltas: np.ndarray) -> float:
    """Epsilon at `delta` of deltas at 0, step, 2 step, ...; infinite below the last of them."""
    if deltas[-1] > delta:
        return math.inf
    i = int(np.argmax(deltas <= delta))
    if i == 0:
        return 0.0
    share = (delta - deltas[i]) / (deltas[i - 1] - deltas[i])
    return max(0.0, i * step + math.log1p(share * math.expm1(-step)))


def is_small(delta: float, rounds: int) -> bool:
    """Whether losses are tilted to tell so small a delta after so many rounds."""
    return delta < _DIRECT_DELTA * rounds


def tail_for(delta: float, rounds: int) -> float:
    """The mass of one round's loss that may be moved to infinity, for this delta after so many."""
    if not is_small(delta, rounds):
        return _TAIL
    return max(min(_TAIL, 1e-6 * delta / rounds), _LEAST_TAIL)


def discretise(up: Curve, down: Curve, tail: float = _TAIL) -> LossDistribution:
    """Pessimistic connect-the-dots [3] of a pair (P, Q), from delta(P, Q) and delta(Q, P): the loss
    -x has under P e^-x times the probability of x under Q in the reversed pair, and 0 takes what is
    left. At most `tail` is moved to infinity.
    """
    reach = max(_reach(up, tail), _reach(down, tail))
    step = reach / 4
    while True:
        n = max(1, math.ceil(reach / step))
        loss = _on_grid(up, down, step, n)
        fine = loss.std() / _STEPS_PER_STD
        if step <= fine or n >= _MOST_POINTS:
            return loss
        step = max(fine * 0.9, reach / _MOST_POINTS)


def _on_grid(up: Curve, down: Curve, step: float, n: int) -> LossDistribution:
    above, infinite = dots(up, step, n)
    below = dots(down, step, n)[0] * np.exp(-step * np.arange(1, n + 1))
    centre = max(0.0, 1.0 - infinite - above.sum() - below.sum())
    return LossDistribution(step, np.concatenate([below[::-1], [centre], above]), infinite)


def dots(curve: Curve, step: float, n: int) -> tuple[np.ndarray, float]:
    """Masses [n] at step, ..., n step, and the mass at infinity."""
    deltas = np.minimum.accumulate(curve(step * np.arange(n + 1)))
    drops = -np.diff(deltas)
    masses = drops / -math.expm1(-step)
    masses[:-1] -= drops[1:] / math.expm1(step) if step < 700 else 0.0
    return masses.clip(min=0.0), float(deltas[-1])


def group_privacy(curve: Curve, group: int) -> Curve:
    """A bound on the curve for `group` units, exchanged one after another, from that of one ([7]
    Lemma 2.2): delta(eps / group) (e^eps - 1) / (e^(eps / group) - 1); constant from where the
    curve leaves double precision.
    """
    last = group * _reach(curve, 1e-300)

    def bound(epsilon: np.ndarray) -> np.ndarray:
        epsilon = np.minimum(epsilon, last)
        part = np.maximum(epsilon / group, 1e-12)  # where the factor is `group` in double precision
        factor = np.expm1(-group * part) / np.expm1(-part)
        exponent = (group - 1) * part + np.log(np.maximum(curve(epsilon / group), 1e-300))
        return np.minimum(factor * np.exp(np.minimum(exponent, 0.0)), 1.0)

    return bound


def _reach(curve: Curve, tail: float = _TAIL) -> float:
    """The epsilon at which the curve has fallen to `tail`, or to its floor, if that is higher."""
    high = 1e-9 * 2.0 ** np.arange(8)
    tail = max(tail, float(curve(np.array([_FAR_EPSILON]))[0]))
    while curve(high[-1:])[0] > tail:
        high = 2.0**8 * high
    high = high[np.argmax(curve(high) <= tail), None]
    return float(bisect_brackets(lambda x: curve(x) > tail, high / 2, high, times=5)[0])


def _unamplified_epsilon(epsilon: np.ndarray, q: float) -> np.ndarray:
    """ln(1 + (e^epsilon - 1)/q), which sampling with probability q reduces to epsilon >= 0 [2]."""
    small = np.log1p(np.expm1(np.minimum(epsilon, 1.0)) / q)
    return np.where(
        epsilon < 1.0, small, epsilon - math.log(q) + np.log1p((q - 1) * np.exp(-epsilon))
    )


def poisson_curves(
    q: float, mu: float, delta: Callable[..., np.ndarray] = gaussian_delta
) -> tuple[CurvePair, CurvePair]:
    """One round of the Poisson-sampled Gaussian, under add_remove or zero_out: the curves of
    removing and adding a client of probability q, delta(P, Q) and delta(Q, P) with
    P = (1-q) N(0, 1) + q N(mu, 1) and Q = N(0, 1).
    """
    log_complement = math.log1p(-q) if q < 1 else -math.inf
    removal_curve = fixed_size_curve(q, mu, delta)

    def addition_curve(epsilon: np.ndarray) -> np.ndarray:
        # Q - e^eps P = w (Q - e^eps' N(mu,1)) with w = 1 - e^eps (1-q) and e^eps' = e^eps q / w;
        # nothing is left once w < 0.
        weight = -np.expm1(np.minimum(epsilon + log_complement, 1.0))
        positive = np.maximum(weight, np.finfo(float).tiny)
        inner = epsilon + math.log(q) - np.log(positive)
        return np.where(weight > 0, positive * delta(inner, mu), 0.0)

    return (removal_curve, addition_curve), (addition_curve, removal_curve)


def fixed_size_curve(
    q: float, mu: float, delta: Callable[..., np.ndarray] = gaussian_delta
) -> Curve:
    """One round on a uniform subset, the fraction q of the population, under replace-one:

        delta(eps) = q delta_G(ln(1 + (e^eps - 1)/q); mu), eps >= 0.

    It bounds both directions of every neighbouring pair ([2] Theorem 9), and is the curve of a
    dominating pair, so that it composes ([4]; docs/proofs.md).
    """
    return lambda epsilon: q * delta(_unamplified_epsilon(epsilon, q), mu)


def group_removed_curves(weights: np.ndarray, mu: float) -> tuple[CurvePair, CurvePair]:
    """One round in which k units of a group are in the sample with probability `weights`[k] > 0,
    float64 [units + 1]: the curves of removing the group and of adding it, delta(P, Q) and
    delta(Q, P) with P = sum_k weights[k] N(k mu, 1) and Q = N(0, 1), which dominate where removal
    leaves the others' sample as it is given k = 0 ([6] Theorem 1; docs/proofs.md).
    """
    counts, chances, rest = _group_weights(weights)
    presence = float(chances.sum())
    p0 = float(weights[0])  # the probability that none is drawn

    def removal_curve(epsilon: np.ndarray) -> np.ndarray:
        total = _unamplified_epsilon(epsilon, presence) + math.log(presence)
        ratios = _log_ratios(total, counts * mu, chances)
        return (chances * gaussian_delta(ratios, counts * mu)).sum(axis=-1) + rest

    def addition_curve(epsilon: np.ndarray) -> np.ndarray:
        # (w - e^eps sum_k weights[k] L_k)+ with w = 1 - e^eps weights[0], shared among the k
        weight = -np.expm1(np.minimum(epsilon + math.log(p0), 1.0)) if p0 else epsilon * 0 + 1
        positive = np.maximum(weight, np.finfo(float).tiny)
        total = np.log(positive) - epsilon
        ratios = _log_ratios(total, counts * mu, chances, above=True)
        shares = chances * np.exp(np.minimum(epsilon[..., None] + ratios, 1.0))
        return np.where(weight > 0, (shares * gaussian_delta(-ratios, counts * mu)).sum(-1), 0.0)

    return (removal_curve, addition_curve), (addition_curve, removal_curve)


def group_replaced_curve(weights: np.ndarray, absent: float, other: float) -> Curve:
    """One round in which k units of a group are in the sample with probability `weights`[k], and k
    of those that stand in their place in the neighbouring world. A round with k is at most
    k `absent` from one with none of them, and k `other` from its neighbour. With L_k and M_k the
    likelihood ratios of N(k absent, 1), and of N(k other, 1), to N(0, 1), for eps >= 0

        delta(eps) = sum_(k>0) weights[k] (a_k D(max(M_k, e^eps); k other)
                                           + (1 - a_k) D(L_k; k absent)),
        a_k = min(1, e^eps / M_k),  sum_(k>0) weights[k] (1 - a_k) L_k = weights[0] (e^eps - 1),

    with D(e^a; mu) = delta_G(a; mu), L_k at some x, and M_k at x + k (other - absent). It is the
    curve of a dominating pair (docs/proofs.md); of one unit `three_gaussians_curve`, or where both
    distances are alike `fixed_size_curve`.
    """
    counts, chances, rest = _group_weights(weights)
    near, far = counts * other, counts * absent
    logs = np.log(chances)

    def ratios(x: np.ndarray, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        far_logs = far * x[..., None] - far**2 / 2
        near_logs = near * (x[..., None] + near - far) - near**2 / 2
        return far_logs, near_logs, -np.expm1(np.minimum(epsilon[..., None] - near_logs, 0.0))

    def curve(epsilon: np.ndarray) -> np.ndarray:
        epsilon = np.asarray(epsilon, float)
        with np.errstate(divide="ignore"):
            free = epsilon + np.log(-np.expm1(-epsilon)) + np.log(weights[0])
            free = np.maximum(free, -700.0)[..., None]
            # where the first term alone is more than enough
            above = (np.maximum(free[..., 0], 0.0) + 2 - logs[0] + far[0] ** 2 / 2) / far[0]
            high = np.maximum(above, (epsilon + 1 + near[0] ** 2 / 2) / near[0] + far[0])

            def is_beyond(x: np.ndarray) -> np.ndarray:
                far_logs, _, share = ratios(-x, epsilon)
                return (share * np.exp(np.minimum(logs + far_logs - free, 700.0))).sum(axis=-1) > 1

            x = -bisect_brackets(is_beyond, -high, np.zeros_like(high), times=50)
        far_logs, near_logs, share = ratios(x, epsilon)
        terms = (1 - share) * gaussian_delta(np.maximum(near_logs, epsilon[..., None]), near)
        return (chances * (terms + share * gaussian_delta(far_logs, far))).sum(axis=-1) + rest

    return curve


def three_gaussians_curve(q: float, absent: float, other: float) -> Curve:
    """A round that shows N(u, 1) with probability q, in the neighbouring world N(v, 1) instead, and
    else, in both, N(w, 1), where |u - w| <= `absent` and |u - v| <= `other`, of which one is twice
    the other. For eps >= 0, delta(eps) of the first world against the second is at most

        q Phi(x) - (1-q) (e^eps - 1) Phi(x - absent) - q e^eps Phi(x - other),

    with x where this is largest. It is attained on a line, u = 0, v = other, w = absent
    (docs/proofs.md).
    """
    min_distance = min(absent, other)

    def curve(epsilon: np.ndarray) -> np.ndarray:
        from scipy.special import log_ndtr

        with np.errstate(divide="ignore"):
            absence = epsilon + np.log(-np.expm1(-epsilon)) + np.log((1 - q) / q)
        # 1 = e^(absent x + logs[0]) + e^(other x + logs[1]), quadratic in e^(min_distance x)
        logs = absence - absent**2 / 2, epsilon - other**2 / 2
        first, second = logs if absent < other else logs[::-1]
        x = math.log(2) - np.logaddexp(first, np.logaddexp(2 * first, math.log(4) + second) / 2)
        x /= min_distance
        rest = 0.0
        for log, shift in zip(logs, (absent, other), strict=True):
            share = shift * x + log
            mills = log_ndtr(x - shift) - log_ndtr(x) - shift * x + shift**2 / 2
            rest = rest - np.exp(np.minimum(share, 0.0)) * np.expm1(np.minimum(mills, 0.0))
        return q * np.exp(log_ndtr(x)) * rest

    return curve


def _group_weights(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Numbers of units from 1, float64 [k], their probabilities, and what these leave out."""
    order = np.argsort(weights[1:])
    omitted_index = order[np.cumsum(weights[1:][order]) < _TAIL]
    counts = np.delete(np.arange(1.0, len(weights)), omitted_index)
    return counts, weights[counts.astype(int)], float(weights[1:][omitted_index].sum())


def _log_ratios(
    total: np.ndarray, mus: np.ndarray, chances: np.ndarray, above: bool = False
) -> np.ndarray:
    """log L_k(x), float64 [..., k], L_k the likelihood ratio of N(mus[k], 1) and N(0, 1), a little
    below (or `above`) the x where sum_k chances[k] L_k has the logarithm `total` [...]. By Newton's
    method on that, which is convex.
    """
    from scipy.special import logsumexp

    logs = np.log(chances)
    # where one term alone is the whole
    x = ((total[..., None] - logs + mus**2 / 2) / mus).min(axis=-1)
    for _ in range(60):
        terms = logs + mus * x[..., None] - mus**2 / 2
        value = logsumexp(terms, axis=-1)
        step = (value - total) / (mus * np.exp(terms - value[..., None])).sum(axis=-1)
        x = x - step
        if (np.abs(step) <= 1e-13 * (1 + np.abs(x))).all():
            break
    x = x + (1 if above else -1) * 1e-12 * (1 + np.abs(x))
    return mus * x[..., None] - mus**2 / 2


def mixture(parts: Sequence[tuple[float, Sequence[CurvePair]]]) -> tuple[CurvePair, ...]:
    """The curves of a round that is one of several and says which, from their probabilities and
    curves: the means, direction by direction.
    """
    weights = [weight for weight, _ in parts]

    def mean(curves: Sequence[Curve]) -> Curve:
        return lambda epsilon: np.sum(
            [w * c(epsilon) for w, c in zip(weights, curves, strict=True)], axis=0
        )

    directions = zip(*(pairs for _, pairs in parts), strict=True)
    return tuple((mean([up for up, _ in d]), mean([down for _, down in d])) for d in directions)


def distributions(
    pairs: Sequence[CurvePair], tail: float = _TAIL, gaussian_mu: float = 0.0, period: int = 1
) -> tuple[LossDistribution, ...]:
    """The losses of a round's directions on one grid, that which suits the first, at most `tail` at
    infinity. With `gaussian_mu` each has `also` that of a Gaussian over everyone of this mu, and
    the grid suits one of it with `period` rounds: a step h far above the std s of a round raises
    the variance from s^2 to about h s sqrt(2 / pi), kept below 1e-4 of the whole.
    """
    loss = discretise(*pairs[0], tail)
    step, n = loss.step, len(loss.masses) // 2
    gaussian_loss = None
    if gaussian_mu:
        gaussian = partial(gaussian_delta, mu=gaussian_mu)
        reach = _reach(gaussian, tail)
        s = loss.std()
        growth = 1e-4 * (period * s**2 + gaussian_mu**2) / (period * s * math.sqrt(2 / math.pi))
        suitable_step = min(gaussian_mu / _STEPS_PER_STD, growth)
        step = max(step, suitable_step, reach / _MOST_POINTS)
        gaussian_loss = _on_grid(gaussian, gaussian, step, math.ceil(reach / step))
    if step > loss.step:
        n = math.ceil(max(_reach(curve, tail) for curve in pairs[0]) / step)
        loss = _on_grid(*pairs[0], step, n)
    losses = (loss, *(_on_grid(*pair, step, n) for pair in pairs[1:]))
    return tuple(replace(direction, also=gaussian_loss) for direction in losses)


def composed_epsilon(parts: Sequence[tuple[Sequence[CurvePair], int]], delta: float) -> float:
    """Epsilon at `delta` of all parts, composed adaptively: the curves of one release (a pair, or
    one per direction), and how often it is released.
    """
    losses = [discretise(*pairs[0]) for pairs, _ in parts]
    reaches = [max(max(map(_reach, pair)) for pair in pairs) for pairs, _ in parts]
    step = max(min(loss.step for loss in losses), max(reaches) / _MOST_POINTS)
    epsilons = []
    for direction in range(max(len(pairs) for pairs, _ in parts)):
        grids = [
            (_on_grid(*pairs[direction % len(pairs)], step, math.ceil(reach / step)), count)
            for (pairs, count), reach in zip(parts, reaches, strict=True)
        ]
        epsilons.append(epsilon_at(delta, step, _tail(grids)))
    return max(epsilons)


def _tail(losses: Sequence[tuple[LossDistribution, int]]) -> np.ndarray:
    """Delta at epsilon = 0, step, ... of the sum of losses on one grid, each so many times."""
    from scipy.fft import irfft, next_fast_len

    count = sum(n for _, n in losses)
    halves = [len(loss.masses) // 2 for loss, _ in losses]
    centre = sum(h * n for h, (_, n) in zip(halves, losses, strict=True))
    step = losses[0][0].step
    with np.errstate(divide="ignore"):
        parts = [
            (np.log(loss.masses), np.arange(-h, h + 1), np.array([n]))
            for h, (loss, n) in zip(halves, losses, strict=True)
        ]
    surprise = math.log(1 / _WINDOW)
    spread = max(math.sqrt(sum(n * loss.std() ** 2 for loss, n in losses)) / step, 1e-3)
    order = math.sqrt(2 * surprise) / spread  # the best one if the sum were Gaussian
    orders = np.geomspace(min(0.3 * order, 1 / max(halves)), max(3 * order, 100 / min(halves)), 60)
    upper, below = (
        int(min(centre, math.ceil(_chernoff(parts, sign, surprise, orders)[0]))) for sign in (1, -1)
    )
    upper, lower = max(upper, 1), min(-below, 0)
    longest = max(upper - lower + 1, *(len(loss.masses) for loss, _ in losses))
    size = next_fast_len(longest, real=True)
    numbers = [n for _, n in losses]
    transforms, moduli = zip(*(_transform(loss, size) for loss, _ in losses), strict=True)
    power = np.prod([one**n for one, n in zip(transforms, numbers, strict=True)], axis=0)
    # the largest product of the moduli of one loss less
    whole = [modulus**n for modulus, n in zip(moduli, numbers, strict=True)]
    suffixes = [*accumulate(reversed(whole), np.multiply, initial=np.ones(len(power)))][-2::-1]
    modulus_power, prefix = np.zeros(len(power)), np.ones(len(power))
    for modulus, n, one, rest in zip(moduli, numbers, whole, suffixes, strict=True):
        modulus_power = np.maximum(modulus_power, prefix * modulus ** (n - 1) * rest)
        prefix = prefix * one
    composed_masses = np.roll(irfft(power, size), -centre)
    gap = math.expm1(sum(n * math.log1p(-loss.infinite) for loss, n in losses))
    loss = LossDistribution(step, composed_masses, 0.0)
    error = _WINDOW + _rounding_error(modulus_power, count)
    return loss._finite_deltas(composed_masses, upper, upper) + (error - gap)


def with_replacement_curve(p_max: float, draws: int, mu: float) -> Curve:
    """One round on `draws` draws with replacement, under replace-one: the bound of [2] Theorem 10
    for the likeliest client, of probability `p_max` at one draw (docs/proofs.md); `mu` of one
    draw.
    """
    from scipy.special import bdtrc, gammaln

    chance, times, chances, rest = 1.0, np.array([draws]), np.array([1.0]), 0.0
    if p_max < 1:
        chance = -math.expm1(draws * math.log1p(-p_max))
        counts = np.arange(1, draws + 1)  # up to those beyond which there is 1e-17 at most
        max_count = int(np.argmax(np.append(bdtrc(counts[:-1], draws, p_max) < _TAIL, True))) + 1
        times = counts[:max_count]
        logs = gammaln(draws + 1) - gammaln(times + 1) - gammaln(draws - times + 1)
        logs = logs + times * math.log(p_max) + (draws - times) * math.log1p(-p_max)
        chances = np.exp(logs)
        rest = float(bdtrc(max_count, draws, p_max)) if max_count < draws else 0.0

    def curve(epsilon: np.ndarray) -> np.ndarray:
        inner = _unamplified_epsilon(epsilon, chance)
        draw_chances = zip(times, chances, strict=True)
        return sum(weight * gaussian_delta(inner, k * mu) for k, weight in draw_chances) + rest

    return curve
