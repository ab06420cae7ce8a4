"""What the package takes of dp-accounting, against integrals, sums and closed forms."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta, compute_epsilon

from raydpfl.privacy import pld, rdp


def test_the_orders_are_those_of_its_accountant():
    assert rdp.ORDERS.tolist() == pytest.approx(RdpAccountant().orders)


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
