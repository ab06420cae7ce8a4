"""Renyi differential privacy: rigorous, fast, and about twice as loose as pld where sampling
amplifies: see `raydpfl.privacy.rdp`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from raydpfl.privacy import rdp
from raydpfl.privacy.accountants.base import NEEDS, Accountant
from raydpfl.privacy.mechanism import Event


class Rdp(Accountant):
    """Adds up Renyi divergences, at dp-accounting's orders and with its conversion."""

    name = "rdp"
    needs = NEEDS["rdp"]

    def curve(self, event: Event, delta: float, counts: np.ndarray) -> np.ndarray:
        return rdp.epsilons(_divergences(event), delta, counts, rdp.gaussian(event.once))

    def delta_of(self, event: Event, epsilon: float, count: int) -> float:
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        spent = _divergences(event) * count + rdp.gaussian(event.once)
        return float(compute_delta(rdp.ORDERS, spent, epsilon)[0])


@lru_cache(maxsize=64)
def _divergences(event: Event) -> np.ndarray:
    """Renyi divergences float64 [orders] of one event at `rdp.ORDERS`."""
    sampling = event.sampling
    one = rdp.gaussian(event.mu)
    if sampling.hidden:
        one = sampling.scheme.renyi(sampling, event.mu)
    return event.gaussians * one + rdp.gaussian(event.also)
