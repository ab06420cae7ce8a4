"""Random allocation: its numbers against published bounds, an integral and simulated clients."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import norm

from raydpfl import privacy
from raydpfl.errors import ConfigError
from raydpfl.privacy import Mechanism, Query, Sampling, delta, epsilon, pld, random_allocation


def allocated(epoch, per_epoch=1, rounds=None, z=1.0, population=1000):
    mean = max(1, round(population * per_epoch / epoch))
    sampling = Sampling("random_allocation", population, mean, epoch=epoch, per_epoch=per_epoch)
    return Mechanism(sampling, (Query("updates", 1.0, z),), rounds or epoch)


# Noise multiplier, T, k, epochs and delta, and the lower and upper bound on epsilon by
# `gaussian_allocation_epsilon_range` of PLD_accounting 2.0 (Feldman and Shenfeld 2026).
PUBLISHED = [
    (1.0, 100, 1, 1, 1e-6, 0.8436711728211483, 0.8744979111842018),
    (1.0, 100, 3, 1, 1e-6, 2.1549926981955925, 2.2364834111408873),
    (1.0, 100, 30, 1, 1e-6, 22.731488331319618, 22.830842146679416),
    (1.0, 100, 60, 1, 1e-6, 53.13919805823263, 53.27408460259866),
    (0.5, 100, 1, 1, 1e-6, 6.382617623720973, 6.406087547940433),
    (1.5, 20, 1, 5, 1e-5, 1.4418546695496894, 1.5080678000043264),
    (2.0, 50, 2, 3, 1e-8, 1.331567837665791, 1.3992464024648543),
]


@pytest.mark.parametrize(("z", "rounds", "k", "epochs", "at", "lower", "upper"), PUBLISHED)
def test_epsilon_is_within_the_published_bounds(z, rounds, k, epochs, at, lower, upper):
    run = allocated(rounds, k, rounds * epochs, z=z)
    assert lower <= epsilon(run, "add_remove", at) <= upper
    assert epsilon(run, "zero_out", at) == epsilon(run, "add_remove", at)
    if k <= 3:  # else the blocks cost more than they gain
        poisson = Mechanism(Sampling("poisson", rounds, k), run.queries, run.rounds)
        assert epsilon(run, "add_remove", at) < epsilon(poisson, "add_remove", at)


@pytest.mark.parametrize(("mu", "share"), [(0.7, 1.0), (2.0, 1.0), (1.0, 0.4)])
def test_two_rounds_are_an_integral_over_the_plane(mu, share):
    removed, added = random_allocation.curves(mu, 2, 1, share)
    x, step = np.linspace(-9, 9 + mu, 1201, retstep=True)
    q = np.outer(norm.pdf(x), norm.pdf(x)) * step**2
    ratio = np.exp(mu * x - mu**2 / 2)
    ratio = share * (ratio[:, None] + ratio) / 2 + 1 - share
    for at in (0.0, 0.3, 1.0, 3.0):
        e = math.exp(at)
        up = (np.maximum(ratio - e, 0) * q).sum()
        down = (np.maximum(1 - e * ratio, 0) * q).sum()
        for curve, exact in ((removed, up), (added, down)):
            claimed = float(curve(np.array(at)))
            assert exact * (1 - 1e-6) - 1e-9 <= claimed <= exact * 1.003 + 1e-5


def test_one_round_of_one_is_the_gaussian_curve_and_one_of_many_that_of_poisson():
    at = np.array([0.0, 0.5, 2.0, 6.0])
    (removed, _) = random_allocation.curves(1.0, 1, 1)
    assert removed(at) == pytest.approx(pld.gaussian_delta(at, 1.0), rel=2e-3)
    share = random_allocation.curves(1.0, 1, 1, share=0.05)
    for ours, exact in zip(share, pld.poisson_curves(0.05, 1.0)[0], strict=True):
        assert ours(at) == pytest.approx(exact(at), rel=3e-3, abs=1e-7)
        assert (ours(at) >= exact(at) * (1 - 1e-9)).all()


@pytest.mark.parametrize(("mu", "rounds", "k"), [(1.0, 6, 2), (1.5, 5, 3), (0.5, 7, 1)])
def test_no_simulated_client_has_more_loss_than_is_claimed(mu, rounds, k):
    draws = np.random.default_rng(0).standard_normal((100_000, rounds))
    ratios = np.exp(mu * draws - mu**2 / 2)
    subsets = list(combinations(range(rounds), k))
    ratio = np.mean([ratios[:, list(subset)].prod(axis=1) for subset in subsets], axis=0)
    removed, added = random_allocation.curves(mu, rounds, k)
    for at in (0.0, 0.3, 1.0):
        e = math.exp(at)
        for curve, lost in ((removed, ratio - e), (added, 1 - e * ratio)):
            lost = np.maximum(lost, 0)
            error = lost.std() / math.sqrt(len(lost))
            claimed = float(curve(np.array(at)))
            assert claimed >= lost.mean() - 4 * error
            assert k > 1 or claimed <= lost.mean() + 4 * error + 1e-4


def test_a_run_that_stops_within_an_epoch_has_spent_at_most_that_epoch():
    run = allocated(100, rounds=250)
    spent = privacy.epsilon_curve(run, "add_remove", 1e-6)
    assert (np.diff(spent) >= 0).all()
    assert spent[0] < spent[24] < spent[49] < spent[99] < spent[100] == spent[199] < spent[200]
    for t in (1, 30, 100, 101, 250):
        assert spent[t - 1] == pytest.approx(epsilon(run, "add_remove", 1e-6, t), rel=1e-9)
    # a round alone is Poisson's, of which an epoch has T at least
    poisson = Mechanism(Sampling("poisson", 1000, 10), run.queries, 1)
    assert spent[0] > epsilon(poisson, "add_remove", 1e-6)
    # of several a client of which only whole epochs are counted
    several = privacy.epsilon_curve(allocated(10, 2, 30), "add_remove", 1e-6)
    assert [*np.flatnonzero(np.diff(several)) + 1] == [10, 20]
    assert delta(run, "add_remove", spent[-1], 250) == pytest.approx(1e-6, rel=1e-6)


def test_rounds_that_everyone_is_in_are_plain_gaussians():
    everyone = allocated(3, 3)
    plain = Mechanism(Sampling("full", 1000, 1000), everyone.queries, 3)
    assert epsilon(everyone, "replace_one", 1e-5) == epsilon(plain, "replace_one", 1e-5)


@pytest.mark.parametrize("mu", [1e-9, 1e-3, 20.0, 100.0])
def test_noise_of_any_size_has_an_epsilon_below_that_of_known_rounds(mu):
    run = allocated(50, 2, z=1 / mu)
    known = float(pld.gaussian_epsilon(mu * math.sqrt(2), 1e-6))
    assert 0 <= epsilon(run, "add_remove", 1e-6) <= known * (1 + 1e-3) + 1e-9


@pytest.mark.filterwarnings("error")
def test_ratios_that_float64_does_not_hold_are_told_apart_without_a_warning():
    run = allocated(12, 7, 45, z=0.076)
    known = float(pld.gaussian_epsilon(math.sqrt(4 * 7) / 0.076, 1e-25))
    assert epsilon(run, "add_remove", 1e-25) == pytest.approx(known, rel=1e-3)
    ratio = random_allocation.epoch(1.0, 12, 7)
    assert ratio.is_representable and not replace(ratio, infinite=math.nan).is_representable


def test_calibrated_noise_spends_the_budget():
    run = allocated(20, 1, 60)
    z = privacy.noise_for(2.0, run, "add_remove", 1e-5)
    spent = epsilon(run.with_noise(z), "add_remove", 1e-5)
    assert 2.0 * (1 - 2e-3) < spent <= 2.0


def test_several_runs_count_epochs_and_those_of_one_seed_as_one_of_less_noise():
    run = allocated(10, rounds=20)
    seen = [
        privacy.RunRelease(name, run, "add_remove", 20, 2, seed, "") for name, seed in ["a0", "b1"]
    ]
    apart = privacy.together(seen, 1e-5, ["pld"]).guarantees[0].epsilon
    assert apart == pytest.approx(epsilon(run, "add_remove", 1e-5, 40), rel=1e-3)
    shorter = replace(seen[1], seed="0", rounds=13)
    one = privacy.together([seen[0], shorter], 1e-5, ["pld"]).guarantees[0].epsilon
    louder = epsilon(allocated(10, rounds=20, z=math.sqrt(0.5)), "add_remove", 1e-5)
    assert one == pytest.approx(louder, rel=1e-3)


def test_histograms_of_all_clients_are_spent_next_to_an_epoch():
    run = replace(
        allocated(10, rounds=20), survey=privacy.Survey("accuracy", std=5.0, clients=300, times=2)
    )
    alone = epsilon(run.with_surveys(0), "add_remove", 1e-5)
    known = replace(run, sampling=Sampling("full", 1000, 1000), rounds=2)
    assert alone < epsilon(run, "add_remove", 1e-5) < epsilon(known, "add_remove", 1e-5)


def test_what_is_not_covered_is_refused():
    with pytest.raises(ConfigError, match="covered under add_remove and zero_out only"):
        epsilon(allocated(10), "replace_one", 1e-5)
    for wrong in ({"epoch": None}, {"epoch": 10, "per_epoch": 11}, {"epoch": 10, "cohort": 5}):
        fields = {"cohort": 100, "epoch": 10, "per_epoch": 1} | wrong
        with pytest.raises(ConfigError):
            Sampling("random_allocation", 1000, **fields)
    with pytest.raises(ConfigError):
        Sampling("fixed", 1000, 100, epoch=10, per_epoch=1)


def test_rounds_whose_noise_differs_count_as_those_with_the_least():
    run = replace(allocated(10, rounds=20), factors=(1.0, 2.0) * 10)
    assert epsilon(run, "add_remove", 1e-5) == epsilon(allocated(10, rounds=20), "add_remove", 1e-5)
