"""The accountants against slow references, each other, and the published numbers of PRIVACY.md."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import mechanism, refusal
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.special import ndtr
from scipy.stats import binom, norm

from raydpfl import privacy
from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.privacy import Mechanism, Query, Sampling, delta, epsilon, gaussian_epsilon, guarantees
from raydpfl.privacy.accountants import ACCOUNTANTS
from raydpfl.privacy.group import group_sampling as of_person
from raydpfl.privacy.mechanism import Event
from raydpfl.privacy.sampling.with_replacement import SamplingWithReplacement

RELATIONS = privacy_accountant.NeighboringRelation
NATURAL = {
    "poisson": "add_remove",
    "fixed": "replace_one",
    "with_replacement": "replace_one",
    "full": "replace_one",
}


def at_mu(kind, mu, population, cohort, rounds):
    """The mechanism whose sensitivity / std is `mu` under the relation natural to its sampling."""
    return mechanism(
        kind, population, cohort, (2 if NATURAL[kind] == "replace_one" else 1) / mu, rounds
    )


def formula(kind, population, cohort, mu):
    """One round's curve as PRIVACY.md sec. 2 prints it, by epsilon >= 0; digits may cancel."""
    q = cohort / population

    def delta_g(eps, mu):
        return ndtr(mu / 2 - eps / mu) - math.exp(eps) * ndtr(-mu / 2 - eps / mu)

    if kind == "with_replacement":
        p = 1 - (1 - 1 / population) ** cohort
        times = range(1, cohort + 1)
        chances = binom.pmf(times, cohort, 1 / population)
        return lambda eps: sum(
            chance * delta_g(math.log(1 + (math.exp(eps) - 1) / p), k * mu)
            for k, chance in zip(times, chances, strict=True)
        )
    return lambda eps: q * delta_g(math.log(1 + (math.exp(eps) - 1) / q), mu)


def solve(curve, target):
    low = 0.0
    high = 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if curve(middle) > target else (low, middle)
    return high


def spent(kind: str, std: float, accountant: str = "pld", rounds: int = 100) -> float:
    """Epsilon at delta 1e-5 under the relation natural to the sampling."""
    size = (10, 10) if kind == "full" else (1920, 80)
    run = mechanism(kind, *size, std=std, rounds=rounds)
    return epsilon(run, NATURAL[kind], 1e-5, accountant=accountant)


@pytest.mark.parametrize(
    ("kind", "std", "accountant", "expected"),
    [("poisson", 2.0, "pld", 0.900), ("fixed", 4.0, "pld", 0.984), ("fixed", 4.0, "rdp", 2.044)],
)
def test_the_three_published_numbers_of_section_2(kind, std, accountant, expected):
    """At the same z = std / sensitivity = 2: sensitivity is c for Poisson (std 2c) and 2c for the
    fixed size (std 4c).
    """
    assert spent(kind, std, accountant) == pytest.approx(expected, abs=6e-4)


def test_the_trap_of_the_library_is_wrapped():
    """dp-accounting answers the same event under REPLACE_ONE with 4.73 and 10.00; here both
    accountants mean std / (2 bound) = 1.
    """
    event = dp_event.GaussianDpEvent(1.0)
    rdp = RdpAccountant(neighboring_relation=RELATIONS.REPLACE_ONE).compose(event)
    pld = PLDAccountant(RELATIONS.REPLACE_ONE).compose(event)
    library = [each.get_epsilon(1e-5) for each in (rdp, pld)]
    assert library == pytest.approx([4.73, 10.00], abs=5e-3)
    ours = [spent("full", *each, rounds=1) for each in ((2.0, "rdp"), (2.0, "pld"), (1.0, "pld"))]
    assert ours == pytest.approx([4.73, 4.377, 10.00], abs=5e-3)


@pytest.mark.slow
def test_the_exact_gaussian_curve_is_that_of_the_library():
    for mu in (0.05, 0.7, 3.0):
        loss = privacy_loss_distribution.from_gaussian_mechanism(1 / mu)
        for eps in (0.0, 0.1, 2.0):
            assert privacy.gaussian_delta(eps, mu) == pytest.approx(
                loss.get_delta_for_epsilon(eps), rel=1e-3
            )
        assert gaussian_epsilon(mu, 1e-5) == pytest.approx(
            loss.get_epsilon_for_delta(1e-5), rel=1e-3, abs=1e-6
        )
        assert privacy.gaussian_delta(gaussian_epsilon(mu, 1e-5), mu) <= 1e-5


@pytest.mark.parametrize("kind", ["fixed", "with_replacement"])
@pytest.mark.parametrize(
    ("mu", "population", "cohort"),
    [(0.5, 1920, 80), (2.0, 100, 10), (0.05, 50, 40), (4.0, 1000, 3)],
)
def test_one_round_is_the_printed_formula_and_never_below_it(kind, mu, population, cohort):
    exact = solve(formula(kind, population, cohort, mu), 1e-5)
    found = epsilon(at_mu(kind, mu, population, cohort, 1), "replace_one", 1e-5)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-3) + 1e-6


@pytest.mark.parametrize(
    ("q", "mu", "rounds"), [(80 / 1920, 0.5, 100), (0.3, 1.0, 7), (0.01, 2.5, 300), (0.9, 0.2, 40)]
)
def test_poisson_agrees_with_the_library_and_is_not_below_its_optimistic_estimate(q, mu, rounds):
    population = 1920 if q == 80 / 1920 else 1000
    run = at_mu("poisson", mu, population, round(q * population), rounds)
    found = epsilon(run, "add_remove", 1e-5)
    options = {"sampling_prob": q, "value_discretization_interval": 1e-3}
    optimistic, pessimistic = (
        privacy_loss_distribution.from_gaussian_mechanism(
            1 / mu, pessimistic_estimate=pessimistic, **options
        )
        .self_compose(rounds)
        .get_epsilon_for_delta(1e-5)
        for pessimistic in (False, True)
    )
    assert optimistic <= found == pytest.approx(pessimistic, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("population", "cohort", "mu", "rounds"),
    [(1920, 80, 0.5, 100), (100, 10, 1.0, 20), (600, 10, 0.3, 300)],
)
def test_the_fixed_size_composition_is_that_of_the_library_on_the_printed_curve(
    population, cohort, mu, rounds
):
    curve = formula("fixed", population, cohort, mu)
    step = 8 * mu / 6000
    upper = np.array([curve(i * step) for i in range(6001)])
    fall = np.exp(-step * np.arange(6000, 0, -1))
    deltas = np.clip(np.concatenate([1 - fall + fall * upper[:0:-1], upper]), 0, 1)
    one_round = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -6000, 6000, deltas)
    slow = one_round.self_compose(rounds)
    found = at_mu("fixed", mu, population, cohort, rounds)
    expected = pytest.approx(slow.get_epsilon_for_delta(1e-5), rel=2e-3)
    assert epsilon(found, "replace_one", 1e-5) == expected
    expected = pytest.approx(slow.get_delta_for_epsilon(0.3), rel=5e-3)
    assert delta(found, "replace_one", 0.3) == expected


@pytest.mark.parametrize("draw", range(25))
def test_poisson_pld_is_at_most_fixed_pld_is_at_most_fixed_rdp(draw):
    """At the same z, in random settings from many rare clients to few with little noise."""
    random = stream(0, Purpose.DATA, draw=draw)
    population = int(random.integers(10, 5000))
    rounds = int(10 ** random.uniform(0, 2.6))
    target = float(10 ** random.uniform(-7, -3))
    z = 10 ** random.uniform(-0.4, 1.3)
    cohort = max(1, round(population * 10 ** random.uniform(-2.7, -0.05)))
    poisson, fixed = (
        at_mu(kind, 1 / z, population, cohort, rounds) for kind in ("poisson", "fixed")
    )
    first = epsilon(poisson, "add_remove", target, accountant="pld")
    second = epsilon(fixed, "replace_one", target, accountant="pld")
    third = epsilon(fixed, "replace_one", target, accountant="rdp")
    assert first <= second * (1 + 1e-3) + 1e-6
    assert second <= third * (1 + 1e-3) + 1e-6


def test_rdp_gives_a_delta_where_there_is_hardly_any_divergence():
    event = at_mu("poisson", 1e-9, 10, 5, 2).event("add_remove")
    assert 0 < ACCOUNTANTS["rdp"].delta_of(event, 0.0, 2) < 1e-7


class WithoutWorst(SamplingWithReplacement):
    """Draws with replacement, of whose worst cohorts nothing is said."""

    kind = "without_worst"

    def moved(self, sampling, relation):
        return math.inf


@pytest.mark.slow
def test_a_loss_that_is_beyond_every_grid_is_infinite():
    far = Mechanism(Sampling(WithoutWorst(), 1, 90), (Query("updates", 1.0, 0.01),), 1)
    assert 1.6e8 < epsilon(far, "replace_one", 1e-100) < 1.65e8  # mu^2 / 2, mu = 18,000
    sure = far.with_noise(1e-20)
    assert epsilon(sure, "replace_one", 1e-100) == math.inf
    assert delta(sure, "replace_one", 1e3) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2])
def test_delta_never_grows_with_epsilon(rounds):
    run = mechanism("poisson", 1000, 100, 10.0, rounds)
    spent = [delta(run, "add_remove", each) for each in np.geomspace(0.03, 3, 30)]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(spent))


class Floor(privacy.SamplingScheme):
    """A secret that is revealed with probability 1e-12, next to Poisson samples."""

    kind = "floor"

    def words(self, sampling):
        return "a floor"

    def curves(self, sampling, mu, relation):
        raised = [
            tuple(lambda e, of=curve: 1e-12 + (1 - 1e-12) * of(e) for curve in pair)
            for pair in privacy.pld.poisson_curves(sampling.q, mu)
        ]
        return tuple(raised)


def test_a_scheme_may_leave_a_delta_that_no_epsilon_covers():
    run = Mechanism(Sampling(Floor(), 100, 10), (Query("update", 1.0, 1.0),), 1)
    assert math.isinf(epsilon(run, "add_remove", 1e-15))
    without = epsilon(mechanism("poisson", 100, 10, 1.0, 1), "add_remove", 1e-5)
    assert epsilon(run, "add_remove", 1e-5) == pytest.approx(without, rel=1e-4)


def test_draws_with_replacement_reduce_to_the_cases_they_contain():
    once = epsilon(at_mu("with_replacement", 0.7, 200, 1, 50), "replace_one", 1e-5)
    assert once == pytest.approx(
        epsilon(at_mu("fixed", 0.7, 200, 1, 50), "replace_one", 1e-5), rel=1e-4
    )
    alone = epsilon(at_mu("with_replacement", 0.7, 1, 3, 4), "replace_one", 1e-5)
    assert alone == pytest.approx(float(gaussian_epsilon(3 * 0.7 * 2, 1e-5)), rel=1e-3)


@pytest.mark.parametrize("kind", ["fixed", "poisson", "with_replacement", "full"])
@pytest.mark.parametrize("accountant", ["pld", "rdp", "paper"])
def test_the_curve_is_epsilon_at_every_round_and_grows(kind, accountant):
    if (kind, accountant) == ("with_replacement", "rdp"):
        kind = "fixed"  # rdp does not cover the other
    run = at_mu(kind, 0.8, 60, 60 if kind == "full" else 6, 40)
    curve = privacy.epsilon_curve(run, NATURAL[kind], 1e-5, accountant=accountant)
    assert curve.shape == (40,) and curve.dtype == np.float64 and (np.diff(curve) >= 0).all()
    for t in (1, 2, 17, 40):
        assert curve[t - 1] == pytest.approx(
            epsilon(run, NATURAL[kind], 1e-5, t, accountant), rel=1e-6
        )


@pytest.mark.parametrize("mu", [1e-4, 0.01, 60.0])
def test_extreme_noise_is_accounted_for_too(mu):
    found = epsilon(at_mu("fixed", mu, 1000, 900, 10), "replace_one", 1e-5)
    assert 0 <= found <= float(gaussian_epsilon(mu * math.sqrt(10), 1e-5)) * (1 + 1e-3) + 1e-9


@pytest.mark.slow
def test_a_delta_out_of_numerical_reach_gives_infinity_not_a_number_too_small():
    """Of a curve with a floor: what it costs to be drawn too often."""
    drawn = mechanism(WithoutWorst())
    assert epsilon(drawn, "replace_one", 1e-20) == math.inf
    hidden, known = guarantees(drawn, "replace_one", 1e-20, accountants=["pld"])
    assert hidden.epsilon == math.inf and hidden.conditions_failed == (
        "delta is too small for pld to tell an epsilon in double precision",
    )
    assert math.isfinite(known.epsilon) and not known.conditions_failed
    with pytest.raises(ConfigError, match=r"^delta = 1e-20: expected more: .* too small for pld"):
        privacy.noise_for(1.0, drawn, "replace_one", 1e-20)


def test_draws_with_replacement_spend_at_most_what_all_of_them_of_one_client_do():
    hidden, known = guarantees(
        mechanism("with_replacement"), "replace_one", 1e-20, accountants=["pld"]
    )
    worst = float(gaussian_epsilon(80 * math.sqrt(100) * 2 / 4, 1e-20))
    assert hidden.epsilon == pytest.approx(worst) and known.epsilon == pytest.approx(worst)


@pytest.mark.parametrize("target", [1e-12, 1e-16, 1e-30, 1e-100, 1e-250])
@pytest.mark.parametrize(("mu", "rounds"), [(0.1, 100), (1.0, 10)])
def test_small_deltas_of_composed_gaussians_are_those_of_the_one_that_they_are(mu, rounds, target):
    """By FFT, as if no closed form were known."""

    def curve(eps):
        return privacy.gaussian_delta(eps, mu)

    (loss,) = privacy.pld.distributions(((curve, curve),), privacy.pld.tail_for(target, rounds))
    found = loss.epsilons(target, 1, rounds)
    exact = gaussian_epsilon(mu * np.sqrt(np.arange(1, rounds + 1)), target)
    assert (found >= exact).all() and found == pytest.approx(exact, rel=5e-3)
    assert found[-1] == pytest.approx(exact[-1], rel=1e-4)
    back = loss.delta(float(found[-1]), rounds, near=target)
    assert back == pytest.approx(target, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("population", "rounds", "finer"),
    [(10**6, 10**4, 2.25296e-3), (10**6, 10**6, 2.66348e-2), (10**7, 10**6, 1.49883e-3)],
)
def test_rare_participations_have_a_grid_that_suits_them(population, rounds, finer):
    """Next to a grid of 2^21 points, which takes a minute."""
    found = epsilon(at_mu("poisson", 2.0, population, 1, rounds), "add_remove", 1e-5)
    assert finer * (1 - 1e-5) <= found <= finer * 1.02


BY_CLIENTS = {"placement": "client"}
UNCOVERED = [
    (mechanism("poisson", **BY_CLIENTS), "add_remove", "pld", "noise.placement server"),
    (mechanism("poisson", stateful="scaffold"), "replace_one", "pld", "zero_out or add_remove"),
    (mechanism("with_replacement"), "replace_one", "rdp", "pld"),
    (mechanism("with_replacement"), "zero_out", "pld", "replace_one"),
    (mechanism("full", 80, 80, **BY_CLIENTS), "add_remove", "pld", "noise.placement server"),
    (mechanism("public"), "add_remove", "pld", "zero_out or replace_one"),
]


@pytest.mark.parametrize(("run", "relation", "accountant", "nearest"), UNCOVERED)
def test_what_is_not_covered_is_refused_with_the_nearest_that_is(
    run, relation, accountant, nearest
):
    assert nearest in privacy.covers(accountant, run, relation)
    with pytest.raises(ConfigError, match=r"^accountant = "):
        epsilon(run, relation, 1e-5, accountant=accountant)
    if run.sampling.hidden:
        found = guarantees(run, relation, 1e-5, accountants=[accountant])[0]
        assert found.epsilon == math.inf and nearest in found.conditions_failed[0]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("relation", ["neighbour"]),
        ("delta", [0.0, 1.0, math.nan]),
        ("rounds", [0]),
        ("accountant", ["moments"]),
    ],
)
def test_bad_arguments_are_refused_by_name(field, values):
    for value in values:
        asked = {"mechanism": mechanism(), "relation": "replace_one", "delta": 1e-5}
        with refusal(begins=f"{field}: "):
            epsilon(**asked | {field: value})


def test_hidden_cohort_known_cohort_and_every_update_are_reported():
    """PRIVACY.md sec. 2: calibrated to 1.5 hidden, 6.2 known and 124 seen update by update,
    composed over the *expected* T r / N = 4.17 rounds of a client, which bounds no client; the
    guarantees compose over the realised number, or over all rounds.
    """
    z = privacy.noise_for(1.5, mechanism(), "replace_one", 1e-5)
    run = mechanism(placement="client").with_noise(z)
    mu = run.mu("replace_one")

    def gaussians(count: float) -> float:
        return float(gaussian_epsilon(mu * math.sqrt(count), 1e-5))

    expected = 100 * 80 / 1920
    assert gaussians(expected) == pytest.approx(6.2, abs=0.05)
    assert gaussians(80 * expected) == pytest.approx(124, abs=0.5)
    asked = {"accountants": ["pld"], "participations": 5}
    hidden, known, seen = guarantees(run, "replace_one", 1e-5, **asked)
    size = "fixed size 80 of 1920"
    assert str(hidden.sampling) == f"{size}, cohort hidden"
    assert str(known.sampling) == f"{size}, cohort known, a client in at most 5 of 100 rounds"
    observers = [each.observer for each in (hidden, known, seen)]
    assert observers == ["every aggregate", "every aggregate", "every single update"]
    assert 1.49 < hidden.epsilon <= 1.5
    assert known.epsilon == pytest.approx(gaussians(5), rel=1e-6)
    assert seen.epsilon == pytest.approx(gaussians(5 * 80), rel=1e-6)
    _, all_rounds, all_seen = guarantees(run, "replace_one", 1e-5, accountants=["pld"])
    assert (all_rounds.epsilon, all_seen.epsilon) == pytest.approx((49.4, 2006), rel=2e-3)


def test_a_known_poisson_cohort_protects_the_contribution_not_the_presence():
    hidden, known = guarantees(
        mechanism("poisson"), "add_remove", 1e-5, accountants=["rdp"], participations=3
    )
    assert (hidden.relation, known.relation) == ("add_remove", "zero_out")


def test_a_client_drawn_several_times_counts_with_its_multiplicity_when_the_cohort_is_known():
    run = at_mu("with_replacement", 0.5, 100, 4, 10)
    _, known = guarantees(run, "replace_one", 1e-5, accountants=["pld"], participations=6)
    worst = 4 * 6  # at least 4^2 + 2^2, six draws over two rounds of four
    assert known.epsilon == pytest.approx(float(gaussian_epsilon(0.5 * math.sqrt(worst), 1e-5)))


def test_all_draws_of_a_client_may_be_of_the_round_with_the_least_noise():
    run = replace(at_mu("with_replacement", 0.1, 100, 10, 50), factors=(0.1,) + (1.0,) * 49)
    _, known = guarantees(run, "replace_one", 1e-5, accountants=["pld"], participations=10)
    assert known.epsilon == pytest.approx(float(gaussian_epsilon(0.1 / 0.1 * 10, 1e-5)))


def unequal(p_max: float, draws: int, mu: float, rounds: int = 1) -> Mechanism:
    return Mechanism(
        Sampling("with_replacement", 3, draws, p_max=p_max), (Query("update", 1.0, 2 / mu),), rounds
    )


@pytest.mark.parametrize("others", [(0.0, 0.0), (-1.0, -1.0), (1.0, -1.0)])
@pytest.mark.parametrize("mu", [0.4, 1.5, 4.0])
def test_draws_of_unequal_probabilities_stay_below_the_curve_of_the_likeliest_client(others, mu):
    """Exact, over all sequences of three draws, for each client at +1 or -1 and the others
    anywhere; at 1/n the curve would be too low.
    """
    p = np.array([0.7, 0.2, 0.1])
    draws = 3
    std = 2 / mu
    x = np.linspace(-3 - 12 * std, 3 + 12 * std, 20_001)

    def density(values):
        sums: dict[float, float] = {}
        for sequence in itertools.product(range(3), repeat=draws):
            total = sum(values[k] for k in sequence)
            sums[total] = sums.get(total, 0.0) + math.prod(p[k] for k in sequence)
        return sum(chance * norm.pdf(x, total, std) for total, chance in sums.items())

    below_uniform = []
    for client in range(3):
        here, there = (density(np.insert(np.array(others), client, sign)) for sign in (1.0, -1.0))
        for eps in (0.0, 0.3, 1.0, 3.0):
            true = max(
                np.maximum(a - math.exp(eps) * b, 0).sum()
                for a, b in ((here, there), (there, here))
            ) * (x[1] - x[0])
            assert true <= delta(unequal(0.7, draws, mu), "replace_one", eps) * (1 + 1e-6)
            below_uniform.append(true <= delta(unequal(1 / 3, draws, mu), "replace_one", eps))
    assert not all(below_uniform)


@pytest.mark.slow
def test_the_curve_of_the_likeliest_client_is_the_printed_formula_and_grows_with_its_probability():
    for mu, draws in ((0.1, 40), (0.8, 5), (3.0, 2)):
        found = [
            epsilon(unequal(p, draws, mu), "replace_one", 1e-5)
            for p in (1 / 3, 0.34, 0.5, 0.8, 0.99, 1.0)
        ]
        assert (np.diff(found) > 0).all()
        # always drawn: nothing hidden
        assert found[-1] == pytest.approx(float(gaussian_epsilon(draws * mu, 1e-5)), rel=1e-3)
        assert found[0] == pytest.approx(
            epsilon(at_mu("with_replacement", mu, 3, draws, 1), "replace_one", 1e-5), rel=1e-9
        )
        assert found[2] == pytest.approx(
            solve(formula("with_replacement", 2, draws, mu), 1e-5), rel=1e-3
        )


@pytest.mark.parametrize(("relation", "k"), [("replace_one", 2), ("zero_out", 1)])
def test_public_cohorts_cost_what_the_gaussians_of_a_clients_own_rounds_cost(relation, k):
    run = mechanism("public", 50, 5, std=3.0, rounds=12)
    full = mechanism("full", 50, 50, std=3.0, rounds=12)
    mu = k / 3 * np.sqrt(np.arange(1, 13))
    assert privacy.epsilon_curve(run, relation, 1e-5) == pytest.approx(
        gaussian_epsilon(mu, 1e-5), rel=1e-9
    )
    assert delta(run, relation, 0.7) == pytest.approx(privacy.gaussian_delta(0.7, mu[-1]), rel=1e-9)
    renyi = [epsilon(each, relation, 1e-5, accountant="rdp") for each in (run, full)]
    assert renyi[0] == pytest.approx(renyi[1], rel=1e-12)
    z = [privacy.noise_for(2.0, each, relation, 1e-5) for each in (run, full)]
    assert z[0] == pytest.approx(z[1], rel=1e-3)


@pytest.mark.parametrize(("relation", "moves"), [("replace_one", 2), ("zero_out", 1)])
def test_a_per_client_query_costs_what_the_library_says_of_two_gaussians(relation, moves):
    z, bound, std = 3.0, 1.5, 4.0
    r, rounds = 9, 6
    queries = (Query("updates", 1.0, z), Query("losses", bound, std, per_client=True))
    placement = "client" if relation == "replace_one" else "server"
    both = Mechanism(Sampling("public", 100, r), queries, rounds, placement=placement)

    def library(spread: float, accountant) -> float:
        accountant.compose(dp_event.GaussianDpEvent(spread / moves), rounds)
        accountant.compose(dp_event.GaussianDpEvent(std / (moves * bound)), rounds)
        return accountant.get_epsilon(1e-5)

    for name, make in (
        ("pld", lambda: PLDAccountant(value_discretization_interval=1e-3)),
        ("rdp", RdpAccountant),
    ):
        claims = guarantees(both, relation, 1e-5, accountants=[name])
        for found, spread in zip(claims, (z, z / math.sqrt(r)), strict=False):
            assert found.epsilon == pytest.approx(library(spread, make()), rel=2e-3)
    mu = moves * math.hypot(1 / z, bound / std) * math.sqrt(rounds)
    assert delta(both, relation, 5.0) == pytest.approx(float(privacy.gaussian_delta(5.0, mu)))
    found = privacy.noise_for(20.0, both, relation, 1e-5)
    less = both.with_noise(found * (1 - 2e-4))
    assert epsilon(both.with_noise(found), relation, 1e-5) <= 20.0 < epsilon(less, relation, 1e-5)
    alone = float(gaussian_epsilon(moves * bound / std * math.sqrt(rounds), 1e-5))
    refused = "no noise, however large.*the losses alone, with the noise given, spend "
    with pytest.raises(ConfigError, match=f"{refused}{alone:.4g}"):
        privacy.noise_for(0.99 * alone, both, relation, 1e-5)


def test_the_papers_formula_claims_nothing_for_a_per_client_query():
    sums = mechanism()
    losses = Query("losses", 1.0, 4.0, per_client=True)
    both = replace(sums, queries=(*sums.queries, losses))
    (without,), (found,) = (
        guarantees(each, "replace_one", 1e-5, accountants=["paper"]) for each in (sums, both)
    )
    more = set(found.conditions_failed) - set(without.conditions_failed)
    assert found.epsilon == without.epsilon
    assert more == {"nothing is released next to the sum (here too: the losses of clients)"}


def test_against_public_cohorts_there_is_no_observer_who_does_not_know_them():
    sampling = Sampling("public", 50, 5, rule="taking turns")
    run = Mechanism(sampling, (Query("update", 1.0, 3.0),), 12, placement="client")
    known, seen = guarantees(run, "replace_one", 1e-5, accountants=["pld"], participations=7)
    words = "public cohorts of 5 of 50 (taking turns), cohort known, a client in at most 7 rounds"
    assert str(known.sampling) == str(seen.sampling) == words
    assert (known.observer, seen.observer) == ("every aggregate", "every single update")
    mu = 2 / 3 * np.sqrt([7, 7 * 5])
    expected = pytest.approx(gaussian_epsilon(mu, 1e-5), rel=1e-6)
    assert np.array([known.epsilon, seen.epsilon]) == expected
    assert privacy.covers("rdp", run, "zero_out") is None
    under = guarantees(run, "add_remove", 1e-5, accountants=["pld"])
    assert {found.relation for found in under} == {"zero_out"}
    (printed,) = guarantees(run, "replace_one", 1e-5, accountants=["paper"])
    assert "hidden" not in str(printed.sampling) and printed.conditions_failed


def test_without_noise_nothing_is_guaranteed_and_the_sentence_says_so():
    silent = mechanism(std=0.0, placement="client")
    for found in guarantees(silent, "replace_one", 1e-5):
        assert found.epsilon == math.inf and "no noise is added" in found.sentence()
        assert "No privacy" in found.sentence()
    assert epsilon(silent, "replace_one", 1e-5) == math.inf
    assert delta(silent, "replace_one", 3.0) == 1.0


@pytest.mark.parametrize(
    ("kind", "relation", "spent"),
    [
        ("fixed", "replace_one", 57.3017),  # by [2] Theorem 27 alone: 64.3381
        ("fixed", "zero_out", 22.0199),  # 64.3381
        ("poisson", "replace_one", 57.3017),  # 64.3381
        ("truncated_poisson", "replace_one", 57.3017),
        ("poisson", "zero_out", 12.5617),  # which is exact
    ],
)
def test_rdp_of_hidden_cohorts_is_never_above_that_of_everyone_in_every_round(
    kind, relation, spent
):
    cap = {"cap": 70} if kind == "truncated_poisson" else {}
    run = Mechanism(Sampling(kind, 100, 60, **cap), (Query("update", 1.0, 2.0),), 50)
    assert epsilon(run, relation, 1e-5, accountant="rdp") == pytest.approx(spent, rel=1e-5)
    assert epsilon(run.with_known_cohorts(), relation, 1e-5, accountant="rdp") >= spent * (1 - 1e-5)


def test_few_participations_that_occurred_bound_no_hidden_cohort():
    """An attack that counts the rounds in which the sum is far off: 7 of 100 prove more than 3
    rounds cost that are known.
    """
    run = mechanism("fixed", 1000, 10, std=0.2)
    hidden, known = guarantees(run, "replace_one", 1e-5, accountants=["pld"], participations=3)
    mu, far, count = 10.0, 9.34, 7
    often = binom.sf(count - 1, 100, 0.01 * norm.sf(far - mu) + 0.99 * norm.sf(far))
    proved = math.log(often - 1e-5) - binom.logsf(count - 1, 100, norm.sf(far))
    assert proved == pytest.approx(290.4, abs=0.1)
    assert known.epsilon == pytest.approx(222.98, abs=0.01)
    assert proved <= hidden.epsilon == pytest.approx(355.14, abs=0.01)


PERSONS = [Sampling(kind, 100, 60) for kind in ("fixed", "poisson")]
HIDDEN = [
    Sampling("fixed", 100, 60),
    Sampling("fixed", 1000, 990),
    Sampling("fixed", 100, 60, colluders=20),
    Sampling("poisson", 100, 60),
    Sampling("truncated_poisson", 100, 60, cap=65),
    Sampling("random_allocation", 100, 33, epoch=3, per_epoch=1),
    *(of_person(sampling, 3)[0] for sampling in PERSONS),
]


@pytest.mark.parametrize("relation", ["replace_one", "zero_out", "add_remove"])
@pytest.mark.parametrize("sampling", HIDDEN, ids=str)
def test_no_round_shows_more_than_the_gaussian_of_the_worst_cohorts(sampling, relation):
    scheme = sampling.scheme
    if scheme.refuses(relation) or (sampling.colluders and relation == "add_remove"):
        return
    mu, at = 0.7, np.array([0.0, 0.1, 1.0, 3.0])
    event = Event(sampling, mu, relation=relation)
    most = privacy.gaussian_delta(at, float(event.mu_bound(1)))
    curves = [curve for pair in sampling.scheme.curves(sampling, mu, relation) for curve in pair]
    shown = np.max([curve(at) for curve in curves], axis=0)
    assert (shown <= most * (1 + 1e-9)).all()
    if sampling.cohort == 990:
        assert (shown > privacy.gaussian_delta(at, 0.9 * float(event.mu_bound(1)))).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "relation", "z", "rounds", "delta"),
    [
        (HIDDEN[5], "add_remove", 8.4, 6, 1e-38),
        (Sampling("fixed", 495, 299), "replace_one", 0.19, (1.0, 1.5) * 40, 1e-13),
        (Sampling("poisson", 1000, 5), "replace_one", 0.03, (1.0, 1.5) * 15, 1e-13),
    ],
    ids=str,
)
def test_a_hidden_cohort_never_costs_more_than_a_known_one(sampling, relation, z, rounds, delta):
    factors = rounds if isinstance(rounds, tuple) else ()
    query = Query("update", 1.0, z)
    run = Mechanism(sampling, (query,), len(factors) or rounds, factors=factors)
    hidden, known = guarantees(run, relation, delta, accountants=["pld"])
    assert hidden.epsilon <= known.epsilon < math.inf
    event = run.event(relation)
    most = ACCOUNTANTS["pld"].delta_of(event, known.epsilon, run.rounds)
    assert most <= delta * (1 + 1e-9)
