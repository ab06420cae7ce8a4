"""The papers' formulas give what PRIVACY.md says they give, and say where their conditions fail."""

import math

import numpy as np
import pytest
from conftest import local_steps, mechanism, refusal

from raydpfl import privacy
from raydpfl.errors import ConfigError
from raydpfl.privacy import Mechanism, Query, Sampling, budget_variance, epsilon, paper_multiplier
from raydpfl.privacy.accountants import FORMULAS
from raydpfl.privacy.accountants.chen_2024 import tcdp
from raydpfl.privacy.accountants.paper import paper_epsilon
from raydpfl.privacy.accountants.xu_2026 import unamplified_budget

COHORT = Sampling("fixed", 1920, 80)
MNIST = {"bound": 1.0, "batch": 10, "samples": 600, "steps": 300}  # 002, PRIVACY.md sec. 4
SMALL = {"batch": 5, "samples": 100}
TCDP, THEOREM5, BUDGETS = FORMULAS.values()

pytestmark = pytest.mark.usefixtures("cache")


def steps_epsilon(client: dict, std: float, target: float) -> float:
    """What noise of this std at the local steps of a client truly gives."""
    return epsilon(local_steps(**client, std=std), "replace_one", target)


def claims(formula, std: float, client: dict, target: float = 1e-2) -> float:
    return formula.printed(std, target, **client)[0].value


@pytest.mark.parametrize(
    ("kind", "relation", "v"), [("poisson", "add_remove", 2.27), ("fixed", "replace_one", 10.3)]
)
def test_the_constant_v_that_exact_accounting_needs(kind, relation, v):
    """PRIVACY.md sec. 3: at epsilon 1.5 and T = 100, so no single constant is right."""
    z = privacy.noise_for(1.5, mechanism(kind, std=0.0), relation, 1e-5)
    assert (z * 1.5 / COHORT.q) ** 2 / (100 * math.log(1e5)) == pytest.approx(v, abs=0.05)


def test_the_formula_inverts_and_its_guarantee_is_labelled_as_the_papers():
    z = paper_multiplier(1.5, COHORT, 100, 1e-5, v=2.0)
    assert z == pytest.approx(80 / 1920 * math.sqrt(2 * 100 * math.log(1e5)) / 1.5)
    assert paper_epsilon(z, COHORT, 100, 1e-5, v=2.0).value == pytest.approx(1.5)
    run = mechanism(std=z)
    assert privacy.delta(run, "replace_one", 1.5, accountant="paper", v=2.0) == pytest.approx(1e-5)
    printed, *_ = privacy.guarantees(run, "replace_one", 1e-5, accountants=["paper", "pld"], v=2.0)
    assert (printed.kind, printed.relation) == ("paper", "unstated") and printed.conditions_failed
    assert printed.epsilon == pytest.approx(1.5)


def test_a_condition_that_fails_is_reported_and_one_that_holds_is_not():
    inside, outside = (
        paper_epsilon(paper_multiplier(each, COHORT, 100, 1e-5), COHORT, 100, 1e-5)
        for each in (0.1, 1.5)
    )
    assert inside.conditions_failed == () and "q^2 T = 0.1736" in outside.conditions_failed[0]
    poisson = paper_epsilon(1.0, Sampling("poisson", 1920, 80), 100, 1e-5)
    assert any("fixed size" in reason for reason in poisson.conditions_failed)


def test_002_usable_form_and_what_it_truly_gives():
    """PRIVACY.md sec. 4: sigma = 2.14 G where 0.343 G would do; 2.14 G truly gives 0.0025."""
    noise = TCDP.noise(0.3, 1e-2, **MNIST)
    assert noise.value == pytest.approx(2.14, abs=5e-3) and noise.conditions_failed == ()
    assert claims(TCDP, noise.value, MNIST) == pytest.approx(0.3)
    assert steps_epsilon(MNIST, noise.value, 1e-2) == pytest.approx(0.0025, abs=2e-4)
    assert steps_epsilon(MNIST, 0.343, 1e-2) == pytest.approx(0.3, abs=2e-3)


@pytest.mark.parametrize("std", [0.3, 1.0, 2.14])
def test_002_tcdp_is_composed_as_printed(std):
    """PRIVACY.md sec. 4: rho1 = 2 G^2/(B sigma)^2, 13 q^2 rho1 a step; omega = ln(1/q)/(4 rho1)."""
    rho, omega, failed = tcdp(std, **MNIST)
    rho1 = 2 / (10 * std) ** 2
    q = 10 / 600
    assert (rho, omega) == pytest.approx((300 * 13 * q**2 * rho1, math.log(1 / q) / (4 * rho1)))
    assert (failed == ()) == (rho1 <= 0.1)


@pytest.mark.parametrize(
    ("target", "above"), [(1e-2, True), (1e-5, True), (1e-6, False), (1e-300, False)]
)
def test_002_converts_by_lemma_2_where_its_condition_holds_and_otherwise_in_general(target, above):
    rho, omega, _ = tcdp(0.5, **MNIST)
    assert (target >= math.exp(-((omega - 1) ** 2) * rho)) == above
    surprise = math.log(1 / target)
    general = rho * omega + surprise / (omega - 1)
    expected = rho + 2 * math.sqrt(rho * surprise) if above else general
    assert claims(TCDP, 0.5, MNIST, target) == pytest.approx(expected)


def test_002_theorem_5_as_printed_grows_with_the_noise_and_cannot_reach_a_small_epsilon():
    """PRIVACY.md sec. 4: 0.3 is out of reach; the least noise that rho1 <= 0.1 allows claims 2.1,
    and more noise claims more.
    """
    rho, omega, _ = tcdp(1.0, **MNIST)
    printed, forced = THEOREM5.printed(1.0, 1e-2, **MNIST)
    assert printed.value == pytest.approx(rho * (2 * omega - 1))
    assert forced == pytest.approx(math.exp(-rho * (omega - 1) ** 2))
    least = math.sqrt(2 / 0.1) / 10 * (1 + 1e-9)
    found = [THEOREM5.printed(least * factor, 1e-2, **MNIST) for factor in (1, 2, 10, 100)]
    values = [claim.value for claim, _ in found]
    assert values == sorted(values) and values[0] == pytest.approx(2.11, abs=5e-3)
    assert found[0][0].conditions_failed == () and found[1][1] < found[0][1]
    noise = THEOREM5.noise(0.3, 1e-2, **MNIST)
    assert claims(THEOREM5, noise.value, MNIST) == pytest.approx(0.3) and noise.conditions_failed


@pytest.mark.parametrize("samples", [100, 99, 20, 10])
def test_002_fails_for_clients_with_fewer_than_ten_batches(samples):
    failed = TCDP.noise(0.3, 1e-2, **MNIST | {"samples": samples}).conditions_failed
    assert any(f"q = {10 / samples:.4g} <= 0.1" in each for each in failed) == (samples < 100)


@pytest.mark.parametrize("std", [0.0, 5e-324, 1e-200, 1e-3, 1e3, 1e100, 1e200, 1e308])
@pytest.mark.parametrize("batch", [1, 10, 600, 1200])
def test_002_gives_a_number_and_the_conditions_that_fail_however_far_outside_its_range(std, batch):
    client = MNIST | {"batch": batch}
    rho, omega, failed = tcdp(std, **client)
    assert not math.isnan(rho) and not math.isnan(omega)
    assert bool(failed) == (batch > 60 or std < 0.1)
    for formula in (TCDP, THEOREM5):
        printed, _ = formula.printed(std, 1e-2, **client)
        beyond = bool(printed.conditions_failed) and "> 1" in printed.conditions_failed[-1]
        assert printed.value >= 0 and (printed.value < math.inf or beyond)
        assert omega > 1 or beyond
        for target in (1e-300, 1e-3, 1e3, 1e300):
            assert formula.noise(target, 1e-2, **client).value > 0


@pytest.mark.parametrize("budget", [0.01, 0.3, 1.0, 10.0])
def test_003_asks_below_ten_for_too_much_noise_all_the_same(budget):
    """PRIVACY.md sec. 5, n 500, B 128, 50 steps: 1.6 to 2.8 times the need, from 0.15 or so."""
    client = {"samples": 500, "batch": 128, "steps": 50, "bound": 1.0}
    steps = local_steps(**client, std=1.0)
    exact = privacy.noise_for(budget, steps, "replace_one", 1e-5) / 128
    factor = BUDGETS.noise(budget, 1e-5, **client).value / exact
    assert (1.6 if budget >= 0.3 else 1.4) < factor < 2.8


def test_003_amplifies_the_composition_where_only_steps_are_amplified():
    """PRIVACY.md sec. 5: r = 0.01, T = 100, z = 3, delta 0.0091 claims 0, truth 0.0107 (add or
    remove; replace-one 0.0148).
    """
    composed = privacy.gaussian_delta(0.0, math.sqrt(100) / 3)
    assert 0.01 * composed < 0.0091  # amplified as a whole: epsilon 0
    poisson = mechanism("poisson", 100, 1, 3.0)
    # sensitivity 1, as 003 has it
    fixed = Mechanism(Sampling("fixed", 100, 1), (Query("gradient", 0.5, 3.0),), 100)
    assert epsilon(poisson, "add_remove", 0.0091) == pytest.approx(0.0107, abs=5e-5)
    assert epsilon(fixed, "replace_one", 0.0091) == pytest.approx(0.0148, abs=5e-5)


def test_003_noise_is_the_printed_sigma():
    """V_k and sigma_k of 003 eq. 6 and 7, written out."""
    n, r = 600, 128 / 600
    inner = math.log(1 + (math.exp(0.7) - 1) / r)
    variance = 8 * math.log(math.e + r * inner / 1e-5) / (n * r * inner) ** 2
    assert budget_variance(0.7, 1e-5, batch=128, samples=n) == pytest.approx(variance)
    noise = BUDGETS.noise(0.7, 1e-5, batch=128, samples=n, steps=40, bound=3.0)
    assert noise.value == pytest.approx(3 * math.sqrt(variance * 40))


def test_003_amplified_budget_is_the_same_in_both_forms():
    below, above = (unamplified_budget(30 + step, **SMALL) for step in (-1e-9, 1e-9))
    assert below == pytest.approx(above, abs=1e-8)
    assert unamplified_budget(800.0, **SMALL) == pytest.approx(800 + math.log(20))
    assert BUDGETS.noise(200.0, 1e-5, **SMALL, steps=1, bound=1.0).conditions_failed


@pytest.mark.parametrize(
    ("budget", "holds"),
    [(10.0, True), (169.0, True), (169.5, False), (1e4, False), (math.inf, True)],
)
def test_003_lemma_2_fails_above_169(budget, holds):
    """PRIVACY.md sec. 5, delta 1e-5, all samples in a batch; against the exact Gaussian curve."""
    noise = BUDGETS.noise(budget, 1e-5, batch=100, samples=100, steps=1, bound=1.0)
    assert (noise.conditions_failed == ()) == holds
    if math.isfinite(budget):  # one Gaussian of the sensitivity that the lemma is stated for
        assert (privacy.gaussian_delta(budget, 1 / (100 * noise.value)) <= 1e-5) == holds


@pytest.mark.parametrize("budget", [1e-3, 0.3, 20.0, 1e3])
def test_003_is_solved_for_the_budget(budget):
    client = {**SMALL, "steps": 40, "bound": 2.0}
    noise = BUDGETS.noise(budget, 1e-5, **client).value
    assert claims(BUDGETS, noise, client, 1e-5) == pytest.approx(budget, rel=1e-12)
    assert claims(BUDGETS, 0.0, client, 1e-5) == math.inf


def test_003_variances_of_all_clients_at_once_are_those_of_each_and_none_overflows():
    budgets, batches, samples = [0.1, 5.0, 200.0, math.inf], [5, 5, 3, 5], [10, 20, 3, 5]
    arrays = {"batch": np.array(batches), "samples": np.array(samples)}
    together = budget_variance(np.array(budgets), 1e-5, **arrays)
    clients = zip(budgets, batches, samples, strict=True)
    each = [budget_variance(e, 1e-5, batch=b, samples=n) for e, b, n in clients]
    assert together.tolist() == each and each[-1] == 0
    variances = [budget_variance(10.0**power, 1e-5, **SMALL) for power in (-300, -3, 2, 200, 308)]
    assert variances == sorted(variances, reverse=True) and not any(map(math.isnan, variances))


@pytest.mark.parametrize(
    "change",
    [{"delta": 0.0}, {"delta": 1.0}, {"batch": 101}, {"batch": 0}]
    + [{"epsilon": value} for value in (0.0, -1.0, math.nan)],
)
def test_003_variance_refuses_what_is_no_client(change):
    (field,) = change
    with refusal(begins=f"{field}: "):
        budget_variance(**{"epsilon": 1.0, "delta": 1e-5, **SMALL} | change)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_an_invalid_budget_is_refused(value):
    with pytest.raises(ConfigError, match="epsilon = "):
        paper_multiplier(value, COHORT, 100, 1e-5)
    with pytest.raises(ConfigError, match="epsilon = "):
        TCDP.noise(value, 1e-2, **MNIST)


def test_no_step_sizes_meet_the_conditions_of_theorem_3_of_002():
    """That alpha_l has a range asks for sqrt(G / L) >= 4 tau sqrt(d / beta_2), at least 4; that
    alpha_g has one asks, even with pi = 0, for sqrt(G / L) <= 4 beta_2 / (3 d tau), at most 4/3.
    """
    generator = np.random.default_rng(0)
    G, L, convexity = np.exp(generator.uniform(-12, 12, (3, 100_000)))
    d, tau = np.ceil(np.exp(generator.uniform(0, 4, (2, 100_000))))
    beta, pi = generator.random(100_000), np.exp(generator.uniform(-20, 0, 100_000))
    local = np.sqrt(d / (beta * L * G)) <= 1 / (4 * L * tau)
    least = 3 * np.sqrt(L * G) * (G / L + pi) / (2 * convexity)
    server = least <= 2 * beta * G / (d * tau * convexity)
    assert local.sum() > 1000 and server.sum() > 1000
    assert not (local & server).any()
