"""Integer noise: drawn exactly, rounded within its norm, and never cheaper than it is."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from scipy.special import ive, ndtri
from scipy.stats import chisquare, skellam

from raydpfl.core.integer_distributions import (
    BITS,
    DiscreteGaussianDistribution,
    SkellamDistribution,
)
from raydpfl.core.modular_sum import ModularSum, hadamard
from raydpfl.errors import ConfigError, RunError
from raydpfl.privacy import Mechanism, Query, Sampling, covers, delta, epsilon, pld, rdp
from raydpfl.privacy import integer_noise as integers
from raydpfl.privacy.calculator import client_budget
from raydpfl.privacy.integer_noise import (
    DistributedDiscreteGaussian,
    IntegerNoise,
    SkellamLoss,
    SkellamNoise,
)


def gaussian_masses(std, most):
    """P[X = k], k = 0, ..., most, as defined."""
    k = np.arange(-60 - int(15 * std), 61 + int(15 * std))
    weights = np.exp(-(k**2) / (2 * std**2))
    return np.exp(-(np.arange(most + 1) ** 2) / (2 * std**2)) / weights.sum()


def skellam_masses(std, most):
    return ive(np.arange(most + 1), std**2)


EXACT = ((DiscreteGaussianDistribution, gaussian_masses), (SkellamDistribution, skellam_masses))


@pytest.mark.parametrize("cls, masses", EXACT)
@pytest.mark.parametrize("std", [0.2, 1.0, 7.3, 60.0])
def test_a_table_is_the_distribution_and_draws_follow_it(cls, masses, std):
    """Thresholds against the masses as defined, and 200,000 draws by Pearson's test."""
    distribution = cls(std)
    thresholds = distribution._thresholds.astype(float) / 2**BITS
    chances = masses(std, len(thresholds) - 1)
    np.testing.assert_allclose(thresholds, 2 * chances.cumsum() - chances[0], atol=1e-14)
    drawn = distribution.sample(np.random.Philox(3).random_raw, 200_000)
    most = int(np.searchsorted(thresholds, 1 - 1e-3))
    counts = np.bincount(np.minimum(np.abs(drawn), most + 1).astype(int), minlength=most + 2)
    expected = np.append(np.diff(thresholds[: most + 1], prepend=0), 1 - thresholds[most])
    assert chisquare(counts, 200_000 * expected).pvalue > 1e-6
    assert abs((drawn > 0).sum() - (drawn < 0).sum()) <= 5 * math.sqrt((drawn != 0).sum())
    scores, _ = np.histogram(distribution.scores(drawn), ndtri(np.arange(101) / 100))
    assert chisquare(scores).pvalue > 1e-6


@pytest.mark.parametrize("cls", [DiscreteGaussianDistribution, SkellamDistribution])
def test_draws_that_the_first_bits_do_not_decide_are_by_more_of_them(cls):
    """Every beginning of 6 bits, against the inverse of the function by a search."""
    distribution = cls(2.3)
    for first in range(64):
        words = np.random.Philox(first).random_raw(4)
        given = iter(words)
        size = distribution.resolve(first, 6, lambda n, given=given: np.array([next(given)]))
        uniform = ((first << 64) | int(words[0])) / 2**70
        assert size == np.searchsorted(distribution._thresholds / 2**BITS, uniform)
    # between the thresholds of the last two bits no first words decide
    assert distribution.resolve(2**BITS - 1, BITS, np.random.Philox(1).random_raw) > 15


def test_words_that_equal_a_threshold_are_not_taken_for_decided():
    distribution = DiscreteGaussianDistribution(2.3)
    threshold = int(distribution._thresholds[3])
    words = iter([[np.uint64(threshold << 1)], [np.uint64(0)], [np.uint64(2**64 - 1)]])
    sizes = {int(distribution.sample(lambda n: np.array(next(words)), 1)[0]) for _ in range(1)}
    assert sizes <= {3, 4} and next(words)[0] == 2**64 - 1  # a second word was asked for


# --- sums modulo a power of two ---


def sums(d, bits=16, step=0.01, rotated=True, square=None):
    c = 1 / step
    return ModularSum(
        step, square or int(c * c + d / 4 + c + math.sqrt(d) / 2), bits, rotated, 5, 2
    )


def test_the_rotation_is_orthogonal_and_flattens():
    matrix = hadamard(np.eye(16))
    np.testing.assert_allclose(matrix, matrix.T)
    np.testing.assert_allclose(matrix @ matrix, np.eye(16), atol=1e-12)
    for d in (1, 2, 3, 37, 64, 100):
        one = sums(d)
        turned = one._rotate(np.eye(d))
        np.testing.assert_allclose(turned @ turned.T, np.eye(d), atol=1e-12)
        np.testing.assert_allclose(one._rotate(turned, back=True), np.eye(d), atol=1e-12)
    assert np.abs(sums(700)._rotate(np.eye(700))).max() < 5 / math.sqrt(512)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("d", [1, 40, 5000])
def test_no_vector_within_the_bound_has_integers_beyond_theirs(rotated, d):
    """Also those whose coordinates are all halfway, or which are all in one coordinate."""
    one = sums(d, rotated=rotated)
    vectors = np.zeros((5, d))
    vectors[0] = 1 / math.sqrt(d)
    vectors[1, 0] = -1.0
    vectors[2] = one.step * (np.floor(1 / math.sqrt(d) / one.step) - 0.5)
    vectors[3] = one._rotate(np.full((1, d), one.step / 2), back=True)[0]
    vectors[:4] /= np.maximum(np.linalg.norm(vectors[:4], axis=1), 1)[:, None]
    clients = np.arange(5)
    integers = one.encode(vectors, clients, np.zeros(5, int))
    assert (integers == np.floor(integers)).all() and not integers[4].any()
    assert ((integers**2).sum(1) <= one.square).all()
    alone = one.encode(vectors[2:3], clients[2:3], np.zeros(1, int))
    assert np.array_equal(alone[0], integers[2])
    error = one.decode(integers) - vectors
    assert np.linalg.norm(error, axis=1).max() < one.step * math.sqrt(d)
    with pytest.raises(RunError, match="client 7 sends integers of norm"):
        one.encode(3 * vectors[1:2], np.array([7]), np.zeros(1, int))


def test_rounding_has_the_mean_of_what_is_rounded():
    one = sums(50, step=0.2, square=10**6)
    vector = np.random.default_rng(1).standard_normal(50) / 9
    copies = one.encode(np.tile(vector, (4000, 1)), np.arange(4000), np.zeros(4000, int))
    mean = one.decode(copies).mean(0)
    assert np.abs(mean - vector).max() < 5 * 0.5 * one.step / math.sqrt(4000)


def test_a_sum_is_taken_modulo_its_width_and_wraps_are_counted():
    one = sums(4, bits=8, step=1.0, rotated=False)
    totals = np.array([127.0, 128.0, -128.0, -385.0])
    assert one.wrapped(totals) == 2
    assert one.decode(totals).tolist() == [127.0, -128.0, -128.0, 127.0]
    parts = np.random.default_rng(2).integers(-300, 300, (9, 4)).astype(float)
    assert np.array_equal(one.decode(parts.sum(0)), one.decode((parts % 256).sum(0)))


# --- the discrete Gaussian ---


def test_a_discrete_gaussian_is_a_rounded_gaussian_of_less_variance():
    """The lemma behind `mu`, by quadrature at an r^2 where its error shows."""
    variance, smooth = 3.0, 0.4
    y = np.linspace(-25, 25, 200_001)
    density = np.exp(-(y**2) / (2 * (variance - smooth))) / math.sqrt(
        2 * math.pi * (variance - smooth)
    )
    k = np.arange(-40, 41)[:, None]
    normaliser = sum(np.exp(-((j - y) ** 2) / (2 * smooth)) for j in range(-40, 41))
    theta = 2 * sum(math.exp(-2 * math.pi**2 * smooth * j * j) for j in (1, 2, 3))
    ratio = normaliser / math.sqrt(2 * math.pi * smooth)
    assert ratio.max() == pytest.approx(1 + theta, rel=1e-6) and ratio.min() >= 1 - theta
    for place in (0, 1, 3):
        rounded = np.exp(-((place - y) ** 2) / (2 * smooth)) / normaliser * density
        mass = rounded.sum() * (y[1] - y[0])
        true = float(gaussian_masses(math.sqrt(variance), 3)[place])
        assert (1 - theta) / (1 + theta) <= true / mass <= (1 + theta) / (1 - theta)
        assert len(k) == 81


@pytest.mark.parametrize("std, shift, rounds", [(8.0, 3, 1), (20.0, 11, 10), (100.0, 30, 40)])
def test_the_gaussian_that_a_discrete_one_counts_as_costs_as_much_and_hardly_more(
    std, shift, rounds
):
    """In one dimension, against the exact composition of dp-accounting."""
    loss = library.from_discrete_gaussian_mechanism(
        std, shift, value_discretization_interval=1e-4
    ).self_compose(rounds)
    exact = loss.get_epsilon_for_delta(1e-6)
    mu = shift / math.sqrt(std**2 - integers.smoothing(1, 2 * shift / std)) + integers.SLACK
    counted = float(pld.gaussian_epsilon(mu * math.sqrt(rounds), 1e-6))
    assert exact <= counted * (1 + 1e-3) and counted <= exact * (1 + 2.5 / std**2 + 1e-3)


def mechanism(kind, bits=16, d=7850, z=1.1, n=90, population=900, rounds=60):
    noise = (SkellamNoise if kind == "skellam" else IntegerNoise)(bits, n, d)
    placement = "client" if kind == "skellam" else "server"
    sampling = Sampling("fixed" if n < population else "full", population, n)
    query = Query("updates", 1.0, z)
    return Mechanism(sampling, (query,), rounds, placement=placement, integer=noise)


def gaussian(released):
    return Mechanism(released.sampling, released.queries, released.rounds)


@pytest.mark.parametrize("kind", ["discrete_gaussian", "skellam"])
@pytest.mark.parametrize("n", [90, 900])
def test_fewer_bits_cost_more_and_many_cost_what_a_gaussian_does(kind, n):
    z = 1.1 * n / 90
    spent = [epsilon(mechanism(kind, bits, z=z, n=n), "replace_one", 1e-5, accountant="rdp")
             for bits in (11, 13, 16, 20)]  # fmt: skip
    least = epsilon(gaussian(mechanism(kind, z=z, n=n)), "replace_one", 1e-5, accountant="rdp")
    assert spent == sorted(spent, reverse=True) and spent[-1] >= least
    if kind == "discrete_gaussian" or n == 900:
        assert spent[-1] < least * 1.005


@pytest.mark.parametrize("relation", ["add_remove", "zero_out", "replace_one"])
@pytest.mark.parametrize(
    ("n", "population", "z", "rounds"),
    [(99, 100, 1.0, 1), (450, 900, 2.0, 10), (90, 900, 0.5, 10), (810, 900, 5.0, 60)],
)
def test_skellam_noise_is_never_cheaper_than_gaussian_noise(n, population, z, rounds, relation):
    """The curve of the Gaussian is attained, and a Skellam sum of many steps is nearly Gaussian."""
    released = mechanism("skellam", 16, 1, z, n, population, rounds)
    spent = epsilon(released, relation, 1e-5, accountant="rdp")
    assert spent >= epsilon(gaussian(released), relation, 1e-5)


def test_delta_and_epsilon_of_integers_are_of_one_curve():
    released = mechanism("discrete_gaussian", 12)
    spent = epsilon(released, "replace_one", 1e-5)
    assert delta(released, "replace_one", spent) == pytest.approx(1e-5, rel=1e-6)
    assert epsilon(gaussian(released), "replace_one", 1e-5) < spent


def test_an_observer_of_single_updates_sees_the_grid_of_the_run():
    released = mechanism("skellam")
    part = released.with_known_cohorts().seen(1 / released.draws)
    loss, one = released.event("replace_one").skellam, part.event("replace_one").skellam
    assert loss is not None and one is not None
    assert one.variance == pytest.approx(loss.variance / 90) and one.square == loss.square


def test_what_integers_do_not_cover_is_refused():
    assert covers("pld", mechanism("skellam"), "replace_one") == (
        "Skellam noise is not covered by pld; nearest: rdp"
    )
    with pytest.raises(
        ConfigError, match="bits = 8: expected at least 9, for sums of 5000 clients"
    ):
        mechanism("skellam", 8, n=5000, population=50_000).event("replace_one")
    few = mechanism("discrete_gaussian", 8, d=16, z=0.1)
    assert not few.private and math.isinf(epsilon(few, "replace_one", 1e-5))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_sum_of_discrete_gaussians_is_one_up_to_what_is_allowed_for(n):
    """Convolved at a std where the difference shows, and the condition where it does not."""
    std = 0.55
    k = np.arange(-40, 41)
    one = np.exp(-(k**2) / (2 * std**2))
    total = one / one.sum()
    allowed = 1.0
    for before in range(1, n):
        total = np.convolve(total, one / one.sum(), mode="same")
        variance = std**2 * before / (before + 1)
        t = 2 * sum(math.exp(-2 * math.pi**2 * variance * j * j) for j in (1, 2, 3))
        allowed *= (1 + t) / (1 - t)
    like = np.exp(-(k**2) / (2 * n * std**2))
    near = np.abs(k) <= 6
    ratio = total[near] / (like[near] / like.sum())
    assert 1 + 1e-3 < ratio.max() / ratio.min() <= allowed * (1 + 1e-9)
    far = DistributedDiscreteGaussian(16, 90, 7850)
    z = 1.1
    assert far.mu(2, z) == IntegerNoise(16, 90, 7850).mu(2, z)  # 54 steps of each client
    few = DistributedDiscreteGaussian(10, 90, 7850)
    assert few.lattice(z).std / math.sqrt(90) > 3 and math.isfinite(few.mu(2, z))
    assert math.isinf(DistributedDiscreteGaussian(9, 90, 7850).mu(2, 0.1))


@pytest.mark.parametrize("noise, name", [("discrete_gaussian", "pld"), ("skellam", "rdp")])
def test_the_calculator_answers_for_the_accountants_that_cover_the_noise(noise, name):
    asked = {"population": 900, "cohort": 90, "rounds": 60, "noise": noise, "parameters": 7850}
    given = client_budget(**asked, noise_multiplier=1.1)
    found = next(each for each in given.guarantees if each.accountant == name)
    spent = epsilon(mechanism(noise), "replace_one", 1e-5, accountant=name)
    assert found.epsilon == pytest.approx(spent, rel=1e-9)
    assert 2 < given.noise["sensitivity"] < 2.001
    back = client_budget(**asked, epsilon=found.epsilon)
    assert back.mechanism.noise_multiplier == pytest.approx(1.1, rel=2e-4)
    known = [each for each in given.guarantees if each.accountant == name][1]
    assert (known.rho is None) == (noise == "skellam")  # which has no zCDP that is proved here


# --- Skellam ---


@pytest.mark.parametrize("variance", [0.7, 3.0, 40.0, 1000.0])
@pytest.mark.parametrize("shift", [(1,), (5,), (2, 1, 3)])
def test_no_renyi_divergence_of_skellam_noise_is_above_its_bound(variance, shift):
    """Summed up as defined, coordinate by coordinate, at whole and other orders."""
    orders = np.array([1.05, 1.5, 2.0, 3.3, 8.0, 40.0])
    k = np.arange(-int(60 * math.sqrt(variance)) - 300, int(60 * math.sqrt(variance)) + 300)
    true = np.zeros(len(orders))
    for moved in shift:
        here, there = (skellam.logpmf(k - by, variance / 2, variance / 2) for by in (0, moved))
        kept = np.isfinite(here) & np.isfinite(there)
        for place, order in enumerate(orders):
            logs = order * there[kept] + (1 - order) * here[kept]
            true[place] += (logs.max() + math.log(np.exp(logs - logs.max()).sum())) / (order - 1)
    bound = SkellamLoss(variance, sum(by * by for by in shift), len(shift)).renyi(orders)
    assert (true <= bound * (1 + 1e-9)).all()
    if variance == 1000:
        assert (bound < true * 1.05)[orders >= 2].all()


@pytest.mark.parametrize("q, mu", [(0.01, 0.05), (0.05, 0.5), (0.3, 1.0)])
def test_amplification_of_any_mechanism_is_never_below_that_of_the_gaussian(q, mu):
    """With a Gaussian's divergences, against the bound that knows its moments, and against pld."""
    loose = rdp.fixed_size_of(q, lambda orders: orders * mu * mu / 2)
    kept = rdp.ORDERS <= 64  # beyond 256 neither looks at the moments
    assert (loose >= rdp.fixed_size(q, mu) * (1 - 1e-9))[kept].all()
    curve = pld.fixed_size_curve(q, mu)
    (loss,) = pld.distributions(((curve, curve),))
    exact = loss.epsilons(1e-5, 50, 50)[0]
    assert exact <= rdp.epsilons(np.minimum(loose, rdp.gaussian(mu)), 1e-5, [50])[0] < 4 * exact + 1


def test_a_grid_so_coarse_that_no_guarantee_is_known_says_so():
    """Rounding moves a sum of 8 bits and 10^7 parameters by far more than the noise."""
    asked = {"population": 1000, "cohort": 100, "rounds": 5, "noise_multiplier": 2.0}
    budget = client_budget(**asked, noise="discrete_gaussian", bits=8, parameters=10**7)
    assert {one.epsilon for one in budget.guarantees if one.kind == "rigorous"} == {math.inf}
    reasons = {why for one in budget.guarantees for why in one.conditions_failed}
    assert any("noise of so few steps of the integers has no guarantee" in why for why in reasons)
    assert not any("no noise is added" in why or "delta is too small" in why for why in reasons)


@pytest.mark.parametrize(
    ("noise", "why"),
    [("discrete_gaussian", "has no guarantee in 5 rounds"), ("skellam", "spends 8.45e.04 in 5")],
)
def test_a_width_that_no_noise_is_enough_for_is_named(noise, why):
    """Half of 8 bits holds 4 standard deviations of 4090 clients' rounding, and of noise of 1.2."""
    asked = {"population": 100_000, "cohort": 4090, "rounds": 5, "parameters": 10_000}
    text = "^noise.bits = 8: expected more: sums of so few bits hold noise of 1.225 steps at most"
    with pytest.raises(ConfigError, match=f"{text}, which {why}"):
        client_budget(**asked, epsilon=2.0, noise=noise, bits=8)


def test_a_width_that_is_enough_against_some_observers_is_answered_for_them():
    """A single update of 50 has noise of a seventh of the std, of the same steps."""
    asked = {"population": 1000, "cohort": 50, "rounds": 20, "parameters": 10_000, "bits": 13}
    budget = client_budget(**asked, epsilon=2.0, noise="discrete_gaussian", placement="client")
    by_pld = [one.noise_multiplier for one in budget.answers if one.guarantee.accountant == "pld"]
    assert by_pld == pytest.approx([2.037, 38.18, math.inf], rel=1e-3)
