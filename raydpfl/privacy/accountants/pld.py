"""Privacy loss distributions, the tightest rigorous accountant: see `raydpfl.privacy.pld`."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from raydpfl.privacy import pld
from raydpfl.privacy.accountants.base import Accountant
from raydpfl.privacy.laws.base import Losses

if TYPE_CHECKING:
    from raydpfl.privacy.mechanism import Event


class Pld(Accountant):
    """Composes the privacy loss of a round by FFT, or in closed form where nothing is amplified."""

    name = "pld"
    needs = "losses"

    def curve(self, event: Event, delta: float, counts: np.ndarray) -> np.ndarray:
        if not event.sampling.hidden:
            return pld.gaussian_epsilon(event.unamplified(counts), delta)
        each = event.each
        first = int(counts[0]) * each
        last = int(counts[-1]) * each
        curves = [loss.epsilons(delta, first, last, each, other) for loss, other in _losses(event)]
        return np.max(curves, axis=0)

    def delta_of(self, event: Event, epsilon: float, count: int) -> float:
        if not event.sampling.hidden:
            return float(pld.gaussian_delta(epsilon, event.unamplified(count)))
        times = count * event.each
        deltas = [loss.delta(epsilon, times, event.each, other) for loss, other in _losses(event)]
        return min(1.0, max(deltas))


@lru_cache(maxsize=16)
def _losses(event: Event) -> tuple[Losses, ...]:
    """The losses of an event, a pair for each direction that can differ: that of one of its `each`
    Gaussians, and that of the Gaussian over everyone.
    """
    law = event.sampling.law
    if event.also:
        return law.losses_besides(event.sampling, event.mu, event.each, event.also)
    return tuple((loss, None) for loss in law.losses(event.sampling, event.mu))
