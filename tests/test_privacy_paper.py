"""The papers' formulas give what PRIVACY.md says they give, and say where their conditions fail."""

from __future__ import annotations

import math

import pytest

from raydpfl.errors import ConfigError
from raydpfl.privacy import Mechanism, Query, Sampling, delta, epsilon, guarantees, noise_for, paper, paper_multiplier

COHORT = Sampling("fixed", 1920, 80)


@pytest.mark.parametrize(("kind", "relation", "v"), [("poisson", "add_remove", 2.27), ("fixed", "replace_one", 10.3)])
def test_the_constant_v_that_exact_accounting_needs(kind, relation, v, tmp_path, monkeypatch):
    """PRIVACY.md sec. 3: at epsilon 1.5 and T = 100 v is 2.27 or 10.3, so no single constant is right."""
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    run = Mechanism(Sampling(kind, 1920, 80), (Query("update", 1.0, 0.0),), 100)
    z = noise_for(1.5, run, relation, 1e-5)
    assert (z * 1.5 / COHORT.q) ** 2 / (100 * math.log(1e5)) == pytest.approx(v, abs=0.05)


def test_the_noise_of_one_client_is_the_printed_sigma():
    printed = paper.client_noise(1.5, COHORT, 100, 1e-5, bound=0.5, v=4.0)
    assert printed.value**2 == pytest.approx(4.0 * 0.5**2 * 80 * 100 * math.log(1e5) / (1920**2 * 1.5**2))
    assert printed.value * math.sqrt(80) / 0.5 == pytest.approx(paper_multiplier(1.5, COHORT, 100, 1e-5))


def test_the_formula_inverts():
    z = paper_multiplier(1.5, COHORT, 100, 1e-5, v=2.0)
    assert paper.client_epsilon(z, COHORT, 100, 1e-5, v=2.0).value == pytest.approx(1.5)
    run = Mechanism(COHORT, (Query("update", 1.0, z),), 100)
    assert delta(run, "replace_one", 1.5, accountant="paper", v=2.0) == pytest.approx(1e-5)


def test_a_condition_that_fails_is_reported_and_one_that_holds_is_not():
    inside = paper.client_noise(0.1, COHORT, 100, 1e-5, 1.0)
    outside = paper.client_noise(1.5, COHORT, 100, 1e-5, 1.0)
    assert inside.conditions_failed == () and "q^2 T = 0.1736" in outside.conditions_failed[0]
    assert any("fixed size" in reason for reason in paper.client_epsilon(1.0, Sampling("poisson", 1920, 80), 100, 1e-5).conditions_failed)


def test_the_paper_guarantee_is_labelled_as_such():
    run = Mechanism(COHORT, (Query("update", 1.0, paper_multiplier(1.5, COHORT, 100, 1e-5)),), 100)
    printed, _, _ = guarantees(run, "replace_one", 1e-5, accountants=["paper", "pld"])
    assert (printed.kind, printed.relation) == ("paper", "unstated") and printed.epsilon == pytest.approx(1.5)
    assert printed.conditions_failed


def test_002_usable_form_and_what_it_truly_gives():
    """PRIVACY.md sec. 4, MNIST: sigma = 2.14 G where 0.343 G would do; 2.14 G truly gives 0.0025."""
    client = {"bound": 1.0, "batch": 10, "samples": 600, "steps": 300}
    noise = paper.tcdp_noise(0.3, delta=1e-2, **client)
    assert noise.value == pytest.approx(2.14, abs=5e-3) and noise.conditions_failed == ()
    assert paper.tcdp_epsilon(noise.value, delta=1e-2, **client).value == pytest.approx(0.3)
    truth = epsilon(Mechanism.of_local_steps(**client, std=noise.value), "replace_one", 1e-2)
    assert truth == pytest.approx(0.0025, abs=2e-4)


def test_002_theorem_5_as_printed_grows_with_the_noise():
    client = {"bound": 1.0, "batch": 10, "samples": 600, "steps": 300}
    (low, low_delta), (high, high_delta) = (paper.tcdp_theorem5(std, **client) for std in (1.0, 5.0))
    rho, omega, _ = paper.tcdp(1.0, **client)
    assert low.value == pytest.approx(rho * (2 * omega - 1)) and low_delta == pytest.approx(math.exp(-rho * (omega - 1) ** 2))
    assert high.value > low.value > 0.3 and high_delta < low_delta


def test_002_refuses_by_name_clients_with_too_few_samples():
    failed = paper.tcdp_noise(0.3, bound=1.0, batch=10, samples=90, steps=300, delta=1e-2).conditions_failed
    assert any("q = 0.1111 <= 0.1" in reason for reason in failed)


def test_003_claims_one_where_the_truth_is_less_and_twenty_where_it_is_more():
    """PRIVACY.md sec. 5: n 500, B 128, 50 steps claims 1, truth 0.395; one step at r = 0.5 claims 20, truth 22.5."""
    for claim, batch, steps, truth in ((1.0, 128, 50, 0.395), (20.0, 250, 1, 22.5)):
        client = {"samples": 500, "batch": batch, "steps": steps, "bound": 1.0}
        noise = paper.budget_noise(claim, 1e-5, **client)
        assert epsilon(Mechanism.of_local_steps(**client, std=noise.value), "replace_one", 1e-5) == pytest.approx(truth, rel=5e-3)


def test_003_amplified_budget_is_the_same_in_both_forms_and_public_clients_need_no_noise():
    below, above = (paper.unamplified_budget(30 + step, batch=5, samples=100) for step in (-1e-9, 1e-9))
    assert below == pytest.approx(above, abs=1e-8)
    assert paper.unamplified_budget(800.0, batch=5, samples=100) == pytest.approx(800 + math.log(20))
    assert paper.budget_variance(math.inf, 1e-5, batch=5, samples=100) == 0.0
    assert paper.budget_noise(200.0, 1e-5, batch=5, samples=100, steps=1, bound=1.0).conditions_failed


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_budget_that_is_none_is_refused(value):
    for formula in (
        lambda: paper_multiplier(value, COHORT, 100, 1e-5),
        lambda: paper.tcdp_noise(value, bound=1.0, batch=10, samples=600, steps=3, delta=1e-2),
        lambda: paper.budget_variance(value, 1e-5, batch=10, samples=600),
    ):
        with pytest.raises(ConfigError):
            formula()
