"""What accountants claim of sampling schemes: clauses of the contracts of both.

A scheme claims that a secret cohort amplifies privacy, and by how much. None may claim more than
what holds for a client whose data alone move the sum: it is in the cohort with probability q, and
everyone else sends 0. One round then shows a mixture of two Gaussians, whose privacy loss is an
integral over a line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import get_args

import numpy as np
from scipy.fft import irfft, rfft
from scipy.stats import binom, norm

from raydpfl.check.contract import hold
from raydpfl.privacy import Mechanism, Query, Relation, Sampling
from raydpfl.privacy.accountants import ACCOUNTANTS, Accountant

RELATIONS: tuple[Relation, ...] = get_args(Relation)
NOISE = (1.0, 3.0)  # std over bound
EPSILONS = (0.0, 0.3, 1.0)
DELTA = 1e-3
POINTS = 40_001
LOSSES = 30.0  # privacy losses of one round are looked at up to here
LOSS_STEP = 1e-3
ROUNDS = 5
V = 4.0  # what 000 Theorem 3.2 leaves open


@dataclass(frozen=True)
class Claims:
    """What accountants claim of sampling schemes, each asked about the same numbers."""

    samplings: tuple[Sampling, ...]
    accountants: tuple[Accountant, ...] = tuple(
        accountant for accountant in ACCOUNTANTS.values() if accountant.rigorous
    )

    @property
    def sampling(self) -> Sampling:
        """The first of them."""
        return self.samplings[0]

    def mechanisms(self, z: float = 1.0) -> Iterator[Mechanism]:
        """Rounds of each with this noise multiplier."""
        for sampling in self.samplings:
            yield Mechanism(sampling, (Query("updates", 1.0, z),), rounds=ROUNDS)

    def covered(self, z: float = 1.0) -> Iterator[tuple[Accountant, Mechanism, Relation, str]]:
        """Each accountant with a mechanism and a relation that it covers, and these in words."""
        for mechanism, relation in product(self.mechanisms(z), RELATIONS):
            for accountant in self.accountants:
                if accountant.covers(mechanism, relation) is None:
                    words = f"{accountant.name}: {mechanism.sampling} under {relation}"
                    yield accountant, mechanism, relation, words


@dataclass(frozen=True)
class LoneClient:
    """One round in which a single client alone moves the sum: two densities on a line."""

    p: np.ndarray  # float64 [points], with the client's data
    q: np.ndarray  # float64 [points], with other data, or none
    step: float

    @classmethod
    def of(cls, sampling: Sampling, relation: Relation, mu: float) -> LoneClient:
        """Under a relation; `mu` is sensitivity over std."""
        times, chances = _times(sampling)
        x = np.linspace(-mu * times[-1] - 9, mu * times[-1] + 9, POINTS)

        def seen(move: float) -> np.ndarray:
            pairs = zip(times, chances, strict=True)
            return np.sum([chance * norm.pdf(x - move * k) for k, chance in pairs], axis=0)

        if relation == "replace_one":
            return cls(seen(mu / 2), seen(-mu / 2), float(x[1] - x[0]))
        return cls(seen(mu), norm.pdf(x), float(x[1] - x[0]))

    def delta(self, epsilon: float) -> float:
        """At this epsilon, in the worse direction."""
        e = math.exp(epsilon)
        backends = ((self.p, self.q), (self.q, self.p))
        return max(float(np.maximum(a - e * b, 0).sum() * self.step) for a, b in backends)

    def composed_delta(self, epsilon: float, rounds: int) -> float:
        """A lower bound on delta at this epsilon after so many rounds, in the worse direction: what
        the sum of the rounds' privacy losses has, each rounded down, those beyond `LOSSES` cut.
        """
        limit = round(LOSSES / LOSS_STEP)
        sums = LOSS_STEP * np.arange(-rounds * limit, rounds * limit + 1)
        deltas = []
        for a, b in ((self.p, self.q), (self.q, self.p)):
            both = (a > 1e-280) & (b > 1e-280)
            losses = np.floor(np.log(a[both] / b[both]) / LOSS_STEP)
            cells = np.minimum(losses, limit).astype(int) + limit
            kept = cells >= 0
            masses = np.bincount(cells[kept], a[both][kept] * self.step, 2 * limit + 1)
            composed_masses = irfft(rfft(masses, len(sums)) ** rounds, len(sums))
            above = sums > epsilon
            deltas.append(float(composed_masses[above] @ -np.expm1(epsilon - sums[above])))
        return max(deltas)

    def attacks(self) -> tuple[np.ndarray, np.ndarray]:
        """Some of the most powerful tests for the client's data (Neyman and Pearson): their rates
        of false positives and of false negatives, float64 [n] each.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            order = np.argsort(-np.nan_to_num(self.p / self.q, nan=1.0), kind="stable")
        rates = [
            np.cumsum(density[order])[:: POINTS // 400] * self.step for density in (self.q, self.p)
        ]
        return rates[0], 1 - rates[1]

    def renyi(self, order: float) -> float:
        """The divergence at an order above 1, in the worse direction."""
        p, q = self._logs
        curves = []
        for a, b in ((p, q), (q, p)):
            logs = order * a + (1 - order) * b
            curves.append(math.log(float(np.exp(logs).sum() * self.step)) / (order - 1))
        return max(curves)

    @cached_property
    def _logs(self) -> tuple[np.ndarray, np.ndarray]:
        """Of both densities, where there is something of both."""
        support = (self.p > 1e-280) & (self.q > 1e-280)
        return np.log(self.p[support]), np.log(self.q[support])


def _times(sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """How often a client may be in a cohort, and the probability of each number."""
    if not sampling.hidden:
        return np.array([1]), np.array([1.0])
    if not sampling.repeats:
        return np.array([0, 1]), np.array([1 - sampling.q, sampling.q])
    chance = sampling.p_max or 1 / sampling.population
    times = np.arange(min(sampling.cohort, 12) + 1)
    return times, binom.pmf(times, sampling.cohort, chance)


def no_more_private_than_a_lone_client(case: Claims) -> str:
    """No delta that is claimed is below that of a client who alone moves the sum."""
    delta_count = 0
    for z in NOISE:
        for accountant, mechanism, relation, words in case.covered(z):
            lone = LoneClient.of(mechanism.sampling, relation, mechanism.mu(relation))
            for epsilon in EPSILONS if accountant.rigorous else ():
                claim = accountant.delta(mechanism, relation, epsilon, 1, V)
                lone_delta = lone.delta(epsilon)
                message = f"{words} with noise {z:g}: delta {claim:.4g} at epsilon {epsilon:g}"
                message += f" for a round; a lone client has {lone_delta:.4g}"
                hold(claim >= lone_delta * (1 - 1e-4) - 1e-9, message)
                delta_count += 1
    return f"{delta_count} values of delta held against an integral"


def no_less_than_an_attack(case: Claims) -> str:
    """No trade-off curve is above the errors that an attack on a lone client makes."""
    point_count = 0
    for accountant, mechanism, relation, words in case.covered(NOISE[0]):
        if not accountant.rigorous:
            continue
        lone = LoneClient.of(mechanism.sampling, relation, mechanism.mu(relation))
        false_positives, false_negatives = lone.attacks()
        curve = accountant.tradeoff(mechanism, relation, 1, V)
        negatives = curve.false_negatives(false_positives.clip(0, 1), "absent")
        positives = curve.false_negatives(false_negatives.clip(0, 1), "present")
        for rates, attack in ((negatives, false_negatives), (positives, false_positives)):
            worst_index = int(np.argmax(rates - attack))
            rate, attack_rate = rates[worst_index], attack[worst_index]
            message = f"{words}: error rate {rate:.4g}, where an attack has {attack_rate:.4g}"
            hold(rate <= attack_rate + 1e-4, message)
        point_count += 2 * len(negatives)
    return f"{point_count} points of trade-off curves held against the best test"


def monotone(case: Claims) -> str:
    """Epsilon rises with the rounds, and falls with the noise."""
    for low_noise, high_noise in zip(*map(case.covered, NOISE), strict=True):
        curves = []
        for accountant, mechanism, relation, words in (low_noise, high_noise):
            curves.append(accountant.epsilons(mechanism, relation, DELTA, 1, ROUNDS, V))
            hold(curves[-1].shape == (ROUNDS,), f"{words}: {list(curves[-1].shape)} epsilons")
            hold((np.diff(curves[-1]) >= -1e-9).all(), f"{words}: it falls with the rounds")
            hold(np.isfinite(curves[-1]).all(), f"{words}: it is not finite")
        hold((curves[1] <= curves[0] + 1e-9).all(), f"{words}: it rises with the noise")
    return "in rounds and in noise"


def inverse(case: Claims) -> str:
    """Delta at the epsilon of a delta is that delta, at most."""
    for accountant, mechanism, relation, words in case.covered(NOISE[0]):
        epsilons = accountant.epsilons(mechanism, relation, DELTA, ROUNDS, ROUNDS, V)
        claim = accountant.delta(mechanism, relation, float(epsilons[0]), ROUNDS, V)
        message = f"{words}: epsilon {epsilons[0]:.6g} at {DELTA:g}, delta {claim:.6g} there"
        hold(claim <= DELTA * 1.001, message)
    return f"at delta {DELTA:g}"
