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
from raydpfl.privacy.unequal_rounds import mu_levels

_LEVELS = 64  # of noise, at which divergences are computed where it differs by round


class Rdp(Accountant):
    """Adds up Renyi divergences, at dp-accounting's orders and with its conversion."""

    name = "rdp"
    needs = NEEDS["rdp"]

    def curve(self, event: Event, delta: float, counts: np.ndarray) -> np.ndarray:
        offset = rdp.gaussian(event.once)
        if event.mus:
            rounds = _cumulative_divergences(event, int(counts[-1]))[int(counts[0]) - 1 :]
            return np.array([rdp.epsilons(row, delta, 1) for row in rounds + offset])
        return rdp.epsilons(_divergences(event), delta, event.effective_counts(counts), offset)

    def delta_of(self, event: Event, epsilon: float, count: int) -> float:
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        total = _total_divergences(event, count)
        # it takes log(1 - e^-r), and e^-r is 1 at a lower r
        total = np.where(total > 0, np.maximum(total, 2.0**-52), total)
        return float(compute_delta(rdp.ORDERS, total, epsilon)[0])

    def together(self, parts: Sequence[Part], delta: float) -> float:
        total = np.sum([_total_divergences(*part) for part in parts], axis=0)
        return float(rdp.epsilons(total, delta, 1))

    def best_of(self, repetition: Repetition, runs: Sequence[Part], delta: float) -> float:
        worst = np.max([_total_divergences(*part) for part in runs], axis=0)
        return float(rdp.epsilons(repetition.renyi(worst), delta, 1))


def _total_divergences(event: Event, count: int) -> np.ndarray:
    """Renyi divergences float64 [orders] of the first `count` events."""
    offset = rdp.gaussian(event.once)
    if not event.mus:
        return _divergences(event) * event.effective_counts(count) + offset
    return _cumulative_divergences(event, count)[-1] + offset


@lru_cache(maxsize=4)
def _cumulative_divergences(event: Event, count: int) -> np.ndarray:
    """Renyi divergences of the first 1, ..., `count` of events that differ, float64 [count,
    orders]; between two levels averages of exponentials (docs/proofs.md, Rounds that differ).
    """
    mus = event.first(count)
    if not event.sampling.hidden:
        return np.square(mus).cumsum()[:, None] * rdp.gaussian(1.0)
    distinct, place = np.unique(mus, return_inverse=True)
    levels, weights = mu_levels(distinct, event.convex, _LEVELS)
    base = replace(event, mus=(), once=0.0)
    logs = [_divergences(replace(base, mu=mu)) * (rdp.ORDERS - 1) for mu in levels.tolist()]
    rows = [
        np.logaddexp.reduce([logs[i] + math.log(row[i]) for i in np.flatnonzero(row)], axis=0)
        for row in weights
    ]
    return (np.array(rows) / (rdp.ORDERS - 1))[place.reshape(-1)].cumsum(axis=0)


@lru_cache(maxsize=256)
def _divergences(event: Event) -> np.ndarray:
    """Renyi divergences float64 [orders] of one event at `rdp.ORDERS`."""
    sampling = event.sampling
    skellam = event.skellam
    curve = skellam.renyi(rdp.ORDERS) if skellam else rdp.gaussian(event.mu)
    if sampling.hidden and skellam:
        # what is zeroed is replaced by zeros, at most twice as far
        distance_factor = 1 if event.relation == "replace_one" else 2
        replaced_loss = replace(skellam, square=distance_factor**2 * skellam.square)
        if event.relation == "add_remove":  # another takes the place of who is absent
            curve = replaced_loss.renyi(rdp.ORDERS)
        curve = np.minimum(curve, sampling.scheme.amplified(sampling, replaced_loss.renyi))
    elif sampling.hidden:
        curve = sampling.scheme.renyi(sampling, event.mu, event.relation)
    return event.gaussians * curve + rdp.gaussian(event.also)
