"""The small families: bounding, weights and server steps, against equations and references."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch

from raydpfl.check.contract import Broken
from raydpfl.check.example import Example
from raydpfl.check.scales import scales
from raydpfl.core import exact_sum, prng
from raydpfl.core.messages import Grid
from raydpfl.errors import ConfigError, RunError
from raydpfl.experiment import Experiment
from raydpfl.methods import bounding, server, weights
from raydpfl.simulation.client.contribution import vector_norms

UNBOUNDED = ("none", "per_sample_clip")


@pytest.mark.parametrize("kind", [kind for kind in bounding.FAMILY if kind not in UNBOUNDED])
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
    with pytest.raises(Broken, match="a vector of size 1e-9 is sent with norm 1e-12, above 1e-12"):
        scales(Example("bounding", {"kind": name, "bound": 1.0}))
    for bound in (1e-25, 1e16):
        with pytest.raises(ConfigError, match=r"bounding.bound = .*: .*a number from 1e-12 to"):
            Experiment.from_dict(Example("bounding", {"kind": name, "bound": bound}).tree())


def test_an_adaptive_bound_stays_in_its_range():
    member = bounding.FAMILY["quantile_clip"](bound=1.0, lr=50.0)
    assert member.adapt(1e-6, {"count": 5.0}, 10, {}) == 1e-12
    assert member.adapt(1e6, {"count": -5.0}, 10, {}) == 1e15


def test_a_norm_whose_squares_underflow_is_not_given_too_small():
    vectors = torch.full((3, 4), 1.0, dtype=torch.float64)
    vectors *= torch.tensor([[0.0], [1e-161], [1e-100]], dtype=torch.float64)
    found = vector_norms(vectors)
    assert (found >= 2 * vectors[:, 0].numpy()).all() and found[0] == 0 and found[2] == 2e-100


def test_clipping_leaves_short_updates_alone_and_normalising_does_not():
    assert bounding.FAMILY["clip"](bound=2.0).factor(1.5, 2.0) == 1.0
    assert bounding.FAMILY["normalize"](bound=2.0).factor(0.5, 2.0) == 4.0
    assert bounding.FAMILY["smooth_normalize"](bound=2.0, a=0.5).factor(0.5, 2.0) == 2.0


def test_the_adaptive_bound_moves_towards_its_quantile_and_rests_there():
    member = bounding.FAMILY["quantile_clip"](bound=1.0, quantile=0.5, lr=0.2)
    assert member.adapt(1.0, {"count": 0.0}, 10, {}) == 1.0
    assert member.adapt(1.0, {"count": 5.0}, 10, {}) == pytest.approx(math.exp(-0.1))
    assert member.adapt(1.0, {"count": -5.0}, 10, {}) == pytest.approx(math.exp(0.1))
    assert member.adapt(1.0, {"count": 40.0}, 10, {}) == pytest.approx(math.exp(-0.1))
    norms = np.random.default_rng(0).lognormal(size=2000)
    bound = 10.0
    for _ in range(300):
        answers = member.answers({"norm": norms}, bound)
        bound = member.adapt(bound, {"count": float(answers["count"].sum())}, len(norms), {})
    assert bound == pytest.approx(np.median(norms), rel=0.02)


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


def test_data_weights_are_unbiased_by_enumeration_of_all_cohorts():
    """002 Lemma 5: the mean of (N/r) sum p_i Delta_i over all cohorts of size r is sum p_i
    Delta_i.
    """
    sizes = np.array([1, 5, 2, 9, 3])
    r = 2
    updates = np.random.default_rng(1).normal(size=(5, 4))
    member = weights.FAMILY["data"]()
    means = []
    for cohort in combinations(range(5), r):
        w = member.of(sizes[list(cohort)], int(sizes.sum()), 5)
        means.append((w[:, None] * updates[list(cohort)]).sum(0) / r)
    expected = (sizes / sizes.sum()) @ updates
    np.testing.assert_allclose(np.mean(means, axis=0), expected, rtol=1e-12)


def reference_step(kind, x, u, state, lr, b1=0.9, b2=0.99, tau=1e-3):
    """Reddi et al. 2021, Alg. 2, written out coordinate by coordinate."""
    out = []
    for j in range(len(x)):
        m = b1 * state["m"][j] + (1 - b1) * u[j]
        v = state["v"][j]
        if kind == "adam":
            v = b2 * v + (1 - b2) * u[j] ** 2
        elif kind == "yogi":
            v = v - (1 - b2) * u[j] ** 2 * np.sign(v - u[j] ** 2)
        else:
            v = v + u[j] ** 2
        state["m"][j] = m
        state["v"][j] = v
        out.append(x[j] + lr * m / (math.sqrt(v) + tau))
    return np.array(out)


@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
def test_adaptive_servers_follow_their_algorithm(kind):
    member = server.FAMILY[kind](lr=0.05)
    b1 = member.beta1
    generator = np.random.default_rng(2)
    x = generator.normal(size=6).astype(np.float32)
    state = member.start(6)
    slow = {"m": np.zeros(6), "v": np.full(6, 1e-6)}
    expected = x.astype(float)
    for t in range(5):
        u = generator.normal(size=6)
        expected = reference_step(kind, x.astype(float), u, slow, 0.05, b1=b1)
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
    names = [
        dict(t=r, client=c, draw=d, step=s)
        for r in (0, 1, 2**40)
        for c in (0, 1, 2**33)
        for d in (0, 1)
        for s in (0, 1)
    ]
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
    import torch

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


def test_a_bounding_gives_the_factor_of_one_norm_or_those_of_many():
    member = Halves()
    assert member.factor(4.0, 1.0) == 0.125 and member.factor(0.5, 1.0) == 0.5
    many = member.factors(torch.tensor([4.0]), 1.0)
    assert many.tolist() == [0.125]
