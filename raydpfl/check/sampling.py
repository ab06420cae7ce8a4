"""The contract of a sampling scheme: see `raydpfl.privacy.sampling`.

A scheme claims that a secret cohort amplifies privacy, and by how much. None may claim more than
what holds for a client whose data alone move the sum: it is in the cohort with probability q, and
everyone else sends 0. One round then shows a mixture of two Gaussians, whose privacy loss is an
integral over a line. No sound scheme claims less than this loss for a round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np
from scipy.stats import binom, norm

from raydpfl import privacy
from raydpfl.check.contract import Look, hold
from raydpfl.privacy import Mechanism, Query, Relation, Sampling, rdp
from raydpfl.privacy.accountants import ACCOUNTANTS

RELATIONS: tuple[Relation, ...] = get_args(Relation)
NOISE = (1.0, 3.0)  # std over bound
EPSILONS = (0.0, 0.3, 1.0)
ORDERS = 12.0  # Renyi orders up to this one are integrated
DELTA = 1e-3
POINTS = 40_001


@dataclass(frozen=True)
class SchemeCase:
    """A sampling scheme, and the numbers that it is asked about."""

    sampling: Sampling

    def mechanism(self, z: float) -> Mechanism:
        """Rounds of it with this noise multiplier."""
        return Mechanism(self.sampling, (Query("updates", 1.0, z),), rounds=5)

    def covered(self) -> Iterator[tuple[str, Relation]]:
        """The rigorous accountants that cover it, each with a relation."""
        names = [name for name, accountant in ACCOUNTANTS.items() if accountant.rigorous]
        for relation in RELATIONS:
            for name in names:
                if privacy.covers(name, self.mechanism(1.0), relation) is None:
                    yield name, relation


def words(case: SchemeCase) -> str:
    """It says in words what it is, and which relation no accountant covers."""
    scheme = case.sampling.scheme
    words = scheme.words(case.sampling)
    hold(isinstance(scheme.kind, str) and scheme.kind, "it has no kind, its name in the ledger")
    hold(isinstance(words, str) and words, f"words gives {words!r}")
    for relation in RELATIONS:
        refused = scheme.refuses(relation)
        hold(refused is None or (isinstance(refused, str) and refused), f"refuses: {refused!r}")
    return words


def chances(case: SchemeCase) -> str:
    """Its chances are probabilities, its size a number of clients."""
    sampling = case.sampling
    hold(0 < sampling.q <= 1, f"q is {sampling.q}")
    hold(
        sampling.coins is None or 0 < sampling.coins <= 1, f"the coin's chance is {sampling.coins}"
    )
    size = sampling.size
    hold(size is None or 1 <= size <= sampling.cohort * 1e9, f"the size is {size}")
    hold(not (sampling.hidden and sampling.everyone), "everyone takes part, and that is a secret")
    participations = sampling.scheme.participations(sampling, 5, None)
    hold(participations.most >= 1, "a client takes part in no round at all")
    return f"q = {sampling.q:.4g}"


def covered(case: SchemeCase) -> str:
    """Some rigorous accountant covers it, under some relation."""
    covered = [f"{name} under {relation}" for name, relation in case.covered()]
    hold(covered, f"{case.sampling}: give curves, renyi or both")
    return ", ".join(covered)


@dataclass(frozen=True)
class Lone:
    """One round in which a single client alone moves the sum: two densities on a line."""

    p: np.ndarray  # float64 [points], with the client's data
    q: np.ndarray  # float64 [points], with other data, or none
    step: float

    @classmethod
    def of(cls, sampling: Sampling, relation: Relation, mu: float) -> Lone:
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
        here = (self.p > 1e-280) & (self.q > 1e-280)
        return np.log(self.p[here]), np.log(self.q[here])


def _times(sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """How often a client may be in a cohort, and the probability of each number."""
    if not sampling.hidden:
        return np.array([1]), np.array([1.0])
    if not sampling.repeats:
        return np.array([0, 1]), np.array([1 - sampling.q, sampling.q])
    chance = sampling.p_max or 1 / sampling.population
    times = np.arange(min(sampling.cohort, 12) + 1)
    return times, binom.pmf(times, sampling.cohort, chance)


def no_more_private_than_a_lone_client(case: SchemeCase) -> str:
    """No epsilon of it is below that of a client who alone moves the sum."""
    looked = 0
    for name, relation in case.covered():
        for z in NOISE:
            mechanism = case.mechanism(z)
            lone = Lone.of(case.sampling, relation, mechanism.mu(relation))
            for epsilon in EPSILONS:
                claimed = privacy.delta(mechanism, relation, epsilon, 1, name)
                least = lone.delta(epsilon)
                wrong = f"{name} claims delta {claimed:.4g} at epsilon {epsilon:g} for a round"
                wrong += f" with noise {z:g}, under {relation}; a lone client has {least:.4g}"
                hold(claimed >= least * (1 - 1e-4) - 1e-9, wrong)
                looked += 1
    return f"{looked} values of delta"


def renyi_curve(case: SchemeCase) -> str:
    """Its Renyi divergences rise with the order, and are those of a lone client at least."""
    scheme = case.sampling.scheme
    if not case.sampling.hidden or not scheme.gives("renyi"):
        return "none is needed, or given"
    for relation in [relation for relation in RELATIONS if scheme.refuses(relation) is None]:
        for z in NOISE:
            mu = case.mechanism(z).mu(relation)
            curve = scheme.renyi(case.sampling, mu)
            hold(curve.shape == rdp.ORDERS.shape, f"{list(curve.shape)} divergences")
            lone = Lone.of(case.sampling, relation, mu)
            for order, claimed in zip(rdp.ORDERS.tolist(), curve.tolist(), strict=True):
                if not 1.1 <= order <= ORDERS:
                    continue
                least = lone.renyi(order)
                wrong = f"{claimed:.4g} at order {order:g} with noise {z:g}, under {relation}"
                hold(claimed >= least * (1 - 1e-4), f"{wrong}; a lone client has {least:.4g}")
    return f"orders up to {ORDERS:g} held against an integral"


def monotone(case: SchemeCase) -> str:
    """Epsilon rises with the rounds, and falls with the noise."""
    for name, relation in case.covered():
        curves = []
        for z in NOISE:
            mechanism = case.mechanism(z)
            curves.append(privacy.epsilon_curve(mechanism, relation, DELTA, accountant=name))
            hold((np.diff(curves[-1]) >= -1e-9).all(), f"{name}: it falls with the rounds")
            hold(np.isfinite(curves[-1]).all(), f"{name}: it is not finite")
        hold((curves[1] <= curves[0] + 1e-9).all(), f"{name}: it rises with the noise")
    return "in rounds and in noise"


def inverse(case: SchemeCase) -> str:
    """Delta at the epsilon of a delta is that delta, at most."""
    for name, relation in case.covered():
        mechanism = case.mechanism(NOISE[0])
        epsilon = privacy.epsilon(mechanism, relation, DELTA, accountant=name)
        back = privacy.delta(mechanism, relation, epsilon, accountant=name)
        wrong = (
            f"{name} under {relation}: epsilon {epsilon:.6g} at {DELTA:g}, delta {back:.6g} there"
        )
        hold(back <= DELTA * 1.001, wrong)
    return f"at delta {DELTA:g}"


CONTRACT: tuple[Look, ...] = (
    words,
    chances,
    covered,
    no_more_private_than_a_lone_client,
    renyi_curve,
    monotone,
    inverse,
)
