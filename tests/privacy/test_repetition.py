"""An epsilon for a search: dp-accounting's own, published numbers, and the exact divergences of a
search over Gaussians, which no bound may undercut.
"""

import math

import numpy as np
import pytest
from conftest import mechanism
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from raydpfl.errors import ConfigError
from raydpfl.privacy import Repetition, pld, rdp
from raydpfl.privacy.accountants import ACCOUNTANTS

POISSON = mechanism("poisson", 1000, 100, 2.6)
SEARCHES = {
    "geometric": Repetition("geometric", 10),
    "Poisson": Repetition("poisson", 30),
    "logarithmic": Repetition("logarithmic", 4),
    "negative binomial": Repetition("negative_binomial", 6.5, 0.3),
    "negative binomial, peaked": Repetition("negative_binomial", 20, 5),
}
BY_SEARCH = pytest.mark.parametrize("search", SEARCHES.values(), ids=[*SEARCHES])


def spent(search, accountant, delta=1e-5):
    part = (POISSON.event("add_remove"), POISSON.rounds)
    return ACCOUNTANTS[accountant].best_of(search, [part], delta)


@pytest.mark.parametrize(("name", "epsilon"), [("geometric", 3.65), ("Poisson", 7.73)])
def test_published_numbers(name, epsilon):
    """Papernot and Steinke, by divergences of 100 Poisson rounds; profiles cost less."""
    one = ACCOUNTANTS["rdp"].curve(POISSON.event("add_remove"), 1e-5, np.array([100]))
    assert float(one[0]) == pytest.approx(1.83, abs=0.005)
    assert spent(SEARCHES[name], "rdp") == pytest.approx(epsilon, abs=0.005)
    assert spent(SEARCHES[name], "pld") < epsilon - 0.9


@BY_SEARCH
def test_divergences_are_those_of_dp_accounting(search):
    accountant = RdpAccountant(rdp.ORDERS.tolist())
    one = dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(2.6))
    run = dp_event.SelfComposedDpEvent(one, 100)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(run, search.mean, search.eta))
    assert spent(search, "rdp") == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


def density(search, z):
    """The derivative of the generating function of the number of runs, and the number's mean."""
    if search.runs == "poisson":
        return search.mean * np.exp(search.mean * (z - 1)), search.mean
    gamma, eta = search.gamma, search.eta
    if eta == 0:
        mean = (1 / gamma - 1) / -math.log(gamma)
    else:
        mean = eta * (1 / gamma - 1) / -math.expm1(eta * math.log(gamma))
    return mean * ((1 - (1 - gamma) * z) / gamma) ** (-eta - 1), mean


@BY_SEARCH
@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_no_bound_is_below_what_the_best_of_gaussians_shows(search, mu):
    """The largest of K draws of N(x, 1) has the density phi(y - x) f(Phi(y - x)), f the derivative
    of the generating function: what it shows of x = 0 or mu is one integral.
    """
    y = np.linspace(-12, mu + 12, 400_001)
    worlds = [norm.pdf(y - x) * density(search, norm.cdf(y - x))[0] for x in (0.0, mu)]
    for delta in (1e-3, 1e-6):
        divergences = rdp.gaussian(mu)
        by_rdp = float(rdp.epsilons(search.renyi(divergences), delta, 1))
        by_pld = search.epsilon(
            delta,
            lambda at: float(pld.gaussian_epsilon(mu, at)),
            lambda at: float(pld.gaussian_delta(at, mu)),
        )
        for epsilon in (by_rdp, by_pld):
            for one, other in (worlds, worlds[::-1]):
                shown = np.trapezoid(np.maximum(one - math.exp(epsilon) * other, 0.0), y)
                assert shown <= delta * (1 + 1e-6)
        # and the bound is of use: a plain composition of the mean number of runs costs more
        composed = float(pld.gaussian_epsilon(mu * math.sqrt(search.mean), delta))
        assert min(by_rdp, by_pld) < 3 * composed + 1


@BY_SEARCH
def test_numbers_of_runs_are_drawn_as_accounted_for(search):
    f, mean = density(search, 0.0)  # f(0) is the probability of one run
    assert mean == pytest.approx(search.mean, rel=1e-8) and mean <= search.mean * (1 + 1e-12)
    generator = np.random.default_rng(0)
    drawn = np.array([search.draw(generator) for _ in range(20_000)])
    assert (drawn == 1).mean() == pytest.approx(f, abs=5 * math.sqrt(f / 20_000) + 1e-4)
    assert drawn.mean() == pytest.approx(mean, abs=5 * drawn.std() / math.sqrt(20_000))
    assert drawn.min() >= (0 if search.runs == "poisson" else 1)


@pytest.mark.parametrize("shape", [0.001, 1e-7, 1e-300])
def test_a_small_shape_is_drawn_as_accounted_for(shape):
    search = Repetition("negative_binomial", 5, shape)
    p, mean = density(search, 0.0)  # p(1), the mean
    generator = np.random.default_rng(0)
    drawn = np.array([search.draw(generator) for _ in range(5000)])
    assert drawn.mean() == pytest.approx(mean, abs=5 * drawn.std() / math.sqrt(5000))
    for count in range(1, 6):
        share = (drawn == count).mean()
        assert share == pytest.approx(p, abs=5 * math.sqrt(p / 5000))
        p *= (1 - search.gamma) * (count + shape) / (count + 1)


def test_a_mean_near_one_is_drawn_at_once():
    assert Repetition("geometric", 1 + 1e-12).draw(np.random.default_rng(0)) == 1


def test_one_run_costs_what_it_costs():
    alone = Repetition("geometric", 1)
    for name in ("pld", "rdp"):
        accountant = ACCOUNTANTS[name]
        one = accountant.curve(POISSON.event("add_remove"), 1e-5, np.array([100]))
        assert spent(alone, name) == pytest.approx(float(one[0]), rel=1e-9)


@pytest.mark.parametrize(
    "given", [("uniform", 3), ("geometric", 0.5), ("poisson", 3, 1.0), ("negative_binomial", 3)]
)
def test_other_numbers_are_refused(given):
    with pytest.raises(ConfigError):
        Repetition(*given)
