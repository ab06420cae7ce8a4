"""Privacy loss distributions, the tightest rigorous accountant: see `raydpfl.privacy.pld`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from raydpfl.privacy import pld
from raydpfl.privacy.accountants.base import NEEDS, Accountant
from raydpfl.privacy.mechanism import Event, Mechanism
from raydpfl.privacy.sampling.base import Losses
from raydpfl.privacy.types import Relation


class Pld(Accountant):
    """Composes the privacy loss of a round by FFT, or in closed form where nothing is amplified."""

    name = "pld"
    needs = NEEDS["pld"]

    def covers(self, mechanism: Mechanism, relation: Relation) -> str | None:
        refused = super().covers(mechanism, relation)
        scheme = mechanism.sampling.scheme
        asked = mechanism.survey is not None and mechanism.sampling.hidden
        if refused is None and asked and not scheme.gives("losses_with_gaussian"):
            return f"{scheme.plural()} with {mechanism.survey} are not covered by pld; nearest: rdp"
        return refused

    def curve(self, event: Event, delta: float, counts: np.ndarray) -> np.ndarray:
        if not event.sampling.hidden:
            return pld.gaussian_epsilon(event.unamplified(counts), delta)
        gaussians = event.each
        first = int(counts[0]) * gaussians
        last = int(counts[-1]) * gaussians
        once = event.once > 0
        curves = [
            loss.epsilons(delta, first, last, gaussians, other, once)
            for loss, other in _losses(event, last if once else gaussians)
        ]
        return np.max(curves, axis=0)

    def delta_of(self, event: Event, epsilon: float, count: int) -> float:
        if not event.sampling.hidden:
            return float(pld.gaussian_delta(epsilon, event.unamplified(count)))
        times = count * event.each
        once = event.once > 0
        deltas = [
            loss.delta(epsilon, times, event.each, other, once)
            for loss, other in _losses(event, times if once else event.each)
        ]
        return min(1.0, max(deltas))


@lru_cache(maxsize=16)
def _losses(event: Event, times: int) -> tuple[Losses, ...]:
    """The losses of an event, a pair for each direction that can differ: that of one of its `each`
    Gaussians, and that of a Gaussian over everyone, released once in so many `times`.
    """
    sampling = event.sampling
    over_everyone = event.also or event.once
    if over_everyone:
        return sampling.scheme.losses_with_gaussian(sampling, event.mu, times, over_everyone)
    return tuple((loss, None) for loss in sampling.scheme.losses(sampling, event.mu))
