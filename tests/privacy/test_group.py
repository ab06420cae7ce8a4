"""What a person's samples together cost: the curves of groups against enumerations and mixtures."""

from itertools import combinations, product

import numpy as np
import pytest
from conftest import mechanism
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, MixtureGaussianPrivacyLoss
from scipy.stats import binom, hypergeom

from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.privacy import LocalSteps, Mechanism, Query, Sampling, SamplingScheme, pld, rdp
from raydpfl.privacy.calculator import PersonalBudget, sample_budget
from raydpfl.privacy.group import group_sampling

EPSILONS = np.array([0.0, 0.05, 0.4, 1.0, 2.5, 5.0])
GRID = np.linspace(-22, 22, 11001)


def hockey_stick(
    first: np.ndarray, second: np.ndarray, chances: np.ndarray | None = None
) -> np.ndarray:
    """delta at `EPSILONS` of two mixtures of unit Gaussians, by default of equal weights."""
    weights = np.full(len(first), 1 / len(first)) if chances is None else chances
    p, q = (
        np.exp(-((GRID[:, None] - means) ** 2) / 2) @ weights / np.sqrt(2 * np.pi)
        for means in (first, second)
    )
    excess = (p - np.exp(EPSILONS)[:, None] * q).clip(min=0)
    return excess.sum(axis=1) * (GRID[1] - GRID[0])


@pytest.mark.parametrize(("person", "epsilon"), [(1, 0.718), (5, 4.072), (20, 18.91)])
def test_a_persons_epsilon_under_poisson_is_that_of_a_mixture_of_gaussians(person, epsilon):
    budget = sample_budget(
        samples=10_000, batch=100, steps=100, participations=1, noise_multiplier=1.0,
        sampling="poisson", person=person,
    )  # fmt: skip
    exact, other = budget.persons
    assert float(f"{exact.epsilon:.4g}") == epsilon
    assert (exact.unit, exact.relation, exact.delta) == ("person", "add_remove", 1e-5)
    assert "group privacy" not in str(exact.sampling)
    assert other.conditions_failed  # rdp has no mixtures, and says so
    assert budget.guarantees[0].unit == "sample"


@pytest.mark.parametrize(("q", "group", "mu"), [(0.01, 5, 1.0), (0.3, 3, 0.7), (0.05, 30, 0.5)])
def test_the_curves_of_a_group_under_poisson_are_the_librarys(q, group, mu):
    weights = binom.pmf(range(group + 1), group, q)
    directions = AdjacencyType.REMOVE, AdjacencyType.ADD
    curves = pld.group_removed_curves(weights, mu)
    for adjacency, (curve, _) in zip(directions, curves, strict=True):
        loss = MixtureGaussianPrivacyLoss(
            1 / mu, range(group + 1), weights, adjacency_type=adjacency
        )
        expected = loss.get_delta_for_epsilon(EPSILONS)
        assert curve(EPSILONS) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_of_one_unit_the_curves_are_those_of_a_unit():
    weights = np.array([0.97, 0.03])
    (removed, added), _ = pld.group_removed_curves(weights, 0.8)
    expected, _ = pld.poisson_curves(0.03, 0.8)
    assert removed(EPSILONS) == pytest.approx(expected[0](EPSILONS), rel=1e-8)
    assert added(EPSILONS) == pytest.approx(expected[1](EPSILONS), rel=1e-8, abs=1e-15)
    for absent, other in ((0.8, 0.8), (0.8, 0.4), (0.4, 0.8)):
        one = pld.three_gaussians_curve(0.03, absent, other)
        one = pld.fixed_size_curve(0.03, other) if absent == other else one
        found = pld.group_replaced_curve(weights, absent, other)(EPSILONS)
        assert found == pytest.approx(one(EPSILONS), rel=1e-8)


@pytest.mark.parametrize("draw", range(20))
def test_far_beyond_all_losses_the_curve_of_three_gaussians_is_zero(draw):
    random = stream(1, Purpose.DATA, draw=draw)
    q, mu = random.uniform(0.01, 0.9), random.uniform(0.1, 2.0)
    with np.errstate(over="raise", invalid="raise"):
        for absent, other in ((mu, 2 * mu), (2 * mu, mu)):
            assert pld.three_gaussians_curve(q, absent, other)(np.array([1e30])) == [0.0]


@pytest.mark.parametrize("draw", range(24))
@pytest.mark.parametrize("zeros", [False, True])
def test_no_person_in_a_batch_of_fixed_size_passes_the_curve(draw, zeros):
    """All batches are enumerated, of values at random or at the ends of what a bound of 1 allows;
    the first of these attain the curve at epsilon 0, where the person's are opposite.
    """
    random = stream(0, Purpose.DATA, draw=draw)
    n, batch, group = 6, int(random.integers(1, 5)), int(random.integers(1, 4))
    std = float(random.uniform(0.5, 2.0))
    others = (
        random.choice([-1.0, 0.0, 1.0], n - group) if draw % 2 else np.full(n - group, zeros / 2)
    )
    mine = random.uniform(-1, 1, group) if draw % 4 == 3 else np.ones(group)
    theirs = random.uniform(-1, 1, group) if draw % 8 == 7 else -np.ones(group)
    theirs = 0 * theirs if zeros else theirs
    sums = [
        np.array([sum(values[i] for i in some) / std for some in combinations(range(n), batch)])
        for values in (np.append(mine, others), np.append(theirs, others))
    ]
    relation = "zero_out" if zeros else "replace_one"
    sampling = Sampling("fixed", n, batch)
    mu = 1 / std if zeros else 2 / std
    (up, down), *_ = sampling.scheme.group_curves(sampling, mu, group, relation)
    assert (hockey_stick(*sums) <= up(EPSILONS) + 1e-6).all()
    assert (hockey_stick(*sums[::-1]) <= down(EPSILONS) + 1e-6).all()
    if not draw % 2:
        assert hockey_stick(*sums)[0] == pytest.approx(up(EPSILONS)[0], abs=1e-6)


@pytest.mark.parametrize("draw", range(12))
def test_no_person_that_is_replaced_under_poisson_passes_the_curve(draw):
    random = stream(1, Purpose.DATA, draw=draw)
    group, q = int(random.integers(1, 5)), float(random.choice([0.1, 0.25, 0.5]))
    std = float(random.uniform(0.4, 2.0))
    mine = random.uniform(-1, 1, group) if draw % 2 else np.ones(group)
    theirs = random.uniform(-1, 1, group) if draw % 4 == 3 else -np.ones(group)
    coins = np.array([*product([False, True], repeat=group)])
    chances = np.where(coins, q, 1 - q).prod(axis=1)
    sums = [coins @ values / std for values in (mine, theirs)]
    sampling = Sampling("poisson", 20, round(20 * q))
    ((curve, _),) = sampling.scheme.group_curves(sampling, 2 / std, group, "replace_one")
    found = hockey_stick(*sums, chances), hockey_stick(*sums[::-1], chances)
    assert (np.maximum(*found) <= curve(EPSILONS) + 1e-6).all()
    if not draw % 2:
        assert found[0][0] == pytest.approx(curve(EPSILONS)[0], abs=1e-6)
        if group == 1:
            assert found[0] == pytest.approx(curve(EPSILONS), abs=1e-6)


@pytest.mark.parametrize(("group", "most"), [(1, 6.641), (5, 27.03), (20, 99.89)])
def test_a_person_in_batches_of_fixed_size_costs_little_more_than_one_mixture(group, most):
    """One pair of neighbours, in one direction, is a mixture against a Gaussian; and it grows."""
    weights = hypergeom.pmf(range(group + 1), 10_000, group, 100)
    curve = pld.group_replaced_curve(weights, 2.0, 2.0)
    (loss,) = pld.distributions(((curve, curve),))
    (found,) = loss.epsilons(1e-5, 100, 100)
    one_way = pld.distributions(pld.group_removed_curves(weights, 2.0))[0]
    assert one_way.epsilons(1e-5, 100, 100)[0] < found < most


@pytest.mark.parametrize("sampling", ["fresh", "epochs"])
def test_all_samples_of_a_client_are_in_every_step(sampling):
    steps = LocalSteps(
        [60, 8], batch=10, steps=6, bound=0.5, stds=[2.0, 4.0], delta=1e-3, sampling=sampling
    )
    persons = PersonalBudget(steps, [3, 1], ["pld"]).persons
    expected = pld.gaussian_epsilon(2 * 0.5 / 2.0 * np.sqrt(3 * 6), 1e-3)
    assert [one.epsilon for one in persons] == pytest.approx([float(expected)])
    assert persons[0].sampling.client == 0
    assert not persons[0].sampling.knows
    some = PersonalBudget(steps, [3, 1], ["pld"], person=5).persons
    alone = PersonalBudget(steps, [3, 1], ["pld"]).guarantees[0]
    assert alone.epsilon < some[0].epsilon < persons[0].epsilon
    assert str(some[0].sampling).endswith("by group privacy") == (sampling == "epochs")


class Unknown(SamplingScheme):
    """Fixed size, of which nothing is said for groups."""

    kind = "unknown"

    def words(self, sampling):
        return "unknown"

    def curves(self, sampling, mu, relation):
        curve = pld.fixed_size_curve(sampling.q, mu)
        return ((curve, curve),)

    def renyi(self, sampling, mu, relation):
        return rdp.fixed_size(sampling.q, mu)


def test_a_scheme_that_says_nothing_of_groups_has_group_privacy():
    sampling, factor = group_sampling(Sampling(Unknown(), 100, 5), 3)
    assert factor == 1
    assert sampling.scheme.by_group_privacy("curves")
    ((curve, _),) = sampling.scheme.curves(sampling, 0.5, "replace_one")
    own = pld.group_replaced_curve(hypergeom.pmf(range(4), 100, 3, 5), 0.5, 0.5)(EPSILONS)
    assert (curve(EPSILONS) >= own).all()
    assert curve(np.zeros(1)) == pytest.approx(3 * pld.fixed_size_curve(0.05, 0.5)(np.zeros(1)))
    # of 3, so up to 4 = 2^2: 3^2 times the divergence at 4 times the order, from 2 on
    one = Unknown().renyi(Sampling(Unknown(), 100, 5), 0.5, "replace_one")
    orders = rdp.ORDERS.tolist()
    renyi = sampling.scheme.renyi(sampling, 0.5, "replace_one")
    assert renyi[orders.index(4.0)] == 9 * one[orders.index(16)]
    assert renyi[0] == 9 * one[orders.index(8.0)]
    assert np.isinf(renyi[-1])


@pytest.mark.parametrize(("mu", "group"), [(1.0, 5), (1.0, 100), (0.05, 100), (0.01, 1000)])
def test_group_privacy_says_no_less_than_the_curve_of_the_group(mu, group):
    bound = pld.group_privacy(lambda epsilon: pld.gaussian_delta(epsilon, mu), group)
    epsilons = np.geomspace(0.01, 1e5, 200)
    assert (bound(epsilons) >= pld.gaussian_delta(epsilons, group * mu)).all()


@pytest.mark.parametrize(
    "fields", [{"kind": "truncated_poisson", "cap": 14},
               {"kind": "random_allocation", "epoch": 10, "per_epoch": 1}]
)  # fmt: skip
def test_a_person_is_refused_where_nothing_covers_her(fields):
    run = Mechanism(Sampling(population=100, cohort=10, **fields), (Query("updates", 1.0, 1.0),), 1)
    with pytest.raises(ConfigError, match="person = 3: expected none with sampling"):
        run.person_mechanism(3)


def test_groups_of_other_schemes_are_other_mechanisms():
    fields = {"unit": "sample", "placement": "step"}
    runs = [mechanism(kind, 100, 10, 1.0, 10, **fields) for kind in ("fixed", "poisson")]
    assert len({run.person_mechanism(group).digest() for run in runs for group in (4, 5)}) == 4
