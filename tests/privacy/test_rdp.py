"""Renyi divergences: dp-accounting's, and exact moments where it loses them to cancellation."""

import math
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant, compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import _compute_rdp_sample_wor_gaussian as reference
from scipy.stats import norm

from raydpfl.privacy import rdp


@pytest.mark.parametrize(
    ("q", "mu"), [(10 / 600, 2 / 3.43), (128 / 500, 0.4), (1 / 600, 2.0), (0.01, 8.0), (0.9, 30.0)]
)
def test_divergences_and_epsilons_are_dp_accountings(q, mu):
    ours = rdp.fixed_size(q, mu)
    theirs = reference(q, 1 / mu, rdp.ORDERS)
    assert ours == pytest.approx(theirs, rel=1e-9)
    for delta in (1e-2, 1e-5):
        counts = [1, 40, 3000]
        expected = [compute_epsilon(rdp.ORDERS, theirs * count, delta)[0] for count in counts]
        assert rdp.epsilons(ours, delta, counts) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("samples", "batch", "z", "counts", "delta"),
    [
        (10_000, 261, 54.931, 50, 1e-12),
        (600, 1, 9.938, 50, 1e-5),
        (10_000, 63, 3.966, 1, 1e-5),
        (20, 1, 98.555, 10_000, 1e-12),
        (10**6, 100, 0.6, 10**4, 1e-8),
    ],
)
def test_epsilons_far_from_the_usual_are_dp_accountings_too(samples, batch, z, counts, delta):
    # with the orders that it has by default
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    one = dp_event.SampledWithoutReplacementDpEvent(samples, batch, dp_event.GaussianDpEvent(z / 2))
    accountant.compose(one, counts)
    found = rdp.epsilons(rdp.fixed_size(batch / samples, 2 / z), delta, counts)
    assert float(found) == pytest.approx(accountant.get_epsilon(delta), rel=1e-8)


@pytest.mark.parametrize(
    ("q", "mu"),
    [
        (0.1, 1 / 2.6),
        (0.01, 1.0),
        (0.5, 0.2),
        (0.999, 2.0),
        (1e-4, 3.0),
        (0.3, 14.0),
        (0.1, 30.0),
        (1.0, 0.5),
    ],
)
def test_divergences_of_poisson_samples_are_dp_accountings(q, mu):
    """Those at orders where its series does not converge are infinite."""
    accountant = RdpAccountant(rdp.ORDERS.tolist())
    accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(1 / mu)))
    assert rdp.poisson(q, mu) == pytest.approx(accountant.rdp, rel=1e-9)


def divergence(q, mu, order):
    """The larger Renyi divergence of N(0, 1) and (1 - q) N(0, 1) + q N(mu, 1), by a sum."""
    x = np.linspace(-40, 40 + order * mu, 100_001)
    ratio = np.logaddexp(math.log1p(-q), math.log(q) + mu * x - mu * mu / 2)
    powers = order * ratio, (1 - order) * ratio
    logs = [np.log(np.trapezoid(np.exp(power + norm.logpdf(x)), x)) for power in powers]
    return max(logs) / (order - 1)


@pytest.mark.parametrize(("q", "mu"), [(0.1, 1 / 2.6), (0.01, 1.0), (0.5, 0.2)])
def test_divergences_of_poisson_samples_are_integrals(q, mu):
    orders = np.array([2, 8, 32, 1.5, 3.7])
    ours = rdp.poisson(q, mu)[[int(np.abs(rdp.ORDERS - order).argmin()) for order in orders]]
    exact = np.array([divergence(q, mu, order) for order in orders])
    assert ours[:3] == pytest.approx(exact[:3], rel=1e-6)
    assert (ours >= exact * (1 - 1e-6)).all()  # between whole orders it is a bound, or infinite


@pytest.mark.parametrize(("mu", "rounding"), [(0.02, 1e-9), (0.002, 1e-6)])
def test_what_alternating_sums_lose_is_kept(mu, rounding):
    """At large noise dp-accounting's high orders drown in rounding; ours are never above them, but
    for what low orders lose too, and far below some.
    """
    ours = rdp.fixed_size(0.5, mu)
    theirs = reference(0.5, 1 / mu, rdp.ORDERS)
    assert (ours <= theirs * (1 + rounding)).all() and (ours < theirs / 5).any()


@pytest.mark.parametrize("mu", [0.02, 0.5, 3.0])
def test_moments_are_the_exact_alternating_sums(mu):
    """E (L-1)^i = sum_j (-1)^(i-j) C(i,j) e^(j(j-1) mu^2/2), in fractions, e by Taylor."""

    def exponential(x: Fraction) -> Fraction:
        halvings = max(0, math.ceil(math.log2(max(x, Fraction(1)))))
        small = x / 2**halvings
        term = Fraction(1)
        total = Fraction(0)
        for n in range(1, 60):
            total = total + term
            term = (term * small / n).limit_denominator(10**120)
        for _ in range(halvings):
            total = (total * total).limit_denominator(10**120)
        return total

    found = rdp._even_moments(mu)
    for i in (2, 6, 12):
        half = Fraction(mu) ** 2 / 2
        exact = sum(
            (-1) ** (i - j) * math.comb(i, j) * exponential(j * (j - 1) * half)
            for j in range(i + 1)
        )
        assert found[i // 2] == pytest.approx(math.log(exact), abs=1e-10)


def test_without_sampling_the_divergence_is_the_gaussians():
    assert rdp.gaussian(0.5) == pytest.approx(rdp.ORDERS / 8)
    # PRIVACY.md sec. 1
    assert float(rdp.epsilons(rdp.gaussian(1.0), 1e-5, 1)) == pytest.approx(4.73, abs=5e-3)


def test_epsilon_is_zero_where_delta_covers_the_distance():
    assert rdp.epsilons(rdp.gaussian(1e-6), 1e-2, np.array([1, 100])).tolist() == [0.0, 0.0]
