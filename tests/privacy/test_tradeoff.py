"""Trade-off curves against the most powerful tests, closed forms and published numbers."""

import numpy as np
import pytest
from conftest import mechanism
from scipy.special import ndtr, ndtri

from raydpfl.privacy import TradeOff, delta, tradeoff

RATES = np.concatenate([np.geomspace(1e-8, 0.1, 30), np.linspace(0.1, 1, 30)])


def test_one_poisson_round_has_the_errors_of_the_most_powerful_test_in_both_directions():
    q, z = 0.1, 1.3
    curve = tradeoff(mechanism("poisson", 100, 10, z, 1), "add_remove")
    at = np.linspace(-6, 8, 4000)  # the likelihood ratio rises with the sum
    absent = ndtr(-at)
    missed = (1 - q) * ndtr(at) + q * ndtr(at - 1 / z)
    least = np.interp(RATES, absent[::-1], missed[::-1])
    reverse = np.interp(RATES, missed, absent)
    for null, truth in (("absent", least), ("present", reverse)):
        found = curve.false_negatives(RATES, null)
        assert (found <= truth + 2e-6).all()
        assert found == pytest.approx(truth, abs=2e-4)
    either = curve.false_negatives(RATES)
    assert (either <= np.minimum(least, reverse) + 1e-6).all()
    assert curve.false_negatives(either) == pytest.approx(RATES, abs=1e-3)  # its own inverse


def test_what_nothing_amplifies_is_one_gaussian_in_all_that_is_said_of_it():
    full = mechanism("full", 10, 10, 3.0, 9)
    curve = tradeoff(full, "replace_one")
    assert curve.mu == pytest.approx(2.0)
    assert curve.nearest_gaussian() == (curve.mu, 0.0)
    assert curve.true_positives(RATES) == pytest.approx(ndtr(ndtri(RATES) + 2), abs=1e-12)
    assert curve.delta(0.7) == pytest.approx(delta(full, "replace_one", 0.7))
    known = TradeOff(curve.epsilons, curve.deltas)  # the same from its profile alone
    assert (known.false_negatives(RATES) <= curve.false_negatives(RATES) + 1e-12).all()
    assert known.nearest_gaussian()[0] == pytest.approx(2.0, rel=1e-5)


def test_the_nearest_gaussian_is_that_of_its_paper_and_below_the_curve():
    curve = tradeoff(mechanism("poisson", 1000, 328, 9.4, 2000), "add_remove")
    mu, regret = curve.nearest_gaussian()
    assert (mu, regret) == pytest.approx((1.5686, 1.02e-3), rel=1e-2)  # gdpnum's README
    rates = RATES[RATES < 0.99]
    below = TradeOff.gaussian(mu).false_negatives(rates)
    assert (below <= curve.false_negatives(rates) + 1e-12).all()
    less = TradeOff.gaussian(mu * 0.999).false_negatives(np.geomspace(1e-10, 0.1, 100))
    assert (less > curve.false_negatives(np.geomspace(1e-10, 0.1, 100))).any()


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_no_curve_claims_more_than_the_profile_it_is_of(accountant):
    fixed = mechanism(std=2.0)
    curve = tradeoff(fixed, "replace_one", accountant=accountant)
    epsilons = np.array([0.0, 0.21, 0.9, 2.0])
    exact = [delta(fixed, "replace_one", at, accountant=accountant) for at in epsilons]
    found = curve.delta(epsilons)
    assert (found >= np.array(exact) * (1 - 1e-9)).all()
    assert found == pytest.approx(exact, rel=2e-3)
    lines = 1 - found[:, None] - np.exp(epsilons)[:, None] * RATES
    assert (curve.false_negatives(RATES) >= lines.max(axis=0) - 1e-6).all()
    loose = tradeoff(fixed, "replace_one", accountant="rdp").false_negatives(RATES)
    assert (loose <= tradeoff(fixed, "replace_one").false_negatives(RATES) + 1e-9).all()


def test_without_noise_an_attack_makes_no_error():
    silent = mechanism("poisson", 100, 10, 0.0, 5)
    assert tradeoff(silent, "add_remove").true_positives([1e-3]).tolist() == [1.0]
