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
_CHERNOFF_SHARE = 0.02  # about what delta is of its Chernoff bound


class Pld(Accountant):
    """Composes the privacy loss of a round by FFT, or in closed form where nothing is amplified.
    Next to a grid that is coarse for the loss, and with Laplace noise, the smaller of its epsilon
    and rdp's is taken.
    """

    name = "pld"
    needs = NEEDS["pld"]

    def curve(self, event: Event, delta: float, counts: np.ndarray) -> np.ndarray:
        epsilons = np.minimum(self._epsilons(event, delta, counts), _largest_loss(event, counts))
        if not event.sampling.hidden:
            return epsilons
        return np.minimum(epsilons, _mu_bound_epsilons(event.mu_bound(counts), delta))

    def _epsilons(self, event: Event, delta: float, counts: np.ndarray) -> np.ndarray:
        """Epsilon by the loss itself."""
        if not event.sampling.hidden:
            return pld.gaussian_epsilon(event.unamplified(counts), delta)
        if event.mus:
            first, last = int(counts[0]), int(counts[-1])
            rounds = _rounds_of(event, last)
            tails: Iterable[Iterable[np.ndarray]] = ([end] for end in rounds.ends)
            if first < last:
                tails = (rounds.deltas(d, first) for d in range(rounds.directions))
            curve = np.max(
                [[pld.epsilon_at(delta, rounds.step, tail) for tail in row] for row in tails],
                axis=0,
            )
            unreached = pld.is_small(delta, last) or np.isinf(curve).any()
            if _has_renyi(event) and (unreached or _is_loose(event, [rounds])):
                curve = np.minimum(curve, Rdp().curve(event, delta, counts))
            if unreached:  # rounds of the least noise spend no less
                curve = np.minimum(curve, self._epsilons(replace(event, mus=()), delta, counts))
            return curve
        times, parts = event.sampling.scheme.charged(event.sampling, counts)
        epsilons = np.empty(len(counts))
        for part in np.unique(parts).tolist():
            part_mask = parts == part
            epsilons[part_mask] = self._part_curve(event, delta, times[part_mask], part)
        return epsilons

    def _part_curve(self, event: Event, delta: float, times: np.ndarray, part: int) -> np.ndarray:
        """Epsilon of so many events, int64 [n], never falling, or of a `part` of the first."""
        first, last = (int(count) * event.gaussians for count in (times[0], times[-1]))
        losses = _losses(event, last, part, delta)
        epsilons = np.max([loss.epsilons(delta, first, last) for loss in losses], axis=0)
        if _has_renyi(event) and (_is_loose(event, losses) or np.isinf(epsilons).any()):
            epsilons = np.minimum(epsilons, Rdp().curve(event, delta, times))
        return epsilons[times - times[0]]

    def tradeoff(self, mechanism, relation, rounds, v):
        return self.tradeoff_of(mechanism.event(relation), rounds)

    def tradeoff_of(self, event: Event, count: int) -> TradeOff:
        if not event.sampling.hidden:
            return TradeOff.gaussian(float(event.unamplified(count)))
        if event.mus:
            rounds = _rounds_of(event, count)
            return TradeOff.from_directions(rounds.step, rounds.ends)
        times, part = _charged_gaussians(event, count)
        losses = _losses(event, times, part, 1.0)
        return TradeOff.from_directions(losses[0].step, [loss.deltas(times) for loss in losses])

    def delta_of(self, event: Event, epsilon: float, count: int) -> float:
        if epsilon >= _largest_loss(event, np.array(count)):
            return 0.0
        if not event.sampling.hidden:
            return float(pld.gaussian_delta(epsilon, event.unamplified(count)))
        gaussian_bound = float(pld.gaussian_delta(epsilon, event.mu_bound(count)))
        return min(self._delta_of(event, epsilon, count), gaussian_bound)

    def _delta_of(self, event: Event, epsilon: float, count: int) -> float:
        """Delta by the loss itself."""
        if event.mus:
            delta = float(self.tradeoff_of(event, count).delta(epsilon))
            is_small = pld.is_small(delta, count)
            if _has_renyi(event) and (is_small or _is_loose(event, [_rounds_of(event, count)])):
                delta = min(delta, Rdp().delta_of(event, epsilon, count))
            if is_small:  # rounds of the least noise spend no less
                delta = min(delta, self._delta_of(replace(event, mus=()), epsilon, count))
            return delta
        rounds, part = _charged_gaussians(event, count)
        bounds = [loss.chernoff(epsilon, rounds) for loss in _losses(event, rounds, part, 1.0)]
        estimate = max(_CHERNOFF_SHARE * max(bounds), 1e-300)
        delta = 1.0
        for guess in (estimate, 1.0):  # Chernoff's bound of a few releases may be far from what is
            losses = _losses(event, rounds, part, guess)
            delta = min(delta, max(loss.delta(epsilon, rounds, guess) for loss in losses))
        if _has_renyi(event) and _is_loose(event, losses):
            return min(delta, Rdp().delta_of(event, epsilon, count))
        return delta

    def together(self, parts: Sequence[Part], delta: float) -> float:
        """All Gaussians over everyone are one."""
        uniform_parts = [part for event, n in parts for part in event.events_by_mu(n)]
        hidden_parts = [part for part in uniform_parts if part[0].sampling.hidden]
        open_mus = [event.unamplified(n) for event, n in uniform_parts if not event.sampling.hidden]
        full_mus = [math.sqrt(event.also**2 * n + event.once**2) for event, n in hidden_parts]
        mu = math.hypot(*open_mus, *full_mus)
        if not hidden_parts:
            return float(pld.gaussian_epsilon(mu, delta))
        kinds = [*dict.fromkeys(event.sampling.scheme.kind for event, _ in hidden_parts)]
        charges = [(event, *_charged_gaussians(event, n)) for event, n in _quantize(hidden_parts)]
        epsilon = 0.0
        # which direction of one scheme goes with which of another is not told by their order
        for directions in itertools.product((1, -1), repeat=len(kinds) - 1):
            order = dict(zip(kinds, (1, *directions), strict=True))
            curves = [
                (_pairs(event, part)[:: order[event.sampling.scheme.kind]], times)
                for event, times, part in charges
            ]
            if mu:
                gaussian = functools.partial(pld.gaussian_delta, mu=mu)
                curves.append((((gaussian, gaussian),), 1))
            epsilon = max(epsilon, pld.composed_epsilon(curves, delta))
        mu_bound = math.hypot(*open_mus, *(event.mu_bound(n) for event, n in hidden_parts))
        epsilon = min(epsilon, float(_mu_bound_epsilons(np.array(mu_bound), delta)))
        if not all(_has_renyi(event) for event, _ in hidden_parts):
            return epsilon
        return min(epsilon, Rdp().together(parts, delta))

    def best_of(self, repetition: Repetition, runs: Sequence[Part], delta: float) -> float:
        by_profile = super().best_of(repetition, runs, delta)
        if not all(_has_renyi(event) for event, _ in runs if event.sampling.hidden):
            return by_profile
        return min(by_profile, Rdp().best_of(repetition, runs, delta))


def _mu_bound_epsilons(mu: np.ndarray, delta: float) -> np.ndarray:
    """Epsilon of what is no more than Gaussians of mu, float64 [...]: all infinite, or none."""
    return pld.gaussian_epsilon(mu, delta) if np.isfinite(mu).all() else mu


def _quantize(parts: Sequence[Part]) -> list[Part]:
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


def _largest_loss(event: Event, counts: np.ndarray) -> np.ndarray | float:
    """The largest loss of `counts` events."""
    scheme, sampling = event.sampling.scheme, event.sampling
    largest = scheme.largest_loss(sampling, event.mu)
    if math.isinf(largest) or not event.mus:
        return counts * largest if math.isfinite(largest) else math.inf
    losses = [scheme.largest_loss(sampling, mu) for mu in event.first(int(np.max(counts))).tolist()]
    return np.append(0.0, np.cumsum(losses))[counts]


def _has_renyi(event: Event) -> bool:
    return event.sampling.scheme.gives(NEEDS["rdp"])


def _is_loose(event: Event, losses: Sequence[pld.LossDistribution | Rounds]) -> bool:
    """Whether rdp may have less: next to a coarse grid, and of Laplace noise, in closed form."""
    return math.isfinite(_largest_loss(event, np.array(1))) or any(loss.coarse for loss in losses)


def _charged_gaussians(event: Event, count: int) -> tuple[int, int]:
    """How many Gaussians `count` events are charged as, and the part of the first event."""
    times, part = event.sampling.scheme.charged(event.sampling, np.array(count))
    return int(times) * event.gaussians, int(part)


def _pairs(event: Event, part: int) -> tuple[pld.CurvePair, ...]:
    """The curves of one of an event's Gaussians, or of a `part` of it."""
    scheme, arguments = event.sampling.scheme, (event.sampling, event.mu, event.relation)
    return scheme.part_curves(*arguments, part) if part else scheme.curves(*arguments)


@lru_cache(maxsize=16)
def _rounds_of(event: Event, count: int) -> Rounds:
    """The losses of the first `count` of events that differ."""
    mus = event.first(count)
    return Rounds(lambda mu: _pairs(replace(event, mu=mu), 0), mus, event.convex, event.once)


def _losses(
    event: Event, gaussians: int, part: int, delta: float
) -> tuple[pld.LossDistribution, ...]:
    """The loss of one Gaussian by direction, and that over everyone, as suits this delta."""
    times = gaussians if event.once else event.gaussians
    return _discretised_losses(event, times, part, pld.tail_for(delta, gaussians))


@lru_cache(maxsize=16)
def _discretised_losses(
    event: Event, times: int, part: int, tail: float
) -> tuple[pld.LossDistribution, ...]:
    losses = pld.distributions(_pairs(event, part), tail, event.also or event.once, times)
    return tuple(replace(loss, every=event.gaussians, once=event.once > 0) for loss in losses)
