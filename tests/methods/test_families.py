"""The small families: bounding, weights and server steps, against equations and references."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import norm

from raydpfl.check.bounding import scales
from raydpfl.check.contract import BrokenClause
from raydpfl.check.example import Example
from raydpfl.core import exact_sum, prng
from raydpfl.core.messages import Grid
from raydpfl.errors import ConfigError, RunError
from raydpfl.experiment import Experiment
from raydpfl.methods import bounding, server
from raydpfl.simulation.client.contribution import vector_norms


@pytest.mark.parametrize("kind", [kind for kind in bounding.FAMILY if kind != "none"])
def test_bounds_of_every_size_are_kept_or_refused(kind):
    case = Example("bounding", {"kind": kind, "bound": 1.0})
    assert scales(case) == "bounds of 1e-12 to 1e15"
    for bound in (1e-30, 0.9e-12, 1.1e15, 1e30):
        with pytest.raises(
            ConfigError, match=r"^bounding.bound = .*: expected a number (less|greater)"
        ):
            Experiment.from_dict(Example("bounding", {"kind": kind, "bound": bound}).tree())


class Single(bounding.Clip):
    """Takes squares in float32."""

    bound: float

    def factor(self, norm, bound):
        length = float(np.sqrt(np.square(np.float32(min(norm, 1e18)))))
        return 1.0 if length <= bound else bound / length


def test_squares_in_float32_break_the_contract_and_a_user_defined_bound_has_the_same_range():
    name = f"{__name__}:Single"
    with pytest.raises(
        BrokenClause, match="a vector of size 1e-9 is sent with norm 1e-12, above 1e-12"
    ):
        scales(Example("bounding", {"kind": name, "bound": 1.0}))
    for bound in (1e-25, 1e16):
        with pytest.raises(ConfigError, match=r"bounding.bound = .*: .*a number from 1e-12 to"):
            Experiment.from_dict(Example("bounding", {"kind": name, "bound": bound}).tree())


def test_a_norm_whose_squares_underflow_is_not_given_too_small():
    vectors = torch.full((3, 4), 1.0, dtype=torch.float64)
    vectors *= torch.tensor([[0.0], [1e-161], [1e-100]], dtype=torch.float64)
    found = vector_norms(vectors)
    assert (found >= 2 * vectors[:, 0].numpy()).all() and found[0] == 0 and found[2] == 2e-100


def test_the_adaptive_bound_moves_towards_its_quantile_and_rests_there():
    member = bounding.FAMILY["quantile_clip"](bound=1.0, quantile=0.5, lr=0.2)
    assert member.adapt(1.0, {"count": 0.0}, 10, {}) == 1.0
    assert member.adapt(1.0, {"count": 5.0}, 10, {}) == pytest.approx(math.exp(-0.1))
    assert member.adapt(1.0, {"count": -5.0}, 10, {}) == pytest.approx(math.exp(0.1))
    assert member.adapt(1.0, {"count": 40.0}, 10, {}) == pytest.approx(math.exp(-0.8))
    fast = bounding.FAMILY["quantile_clip"](bound=1.0, lr=50.0)
    assert fast.adapt(1e-6, {"count": 5.0}, 10, {}) == 1e-12
    assert fast.adapt(1e6, {"count": -5.0}, 10, {}) == 1e15
    norms = np.random.default_rng(0).lognormal(size=2000)
    bound = 10.0
    for _ in range(300):
        answers = member.answers({"norm": norms}, bound)
        bound = member.adapt(bound, {"count": float(answers["count"].sum())}, len(norms), {})
    assert bound == pytest.approx(np.median(norms), rel=0.02)


@pytest.mark.parametrize("quantile", [0.1, 0.9])
def test_noise_on_the_count_does_not_drive_the_bound_away(quantile):
    """Where it exceeds the shares that there can be, its mean is 0 all the same."""
    member = bounding.FAMILY["quantile_clip"](bound=1.0, quantile=quantile)
    generator = np.random.default_rng(1)
    bounds = [1.0]
    for _ in range(500):
        norms = generator.lognormal(size=10)
        count = float(member.answers({"norm": norms}, bounds[-1])["count"].sum())
        count += generator.normal(scale=2 / (2 * math.sqrt(member.share)))  # multiplier 2
        bounds.append(member.adapt(bounds[-1], {"count": count}, 10, {}))
    truth = math.exp(norm.ppf(quantile))
    assert truth / 2 < math.exp(np.log(bounds[250:]).mean()) < 2 * truth


def test_the_grid_covers_the_largest_sum_and_is_finer_than_a_billionth_of_the_bound():
    cases = [(1, 1.0, 0.0), (80, 0.5, 3.0), (10_000, 1.0, 2.0), (1_000_000, 1.05, 0.0)]
    for cohort, bound, std in cases:
        grid = Grid.of(cohort, bound, std)
        assert bound + Grid.TAIL * std <= grid.most <= 2.0**51 * grid.step / cohort
        assert grid.step < 1e-9 * (bound + Grid.TAIL * std)
        assert math.log2(grid.step) == int(math.log2(grid.step))


def test_a_contribution_out_of_range_is_a_divergence():
    for wrong in (1e30, np.nan):
        with pytest.raises(RunError, match="diverged"):
            exact_sum.add(np.zeros(2), np.array([[1.0, wrong]]), Grid.of(10, None))


SECOND_MOMENTS = {  # of each coordinate (Reddi et al. 2021, Alg. 2)
    "adam": lambda v, u: 0.99 * v + 0.01 * u**2,
    "yogi": lambda v, u: v - 0.01 * u**2 * math.copysign(1, v - u**2),
    "adagrad": lambda v, u: v + u**2,
}


@pytest.mark.parametrize("kind", SECOND_MOMENTS)
def test_adaptive_servers_follow_their_algorithm(kind):
    member = server.FAMILY[kind](lr=0.05)
    generator = np.random.default_rng(2)
    x = generator.normal(size=6).astype(np.float32)
    state = member.start(6)
    m, v = np.zeros(6), np.full(6, 1e-6)
    for t in range(5):
        u = generator.normal(size=6)
        m = member.beta1 * m + (1 - member.beta1) * u
        v = np.array([SECOND_MOMENTS[kind](*pair) for pair in zip(v, u, strict=True)])
        expected = x + 0.05 * m / (np.sqrt(v) + 1e-3)
        x = member.step(x.astype(float), u, state, t)
        np.testing.assert_allclose(x, expected, rtol=1e-6)


def test_server_momentum_accumulates_and_zero_momentum_is_sgd():
    x = np.zeros(3)
    u = np.ones(3)
    member = server.FAMILY["momentum"](lr=0.5, momentum=0.8)
    state = {"v": np.zeros(3)}
    first = member.step(x, u, state, 0)
    assert first == pytest.approx(0.5 * u)
    assert member.step(first.astype(float), u, state, 1) == pytest.approx(0.5 + 0.5 * 1.8 * u)
    plain = server.FAMILY["momentum"](lr=0.5, momentum=0.0)
    assert np.array_equal(
        plain.step(x, u, plain.start(3), 0), server.ServerSgd(lr=0.5).step(x, u, {}, 0)
    )


def test_a_model_that_is_no_longer_finite_stops_the_run():
    with pytest.raises(RunError, match="no longer finite"):
        server.ServerSgd().step(np.zeros(2), np.array([1.0, 1e300]), {}, 3)


def test_no_two_names_share_a_stream():
    places = product((0, 1, 2**40), (0, 1, 2**33), (0, 1), (0, 1))
    names = [dict(zip(("t", "client", "draw", "step"), place, strict=True)) for place in places]
    firsts = {
        prng.stream(9, purpose, **name).bit_generator.random_raw()
        for purpose in prng.Purpose
        for name in names
    }
    assert len(firsts) == len(names) * len(prng.Purpose)
    seeds = {
        prng.stream(seed, prng.Purpose.BATCH).bit_generator.random_raw()
        for seed in (0, 1, 2**32, 2**63)
    }
    assert len(seeds) == 4


def test_torch_streams_keep_all_the_bits_of_their_key():
    near = [
        prng.torch_stream(s, prng.Purpose.MODEL, client=c)
        for s in (1, 1 + 2**32)
        for c in (0, 2**32)
    ]
    assert len({torch.randn(1, generator=g).item() for g in near}) == 4


class Halves(bounding.Bounding):
    """Gives `factors` alone."""

    bound: float = 1.0

    def factors(self, norms, bound):
        return torch.clamp(bound / (2 * norms), max=0.5)


class Quarters(Halves):
    """Gives `factor` alone, by that of a base with `factors` alone."""

    def factor(self, norm, bound):
        return super().factor(norm, bound) / 2


def test_a_bounding_gives_the_factor_of_one_norm_or_those_of_many():
    assert Quarters().factors(torch.tensor([4.0, 0.5]), 1.0).tolist() == [0.0625, 0.25]
    member = Halves()
    assert member.factor(4.0, 1.0) == 0.125 and member.factor(0.5, 1.0) == 0.5
    many = member.factors(torch.tensor([4.0]), 1.0)
    assert many.tolist() == [0.125]


class Quarter:
    """A mixin with `factor` alone."""

    def factor(self, norm, bound):
        return 0.25 * min(1.0, bound / norm)


class Half:
    """A mixin with `factors` alone."""

    def factors(self, norms, bound):
        return 0.5 * torch.clamp(bound / norms, max=1.0)


def test_a_mixins_factor_counts_where_it_stands_before_the_base():
    class One(Quarter, bounding.Clip):
        pass

    class Many(Half, Quarters):
        pass

    class After(bounding.Clip, Quarter):
        pass

    norms = torch.tensor([4.0, 0.5], dtype=torch.float64)
    for member, factors in (
        (One(bound=1.0), [0.0625, 0.25]),
        (Many(), [0.125, 0.5]),
        (After(bound=1.0), [0.25, 1.0]),
    ):
        assert member.factors(norms, 1.0).tolist() == factors
        assert [member.factor(norm, 1.0) for norm in norms.tolist()] == factors
