"""Renyi differential privacy: rigorous, fast, and about twice as loose as pld where sampling
amplifies: see `raydpfl.privacy.rdp`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from raydpfl.privacy import rdp
from raydpfl.privacy.accountants.base import NEEDS, Accountant, Part
from raydpfl.privacy.mechanism import Event
from raydpfl.privacy.repetition import Repetition
from raydpfl.privacy.unequal_rounds import in_levels

_LEVELS = 64  # of noise, at which divergences are computed where it differs by round


class Rdp(Accountant):
    """Adds up Renyi divergences, at dp-accounting's orders and with its conversion."""

    name = "rdp"
    needs = NEEDS["rdp"]

    def curve(self, event: Event, delta: float, counts: np.ndarray) -> np.ndarray:
        once = rdp.gaussian(event.once)
        if event.mus:
            rounds = _composed(event, int(counts[-1]))[int(counts[0]) - 1 :]
            return np.array([rdp.epsilons(spent, delta, 1) for spent in rounds + once])
        return rdp.epsilons(_divergences(event), delta, event.amounting(counts), once)

    def delta_of(self, event: Event, epsilon: float, count: int) -> float:
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        return float(compute_delta(rdp.ORDERS, _spent(event, count), epsilon)[0])

    def together(self, parts: Sequence[Part], delta: float) -> float:
        return float(rdp.epsilons(np.sum([_spent(*part) for part in parts], axis=0), delta, 1))

    def best_of(self, repetition: Repetition, runs: Sequence[Part], delta: float) -> float:
        worst = np.max([_spent(*part) for part in runs], axis=0)
        return float(rdp.epsilons(repetition.renyi(worst), delta, 1))


def _spent(event: Event, count: int) -> np.ndarray:
    """Renyi divergences float64 [orders] of the first `count` events."""
    once = rdp.gaussian(event.once)
    if not event.mus:
        return _divergences(event) * event.amounting(count) + once
    return _composed(event, count)[-1] + once


@lru_cache(maxsize=4)
def _composed(event: Event, count: int) -> np.ndarray:
    """Renyi divergences of the first 1, ..., `count` of events that differ, float64 [count,
    orders]; between two levels averages of exponentials (docs/proofs.md, Rounds that differ).
    """
    mus = event.first(count)
    if not event.sampling.hidden:
        return np.square(mus).cumsum()[:, None] * rdp.gaussian(1.0)
    distinct, place = np.unique(mus, return_inverse=True)
    levels, weights = in_levels(distinct, event.convex, _LEVELS)
    alone = replace(event, mus=(), once=0.0)
    known = [_divergences(replace(alone, mu=mu)) * (rdp.ORDERS - 1) for mu in levels.tolist()]
    rows = [
        np.logaddexp.reduce([known[i] + math.log(row[i]) for i in np.flatnonzero(row)], axis=0)
        for row in weights
    ]
    return (np.array(rows) / (rdp.ORDERS - 1))[place.reshape(-1)].cumsum(axis=0)


@lru_cache(maxsize=256)
def _divergences(event: Event) -> np.ndarray:
    """Renyi divergences float64 [orders] of one event at `rdp.ORDERS`."""
    sampling = event.sampling
    skellam = event.skellam
    one = skellam.renyi(rdp.ORDERS) if skellam else rdp.gaussian(event.mu)
    if sampling.hidden and skellam:
        # what is zeroed is replaced by zeros, at most twice as far
        moved = 1 if event.relation == "replace_one" else 2
        replaced = replace(skellam, square=moved**2 * skellam.square)
        if event.relation == "add_remove":  # another takes the place of who is absent
            one = replaced.renyi(rdp.ORDERS)
        one = np.minimum(one, sampling.scheme.amplified(sampling, replaced.renyi))
    elif sampling.hidden:
        one = sampling.scheme.renyi(sampling, event.mu, event.relation)
    return event.gaussians * one + rdp.gaussian(event.also)
