"""Laplace noise against the library, closed forms and the convolution of coordinates."""

import math

import numpy as np
import pytest
from conftest import experiment, mechanism
from dp_accounting import dp_event, pld, rdp
from scipy.stats import kstest

from raydpfl import run
from raydpfl.errors import ConfigError
from raydpfl.methods.noise import FAMILY
from raydpfl.methods.noise.laplace import LaplaceSource
from raydpfl.privacy import delta, epsilon, guarantees, tradeoff
from raydpfl.privacy.accountants import ACCOUNTANTS
from raydpfl.privacy.laplace import laplace_delta

DELTA = 1e-5
ROOT = math.sqrt(2)


def of(kind, population, cohort, scale, rounds, factors=()):
    """Sums of L1 bound 1 with Laplace noise of this scale."""
    fields = {"laplace": True, "factors": factors}
    return mechanism(kind, population, cohort, ROOT * scale, rounds, **fields)


def test_one_round_is_pure_and_so_are_many():
    assert epsilon(of("full", 9, 9, 2.0, 1), "zero_out", 1e-300) == pytest.approx(0.5)
    assert epsilon(of("full", 9, 9, 2.0, 7), "replace_one", 1e-300) == pytest.approx(7.0)
    exact = 0.5 + 2 * math.log1p(-0.1)  # where delta = 1 - e^((eps - 1/2)/2)
    assert epsilon(of("full", 9, 9, 2.0, 1), "zero_out", 0.1) == pytest.approx(exact, rel=1e-3)
    sampled = of("poisson", 1000, 10, 1.0, 3)
    pure = 3 * math.log1p(0.01 * math.expm1(1.0))
    assert epsilon(sampled, "add_remove", 1e-300) == pytest.approx(pure)
    assert delta(sampled, "add_remove", pure * 1.0001) == 0.0
    unequal = of("full", 9, 9, 2.0, 2, (1.0, 0.5))
    assert epsilon(unequal, "zero_out", 1e-300) == pytest.approx(0.5 + 1.0)


@pytest.mark.parametrize(
    ("z", "rounds", "at"), [(20.197, 6, 8.2e-6), (1.0, 10, 1e-5), (5.0, 3, 1e-4)]
)
def test_pld_is_never_above_rdp(z, rounds, at):
    full = of("full", 9, 9, z / ROOT, rounds)
    by_rdp = epsilon(full, "zero_out", at, accountant="rdp")
    assert epsilon(full, "zero_out", at) == by_rdp
    event = full.event("zero_out")
    deltas = [ACCOUNTANTS[name].delta_of(event, by_rdp, rounds) for name in ("pld", "rdp")]
    assert deltas[0] <= deltas[1] <= at * (1 + 1e-9)


@pytest.mark.parametrize(("q", "scale", "rounds"), [(0.01, 1.0, 100), (0.2, 4.0, 50), (1, 3.0, 40)])
def test_compositions_are_those_of_the_library(q, scale, rounds):
    library = pld.PLDAccountant(value_discretization_interval=2e-4)
    laplace = dp_event.LaplaceDpEvent(scale)
    event = laplace if q == 1 else dp_event.PoissonSampledDpEvent(q, laplace)
    library.compose(event, rounds)
    sums = of("full" if q == 1 else "poisson", 1000, int(1000 * q), scale, rounds)
    relation = "zero_out" if q == 1 else "add_remove"
    spent = epsilon(sums, relation, DELTA)
    assert spent == pytest.approx(library.get_epsilon(DELTA), rel=5e-3)
    assert 0 <= tradeoff(sums, relation).true_positives(1e-3) < 1
    if q == 1:
        known = rdp.RdpAccountant().compose(laplace, rounds).get_epsilon(DELTA)
        by_rdp = epsilon(sums, relation, DELTA, accountant="rdp")
        assert by_rdp == pytest.approx(known, rel=0.02) and spent <= known


@pytest.mark.parametrize("parts", [(0.5, 0.5), (1.5, 0.2), (0.3, 0.3, 0.4)])
def test_no_split_over_coordinates_has_more_delta_than_one_number(parts):
    """By a sum over the losses of each coordinate on a grid."""
    step = 1e-3
    masses, low = np.ones(1), 0.0
    for ratio in parts:
        n = round(2 * ratio / step)
        # y = the place from 0 to ratio, of which the loss is 2 y - ratio, under the noise at 0
        edges = np.linspace(0, ratio, n + 1)
        inside = (np.exp(-edges[:-1]) - np.exp(-edges[1:])) / 2
        one = np.concatenate([[0.5], inside, [math.exp(-ratio) / 2]])
        masses, low = np.convolve(masses, one), low - ratio
    losses = low + step * np.arange(len(masses))  # of each its lower end
    for at in (0.0, 0.3, 0.8):
        found = masses @ np.maximum(np.exp(losses) - math.exp(at), 0.0)
        assert found <= laplace_delta(at, sum(parts)) + 1e-9


def test_fixed_cohorts_are_covered_and_others_named():
    fixed = of("fixed", 100, 10, 2.0, 20)
    assert 0 < epsilon(fixed, "replace_one", DELTA) < 20 * math.log1p(0.1 * math.expm1(1.0))
    for relation, accountant, reason in (
        ("replace_one", "rdp", "nearest: pld"), ("zero_out", "pld", "nearest: poisson"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=reason):
            epsilon(fixed, relation, DELTA, accountant=accountant)


def test_draws_with_replacement_are_not_covered():
    """Moved by m bounds, Laplace noise is not dominated by m^2 rounds, as Gaussian noise is."""
    drawn = mechanism("with_replacement", 100, 10, 100.0, 3, laplace=True)
    spent = guarantees(drawn, "replace_one", 1e-3, accountants=["pld"], participations=2)
    assert all(math.isinf(one.epsilon) for one in spent)


def test_the_noise_is_laplace_and_its_scores_are_normal():
    drawn = LaplaceSource(3, 20_000).on_sum(5, 2.0)
    assert kstest(drawn, "laplace", (0, ROOT)).pvalue > 1e-6
    scores = FAMILY["laplace"](multiplier=1.0).scores(drawn, 2.0)
    assert kstest(scores, "norm").pvalue > 1e-6


def test_a_run_with_laplace_noise_holds_its_epsilon(tmp_path):
    given = {"bounding": {"kind": "clip_l1", "bound": 2.0}, "noise": {"kind": "laplace"}}
    given["noise"] |= {"epsilon": 9.0, "delta": 1e-5}
    asked = {"accountants": ["pld"]}
    result = run(experiment(**given, privacy=asked), tmp_path / "out")
    spent, known = (one.epsilon for one in result.guarantees)
    assert 8.9 < spent <= 9.0 < known
    std = result.rounds["noise_std"].to_pylist()[0]
    fixed = of("fixed", 50, 20, std / 2.0 / ROOT, 4)
    assert epsilon(fixed, "replace_one", DELTA) == pytest.approx(spent, rel=1e-3)
    clip = experiment(**given, privacy=asked).bounding
    assert clip.order == 1 and not clip.scales and clip.factor(4.0, 2.0) == 0.5
