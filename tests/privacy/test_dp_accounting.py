"""What the package takes of dp-accounting, held to integrals, sums and closed forms that do not
come from it: a release for which this passes may be used.
"""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta, compute_epsilon
from scipy.stats import norm

from raydpfl.privacy import pld, rdp


def divergence(q, mu, order):
    """The larger Renyi divergence of N(0, 1) and (1 - q) N(0, 1) + q N(mu, 1), by a sum."""
    x = np.linspace(-40, 40 + order * mu, 100_001)
    ratio = np.logaddexp(math.log1p(-q), math.log(q) + mu * x - mu * mu / 2)
    powers = order * ratio, (1 - order) * ratio
    logs = [np.log(np.trapezoid(np.exp(power + norm.logpdf(x)), x)) for power in powers]
    return max(logs) / (order - 1)


def test_the_orders_are_those_of_its_accountant():
    assert rdp.ORDERS.tolist() == pytest.approx(RdpAccountant().orders)


@pytest.mark.parametrize(("q", "mu"), [(0.1, 1 / 2.6), (0.01, 1.0), (0.5, 0.2)])
def test_divergences_of_poisson_sampling(q, mu):
    event = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(1 / mu))
    orders = [2, 8, 32, 1.5, 3.7]
    found = RdpAccountant(orders).compose(event).rdp
    exact = np.array([divergence(q, mu, order) for order in orders])
    assert found[:3] == pytest.approx(exact[:3], rel=1e-6)
    assert (found >= exact * (1 - 1e-6)).all()  # between whole orders it is a bound, or infinite


def test_conversions_are_of_canonne_kamath_and_steinke():
    """Proposition 12 of 2004.00010, by a grid of orders."""
    orders = np.linspace(1.5, 60, 200)
    divergences = orders * 0.125
    logs = orders * np.log1p(-1 / orders) - np.log(orders - 1)
    for epsilon in (0.5, 2.0):
        delta = np.exp((orders - 1) * (divergences - epsilon) + logs).min()
        assert compute_delta(orders, divergences, epsilon)[0] <= delta * (1 + 1e-9)
    epsilon = compute_epsilon(orders, divergences, 1e-5)[0]
    assert epsilon == pytest.approx(float(rdp.epsilons(rdp.gaussian(0.5), 1e-5, 1)), rel=1e-3)
    assert epsilon >= float(pld.gaussian_epsilon(0.5, 1e-5))


def test_the_best_of_a_geometric_number_of_runs():
    """Theorem 2 of 2110.03620: the divergences of zCDP, and a minimum over a grid."""
    rho, mean = 0.05, 10.0
    event = dp_event.RepeatAndSelectDpEvent(
        dp_event.GaussianDpEvent(1 / math.sqrt(2 * rho)), mean, 1
    )
    found = RdpAccountant(rdp.ORDERS.tolist()).compose(event).rdp
    other = rdp.ORDERS
    constant = 2 * ((1 - 1 / other) * rho * other + math.log(mean) / other).min()
    expected = rho * other + math.log(mean) / (other - 1) + constant
    # divergences grow with the order
    expected = np.minimum.accumulate(expected[::-1])[::-1]
    assert found == pytest.approx(expected, rel=1e-9)
