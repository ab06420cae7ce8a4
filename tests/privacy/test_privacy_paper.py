"""The papers' formulas give what PRIVACY.md says they give, and say where their conditions fail."""

from __future__ import annotations

import math

import numpy as np
import pytest

from raydpfl.errors import ConfigError
from raydpfl.privacy import (
    Mechanism,
    Query,
    Sampling,
    delta,
    epsilon,
    gaussian_delta,
    guarantees,
    noise_for,
    paper_formulas,
    paper_multiplier,
)

COHORT = Sampling("fixed", 1920, 80)
MNIST = {"bound": 1.0, "batch": 10, "samples": 600, "steps": 300}  # 002, PRIVACY.md sec. 4


@pytest.mark.parametrize(
    ("kind", "relation", "v"), [("poisson", "add_remove", 2.27), ("fixed", "replace_one", 10.3)]
)
def test_the_constant_v_that_exact_accounting_needs(kind, relation, v, tmp_path, monkeypatch):
    """PRIVACY.md sec. 3: at epsilon 1.5 and T = 100 v is 2.27 or 10.3, so no single constant is
    right.
    """
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    run = Mechanism(Sampling(kind, 1920, 80), (Query("update", 1.0, 0.0),), 100)
    z = noise_for(1.5, run, relation, 1e-5)
    assert (z * 1.5 / COHORT.q) ** 2 / (100 * math.log(1e5)) == pytest.approx(v, abs=0.05)


def test_the_noise_of_one_client_is_the_printed_sigma():
    printed = paper_formulas.client_noise(1.5, COHORT, 100, 1e-5, bound=0.5, v=4.0)
    assert printed.value**2 == pytest.approx(
        4.0 * 0.5**2 * 80 * 100 * math.log(1e5) / (1920**2 * 1.5**2)
    )
    assert printed.value * math.sqrt(80) / 0.5 == pytest.approx(
        paper_multiplier(1.5, COHORT, 100, 1e-5)
    )


def test_the_formula_inverts():
    z = paper_multiplier(1.5, COHORT, 100, 1e-5, v=2.0)
    assert paper_formulas.client_epsilon(z, COHORT, 100, 1e-5, v=2.0).value == pytest.approx(1.5)
    run = Mechanism(COHORT, (Query("update", 1.0, z),), 100)
    assert delta(run, "replace_one", 1.5, accountant="paper", v=2.0) == pytest.approx(1e-5)


def test_a_condition_that_fails_is_reported_and_one_that_holds_is_not():
    inside = paper_formulas.client_noise(0.1, COHORT, 100, 1e-5, 1.0)
    outside = paper_formulas.client_noise(1.5, COHORT, 100, 1e-5, 1.0)
    assert inside.conditions_failed == () and "q^2 T = 0.1736" in outside.conditions_failed[0]
    assert any(
        "fixed size" in reason
        for reason in paper_formulas.client_epsilon(
            1.0, Sampling("poisson", 1920, 80), 100, 1e-5
        ).conditions_failed
    )


def test_the_paper_guarantee_is_labelled_as_such():
    run = Mechanism(COHORT, (Query("update", 1.0, paper_multiplier(1.5, COHORT, 100, 1e-5)),), 100)
    printed, _, _ = guarantees(run, "replace_one", 1e-5, accountants=["paper", "pld"])
    assert (printed.kind, printed.relation) == (
        "paper",
        "unstated",
    ) and printed.epsilon == pytest.approx(1.5)
    assert printed.conditions_failed


def test_002_usable_form_and_what_it_truly_gives():
    """PRIVACY.md sec. 4, MNIST: sigma = 2.14 G where 0.343 G would do; 2.14 G truly gives
    0.0025.
    """
    client = {"bound": 1.0, "batch": 10, "samples": 600, "steps": 300}
    noise = paper_formulas.tcdp_noise(0.3, delta=1e-2, **client)
    assert noise.value == pytest.approx(2.14, abs=5e-3) and noise.conditions_failed == ()
    assert paper_formulas.tcdp_epsilon(noise.value, delta=1e-2, **client).value == pytest.approx(
        0.3
    )
    truth = epsilon(Mechanism.of_local_steps(**client, std=noise.value), "replace_one", 1e-2)
    assert truth == pytest.approx(0.0025, abs=2e-4)


def test_002_theorem_5_as_printed_grows_with_the_noise():
    client = {"bound": 1.0, "batch": 10, "samples": 600, "steps": 300}
    (low, low_delta), (high, high_delta) = (
        paper_formulas.tcdp_theorem5(std, **client) for std in (1.0, 5.0)
    )
    rho, omega, _ = paper_formulas.tcdp(1.0, **client)
    assert low.value == pytest.approx(rho * (2 * omega - 1)) and low_delta == pytest.approx(
        math.exp(-rho * (omega - 1) ** 2)
    )
    assert high.value > low.value > 0.3 and high_delta < low_delta


@pytest.mark.parametrize("std", [0.3, 1.0, 2.14])
def test_002_tcdp_is_composed_as_printed(std):
    """PRIVACY.md sec. 4: rho1 = 2 G^2 / (B sigma)^2, 13 q^2 rho1 a step; omega = ln(1/q) / (4
    rho1).
    """
    rho, omega, failed = paper_formulas.tcdp(std, **MNIST)
    rho1 = 2 / (10 * std) ** 2
    q = 10 / 600
    assert (rho, omega) == pytest.approx((300 * 13 * q**2 * rho1, math.log(1 / q) / (4 * rho1)))
    assert (rho, omega) == pytest.approx(
        (26 * 300 / (600 * std) ** 2, 100 * std**2 * math.log(60) / 8)
    )
    assert (failed == ()) == (rho1 <= 0.1)


@pytest.mark.parametrize(
    ("target", "above"), [(1e-2, True), (1e-5, True), (1e-6, False), (1e-300, False)]
)
def test_002_converts_by_lemma_2_where_its_condition_holds_and_otherwise_in_general(target, above):
    rho, omega, _ = paper_formulas.tcdp(0.5, **MNIST)
    assert (target >= math.exp(-((omega - 1) ** 2) * rho)) == above
    surprise = math.log(1 / target)
    expected = (
        rho + 2 * math.sqrt(rho * surprise) if above else rho * omega + surprise / (omega - 1)
    )
    assert paper_formulas.tcdp_epsilon(0.5, delta=target, **MNIST).value == pytest.approx(expected)


def test_002_theorem_5_cannot_reach_a_small_epsilon_under_its_own_conditions():
    """PRIVACY.md sec. 4: 0.3 is out of reach; the least noise that rho1 <= 0.1 allows claims 2.1,
    and more noise claims more.
    """
    least = math.sqrt(2 / 0.1) / 10
    assert paper_formulas.tcdp_theorem5(least * (1 + 1e-9), **MNIST)[0].conditions_failed == ()
    claims = [
        paper_formulas.tcdp_theorem5(least * factor, **MNIST)[0].value
        for factor in (1 + 1e-9, 2, 10, 100)
    ]
    assert claims == sorted(claims) and claims[0] == pytest.approx(2.11, abs=5e-3)
    noise = paper_formulas.tcdp_theorem5_noise(0.3, **MNIST)
    assert (
        paper_formulas.tcdp_theorem5(noise.value, **MNIST)[0].value == pytest.approx(0.3)
        and noise.conditions_failed
    )


@pytest.mark.parametrize("samples", [99, 90, 20, 10])
def test_002_fails_for_clients_with_fewer_than_ten_batches(samples):
    failed = paper_formulas.tcdp_noise(
        0.3, bound=1.0, batch=10, samples=samples, steps=300, delta=1e-2
    ).conditions_failed
    assert any(f"q = {10 / samples:.4g} <= 0.1" in reason for reason in failed)
    assert not paper_formulas.tcdp_noise(
        0.3, bound=1.0, batch=10, samples=100, steps=300, delta=1e-2
    ).conditions_failed


@pytest.mark.parametrize("std", [0.0, 5e-324, 1e-200, 1e-3, 1e3, 1e100, 1e200, 1e308])
@pytest.mark.parametrize("batch", [1, 10, 600, 1200])
def test_002_gives_a_number_and_the_conditions_that_fail_however_far_outside_its_range(std, batch):
    client = MNIST | {"batch": batch}
    rho, omega, failed = paper_formulas.tcdp(std, **client)
    assert not math.isnan(rho) and not math.isnan(omega)
    assert bool(failed) == (batch > 60 or std < 0.1)
    for printed in (
        paper_formulas.tcdp_epsilon(std, delta=1e-2, **client),
        paper_formulas.tcdp_theorem5(std, **client)[0],
    ):
        assert printed.value >= 0 and (
            printed.value < math.inf or "> 1" in printed.conditions_failed[-1]
        )
        assert omega > 1 or "> 1" in printed.conditions_failed[-1]
    for target in (1e-300, 1e-3, 1e3, 1e300):
        assert paper_formulas.tcdp_noise(target, delta=1e-2, **client).value > 0
        assert paper_formulas.tcdp_theorem5_noise(target, **client).value > 0


def test_003_claims_one_where_the_truth_is_less_and_twenty_where_it_is_more():
    """PRIVACY.md sec. 5: n 500, B 128, 50 steps claims 1, truth 0.395; one step at r = 0.5 claims
    20, truth 22.5.
    """
    for claim, batch, steps, truth in ((1.0, 128, 50, 0.395), (20.0, 250, 1, 22.5)):
        client = {"samples": 500, "batch": batch, "steps": steps, "bound": 1.0}
        noise = paper_formulas.budget_noise(claim, 1e-5, **client)
        assert epsilon(
            Mechanism.of_local_steps(**client, std=noise.value), "replace_one", 1e-5
        ) == pytest.approx(truth, rel=5e-3)


@pytest.mark.parametrize("budget", [0.01, 0.3, 1.0, 10.0])
def test_003_asks_below_ten_for_too_much_noise_all_the_same(budget, tmp_path, monkeypatch):
    """PRIVACY.md sec. 5, at n 500, B 128, 50 steps: 1.6 to 2.8 times what is needed, from 0.15 or
    so.
    """
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    client = {"samples": 500, "batch": 128, "steps": 50, "bound": 1.0}
    exact = (
        noise_for(budget, Mechanism.of_local_steps(**client, std=1.0), "replace_one", 1e-5) / 128
    )
    factor = paper_formulas.budget_noise(budget, 1e-5, **client).value / exact
    assert (1.6 if budget >= 0.3 else 1.4) < factor < 2.8


def test_003_amplifies_the_composition_where_only_steps_are_amplified():
    """PRIVACY.md sec. 5: r = 0.01, T = 100, z = 3, delta 0.0091 claims 0, truth 0.0107 (add or
    remove; replace-one 0.0148).
    """
    composed = gaussian_delta(0.0, math.sqrt(100) / 3)
    assert 0.01 * composed < 0.0091  # amplified as a whole: epsilon 0
    poisson = Mechanism(Sampling("poisson", 100, 1), (Query("gradient", 1.0, 3.0),), 100)
    # sensitivity 1, as 003 has it
    fixed = Mechanism(Sampling("fixed", 100, 1), (Query("gradient", 0.5, 3.0),), 100)
    assert epsilon(poisson, "add_remove", 0.0091) == pytest.approx(0.0107, abs=5e-5)
    assert epsilon(fixed, "replace_one", 0.0091) == pytest.approx(0.0148, abs=5e-5)


def test_003_noise_is_the_printed_sigma():
    """V_k and sigma_k of 003 eq. 6 and 7, written out."""
    budget = 0.7
    target = 1e-5
    n = 600
    r = 128 / 600
    inner = math.log(1 + (math.exp(budget) - 1) / r)
    variance = 8 * math.log(math.e + r * inner / target) / (n * r * inner) ** 2
    assert paper_formulas.budget_variance(budget, target, batch=128, samples=600) == pytest.approx(
        variance
    )
    assert paper_formulas.budget_noise(
        budget, target, batch=128, samples=600, steps=40, bound=3.0
    ).value == pytest.approx(3 * math.sqrt(variance * 40))


def test_003_amplified_budget_is_the_same_in_both_forms_and_public_clients_need_no_noise():
    below, above = (
        paper_formulas.unamplified_budget(30 + step, batch=5, samples=100) for step in (-1e-9, 1e-9)
    )
    assert below == pytest.approx(above, abs=1e-8)
    assert paper_formulas.unamplified_budget(800.0, batch=5, samples=100) == pytest.approx(
        800 + math.log(20)
    )
    assert paper_formulas.budget_variance(math.inf, 1e-5, batch=5, samples=100) == 0.0
    assert paper_formulas.budget_noise(
        200.0, 1e-5, batch=5, samples=100, steps=1, bound=1.0
    ).conditions_failed


def test_003_lemma_2_fails_above_169():
    """PRIVACY.md sec. 5, at delta 1e-5, all samples in every batch; held against the exact Gaussian
    curve.
    """
    client = {"batch": 100, "samples": 100, "steps": 1, "bound": 1.0}
    for budget, holds in (
        (10.0, True),
        (169.0, True),
        (169.5, False),
        (1e4, False),
        (math.inf, True),
    ):
        noise = paper_formulas.budget_noise(budget, 1e-5, **client)
        assert (noise.conditions_failed == ()) == holds
        if math.isfinite(budget):  # one Gaussian of the sensitivity that the lemma is stated for
            assert (gaussian_delta(budget, 1 / (100 * noise.value)) <= 1e-5) == holds


@pytest.mark.parametrize("budget", [1e-3, 0.3, 20.0, 1e3])
def test_003_is_solved_for_the_budget(budget):
    client = {"batch": 5, "samples": 100, "steps": 40, "bound": 2.0}
    assert paper_formulas.budget_epsilon(
        paper_formulas.budget_noise(budget, 1e-5, **client).value, 1e-5, **client
    ).value == pytest.approx(budget, rel=1e-12)
    assert paper_formulas.budget_epsilon(0.0, 1e-5, **client).value == math.inf


def test_003_variances_of_all_clients_at_once_are_those_of_each():
    budgets = np.array([0.1, 5.0, 200.0, math.inf])
    batches = np.array([5, 5, 3, 5])
    samples = np.array([10, 20, 3, 5])
    together = paper_formulas.budget_variance(budgets, 1e-5, batch=batches, samples=samples)
    each = [
        paper_formulas.budget_variance(e, 1e-5, batch=b, samples=n)
        for e, b, n in zip(budgets, batches, samples, strict=True)
    ]
    assert together.tolist() == each and each[-1] == 0


def test_003_variance_neither_overflows_nor_takes_what_is_no_client():
    variances = [
        paper_formulas.budget_variance(10.0**power, 1e-5, batch=5, samples=100)
        for power in (-300, -3, 2, 100, 200, 308)
    ]
    assert variances == sorted(variances, reverse=True) and not any(map(math.isnan, variances))
    for change, field in (
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"batch": 101}, "batch"),
        ({"batch": 0}, "batch"),
    ):
        with pytest.raises(ConfigError) as refused:
            paper_formulas.budget_variance(
                **{"epsilon": 1.0, "delta": 1e-5, "batch": 5, "samples": 100} | change
            )
        assert refused.value.field == field


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_budget_that_is_none_is_refused(value):
    for formula in (
        lambda: paper_multiplier(value, COHORT, 100, 1e-5),
        lambda: paper_formulas.tcdp_noise(
            value, bound=1.0, batch=10, samples=600, steps=3, delta=1e-2
        ),
        lambda: paper_formulas.budget_variance(value, 1e-5, batch=10, samples=600),
    ):
        with pytest.raises(ConfigError):
            formula()
