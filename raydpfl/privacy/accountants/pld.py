"""Privacy loss distributions, the tightest rigorous accountant: see `raydpfl.privacy.pld`."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from raydpfl.privacy import pld
from raydpfl.privacy.accountants.base import NEEDS, Accountant, Part
from raydpfl.privacy.accountants.rdp import Rdp
from raydpfl.privacy.mechanism import Event
from raydpfl.privacy.repetition import Repetition
from raydpfl.privacy.tradeoff import TradeOff
from raydpfl.privacy.unequal_rounds import Rounds

_LEVELS = 64  # of different rounds that are composed one by one
_OF_CHERNOFF = 0.02  # about what delta is of its Chernoff bound


class Pld(Accountant):
    """Composes the privacy loss of a round by FFT, or in closed form where nothing is amplified.
    Next to a grid that is coarse for the loss, and with Laplace noise, the smaller of its epsilon
    and rdp's is taken.
    """

    name = "pld"
    needs = NEEDS["pld"]

    def curve(self, event: Event, delta: float, counts: np.ndarray) -> np.ndarray:
        spent = np.minimum(self._spent(event, delta, counts), _largest(event, counts))
        if not event.sampling.hidden:
            return spent
        return np.minimum(spent, _of_any_cohorts(event.at_most(counts), delta))

    def _spent(self, event: Event, delta: float, counts: np.ndarray) -> np.ndarray:
        """Epsilon by the loss itself."""
        if not event.sampling.hidden:
            return pld.gaussian_epsilon(event.unamplified(counts), delta)
        if event.mus:
            first, last = int(counts[0]), int(counts[-1])
            unequal = _unequal(event, last)
            tails: Iterable[Iterable[np.ndarray]] = ([end] for end in unequal.ends)
            if first < last:
                tails = (unequal.deltas(d, first) for d in range(unequal.directions))
            composed = np.max(
                [[pld.epsilon_at(delta, unequal.step, each) for each in one] for one in tails],
                axis=0,
            )
            far = pld.is_small(delta, last) or np.isinf(composed).any()
            if _by_rdp(event) and (far or _loose(event, [unequal])):
                composed = np.minimum(composed, Rdp().curve(event, delta, counts))
            if far:  # rounds of the least noise spend no less
                composed = np.minimum(composed, self._spent(replace(event, mus=()), delta, counts))
            return composed
        times, parts = event.sampling.scheme.charged(event.sampling, counts)
        spent = np.empty(len(counts))
        for part in np.unique(parts).tolist():
            here = parts == part
            spent[here] = self._composed(event, delta, times[here], part)
        return spent

    def _composed(self, event: Event, delta: float, times: np.ndarray, part: int) -> np.ndarray:
        """Epsilon of so many events, int64 [n], never falling, or of a `part` of the first."""
        first, last = (int(count) * event.gaussians for count in (times[0], times[-1]))
        losses = _losses(event, last, part, delta)
        composed = np.max([loss.epsilons(delta, first, last) for loss in losses], axis=0)
        if _by_rdp(event) and (_loose(event, losses) or np.isinf(composed).any()):
            composed = np.minimum(composed, Rdp().curve(event, delta, times))
        return composed[times - times[0]]

    def tradeoff(self, mechanism, relation, rounds, v):
        return self.tradeoff_of(mechanism.event(relation), rounds)

    def tradeoff_of(self, event: Event, count: int) -> TradeOff:
        if not event.sampling.hidden:
            return TradeOff.gaussian(float(event.unamplified(count)))
        if event.mus:
            unequal = _unequal(event, count)
            return TradeOff.of_directions(unequal.step, unequal.ends)
        times, part = _charged(event, count)
        losses = _losses(event, times, part, 1.0)
        return TradeOff.of_directions(losses[0].step, [loss.deltas(times) for loss in losses])

    def delta_of(self, event: Event, epsilon: float, count: int) -> float:
        if epsilon >= _largest(event, np.array(count)):
            return 0.0
        if not event.sampling.hidden:
            return float(pld.gaussian_delta(epsilon, event.unamplified(count)))
        known = float(pld.gaussian_delta(epsilon, event.at_most(count)))
        return min(self._delta_of(event, epsilon, count), known)

    def _delta_of(self, event: Event, epsilon: float, count: int) -> float:
        """Delta by the loss itself."""
        if event.mus:
            composed = float(self.tradeoff_of(event, count).delta(epsilon))
            far = pld.is_small(composed, count)
            if _by_rdp(event) and (far or _loose(event, [_unequal(event, count)])):
                composed = min(composed, Rdp().delta_of(event, epsilon, count))
            if far:  # rounds of the least noise spend no less
                composed = min(composed, self._delta_of(replace(event, mus=()), epsilon, count))
            return composed
        rounds, part = _charged(event, count)
        bounds = [loss.chernoff(epsilon, rounds) for loss in _losses(event, rounds, part, 1.0)]
        near = max(_OF_CHERNOFF * max(bounds), 1e-300)
        composed = 1.0
        for about in (near, 1.0):  # Chernoff's bound of a few releases may be far from what is
            losses = _losses(event, rounds, part, about)
            composed = min(composed, max(loss.delta(epsilon, rounds, about) for loss in losses))
        if _by_rdp(event) and _loose(event, losses):
            return min(composed, Rdp().delta_of(event, epsilon, count))
        return composed

    def together(self, parts: Sequence[Part], delta: float) -> float:
        """All Gaussians over everyone are one."""
        alike = [part for event, n in parts for part in event.alike(n)]
        secret = [part for part in alike if part[0].sampling.hidden]
        open_ones = [event.unamplified(n) for event, n in alike if not event.sampling.hidden]
        over_everyone = [math.sqrt(event.also**2 * n + event.once**2) for event, n in secret]
        mu = math.hypot(*open_ones, *over_everyone)
        if not secret:
            return float(pld.gaussian_epsilon(mu, delta))
        kinds = [*dict.fromkeys(event.sampling.scheme.kind for event, _ in secret)]
        charged = [(event, *_charged(event, n)) for event, n in _in_levels(secret)]
        composed = 0.0
        # which direction of one scheme goes with which of another is not told by their order
        for turned in itertools.product((1, -1), repeat=len(kinds) - 1):
            order = dict(zip(kinds, (1, *turned), strict=True))
            curves = [
                (_pairs(event, part)[:: order[event.sampling.scheme.kind]], times)
                for event, times, part in charged
            ]
            if mu:
                gaussian = functools.partial(pld.gaussian_delta, mu=mu)
                curves.append((((gaussian, gaussian),), 1))
            composed = max(composed, pld.together(curves, delta))
        known = math.hypot(*open_ones, *(event.at_most(n) for event, n in secret))
        composed = min(composed, float(_of_any_cohorts(np.array(known), delta)))
        if not all(_by_rdp(event) for event, _ in secret):
            return composed
        return min(composed, Rdp().together(parts, delta))

    def best_of(self, repetition: Repetition, runs: Sequence[Part], delta: float) -> float:
        by_profile = super().best_of(repetition, runs, delta)
        if not all(_by_rdp(event) for event, _ in runs if event.sampling.hidden):
            return by_profile
        return min(by_profile, Rdp().best_of(repetition, runs, delta))


def _of_any_cohorts(mu: np.ndarray, delta: float) -> np.ndarray:
    """Epsilon of what is no more than Gaussians of mu, float64 [...]: all infinite, or none."""
    return pld.gaussian_epsilon(mu, delta) if np.isfinite(mu).all() else mu


def _in_levels(parts: Sequence[Part]) -> list[Part]:
    """Parts that are more than `_LEVELS`, with each mu raised to the next of so many levels."""
    if len(parts) <= _LEVELS:
        return [*parts]
    mus = [event.mu for event, _ in parts]
    levels = np.geomspace(min(mus), max(mus) * (1 + 1e-12), _LEVELS)
    levels[0] = min(mus)
    counts = Counter[Event]()
    for event, n in parts:
        counts[replace(event, mu=float(levels[levels.searchsorted(event.mu)]))] += n
    return [*counts.items()]


def _largest(event: Event, counts: np.ndarray) -> np.ndarray | float:
    """The largest loss of `counts` events."""
    scheme, sampling = event.sampling.scheme, event.sampling
    largest = scheme.largest_loss(sampling, event.mu)
    if math.isinf(largest) or not event.mus:
        return counts * largest if math.isfinite(largest) else math.inf
    each = [scheme.largest_loss(sampling, mu) for mu in event.first(int(np.max(counts))).tolist()]
    return np.append(0.0, np.cumsum(each))[counts]


def _by_rdp(event: Event) -> bool:
    return event.sampling.scheme.gives(NEEDS["rdp"])


def _loose(event: Event, losses: Sequence[pld.LossDistribution | Rounds]) -> bool:
    """Whether rdp may have less: next to a coarse grid, and of Laplace noise, in closed form."""
    return math.isfinite(_largest(event, np.array(1))) or any(loss.coarse for loss in losses)


def _charged(event: Event, count: int) -> tuple[int, int]:
    """How many Gaussians `count` events are charged as, and the part of the first event."""
    times, part = event.sampling.scheme.charged(event.sampling, np.array(count))
    return int(times) * event.gaussians, int(part)


def _pairs(event: Event, part: int) -> tuple[pld.CurvePair, ...]:
    """The curves of one of an event's Gaussians, or of a `part` of it."""
    scheme, asked = event.sampling.scheme, (event.sampling, event.mu, event.relation)
    return scheme.part_curves(*asked, part) if part else scheme.curves(*asked)


@lru_cache(maxsize=16)
def _unequal(event: Event, count: int) -> Rounds:
    """The losses of the first `count` of events that differ."""

    def curves(mu: float) -> tuple[pld.CurvePair, ...]:
        return event.sampling.scheme.curves(event.sampling, mu, event.relation)

    return Rounds(curves, event.first(count), event.convex, event.once)


def _losses(
    event: Event, gaussians: int, part: int, delta: float
) -> tuple[pld.LossDistribution, ...]:
    """For every direction the loss of one of an event's Gaussians, and in addition that over
    everyone, as suits this delta after so many.
    """
    times = gaussians if event.once else event.gaussians
    return _discretised(event, times, part, pld.tail_for(delta, gaussians))


@lru_cache(maxsize=16)
def _discretised(
    event: Event, times: int, part: int, tail: float
) -> tuple[pld.LossDistribution, ...]:
    pairs = _pairs(event, part)
    other = event.also or event.once
    losses = pld.and_gaussian(pairs, times, other, tail) if other else None
    return tuple(
        replace(loss, every=event.gaussians, once=event.once > 0)
        for loss in losses or pld.distributions(pairs, tail)
    )
