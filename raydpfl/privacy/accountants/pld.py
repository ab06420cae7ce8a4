"""Privacy loss distributions: the tightest of the rigorous accountants. See `raydpfl.privacy.pld`
for the mathematics.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from raydpfl.privacy import pld
from raydpfl.privacy.accountants.base import Accountant


class Pld(Accountant):
    """Composes the privacy loss of a round by FFT, or in closed form where nothing is amplified."""

    name = "pld"
    needs = "losses"

    def epsilons(self, mechanism, relation, delta, first, last, v):
        mu = mechanism.mu(relation)
        sampling = mechanism.sampling
        if not sampling.hidden:
            return pld.gaussian_epsilon(mu * np.sqrt(np.arange(first, last + 1)), delta)
        return np.max([loss.epsilons(delta, first, last) for loss in _losses(sampling, mu)], axis=0)

    def delta(self, mechanism, relation, epsilon, rounds, v):
        mu = mechanism.mu(relation)
        sampling = mechanism.sampling
        if not sampling.hidden:
            return float(pld.gaussian_delta(epsilon, mu * math.sqrt(rounds)))
        return min(1.0, max(loss.delta(epsilon, rounds) for loss in _losses(sampling, mu)))

    def of_steps(self, q, mu, delta, each, counts, beside):
        if q == 1:
            return pld.gaussian_epsilon(np.sqrt(counts * (each * mu**2 + beside**2)), delta)
        first = int(counts[0])
        last = int(counts[-1])
        loss = pld.fixed_size(q, mu)
        other = None
        if beside:
            loss, other = pld.fixed_size_and_gaussian(q, mu, each, beside)
        return loss.epsilons(delta, each * first, each * last, each, other)


@lru_cache(maxsize=64)
def _losses(sampling, mu):
    return sampling.law.losses(sampling, mu)
