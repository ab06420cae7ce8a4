"""Nothing is claimed that does not hold: weights, budgets, memory, and which epsilon holds."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import experiment, refusal
from pydantic import Field
from scipy.special import ndtr

from raydpfl import run
from raydpfl.audit import audit
from raydpfl.errors import RunError
from raydpfl.methods.weights import Weights
from raydpfl.privacy import Mechanism, Query, Sampling, guarantees, sentences, tightest_guarantees
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.resolution import resolve

UNEQUAL = {
    "data": {"sizes": {"kind": "power-law"}},
    "noise": {"kind": "gaussian", "multiplier": 2.0},
}
MEMORY = {"bounding": {"kind": "alpha_norm_ec", "bound": 1.0}}
SCAFFOLD = {"local": {"kind": "scaffold", "steps": 2, "batch": 10, "lr": 0.1}}


# ---- weights ----


class ByTheMean(Weights):
    """Ordinary FedAvg's weights: n_i over the mean of those that are asked about."""

    kind: str = "by the mean"

    def of(self, sizes, samples, population):
        return sizes / sizes.mean()


class Drifting(ByTheMean):
    """A member that gives other weights each time it is asked."""

    calls: list = Field(default_factory=list)

    def of(self, sizes, samples, population):
        self.calls.append(None)
        return super().of(sizes, samples, population) * len(self.calls)


def test_weights_that_normalise_by_who_is_asked_are_those_of_the_whole_population():
    plan = resolve(experiment(**UNEQUAL, weights=ByTheMean()))
    sizes = plan.population.sizes
    few = np.argsort(sizes)[:5]
    np.testing.assert_array_equal(plan.weights(few), (sizes / sizes.mean())[few])
    assert plan.weight == sizes.max() / sizes.mean() > 2
    assert plan.weight == resolve(experiment(**UNEQUAL, weights={"kind": "data"})).weight


@pytest.mark.slow
def test_noise_is_as_large_as_the_largest_weight_of_any_client_calls_for(tmp_path):
    """Each client's contribution over the sum's noise is within what the accountants were told."""
    result = run(experiment(**UNEQUAL, weights=ByTheMean()), tmp_path / "run")
    sizes = resolve(experiment(**UNEQUAL, weights=ByTheMean())).population.sizes
    assert result.rounds["noise_std"].to_pylist() == [2.0 * sizes.max() / sizes.mean()] * 4


def test_a_weight_above_the_accounted_one_ends_the_run_with_the_members_name():
    said = r"weights\.kind .*Drifting gives a client weight .* accounted for"
    with pytest.raises(RunError, match=said):
        plan = resolve(experiment(**UNEQUAL, weights=Drifting()))
        again = replace(plan, population=type(plan.population)(plan.population.sizes))
        again.weights(np.arange(len(again.population)))


def test_a_weight_that_is_no_number_is_refused():
    with refusal(r"weights.kind = .*finite numbers, one per client"):
        resolve(experiment(**UNEQUAL, weights=Spoilt(says="no number")))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["client", "server"])
def test_an_audit_notices_that_the_mean_weight_was_accounted_instead_of_the_largest(
    placement, monkeypatch
):
    """The accounted weight is the mean, and nothing in the run looks at it again."""
    noise = {"kind": "gaussian", "multiplier": 2.0, "placement": placement}
    unequal = experiment(**{**UNEQUAL, "noise": noise}, weights={"kind": "data"}, rounds=2)
    assert audit(unequal, canaries=50).passed
    weights = resolve(unequal).weights(np.arange(50))

    def by_the_mean(*arguments):
        return replace(resolve(*arguments), weight=1.0)

    monkeypatch.setattr("raydpfl.audit.resolve", by_the_mean)
    monkeypatch.setattr(Plan, "weights", lambda self, clients: weights[clients])
    failed = {check.name for check in audit(unequal, canaries=50).checks if not check.passed}
    assert "bounds" in failed


# ---- budgets ----


@pytest.mark.slow
def test_a_budget_is_held_by_a_rigorous_accountant_where_only_the_papers_formula_was_asked(
    tmp_path,
):
    spending = {"multiplier": 1.6, "kind": "gaussian"}
    asked = {"accountants": ["paper"], "budget": 6.0}
    result = run(experiment(noise=spending, privacy=asked, rounds=40), tmp_path / "run")
    hidden = [one for one in result.guarantees if "hidden" in str(one.sampling)]
    spent = [one.epsilon for one in hidden if one.accountant == "rdp"]
    assert result.summary["status"] == "budget" and 0 < result.summary["rounds"] < 40
    assert spent[0] <= 6.0 and "(rdp)" in result.summary["reason"]


def test_a_budget_that_no_rigorous_accountant_can_hold_is_refused():
    with refusal(r"privacy\.budget.*alpha_norm_ec"):
        resolve(experiment(**MEMORY, privacy={"accountants": ["pld"], "budget": 2.0}))
    uncovered = {"selection": {"kind": "multinomial", "cohort": 20}}
    with refusal(r"privacy.accountants = 'rdp'"):
        resolve(experiment(**uncovered, privacy={"accountants": ["rdp"], "budget": 2.0}))
    plan = resolve(experiment(**uncovered, privacy={"accountants": ["paper"], "budget": 2.0}))
    assert plan.rigorous_accountants == ("pld",)


@pytest.mark.slow
def test_a_budget_is_held_by_the_smallest_rigorous_epsilon(tmp_path):
    """At a delta that double precision alone does not reach: both are valid."""
    noise = {"kind": "gaussian", "multiplier": 2.0, "delta": 1e-15}
    asked = {"accountants": ["rdp", "pld"], "budget": 120.0}
    result = run(experiment(noise=noise, privacy=asked, rounds=40), tmp_path / "run")
    assert result.summary["status"] == "completed"
    first, *_ = result.summary["holds"]
    hidden = [one for one in result.guarantees if "hidden" in str(one.sampling)]
    curves = {one.accountant: one.epsilon for one in hidden}
    assert curves["pld"] < curves["rdp"] and first["epsilon"] == curves["pld"] < 120.0
    between = {**asked, "budget": (curves["pld"] + curves["rdp"]) / 2}
    held = run(experiment(noise=noise, privacy=between, rounds=40), tmp_path / "held")
    assert held.summary["status"] == "completed"


def test_noise_is_calibrated_by_the_first_accountant_that_is_asked_for():
    noise = {"kind": "gaussian", "epsilon": 20.0, "delta": 1e-15}
    by = {
        names: resolve(experiment(noise=noise, privacy={"accountants": names.split()}, rounds=40))
        for names in ("rdp", "pld", "pld rdp", "rdp pld")
    }
    assert by["pld rdp"].ratio == by["pld"].ratio < by["rdp"].ratio == by["rdp pld"].ratio


def test_the_smallest_of_several_valid_epsilons_is_said_to_hold():
    mechanism = Mechanism(Sampling("fixed", 1920, 80), (Query("updates", 1.0, 4.0),), 100)
    found = guarantees(mechanism, "replace_one", 1e-5, participations=12)
    least = tightest_guarantees(found)
    assert [one.accountant for one in least] == ["pld", "pld"]
    assert len({one.sampling for one in least}) == 2
    holds = "This holds, the smallest by pld and rdp."
    marked = [text for text in sentences(found) if holds in text]
    assert len(marked) == 2 and all("by pld" in text for text in marked)
    alone = sentences([one for one in found if one.accountant == "pld"])
    assert not any("holds" in text for text in alone)


# ---- clients with memory ----


@pytest.mark.parametrize(
    "selection,hidden",
    [
        ({"kind": "uniform", "cohort": 20}, "unproven"),
        ({"kind": "multinomial", "cohort": 20}, "unproven"),
        ({"kind": "poisson", "cohort": 20}, "rigorous"),
        ({"kind": "full"}, None),
    ],
)
def test_amplification_of_clients_with_memory_is_rigorous_only_where_a_proof_is_known(
    selection, hidden, tmp_path
):
    kinds = {"all 50": "rigorous"}
    if hidden:
        kinds = {"cohort hidden": hidden, "cohort known": "rigorous"}
    noise = {"kind": "gaussian", "multiplier": 1.0, "placement": "server"}
    asked = {"noise": noise, "selection": selection, "privacy": {"accountants": ["pld"]}}
    given = run(experiment(**MEMORY, **asked), tmp_path / "run").guarantees
    found = {words: one for words in kinds for one in given if words in str(one.sampling)}
    assert {words: one.kind for words, one in found.items()} == kinds
    for one in found.values():
        unproven = one.kind == "unproven"
        assert ("not proved" in one.sentence()) == unproven == bool(one.conditions_failed)
    stored = json.loads((tmp_path / "run" / "summary.json").read_text())["guarantees"]
    assert {each["kind"] for each in stored} == set(kinds.values())


@pytest.mark.parametrize(
    "clients, placement", [(MEMORY, "client"), (MEMORY, "server"), (SCAFFOLD, "client")]
)
def test_curves_of_clients_with_memory_show_what_is_proved(clients, placement):
    noise = {"kind": "gaussian", "multiplier": 2.0, "placement": placement}
    plan = resolve(experiment(**clients, noise=noise, rounds=6))
    for t in range(6):
        found = plan.guarantees(t + 1, plan.participations(t + 1))
        proved = min(one.epsilon for one in found if one.kind == "rigorous")
        assert plan.curves()["rdp"][t] == pytest.approx(proved, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "clients",
    [
        MEMORY,
        SCAFFOLD,
        {"model": {"kind": "mlp", "hidden": [8], "local": ["3.*"]}, "evaluate": {"test": False}},
    ],
)
def test_an_epsilon_that_no_proof_holds_is_not_calibrated_for(clients):
    noise = {"kind": "gaussian", "epsilon": 8.0}
    with refusal(r"noise\.epsilon = 8\.0: expected none here, as no proof holds"):
        resolve(experiment(**clients, noise=noise))
    proved = {"selection": {"kind": "poisson", "cohort": 20}}
    if "bounding" in clients:
        assert resolve(experiment(**clients, noise=noise, **proved)).mechanism.private


def test_scaffold_with_a_hidden_cohort_of_fixed_size_is_not_called_rigorous():
    plan = resolve(experiment(**SCAFFOLD))
    assert "scaffold" in plan.mechanism.proof_gap
    hidden = [one for one in plan.guarantees(4, {3: 2}) if "hidden" in str(one.sampling)]
    assert {one.kind for one in hidden} == {"unproven"}


def ratios(q: float, c: float, signs) -> tuple[np.ndarray, np.ndarray]:
    """The likelihood ratio of two rounds with a client of Poisson rate `q` against none, on a grid,
    and the grid's mass.

    `signs(coin, y)`: the direction of its second contribution, by its first coin and the first
    release; norm c, noise 1.
    """
    y = np.linspace(-9, 9, 721)
    density = np.exp(-(y**2) / 2) / math.sqrt(2 * math.pi) * (y[1] - y[0])
    first = y[:, None]
    second = y[None, :]
    total = np.zeros((len(y), len(y)))
    for coins in itertools.product((0, 1), repeat=2):
        chance = math.prod(q if coin else 1 - q for coin in coins)
        value = c * signs(coins[0], first)
        exponent = coins[0] * (first * c - c**2 / 2) + coins[1] * (second * value - value**2 / 2)
        total += chance * np.exp(exponent)
    return total, density[:, None] * density[None, :]


@pytest.mark.parametrize("q,c", [(0.1, 1.0), (0.3, 0.5), (0.5, 2.0)])
def test_state_never_costs_more_than_none_under_poisson(q, c):
    """The theorem of docs/proofs.md by quadrature: every strategy of two rounds,
    both directions, many epsilons.
    """
    strategies = {
        "forgetful": lambda coin, y: np.ones_like(y),
        "turns back": lambda coin, y: np.ones_like(y) * (1 - 2 * coin),
        "stays silent": lambda coin, y: np.ones_like(y) * (1 - coin),
        "speaks if it spoke": lambda coin, y: np.ones_like(y) * coin,
        "by the release": lambda coin, y: np.where(y > 0, 1.0, -1.0) * (1 - 2 * coin),
        "by both": lambda coin, y: np.tanh(y) * coin + (1 - coin),
    }
    curves = {}
    for name, signs in strategies.items():
        ratio, mass = ratios(q, c, signs)
        assert (ratio * mass).sum() == pytest.approx(1, abs=1e-6)
        epsilons = np.exp(np.linspace(0, 3, 13))
        there = [(np.maximum(ratio - e, 0) * mass).sum() for e in epsilons]
        back = [(np.maximum(1 - e * ratio, 0) * mass).sum() for e in epsilons]
        curves[name] = np.array([there, back])
    for name, curve in curves.items():
        assert (curve <= curves["forgetful"] + 1e-9).all(), name
    assert (curves["turns back"] < curves["forgetful"] - 1e-4).any()
    # One round of it is the hockey stick of the subsampled Gaussian: the quadrature itself is
    # right.
    one = ratios(q, c, lambda coin, y: np.zeros_like(y))
    e = 1.2
    threshold = math.log((e - (1 - q)) / q) / c + c / 2
    exact = q * ndtr(c - threshold) - (e - (1 - q)) * ndtr(-threshold)
    assert (np.maximum(one[0] - e, 0) * one[1]).sum() == pytest.approx(exact, abs=1e-4)


class Spoilt(ByTheMean):
    """A member that says what it is told to."""

    says: str = ""

    def of(self, sizes, samples, population):
        if self.says == "doubles":
            sizes *= 2
        found = {
            "text": ["a"] * population,
            "no number": np.where(sizes == sizes.max(), np.nan, 1.0),
            "nothing": np.zeros(population),
            "huge": sizes * 1e300,
            "tiny": sizes * 1e-300,
        }
        return found.get(self.says, sizes * 1j if self.says == "complex" else sizes)


@pytest.mark.parametrize("says", ["text", "nothing", "huge", "tiny", "complex"])
@pytest.mark.parametrize("size", [{"multiplier": 1.0}, {"std": 1.0}])
def test_weights_that_cannot_be_accounted_for_are_refused_in_one_line(says, size):
    with refusal(r"weights\.kind = .*Spoilt.*: expected one whose "):
        resolve(experiment(weights=Spoilt(says=says), noise={"kind": "gaussian", **size}))


def test_no_member_changes_the_sizes_that_accountants_read():
    with pytest.raises(ValueError, match="output array is read-only"):
        resolve(experiment(weights=Spoilt(says="doubles")))


@pytest.mark.parametrize(
    "selection",
    [{"kind": "full"}, {"kind": "cyclic", "period": 2}, {"kind": "uniform", "cohort": 20}],
)
def test_sums_of_clients_whose_state_holds_their_noise_are_not_called_rigorous(selection):
    """Later contributions reveal that noise; each update's observer sees what the state holds."""
    found = resolve(experiment(**SCAFFOLD, selection=selection)).guarantees(4, {3: 2})
    kinds = {(one.observer, one.kind) for one in found}
    assert kinds == {("every aggregate", "unproven"), ("every single update", "rigorous")}
    assert {one.observer for one in tightest_guarantees(found)} == {"every single update"}
    with refusal(r"privacy\.budget.*holds its own; with scaffold"):
        asked = {"accountants": ["pld"], "budget": 1e3}
        resolve(experiment(**SCAFFOLD, selection=selection, privacy=asked))


def test_noise_that_clients_remember_protects_their_sums_less_than_fresh_noise():
    """The counterexample of `docs/proofs.md`, by least squares and by simulation."""
    covariance = np.array([[2.0, -1.0], [-1.0, 3.0]])
    shift = np.array([2.0, 2.0])
    assert shift @ np.linalg.solve(covariance, shift) == pytest.approx(5.6) and 5.6 > 2 * 2.0**2 / 2
    z = np.random.Generator(np.random.Philox(5)).standard_normal((4, 200_000))
    sums = np.stack([z[0] + z[1], -z[1] + z[2] + z[3]])
    np.testing.assert_allclose(np.cov(sums), covariance, atol=0.03)
