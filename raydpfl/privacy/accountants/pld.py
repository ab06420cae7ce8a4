"""Privacy loss distributions, the tightest rigorous accountant: see `raydpfl.privacy.pld`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from raydpfl.privacy import pld
from raydpfl.privacy.accountants.base import NEEDS, Accountant, Part
from raydpfl.privacy.mechanism import Event
from raydpfl.privacy.tradeoff import TradeOff


class Pld(Accountant):
    """Composes the privacy loss of a round by FFT, or in closed form where nothing is amplified."""

    name = "pld"
    needs = NEEDS["pld"]

    def curve(self, event: Event, delta: float, counts: np.ndarray) -> np.ndarray:
        if not event.sampling.hidden:
            return pld.gaussian_epsilon(event.unamplified(counts), delta)
        gaussians = event.gaussians
        first = int(counts[0]) * gaussians
        last = int(counts[-1]) * gaussians
        once = event.once > 0
        curves = [
            loss.epsilons(delta, first, last, gaussians, other, once)
            for loss, other in _losses(event, last if once else gaussians)
        ]
        return np.max(curves, axis=0)

    def tradeoff(self, mechanism, relation, rounds, v):
        return self.tradeoff_of(mechanism.event(relation), rounds)

    def tradeoff_of(self, event: Event, count: int) -> TradeOff:
        if not event.sampling.hidden:
            return TradeOff.gaussian(float(event.unamplified(count)))
        times = count * event.gaussians
        once = event.once > 0
        losses = _losses(event, times if once else event.gaussians)
        tails = [loss.deltas(times, event.gaussians, other, once) for loss, other in losses]
        return TradeOff.of_directions(losses[0][0].step, tails)

    def delta_of(self, event: Event, epsilon: float, count: int) -> float:
        if not event.sampling.hidden:
            return float(pld.gaussian_delta(epsilon, event.unamplified(count)))
        times = count * event.gaussians
        once = event.once > 0
        deltas = [
            loss.delta(epsilon, times, event.gaussians, other, once)
            for loss, other in _losses(event, times if once else event.gaussians)
        ]
        return min(1.0, max(deltas))

    def together(self, parts: Sequence[Part], delta: float) -> float:
        """All Gaussians over everyone are one."""
        secret = [part for part in parts if part[0].sampling.hidden]
        open_ones = [event.unamplified(n) for event, n in parts if not event.sampling.hidden]
        over_everyone = [math.sqrt(event.also**2 * n + event.once**2) for event, n in secret]
        mu = math.hypot(*open_ones, *over_everyone)
        if not secret:
            return float(pld.gaussian_epsilon(mu, delta))
        curves = [
            (event.sampling.scheme.curves(event.sampling, event.mu), n * event.gaussians)
            for event, n in secret
        ]
        if mu:
            gaussian = functools.partial(pld.gaussian_delta, mu=mu)
            curves.append((((gaussian, gaussian),), 1))
        return pld.together(curves, delta)


@lru_cache(maxsize=16)
def _losses(
    event: Event, times: int
) -> tuple[tuple[pld.LossDistribution, pld.LossDistribution | None], ...]:
    """For every direction the loss of one of an event's Gaussians, and that over everyone."""
    pairs = event.sampling.scheme.curves(event.sampling, event.mu)
    over_everyone = event.also or event.once
    if over_everyone:
        return pld.and_gaussian(pairs, times, over_everyone)
    return tuple((loss, None) for loss in pld.distributions(pairs))
