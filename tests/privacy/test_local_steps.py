"""Noise at local steps: each client as if it were alone, and what was promised to it."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from conftest import experiment, local_steps, refusal
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant

from raydpfl import privacy, run
from raydpfl.core import prng
from raydpfl.errors import BudgetError, ConfigError
from raydpfl.methods.local import Sgd
from raydpfl.privacy import LocalSteps, calibrate_local_steps, report_of
from raydpfl.privacy.accountants import ACCOUNTANTS, FORMULAS
from raydpfl.privacy.accounting import NOISELESS
from raydpfl.privacy.guarantee import SHARES, column
from raydpfl.privacy.release_report import row_quantiles
from raydpfl.simulation.resolution import resolve
from raydpfl.training.minibatches import batches

pytestmark = pytest.mark.usefixtures("cache")
FEW_STEPS = {"batch": 10, "steps": 5, "bound": 1.0, "delta": 1e-5}
MNIST_002 = {"batch": 10, "steps": 300, "bound": 1.0, "delta": 1e-2, "budgets": 0.3}
ONE_002 = {**MNIST_002, "samples": [600], "participations": [1]}
SMALL_002 = {**MNIST_002, "samples": [600, 90, 800, 50, 70]}


# Noise at local steps, held against one client at a time.


def clients(count: int, seed: int) -> dict:
    """Clients of many sizes, some below a batch, with participations from 0 and own budgets."""
    generator = prng.stream(seed, prng.Purpose.BUDGET, step=2)
    samples = np.exp(generator.uniform(np.log(15), np.log(2000), count)).astype(int)
    return {
        "samples": samples,
        "batch": 32,
        "steps": 5,
        "bound": 2.0,
        "delta": 1e-5,
        "participations": generator.poisson(2, count),
        "budgets": np.exp(generator.uniform(np.log(0.05), np.log(20), count)),
    }


def alone(mechanism: LocalSteps, k: int, count: int, accountant: str) -> float:
    """The slow reference: client k by the accountants of one mechanism."""
    if count == 0:
        return 0.0
    client = {"samples": int(mechanism.samples[k]), "batch": int(mechanism.batches[k])}
    client |= {"bound": mechanism.bound, "std": float(mechanism.stds[k])}
    one = local_steps(**client, steps=mechanism.steps * count)
    return privacy.epsilon(one, "replace_one", mechanism.delta, accountant=accountant)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_all_clients_at_once_cost_what_each_costs_alone(accountant):
    given = clients(12, seed=9)
    assert (given["samples"] <= 32).any() and (given["participations"] == 0).any()
    found = calibrate_local_steps(**given)
    counts = given["participations"]
    expected = [alone(found, k, count, accountant) for k, count in enumerate(counts.tolist())]
    together = report_of(found).epsilons(accountant, counts)
    assert together == pytest.approx(expected, rel=1e-9)
    by_id = report_of(found).epsilons(accountant, dict(enumerate(counts.tolist())))
    assert (by_id == together).all()


LOSSES = privacy.Query("losses", 2.5, 3.0, per_client=True)  # losses clipped to [0, 5]


def two_gaussians(mechanism: LocalSteps, k: int, count: int, accountant: str) -> float:
    """Slow reference for client k: dp-accounting's composition of its steps and losses."""
    n = int(mechanism.samples[k])
    b = int(mechanism.batches[k])
    steps = mechanism.steps * count
    q = b / n
    mu = 2 * mechanism.bound / (b * mechanism.stds[k])
    other = 5.0 / (n * 3.0)
    if accountant == "rdp":
        one = dp_event.GaussianDpEvent(1 / mu)
        if q < 1:
            one = dp_event.SampledWithoutReplacementDpEvent(n, b, one)
        library = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
        library.compose(one, steps).compose(dp_event.GaussianDpEvent(1 / other), count)
        return library.get_epsilon(mechanism.delta)
    step = 8 * mu / 4000
    grid = step * np.arange(4001)
    inner = q * privacy.gaussian_delta(np.log1p(np.expm1(grid) / q), mu)
    deltas = np.concatenate([(1 - np.exp(-grid) + np.exp(-grid) * inner)[:0:-1], inner])
    one = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        step, -4000, 4000, np.clip(deltas, 0, 1)
    )
    beside = privacy_loss_distribution.from_gaussian_mechanism(
        1 / other, value_discretization_interval=step
    ).self_compose(count)
    both = one.self_compose(steps).compose(beside._pmf_remove.to_dense_pmf())
    return both.get_epsilon_for_delta(mechanism.delta)


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_losses_released_beside_the_steps_cost_what_the_library_says_of_both(accountant):
    counts = [4, 1, 3, 30]
    shape = ([100, 500, 20, 60], 20, 5, 1.0, 1e-5, [0.2, 0.3, 0.4, 1.0])
    found = LocalSteps(*shape, side_query=LOSSES)
    silent = LocalSteps(*shape)
    values = report_of(found).epsilons(accountant, counts).tolist()
    for k, (count, value) in enumerate(zip(counts, values, strict=True)):
        assert value == pytest.approx(two_gaussians(found, k, count, accountant), rel=2e-3)
        assert value > report_of(silent).epsilons(accountant, counts)[k]
    (curve,) = report_of(found, [accountant]).curves([[3]] * 30).values()
    assert curve == pytest.approx(
        [report_of(found).epsilons(accountant, {3: t})[3] for t in range(1, 31)], rel=1e-6
    )
    assert curve[-1] == report_of(found).epsilons(accountant, {3: 30})[3]


def test_losses_far_louder_or_quieter_than_the_steps_are_accounted_for_on_one_grid():
    """At the ends what is left is the one or the other, to a relative 1e-3, never below it."""

    def spent(cohort: int, mu: float, also: float = 0.0) -> float:
        event = privacy.Event(privacy.Sampling("fixed", 100, cohort), mu, 5, also)
        return float(ACCOUNTANTS["pld"].curve(event, 1e-5, np.array([4]))[0])

    for mu, other in ((1e-4, 3.0), (1e-2, 50.0), (0.02, 1.0)):
        alone = float(privacy.gaussian_epsilon(2 * other, 1e-5))
        assert alone <= spent(1, mu, other) <= alone * 1.001
    steps = spent(10, 1.0)
    assert steps <= spent(10, 1.0, 1e-9) <= steps * 1.001


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("sampling", ["fresh", "epochs"])
@pytest.mark.parametrize("losses", [None, replace(LOSSES, std=1.0)], ids=["steps", "losses too"])
def test_every_client_meets_its_budget_and_hardly_less_noise_would_not(
    accountant, sampling, losses
):
    given = clients(10, seed=8) | {"sampling": sampling, "side_query": losses}
    given["budgets"] = np.maximum(given["budgets"], 2.0)
    given["samples"] = np.maximum(given["samples"] // 5, 40)
    counts = given["participations"]
    found = calibrate_local_steps(**given, accountant=accountant)
    less = replace(found, stds=found.stds * (1 - 1e-3))
    took_part = counts > 0
    assert (found.stds[~took_part] == 0).all()
    spent, over = (
        report_of(each).epsilons(accountant, counts)[took_part] for each in (found, less)
    )
    budgets = given["budgets"][took_part]
    assert (spent <= budgets).all() and (budgets < over).all()
    if losses:
        quiet = calibrate_local_steps(**given | {"side_query": None}, accountant=accountant)
        assert (found.stds >= quiet.stds * (1 - 1e-3)).all()
        assert (found.stds > quiet.stds * 1.02).sum() >= 2
    if accountant == "pld":
        report_of(found).check_claims(counts)


def test_losses_that_leave_a_client_nothing_of_its_budget_are_refused_by_its_name():
    given = {**FEW_STEPS, "samples": [600, 60], "participations": [1, 4], "budgets": 1.0}
    given["side_query"] = LOSSES
    alone = float(privacy.gaussian_epsilon(5 / (60 * 3.0) * 2, 1e-5))
    calibrate_local_steps(**given)
    few = given | {"budgets": 0.1}
    losses = rf"^side_query = 3.0: .* losses of client 1, .* epsilon {alone:.4g} of its 0.1"
    with pytest.raises(ConfigError, match=losses):
        calibrate_local_steps(**few)
    by_formula = calibrate_local_steps(**few, calibration="paper")  # which does not count them
    with pytest.raises(BudgetError, match=r"client 1 \(claimed epsilon 0.1, true"):
        report_of(by_formula).check_claims([1, 4])


def test_no_formula_covers_what_is_released_next_to_the_steps():
    unfit = calibrate_local_steps(**ONE_002, calibration="tcdp", side_query=LOSSES)
    assert "nothing is released next to the steps" in report_of(unfit).warnings([1])[-1]
    found = calibrate_local_steps(**ONE_002, side_query=LOSSES)
    assert unfit.stds == found.stds > calibrate_local_steps(**ONE_002).stds
    steps = replace(found, side_query=None)
    assert found.digest() != steps.digest()
    claims, without = (report_of(each).guarantees([1]) for each in (found, steps))
    for both, alone in zip(claims, without, strict=True):
        condition = "nothing is released next to the steps (here too: the losses)"
        assert (condition in both.conditions_failed) == (both.kind == "paper")
        assert "losses released at each" in str(both.sampling)
        assert (
            both.epsilon == alone.epsilon if both.kind == "paper" else both.epsilon > alone.epsilon
        )


def test_clients_whom_002_does_not_cover_have_the_exact_noise_and_are_named():
    counts = [1, 1, 1, 1, 0]
    given = {**SMALL_002, "participations": counts}
    found = calibrate_local_steps(**given, calibration="tcdp")
    exact = calibrate_local_steps(**given)
    assert found.stds[[1, 3, 4]] == pytest.approx(exact.stds[[1, 3, 4]], rel=1e-3)
    for k in (0, 2):
        client = {"bound": 1.0, "batch": 10, "samples": SMALL_002["samples"][k], "steps": 300}
        assert found.stds[k] == FORMULAS["Chen 2024 tCDP"].noise(0.3, 1e-2, **client).value
        assert found.stds[k] > 4 * exact.stds[k]
    (said,) = [text for text in report_of(found).warnings(counts) if "does not calibrate" in text]
    assert "Chen 2024 tCDP does not calibrate the noise of 2 of 4 clients (1, 3)" in said
    assert "that of pld instead; for client 1, with 90 samples" in said
    assert "q = 0.1111 <= 0.1" in said
    rows = {row["client"]: row["calibrated_by"] for row in report_of(found).client_table(counts)}
    assert rows == {0: "Chen 2024 tCDP", 1: "pld", 2: "Chen 2024 tCDP", 3: "pld"}
    assert {row["calibrated_by"] for row in report_of(exact).client_table(counts)} == {"pld"}
    report_of(found).check_claims(counts)


def test_the_formula_that_calibrates_speaks_of_its_own_clients_and_the_truth_of_all():
    counts = [1, 1, 1, 1, 0]
    given = {**SMALL_002, "participations": counts}
    found = calibrate_local_steps(**given, calibration="tcdp")
    by = {each.accountant: each for each in reversed(report_of(found).guarantees(counts))}
    printed = by["Chen 2024 tCDP"]
    assert printed.epsilon == pytest.approx(0.3) and printed.conditions_failed == ()
    assert any("does not calibrate the noise of 2 of 4" in each for each in printed.exclusions)
    assert by["pld"].epsilon == pytest.approx(0.3, rel=1e-3)  # of the clients 1 and 3
    assert not any("calibrate" in each for each in by["pld"].exclusions)
    curves = report_of(found, ("pld", "paper")).curves([[0, 1], [2, 3]])
    assert {name: curve[-1] for name, curve in curves.items()} == {
        name: each.epsilon for name, each in by.items() if name != "rdp"
    }
    # one that speaks of nobody says so of everybody
    alone = calibrate_local_steps(**{**given, "samples": [50] * 5}, calibration="tcdp")
    (said,) = [
        one for one in report_of(alone).guarantees(counts) if one.accountant == "Chen 2024 tCDP"
    ]
    assert said.conditions_failed and said.epsilon > 0.3


def test_003_fails_loudly_by_name_where_it_claims_less_than_the_truth():
    """PRIVACY.md sec. 5: at 20, one step, r = 0.5 it protects only 22.5."""
    given = FEW_STEPS | {"samples": [500, 500, 500, 40], "batch": 250, "steps": 1}
    given |= {"participations": [1, 0, 1, 1], "budgets": [1.0, 20.0, 20.0, math.inf]}
    report = report_of(calibrate_local_steps(**given, calibration="paper"))
    broken = r"1 of 3 clients .*: client 2 \(claimed epsilon 20, true 22\.5"
    with pytest.raises(BudgetError, match=broken):
        report.check_claims(given["participations"])
    report.check_claims([1, 0, 0, 1])  # a claim fails only for those it was made to


def test_a_promise_holds_for_the_participations_it_was_made_for():
    given = clients(6, seed=11) | {"participations": np.full(6, 2)}
    found = calibrate_local_steps(**given)
    report_of(found).check_claims(np.full(6, 2))
    with pytest.raises(BudgetError, match="this run protects 6 of 6 clients"):
        report_of(found).check_claims(np.full(6, 3))


def test_no_noise_for_public_clients_for_absent_ones_and_for_those_without_samples():
    given = {**FEW_STEPS, "samples": [100, 100, 0, 100], "participations": [1, 1, 1, 0]}
    found = calibrate_local_steps(**given, budgets=[1.0, math.inf, 1.0, 1.0])
    assert (found.stds > 0).tolist() == [True, False, False, False]
    report = report_of(found, ["pld"])
    spent = report.epsilons("pld", [1, 1, 1, 0])
    assert spent == pytest.approx([1.0, math.inf, 0.0, 0.0], rel=1e-3)
    report.check_claims([1, 1, 1, 0])
    guarantee, person = report.guarantees([1, 1, 1, 0])
    assert person.exclusions == guarantee.exclusions and person.unit == "person"
    assert guarantee.epsilon == pytest.approx(1.0, rel=1e-3)
    assert "1 public clients" in guarantee.exclusions[0]
    none, _ = report.guarantees([0, 1, 0, 0])
    assert none.epsilon == math.inf and none.conditions_failed
    assert report.curves([[1], [0]])["pld"] == pytest.approx([0.0, 1.0], rel=1e-3)


def test_a_delta_at_which_no_noise_is_called_for_is_refused_by_name():
    given = FEW_STEPS | {"samples": [50, 1000], "batch": 1, "delta": 1e-2}
    idle = r"^delta = .*chance that a sample of client 1 is used at all: .* 1 clients \(1\)"
    with pytest.raises(ConfigError, match=idle):
        calibrate_local_steps(**given, participations=[1, 1], budgets=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["pld", "rdp", *FORMULAS])
def test_curves_follow_the_client_that_has_spent_most_round_by_round(accountant):
    """Against every client accounted for alone after every round; draws with replacement, so that
    some stand twice. The formulas of 002 want small batches and much noise.
    """
    given = clients(8, seed=12)
    if accountant in FORMULAS:
        given["batch"] = 8
    cohorts = [prng.stream(13, prng.Purpose.COHORT, t=t).integers(0, 8, 5) for t in range(6)]
    assert any(len(set(cohort.tolist())) < 5 for cohort in cohorts)
    counts = np.bincount(np.concatenate(cohorts), minlength=8)
    found = calibrate_local_steps(
        **given | {"participations": counts}, accountant="rdp" if accountant == "rdp" else "pld"
    )
    if accountant in FORMULAS:
        found = replace(found, stds=20 * found.stds)
    curve = report_of(found, [accountant]).curves(cohorts)[accountant]
    for t in range(6):
        seen = np.bincount(np.concatenate(cohorts[: t + 1]), minlength=8)
        if accountant in FORMULAS:
            spent = report_of(found).epsilons(accountant, seen).max()
        else:
            spent = max(alone(found, k, count, accountant) for k, count in enumerate(seen.tolist()))
        assert curve[t] == pytest.approx(spent, rel=1e-8)
    assert np.isfinite(curve).all() and (np.diff(curve) >= 0).all()
    assert curve[-1] == report_of(found).epsilons(accountant, counts).max()


# Shuffled epochs.


def test_epochs_are_counted_at_the_worst_that_the_batches_can_do():
    """The batches that are drawn never weigh one sample more than `compositions` says, and all but
    reach it.
    """
    exact = 0
    cases = [(10, 5, 3), (10, 4, 3), (7, 3, 8), (12, 4, 9), (5, 4, 10), (9, 2, 4), (6, 6, 3)]
    for n, b, steps in cases:
        rule = Sgd(steps=steps, batch=b, sampling="epochs")
        worst = 0
        for client in range(60):
            index, _ = batches(0, 0, [client], [0], [n], rule)
            times = np.stack([np.bincount(step, minlength=n) for step in index[0]])
            worst = max(worst, int((times**2).sum(axis=0).max()))
        release = LocalSteps([n], b, steps, 1.0, 1e-5, [1.0], sampling="epochs")
        assert worst <= release.compositions[0]
        exact += worst == release.compositions[0]
    assert exact >= 5


@pytest.mark.parametrize("sampling", ["fresh", "epochs"])
def test_clients_without_noise_have_no_guarantee_for_a_sample_or_a_person(sampling):
    release = LocalSteps([100, 50], 10, 20, 1.0, 1e-5, [0.0, 2.0], sampling=sampling)
    sample, person = report_of(release, ["pld"]).guarantees([1, 1])
    assert (sample.unit, person.unit) == ("sample", "person")
    assert sample.epsilon == person.epsilon == math.inf
    assert sample.conditions_failed == person.conditions_failed == (NOISELESS,)


def test_epochs_are_not_amplified_and_say_so():
    fresh, epochs = (
        LocalSteps([100], 10, 20, 1.0, 1e-5, [2.0], sampling=sampling)
        for sampling in ("fresh", "epochs")
    )
    # 2 epochs a participation, 3 participations: a sample is in 6 batches, each of sensitivity
    # 2/10.
    plain = local_steps(samples=100, batch=100, steps=6, bound=1.0, std=2.0 * 10 / 100)
    (spent,) = report_of(epochs).epsilons("pld", [3])
    assert spent == pytest.approx(privacy.epsilon(plain, "replace_one", 1e-5), rel=1e-9)
    assert spent > report_of(fresh).epsilons("pld", [3])[0]
    for guarantee in report_of(epochs).guarantees([3]):
        order = "shuffled epochs, order known, 6 Gaussians without amplification"
        assert order in str(guarantee.sampling)
        failed = any("shuffled epochs" in reason for reason in guarantee.conditions_failed)
        assert failed == (guarantee.kind == "paper")
    unfit = calibrate_local_steps(**ONE_002, calibration="tcdp", sampling="epochs")
    assert any("a fresh batch at each step" in reason for reason in unfit.calibration.unfit[0])


# What is reported.


def test_the_guarantees_are_those_of_the_client_that_spends_most():
    given = clients(10, seed=14)
    found = calibrate_local_steps(**given, exclusions=("tuning",))
    counts = given["participations"]
    report = report_of(found)
    held = report.guarantees(counts)
    guarantees = {each.accountant: each for each in held if each.unit == "sample"}
    rows = report.client_table(counts)
    assert list(guarantees) == ["pld", "rdp", *FORMULAS]
    for name, guarantee in guarantees.items():
        spent = report.epsilons(name, counts)
        assert guarantee.epsilon == spent.max()
        assert f"client {spent.argmax()}, " in str(guarantee.sampling)
        assert (guarantee.unit, guarantee.observer) == ("sample", "every single update")
        assert guarantee.exclusions == ("tuning",)
        assert guarantee.kind == ("paper" if name in FORMULAS else "rigorous")
        assert (guarantee.delta == 1e-5) == (name != "Chen 2024 Theorem 5")
        assert privacy.Guarantee.from_dict(json.loads(json.dumps(guarantee.to_dict()))) == guarantee
        ordered = np.sort(spent[counts > 0])
        places = [max(math.ceil(share * len(ordered)) - 1, 0) for share in SHARES]
        assert row_quantiles(rows, column(name)) == ordered[places].tolist()
    assert guarantees["pld"].epsilon == pytest.approx(given["budgets"][counts > 0].max(), rel=2e-3)
    batches = str(guarantees["pld"].sampling)
    assert "fixed size 32 of" in batches and "batch hidden" in batches


def test_the_table_has_a_row_for_each_client_that_took_part():
    given = clients(8, seed=15)
    found = calibrate_local_steps(**given)
    counts = given["participations"]
    report = report_of(found)
    rows = report.client_table(counts)
    assert [row["client"] for row in rows] == np.flatnonzero(counts).tolist()
    spent = {name: report.epsilons(name, counts) for name in ("pld", "rdp", *FORMULAS)}
    for row in rows:
        k = row["client"]
        n = found.samples[k]
        expected = {"samples": n, "batch": min(32, n), "noise_std": found.stds[k], "delta": 1e-5}
        expected |= {"participations": counts[k], "steps": 5 * counts[k]}
        expected["epsilon_claimed"] = given["budgets"][k]
        expected |= {column(name): spent[name][k] for name in spent}
        assert {name: row[name] for name in expected} == expected
        client = {name: row[name] for name in ("batch", "samples", "steps")}
        tcdp = FORMULAS["Chen 2024 tCDP"]
        formula, _ = tcdp.printed(row["noise_std"], 1e-5, bound=2.0, **client)
        failed = [each for each in row["conditions_failed"] if each.startswith("Chen 2024 tCDP")]
        assert failed == [f"Chen 2024 tCDP: {each}" for each in formula.conditions_failed]
    assert pa.table({name: [row[name] for row in rows] for name in rows[0]}).num_rows == len(rows)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formulas_claims_for_many_clients_are_those_for_one_after_another(name):
    generator = np.random.default_rng(3)
    samples = generator.integers(40, 900, 50)
    batch = np.minimum(64, samples)
    stds = generator.uniform(0.1, 4.0, 50)
    counts = generator.integers(1, 30, 50)
    together = FORMULAS[name].claims(
        stds, 1e-5, counts, bound=2.0, batch=batch, samples=samples, steps=5
    )
    for k in range(50):
        client = {"bound": 2.0, "batch": int(batch[k]), "samples": int(samples[k])}
        alone = FORMULAS[name].printed(float(stds[k]), 1e-5, steps=5 * int(counts[k]), **client)
        assert together[k] == pytest.approx(alone[0].value, rel=1e-13)


def test_a_delta_above_one_over_a_clients_samples_is_warned_of():
    found = LocalSteps([600, 50], 10, 5, 1.0, 1e-2, [1.0, 1.0])
    (warning,) = report_of(found).warnings([1, 1])
    assert "above 1/n for 1 clients (0)" in warning and not report_of(found).warnings([0, 1])


def test_the_digest_names_all_that_decides_what_is_released():
    given = {**FEW_STEPS, "samples": [100, 200], "stds": [1.0, 2.0], "claims": [1.0, 2.0]}
    changes = {"batch": 11, "steps": 6, "bound": 1.1, "delta": 1e-6, "sampling": "epochs"}
    changes |= {"samples": [100, 201], "stds": [1.0, 2.1], "claims": None}
    each = [{}, *({name: value} for name, value in changes.items())]
    digests = [LocalSteps(**given | change).digest() for change in each]
    assert len(set(digests)) == len(each) and LocalSteps(**given).digest() == digests[0]


REFUSED = {
    "batch": [0, np.array([3, 3, 3]), np.array([3, 0]), np.array([1.5, 1])],
    "steps": [0], "bound": [0.0], "delta": [1.0], "budgets": [[1.0, 0.0], [1.0, math.nan]],
    "participations": [[1]], "sampling": ["cyclic"], "calibration": ["guess"],
    "accountant": ["paper"],
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_no_mechanism_is_refused(field):
    given = {**FEW_STEPS, "samples": [100, 200], "participations": [1, 2], "budgets": 1.0}
    for value in REFUSED[field]:
        with refusal(begins=f"{field}: "):
            calibrate_local_steps(**given | {field: value})


def test_pld_reaches_the_smallest_deltas_and_calibrates_noise_for_them():
    asked = ONE_002 | {"budgets": [1.0], "delta": 1e-18}
    less, more = (
        calibrate_local_steps(**asked, accountant=name).stds[0] for name in ("pld", "rdp")
    )
    assert less < 0.6 * more
    steps = LocalSteps([600], 10, 300, 1.0, 1e-18, [less])
    by_pld, by_rdp, *_ = report_of(steps, ["pld", "rdp"]).guarantees([1])
    assert by_pld.epsilon == pytest.approx(1.0, rel=1e-3) and by_rdp.epsilon > 1.5


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("batches", [[10, 200], [200, 10]])
def test_clients_alike_but_for_their_batches_each_spend_their_own(accountant, batches):
    """In whichever order: what one has spent is not taken for the other's."""
    common = (5, 1.0, 1e-5)
    together = LocalSteps([400, 400], np.array(batches), *common, [0.1, 0.1])
    draws = [[0, 1], [0], [1], [0, 1]]
    found = report_of(together).epsilons(accountant, [3, 3])
    curve = report_of(together, [accountant]).curves(draws)
    single = [report_of(LocalSteps([400], b, *common, [0.1])) for b in batches]
    alone = [each.epsilons(accountant, [3])[0] for each in single]
    half_way = [each.epsilons(accountant, [1])[0] for each in single]
    assert alone[0] != pytest.approx(alone[1], rel=0.1) and found.tolist() == alone
    (worst,) = curve.values()
    assert worst[0] == pytest.approx(max(half_way), rel=1e-6) and worst[-1] == max(alone)


class Halves(Sgd):
    """Half of a client's rows, whatever `batch` says."""

    def batch_sizes(self, sizes):
        return np.minimum(sizes, (sizes + 1) // 2)


class Beyond(Sgd):
    """More than there is."""

    def batch_sizes(self, sizes):
        return sizes + 1


STEPS = {
    "data": {"kind": "synthetic", "clients": 12, "samples": 20, "sizes": {"kind": "spread"}},
    "selection": {"kind": "uniform", "cohort": 4},
    "bounding": {"kind": "per_sample_clip", "bound": 1.0},
    "noise": {"kind": "gaussian", "multiplier": 2.0, "delta": 1e-3},
    "privacy": {"accountants": ["rdp"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, "full", {"share": 0.1}])
def test_a_rule_with_batches_of_its_own_is_accounted_for_by_these(batch, tmp_path):
    """A batch of more rows moves every sample more often: `batch: 2` would claim far too little."""
    local = {"kind": f"{__name__}:Halves", "steps": 3, "batch": batch}
    of = experiment(**STEPS, local=local)
    plan = resolve(of)
    sizes = plan.population.sizes
    assert np.array_equal(plan.mechanism.batches, (sizes + 1) // 2)
    assert (of.local.max_rows(sizes) == sizes).all()
    assert run(of, tmp_path / "run").summary["status"] == "completed"


def test_a_rule_whose_batches_are_no_part_of_the_rows_is_refused_where_they_are_accounted_for():
    with pytest.raises(ConfigError, match=r"local\.kind = .*Beyond.* from 1 to a client's rows"):
        resolve(experiment(**STEPS, local={"kind": f"{__name__}:Beyond", "steps": 3}))


class AsTheLeast(Sgd):
    """As many steps for all as an epoch of the smallest client given has."""

    def step_counts(self, sizes):
        return np.full(len(sizes), max(1, int(sizes.min()) // 2))


def test_steps_that_depend_on_who_else_is_in_a_chunk_are_refused():
    """Of all clients the smallest has fewer rows than that of a chunk, which would make more steps
    than are accounted for.
    """
    with pytest.raises(ConfigError, match=r"local\.kind = .*AsTheLeast.* step_counts .*own rows"):
        resolve(experiment(**STEPS, local={"kind": f"{__name__}:AsTheLeast", "batch": 2}))


@pytest.mark.slow
@pytest.mark.parametrize("calibration", ["rigorous", "paper"])
def test_a_run_with_batches_by_share_holds_each_clients_budget(calibration, tmp_path):
    sections = {
        "data": {"kind": "fashion_mnist_mini", "clients": 50, "sizes": {"kind": "spread"}},
        "local": {"kind": "sgd", "steps": 3, "batch": {"share": 0.1}, "lr": 0.1},
        "bounding": {"kind": "per_sample_clip", "bound": 1.0},
        "noise": {"kind": "gaussian", "epsilon": 2.0, "delta": 1e-5, "calibration": calibration},
        "privacy": {"accountants": ["rdp", "paper"]},
    }
    plan = resolve(experiment(**sections))
    mechanism = plan.mechanism
    assert np.array_equal(mechanism.batches, np.round(0.1 * mechanism.samples))
    result = run(experiment(**sections), tmp_path / "run")
    assert result.summary["status"] == "completed"
    if calibration == "rigorous":
        of_samples = [g for g in result.guarantees if g.unit == "sample"]
        rigorous = [g.epsilon for g in of_samples if g.kind == "rigorous"]
        assert rigorous and max(rigorous) == pytest.approx(2.0, rel=2e-3)
