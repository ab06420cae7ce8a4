"""The algorithms of the four papers as whole runs, each against something exact."""

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import experiment, local_steps, messages, start_coordinator
from plain_loop import plain_loop

from raydpfl import Experiment, models, privacy, run
from raydpfl.core.prng import Purpose, normals, stream
from raydpfl.data import Data, Shards, Split
from raydpfl.errors import BudgetError, ConfigError
from raydpfl.methods.noise.keyed_noise import query_noise
from raydpfl.methods.selection import FAMILY
from raydpfl.methods.selection.power_of_choice import successive_sample
from raydpfl.methods.weights import Weights
from raydpfl.models.tasks.regression import Regression
from raydpfl.privacy import tightest_guarantees
from raydpfl.simulation import planned_guarantee
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.resolution import resolve
from raydpfl.training.minibatches import batches

STEP = {"kind": "per_sample_clip", "bound": 0.5}
QUIET = {"noise": {"kind": "none"}, "bounding": {"kind": "none"}, "server": {"kind": "sgd"}}


def flat(result) -> np.ndarray:
    return models.flatten(result.model).double().numpy()


# Heterogeneous quadratics, shifted so that the optimum of their mean is 0.
QUADRATICS = yaml.safe_load("""
    data: {kind: quadratics, clients: 10, dimension: 5, rank: 5, variance: 0.2, heterogeneity: 2.0}
    model: {kind: linear, start: 1.0}
    selection: {kind: full}
""")
FEDAVG = "local: {kind: sgd, steps: 10, batch: full, lr: 0.1}"
SCAFFOLD = "local: {kind: scaffold, steps: 5, batch: full, lr: 0.1}"
DESCENT = "local: {kind: sgd, steps: 1, batch: full, lr: 0.1}, "
DESCENT += "bounding: {bound: 0.5, a: 0.5, kind:"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "low", "high"),
    [
        (FEDAVG, 0.05, math.inf),
        (SCAFFOLD, 0.0, 1e-4),
        (f"{SCAFFOLD}, selection: {{kind: poisson, cohort: 4}}", 0.0, 1e-3),
        (f"{SCAFFOLD}, selection: {{kind: multinomial, cohort: 6}}", 0.0, 1e-3),
        (f"{SCAFFOLD}, selection: {{kind: uniform, cohort: 6, dropout: 0.2}}", 0.0, 1e-3),
        (f"{SCAFFOLD}, selection: {{kind: cyclic, period: 3}}", 0.0, 1e-3),
        # normalised updates balance where their directions do, not at the optimum
        (f"{DESCENT} smooth_normalize}}", 0.02, math.inf),
        (f"{DESCENT} alpha_norm_ec}}", 0.0, 1e-3),
    ],
)
def test_variates_and_error_feedback_reach_the_optimum_of_unlike_quadratics(
    sections, low, high, tmp_path
):
    changes = yaml.safe_load(f"{{{sections}}}")
    chosen = {**QUIET, **QUADRATICS, "rounds": 800, "evaluate": {"every": 800}, **changes}
    assert low <= np.linalg.norm(flat(run(experiment(**chosen), tmp_path / "run"))) < high


class Unlike(Data):
    """Clients 1/2 (a_i x - b_i)^2, the first without data; `Failing` cannot train the last."""

    kind: str = "unlike"
    task: Regression = Regression()

    def split(self, seed, root):
        x = np.array([[1.0], [2.0], [1.5], [99.0]], np.float32)
        y = np.array([4.0, 1.0, 2.0, 0.0], np.float32)
        ends = [0, 0, 1, 2, 3, 4]

        def rows(first, last):
            return x[ends[first] : ends[last]], y[ends[first] : ends[last]]

        return Split(np.diff(ends), (1,), 0, rows, lambda: (x, y))


class Failing(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1, bias=False)

    def forward(self, x):
        if (x > 50).any() and self.training:
            raise ValueError("a row that it cannot do")
        return super().forward(x)


@pytest.mark.slow
def test_clients_without_gradients_do_not_keep_scaffold_from_the_others_optimum(tmp_path):
    local = {"kind": "scaffold", "steps": 5, "batch": "full", "lr": 0.1}
    own = {"data": {"kind": "test_methods:Unlike"}, "model": {"kind": "test_methods:Failing"}}
    sections = {**QUIET, **own, "selection": {"kind": "full"}, "local": local, "rounds": 40}
    sections |= {"client": {"on_error": "drop"}, "evaluate": {"every": 40}}
    result = run(experiment(**sections), tmp_path / "run")
    assert set(result.rounds["dropped"].to_pylist()) == {1}
    assert flat(result) == pytest.approx([9 / 7.25], rel=1e-4)


def test_addpnfl_without_noise_or_clipping_is_fedadam(tmp_path):
    adam = {"weights": {"kind": "data"}, "server": {"kind": "adam", "lr": 0.05}}
    adam |= {"noise": {"kind": "none"}, "data": {"sizes": {"kind": "spread"}}}
    loose = {"kind": "per_sample_clip", "bound": 1e6}
    private = run(experiment(**adam, bounding=loose), tmp_path / "addpnfl")
    plain = run(experiment(**adam, bounding={"kind": "none"}), tmp_path / "fedadam")
    np.testing.assert_allclose(flat(private), flat(plain), rtol=1e-3, atol=2e-5)
    assert np.linalg.norm(flat(private)) > 0.5


def test_a_round_of_dpnfl_is_the_plain_loop_over_clients_steps_and_samples(tmp_path):
    """002 Alg. 1: x + sum (N/r) p_i Delta_i, samples' gradients clipped, keyed noise a step."""
    plain = experiment(
        bounding=STEP,
        noise={"kind": "gaussian", "std": 0.02},
        weights={"kind": "data"},
        server={"kind": "sgd"},
        rounds=1,
        data={"clients": 300, "sizes": {"kind": "spread"}},
        selection={"cohort": 5},
        client={"backend": "fused"},  # which draws the noise on all weights for every client
    )
    result = run(plain, tmp_path / "out")
    plan = resolve(plain)
    shards = Shards.open(plan.shards)
    module = models.build(plain.model, shards.form(plain.data.task), plain.seed)
    expected = models.flatten(module).double()
    for client in plain.selection.draw(plain.seed, 0, plan.population).clients.tolist():
        n = int(shards.sizes[client])
        x, y = (torch.from_numpy(part[0]) for part in shards.chunk([client], n)[:2])
        (index,), _ = batches(plain.seed, 0, [client], [0], [n], plain.local)
        key = {"t": 0, "client": client, "draw": 0}
        noise = torch.stack(
            [
                normals(plan.noise_seed, Purpose.STEP_NOISE, plan.d, **key, step=step)
                for step in range(len(index))
            ]
        )
        moved, *_ = plain_loop(module, plain.local, x, y, index, 0.5, 0.02 * noise.double())
        expected += moved * (300 / 5) * n / shards.sizes.sum()
    np.testing.assert_allclose(flat(result), expected.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_client_drawn_twice_trains_as_two_with_batches_and_noise_of_their_own(tmp_path):
    sections = {
        "bounding": STEP,
        "noise": {"kind": "gaussian", "std": 0.02},
        "selection": {"kind": "multinomial", "cohort": 60},
    }
    run(experiment(**sections, rounds=1, measure=["clients"]), tmp_path / "out")
    rows = pq.read_table(tmp_path / "out" / "clients.parquet").to_pylist()
    seen: dict[int, list[float]] = {}
    for row in rows:
        seen.setdefault(row["client"], []).append(row["norm"])
    repeated = [norms for norms in seen.values() if len(norms) > 1]
    assert len(rows) == 60 and repeated
    assert all(len(set(norms)) == len(norms) for norms in repeated)
    participations = pq.read_table(tmp_path / "out" / "guarantees.parquet").to_pylist()
    assert {row["client"]: row["participations"] for row in participations} == {
        client: len(norms) for client, norms in seen.items()
    }


@pytest.mark.slow
def test_every_client_has_a_guarantee_that_holds_one_by_one(tmp_path):
    law = {"kind": "uniform", "low": 0.5, "high": 8.0, "public": 0.2}
    sections = {
        "bounding": STEP,
        "noise": {"kind": "gaussian", "epsilon": law, "delta": 1e-5},
        "selection": {"kind": "multinomial", "cohort": 10},
    }
    asked = experiment(**sections, privacy={"accountants": ["pld", "paper"]})
    result = run(asked, tmp_path / "out")
    rows = pq.read_table(tmp_path / "out" / "guarantees.parquet").to_pylist()
    budgets = [row for row in rows if math.isfinite(row["epsilon_claimed"])]
    assert 0 < len(budgets) < len(rows)
    for row in budgets:
        what = {name: row[name] for name in ("samples", "batch", "steps")}
        mechanism = local_steps(**what, bound=0.5, std=row["noise_std"])
        truth = privacy.epsilon(mechanism, "replace_one", 1e-5)
        assert row["epsilon_pld"] == pytest.approx(truth, rel=1e-4)
        assert row["epsilon_claimed"] * 0.995 < truth <= row["epsilon_claimed"]
        assert row["steps"] == 5 * row["participations"]
    worst = result.guarantees[0]
    assert worst.unit == "sample" and worst.observer == "every single update"
    assert worst.epsilon == max(row["epsilon_pld"] for row in budgets)
    assert result.rounds["epsilon_pld"].to_pylist()[-1] == worst.epsilon
    # one accountant has one name: of its columns here and there, in the ledger and in the summary
    of_samples = [each for each in result.guarantees if each.unit == "sample"]
    spent = {privacy.column(each.accountant): each.epsilon for each in of_samples}
    assert {name for name in result.rounds.column_names if name.startswith("epsilon")} == {*spent}
    assert {name: result.rounds[name][-1].as_py() for name in spent} == spent
    assert {*spent, "epsilon_claimed"} == {name for name in rows[0] if name.startswith("epsilon")}
    recorded = json.loads((tmp_path / "out" / "ledger.jsonl").read_text().splitlines()[-1])
    assert [*recorded["epsilon"]] == [each.accountant for each in of_samples]
    assert any("infinite budget" in each or "public" in each for each in worst.exclusions)


def test_a_paper_whose_noise_protects_less_than_it_claims_fails_the_run_by_the_clients_name(
    tmp_path,
):
    """003 at epsilon 20, one step, half of the samples: the truth is 22.5 (PRIVACY.md sec. 5)."""
    half = {"kind": "sgd", "steps": 1, "batch": 90}
    noise = {"kind": "gaussian", "epsilon": 20.0, "delta": 1e-5, "calibration": "paper"}
    broken = experiment(
        bounding=STEP, noise=noise, local=half, rounds=1, privacy={"accountants": ["pld", "paper"]}
    )
    with pytest.raises(BudgetError, match=r"client \d+ \(claimed epsilon 20, true 22\.\d+\)"):
        run(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# 002's five methods as its Fig. 1 has them, each with the noise of its paper and with exact noise.
STEPPED = {"kind": "sgd", "steps": 300, "batch": 5, "lr": 0.01, "schedule": "inverse_sqrt"}
ADAM = {"kind": "adam", "lr": 0.01, "schedule": "inverse_sqrt"}
OF_002 = {
    "DPNFL": {"weights": {"kind": "data"}},
    "AdDPNFL": {"weights": {"kind": "data"}, "server": ADAM},
    "DPFedAvg": {},
    "DPSCAFFOLD": {"local": {**STEPPED, "kind": "scaffold"}},
}
ACCOUNTINGS = {
    "tcdp": "noise.calibration=tcdp",
    "rdp": "privacy.accountants=[rdp, pld, paper]",
    "pld": "privacy.accountants=[pld, rdp, paper]",
}


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=pytest.mark.slow if name != "AdDPNFL" else ()) for name in OF_002],
)
def test_every_method_of_002_has_its_papers_noise_and_the_exact_one_at_one_epsilon(method):
    """DPNFL and AdDPNFL are calibrated by tCDP, the baselines by RDP; with each of the three the
    epsilons of all accountants stand side by side, and what was promised holds.
    """
    around = {
        "data": {"clients": 8, "sizes": {"kind": "power-law"}},
        "selection": {"kind": "uniform", "cohort": 4},
        "local": STEPPED,
        "bounding": STEP,
        "noise": {"kind": "gaussian", "epsilon": 0.3, "delta": 1e-2},
        "privacy": {"accountants": ["pld", "rdp", "paper"]},
        "server": {"kind": "sgd"},
        "rounds": 2,
    }
    stds = {}
    tree = experiment(**{**around, **OF_002[method]}).to_dict()
    for name, override in ACCOUNTINGS.items():
        plan = resolve(Experiment.from_dict(tree, [override]))
        seen = plan.participations(2)
        plan.check_guarantees()
        said = {each.accountant: each for each in reversed(plan.guarantees(2, seen))}
        assert said.keys() == {"pld", "rdp", *privacy.accountants.FORMULAS}
        assert said["pld"].epsilon <= 0.3 * (1 + 1e-6) and said["pld"].kind == "rigorous"
        by = {row["calibrated_by"] for row in plan.report.client_table(seen)}
        assert by == ({"Chen 2024 tCDP", "pld"} if name == "tcdp" else {name})
        stds[name] = plan.mechanism.stds
        by_name = said["Chen 2024 tCDP" if name == "tcdp" else name]
        assert by_name.epsilon == pytest.approx(0.3, rel=3e-3)
    who = stds["pld"] > 0
    assert (stds["rdp"][who] > stds["pld"][who]).all()
    assert (stds["tcdp"][who] >= stds["pld"][who]).all()


OF_SUMS = {
    "000 DP-FedAvg": {"bounding": {"kind": "clip", "bound": 0.5}},
    "001 DP-NormFedAvg": {
        "bounding": {"kind": "normalize", "bound": 0.5},
        "server": {"kind": "momentum", "momentum": 0.8},
    },
    "001, sums of gradients": {
        "bounding": {"kind": "normalize", "bound": 0.5, "scaling": "gradient"}
    },
    "003": {
        "bounding": STEP,
        "selection": {"kind": "privacy_aware", "cohort": 10, "scale": 0.01},
        "local": {"kind": "sgd", "steps": 4, "batch": 32},
    },
}


@pytest.mark.parametrize("method", OF_SUMS)
def test_000_001_and_003_have_their_papers_noise_and_the_exact_one_at_one_epsilon(method):
    """Either way the paper's epsilon and those that truly hold are told, all at one delta."""
    formula = "Xu 2026" if method == "003" else "paper"
    noise = {"kind": "gaussian", "epsilon": 2.0, "delta": 1e-3}
    asked = {"accountants": ["pld", "paper"]}
    said = {}
    for calibration in ("paper", "rigorous"):
        sized = {**noise, "calibration": calibration}
        plan = resolve(experiment(**OF_SUMS[method], noise=sized, privacy=asked))
        plan.check_guarantees()
        guarantees = plan.guarantees(4, plan.participations(4))
        assert {each.delta for each in guarantees if "Theorem 5" not in each.accountant} == {1e-3}
        first = {}
        for each in guarantees:
            first.setdefault(each.accountant, each)
        assert {each.accountant for each in tightest_guarantees(guarantees)} == {"pld"}
        assert first[formula].kind == "paper" and first["pld"].kind == "rigorous"
        said[calibration] = first
    assert said["paper"][formula].epsilon == pytest.approx(2.0, rel=1e-6)
    assert said["paper"]["pld"].epsilon != pytest.approx(2.0, rel=0.01)
    assert 1.99 < said["rigorous"]["pld"].epsilon <= 2.0
    assert said["rigorous"][formula].epsilon != pytest.approx(2.0, rel=0.01)


def test_the_table_of_guarantees_names_who_has_which_noise(tmp_path, caplog):
    noise = {"kind": "gaussian", "epsilon": 0.3, "delta": 1e-2, "calibration": "tcdp"}
    local = {"kind": "sgd", "batch": 60, "steps": 5}
    run(experiment(bounding=STEP, noise=noise, local=local, rounds=1), tmp_path / "out")
    rows = pq.read_table(tmp_path / "out" / "guarantees.parquet")
    assert set(rows["calibrated_by"].to_pylist()) == {"rdp"}  # 180 samples, batches of 60
    assert "Chen 2024 tCDP does not calibrate the noise of 20 of 20 clients" in caplog.text


NOISED = {"kind": "power_of_choice", "cohort": 5, "pool": 20, "loss_bound": 3.0, "loss_std": 4.0}


def exact_losses(plan: Plan, model: np.ndarray, t: int) -> dict[int, float]:
    """Mean loss of every candidate of round t under `model`, samples' losses clipped."""
    chosen = plan.experiment
    shards = Shards.open(plan.shards)
    module = models.build(chosen.model, shards.form(chosen.data.task), chosen.seed)
    models.load(module, torch.tensor(model))
    found = {}
    for client in chosen.selection.exposed(chosen.seed, t, plan.population).tolist():
        x, y, _ = shards.chunk([client], int(shards.sizes[client]))
        each = torch.nn.functional.cross_entropy(
            module(torch.from_numpy(x[0])), torch.from_numpy(y[0]), reduction="none"
        )
        found[client] = each.double().clamp(0, chosen.selection.loss_bound).mean().item()
    return found


def test_noised_losses_choose_and_nothing_exact_of_them_leaves_the_clients(tmp_path):
    """The largest exact losses plus keyed noise choose; no column and no ledger line is exact."""
    selection = {**NOISED, "loss_bound": 2.2}
    coordinator = start_coordinator(tmp_path, selection=selection, measure=["clients"], rounds=3)
    plan = coordinator.plan
    exact = []
    for t in range(3):
        losses = exact_losses(plan, coordinator.state.model, t)
        answers = {
            client: loss + query_noise(plan.noise_seed, t, 4.0, client, query="losses")
            for client, loss in losses.items()
        }
        given = (coordinator.state.model, t, np.array(list(losses)), plan.noise_seed)
        asked = coordinator.pool.losses(*given)
        told = dict(zip(losses, asked.tolist(), strict=True))
        assert told == pytest.approx(answers, rel=1e-6) and max(losses.values()) < 2.2
        exact += losses.values()
        coordinator.round()
        rows = coordinator.record.tables["clients"].arrow().to_pylist()
        took = [row["client"] for row in rows if row["round"] == t]
        assert took == sorted(sorted(answers, key=answers.get)[-5:])
    coordinator.save()
    shown = [coordinator.finish("completed", False)["test_loss"]]
    for name in ("rounds", "clients"):
        for column in pq.read_table(tmp_path / f"{name}.parquet").columns:
            shown += [value for value in column.to_pylist() if isinstance(value, float)]
    assert np.abs(np.array(shown)[:, None] / np.array(exact) - 1).min() > 1e-5
    assert not any(f"{loss:.5f}" in (tmp_path / "ledger.jsonl").read_text() for loss in exact)


CHOICE = {"kind": "power_of_choice", "cohort": 2, "pool": 6}
CHOSEN = {
    "bounding": STEP,
    "noise": {"kind": "gaussian", "epsilon": 2.0, "delta": 1e-3},
    "local": {"kind": "sgd", "steps": 3, "batch": 20},
    "privacy": {"accountants": ["pld", "rdp", "paper"]},
    "data": {"clients": 12},
    "rounds": 4,
    "measure": ["clients"],
    "selection": {**CHOICE, "accounted": "chosen"},
}


def test_noise_for_the_chosen_is_that_of_a_blind_choice_among_the_candidates():
    chosen = experiment(**CHOSEN)
    plan = resolve(chosen)
    blind = np.zeros(12, np.int64)
    candidates = np.zeros(12, np.int64)
    for t in range(4):
        drawn = successive_sample(stream(chosen.seed, Purpose.COHORT, t=t), plan.population, 6)
        blind[drawn[:2]] += 1
        candidates[drawn] += 1
    counts = np.maximum(blind, candidates > 0)
    assert (counts < candidates).any() and (counts > 1).any()
    expected = privacy.calibrate_local_steps(
        samples=plan.population.sizes,
        batch=20,
        steps=3,
        bound=0.5,
        delta=1e-3,
        participations=counts,
        budgets=2.0,
    ).stds
    assert np.array_equal(plan.mechanism.stds, expected)
    assert ((expected > 0) == (candidates > 0)).all()
    more = resolve(experiment(**{**CHOSEN, "selection": CHOICE})).mechanism.stds
    fewer = counts < candidates
    assert (more[fewer] > expected[fewer]).all()


def test_the_truth_counts_all_candidates_and_the_chosen_alone_are_never_rigorous(tmp_path, caplog):
    chosen = experiment(**CHOSEN)
    plan = resolve(chosen)
    result = run(chosen, tmp_path / "out")
    assert "protects" in caplog.text and "as if cohorts were drawn blindly" in caplog.text
    clients = pq.read_table(tmp_path / "out" / "clients.parquet")["client"].to_numpy()
    took_part = np.bincount(clients, minlength=12)
    candidates = np.bincount(np.concatenate(plan.draws(4)), minlength=12)
    said = {each.accountant: each for each in reversed(result.guarantees)}
    for name in ("pld", "rdp"):
        assert said[name].kind == "rigorous"
        assert said[name].epsilon == plan.report.epsilons(name, candidates).max() > 2.0
        alone = said[f"{name} of the chosen"]
        assert alone.kind == "unproven"
        assert alone.epsilon == plan.report.epsilons(name, took_part).max()
        assert any("losses choose, is not counted" in each for each in alone.exclusions)
        assert not any("losses choose" in each for each in said[name].exclusions)
    assert said["Xu 2026 of the chosen"].kind == "paper"
    assert {each["accountant"] for each in result.summary["holds"]} == {"pld"}
    assert result.rounds["epsilon_pld"][-1].as_py() == said["pld"].epsilon
    whole = resolve(experiment(**{**CHOSEN, "selection": CHOICE}))
    assert not whole.of_the_chosen(4, {1: 1})


@pytest.mark.parametrize("placement", ["client", "server"])
def test_noised_losses_are_accounted_for_beside_the_updates_and_calibration_takes_them_off(
    placement, tmp_path
):
    accountants = {"accountants": ["pld", "rdp", "paper"]}
    chosen = experiment(
        selection=NOISED,
        noise={"kind": "gaussian", "epsilon": 9.0, "placement": placement},
        privacy=accountants,
    )
    plan = resolve(chosen)
    z = plan.mechanism.noise_multiplier
    most = max(plan.participations(4).values())
    result = run(chosen, tmp_path / "out")
    mu = math.sqrt(most) * math.hypot(2 / z, 3.0 / 4.0)
    spent = result.guarantees[0].epsilon
    assert 8.99 < spent <= 9.0
    assert spent == pytest.approx(privacy.gaussian_epsilon(mu, 1e-5), rel=1e-6)
    assert plan.sum_std(0, 1.0) == pytest.approx(z)
    exact = resolve(experiment(**{**chosen.to_dict(), "selection": {**NOISED, "loss_std": 0.0}}))
    assert z > 1.02 * exact.mechanism.noise_multiplier
    by = {(each.accountant, each.observer): each for each in result.guarantees}
    if placement == "client":
        # each update has less noise than the sum, each loss what it had
        alone = math.sqrt(most) * math.hypot(2 * math.sqrt(5) / z, 3.0 / 4.0)
        assert by["pld", "every single update"].epsilon == pytest.approx(
            privacy.gaussian_epsilon(alone, 1e-5), rel=1e-6
        )
    for each in result.guarantees:
        assert not any("losses" in left and "local" in left for left in each.exclusions)
        assert "losses of 20 candidates, noised" in str(each.sampling)
        failed = any("the losses of clients" in condition for condition in each.conditions_failed)
        assert failed == (each.kind == "paper")
    lines = (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()
    ledger = [json.loads(line) for line in lines]
    assert {entry["mechanism"] for entry in ledger} == {plan.mechanism.round_digest()}
    assert {entry["loss_std"] for entry in ledger} == {4.0}
    for name in accountants["accountants"]:
        assert ledger[-1]["epsilon"][name] == pytest.approx(by[name, "every aggregate"].epsilon)


@pytest.mark.slow
def test_noised_losses_are_accounted_for_beside_noise_at_local_steps_client_by_client(tmp_path):
    noise = {"kind": "gaussian", "epsilon": {"kind": "uniform", "low": 2.0, "high": 5.0}}
    given = {
        "selection": {**NOISED, "pool": 8, "loss_std": 0.05},
        "bounding": STEP,
        "noise": noise,
        "data": {"clients": 15},
    }
    chosen = experiment(**given, privacy={"accountants": ["pld", "rdp"]})
    plan = resolve(chosen)
    result = run(chosen, tmp_path / "out")
    counts = plan.participations(4)
    exact = {**given, "selection": {**given["selection"], "loss_std": 0.0}}
    quiet = resolve(experiment(**exact, privacy={"accountants": ["pld", "rdp"]}))
    assert plan.mechanism.side_query.std == 0.05 and quiet.mechanism.side_query is None
    for row in pq.read_table(tmp_path / "out" / "guarantees.parquet").to_pylist():
        k = row["client"]
        claimed = row["epsilon_claimed"]
        assert row["participations"] == counts[k]
        assert claimed * 0.995 < row["epsilon_pld"] <= claimed < row["epsilon_rdp"]
        assert plan.mechanism.stds[k] > quiet.mechanism.stds[k]
        mu = 3.0 / (row["samples"] * 0.05) * math.sqrt(counts[k])
        assert 0 < privacy.gaussian_epsilon(mu, 1e-5) < row["epsilon_pld"]
    for each in result.guarantees:
        assert "losses released at each" in str(each.sampling)
        assert "local losses" not in str(each.exclusions)
    assert "local losses" in str(quiet.guarantees(4, counts)[0].exclusions)
    entry = json.loads((tmp_path / "out" / "ledger.jsonl").read_text().splitlines()[-1])
    assert entry["epsilon"]["pld"] == result.guarantees[0].epsilon and entry["loss_std"] == 0.05


def test_a_count_and_losses_of_one_round_have_noise_of_their_own_and_add_up():
    adaptive = {"kind": "quantile_clip", "bound": 0.1}
    plan = resolve(experiment(selection=NOISED, bounding=adaptive))
    counted = resolve(experiment(selection={**NOISED, "loss_std": 0.0}, bounding=adaptive))
    assert (plan.ratio, plan.side_stds) == (counted.ratio, counted.side_stds)
    mu = [each.mechanism.mu("replace_one") for each in (plan, counted)]
    assert mu[0] == pytest.approx(math.hypot(mu[1], 3.0 / 4.0)) and mu[1] == pytest.approx(2.0)


@pytest.mark.slow
def test_the_noise_of_those_who_stay_is_the_sums_when_most_drop_out(tmp_path):
    selection = {"kind": "uniform", "cohort": 20, "dropout": 0.3}
    noise = {"kind": "gaussian", "epsilon": 5.0}
    dropping = experiment(selection=selection, noise=noise, rounds=20)
    plan = resolve(dropping)
    kept = [len(dropping.selection.draw(dropping.seed, t, plan.population)) for t in range(20)]
    assert min(kept) < 20
    assert plan.client_std(0, 1.0) * math.sqrt(min(kept)) == pytest.approx(plan.sum_std(0, 1.0))
    result = run(dropping, tmp_path / "out")
    assert result.rounds["cohort"].to_pylist() == kept
    assert result.rounds["lost"].to_pylist() == [20 - count for count in kept]
    assert result.guarantees[0].epsilon <= 5.0


def test_a_virtual_cohort_leaves_its_noise_on_the_mean_and_says_whose_guarantee_it_is():
    virtual = {"virtual_cohort": 200, "virtual_population": 10_000}
    plan = resolve(experiment(noise={"kind": "gaussian", "multiplier": 2.0, **virtual}))
    assert plan.sum_std(0, 1.0) / 20 == pytest.approx(2.0 / 200)
    assert plan.client_std(0, 1.0) * math.sqrt(20) == pytest.approx(plan.sum_std(0, 1.0))
    assert plan.mechanism.sampling.population == 10_000 and plan.mechanism.sampling.cohort == 200
    found = plan.guarantees(4, {0: 1})
    assert any("stand for 200 of 10000" in each for each in found[0].exclusions)


HIDDEN = ("uniform", "multinomial", "availability")


@pytest.mark.parametrize(
    "memory",
    [{"bounding": {"kind": "alpha_norm_ec", "bound": 1.0}}, {"local": {"kind": "scaffold"}}],
)
@pytest.mark.parametrize("kind", [*HIDDEN, "full", "cyclic"])
def test_a_hidden_cohort_of_clients_with_memory_is_said_not_to_be_proved_to_amplify(kind, memory):
    """What the others remember tells of their own draws, and those of a client's, unless all draw
    on their own. With full and cyclic cohorts nothing is hidden.
    """
    selection = {"kind": kind, **FAMILY[kind].examples[0]}
    plan = resolve(experiment(**memory, selection=selection, privacy={"accountants": ["pld"]}))
    said = any("proved for clients without state" in each for each in plan.mechanism.exclusions)
    assert said == (kind in HIDDEN)


@pytest.mark.parametrize("kind", ["cyclic", "availability", "uniform"])
def test_noise_by_the_printed_formula_is_printed_with_the_epsilon_that_was_asked_for(kind):
    noise = {"kind": "gaussian", "epsilon": 5.0, "calibration": "paper"}
    selection = {"kind": kind, **FAMILY[kind].examples[0]}
    accountants = {"accountants": ["rdp", "paper"]}
    asked = experiment(selection=selection, noise=noise, rounds=12, privacy=accountants)
    plan = resolve(asked)
    printed = plan.guarantees(12, plan.participations(12))[-1]
    assert printed.kind == "paper" and printed.epsilon == pytest.approx(5.0)
    answer = planned_guarantee.planned_budget(asked).answers[-1]
    assert answer.noise_multiplier == pytest.approx(plan.mechanism.noise_multiplier)


class Signed(Weights):
    def of(self, sizes, samples, population):
        return np.full(len(sizes), -3.0)


def test_a_weight_below_zero_counts_by_its_size():
    plan = resolve(experiment(weights={"kind": "test_methods:Signed"}))
    assert plan.weight == 3.0 and plan.sum_std(0, 1.0) == pytest.approx(3.0)  # noise multiplier 1


def test_banded_noise_costs_what_its_clients_participations_do_and_sums_to_less(tmp_path):
    turns = {"selection": {"kind": "cyclic", "period": 5}, "rounds": 40}
    turns["privacy"] = {"accountants": ["pld"]}
    noise = {"kind": "banded_gaussian", "multiplier": 4.0, "bands": 5}
    plan = resolve(experiment(**turns, noise=noise))
    spent = privacy.gaussian_epsilon(2 / 4.0 * math.sqrt(8), 1e-5)
    assert plan.guarantees(40, {0: 8})[0].epsilon == pytest.approx(spent, rel=1e-6)
    curve = plan.curves()["pld"]
    assert len(curve) == 40 and curve[4] == curve[0] and curve[5] > curve[4]
    spread = {}
    for bands in (1, 5):
        banded = {**noise, "bands": bands}
        coordinator = start_coordinator(tmp_path / str(bands), **turns, noise=banded)
        spread[bands] = np.std(sum(coordinator.release(t, np.zeros(7850)) for t in range(40)))
    assert spread[5] < 0.75 * spread[1]
    with pytest.raises(ConfigError, match=r"noise.bands = 6: expected at most 5"):
        resolve(experiment(**turns, noise={**noise, "bands": 6}))


@pytest.mark.parametrize(("sections", "message"), messages("methods").items())
def test_what_does_not_go_together_is_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        resolve(experiment(**yaml.safe_load(f"{{{sections}}}")))


@pytest.mark.slow
def test_an_adaptive_bound_rests_at_its_quantile_when_clients_drop_out(tmp_path):
    adaptive = {"kind": "quantile_clip", "bound": 0.5, "quantile": 0.9, "lr": 0.3}
    noise = {"kind": "gaussian", "multiplier": 0.1}
    sections = {"bounding": adaptive, "noise": noise, "selection": {"cohort": 20, "dropout": 0.5}}
    asked = experiment(**sections, rounds=60, evaluate={"every": 60})
    last = run(asked, tmp_path / "out").rounds.to_pylist()[-1]
    assert last["bound"] < 2 * last["norm_p90"]


@pytest.mark.parametrize("kind", [kind for kind in FAMILY if kind != "privacy_aware"])
def test_every_selection_runs_privately_with_the_accountants_that_a_config_has_by_itself(
    kind, tmp_path
):
    chosen = {"kind": kind, **FAMILY[kind].examples[0]}
    noise = {"kind": "gaussian", "epsilon": 6.0}
    tree = experiment(selection=chosen, rounds=3, noise=noise).to_dict()
    del tree["privacy"], tree["noise"]["placement"]
    result = run(Experiment.from_dict(tree), tmp_path / "out")
    # against an observer who does not see the cohort
    first = {guarantee.accountant: guarantee for guarantee in reversed(result.guarantees)}
    assert first.keys() == {"pld", "rdp", "paper"}
    assert 5.9 < first["pld"].epsilon < 6.0001
    uncovered = kind in ("multinomial", "unbiased", "importance")
    uncovered |= kind in ("random_allocation", "balls_in_bins")
    assert math.isinf(first["rdp"].epsilon) == uncovered
    assert ("not covered by rdp" in first["rdp"].sentence()) == uncovered
    assert np.isinf(result.rounds["epsilon_rdp"].to_numpy()).all() == uncovered
    entry = json.loads((tmp_path / "out" / "ledger.jsonl").read_text().splitlines()[-1])
    assert (entry["epsilon"]["rdp"] == "infinity") == uncovered
    assert entry["epsilon"]["pld"] == pytest.approx(result.rounds["epsilon_pld"][-1].as_py())


def test_noise_is_calibrated_by_the_first_accountant_that_covers_it(tmp_path):
    chosen = {"selection": {"kind": "multinomial", "cohort": 10}, "rounds": 3}
    chosen |= {"noise": {"kind": "gaussian", "epsilon": 6.0}}
    asked = experiment(**chosen, privacy={"accountants": ["rdp", "pld"], "budget": 6.1})
    result = run(asked, tmp_path / "out")
    assert result.summary["status"] == "completed"
    assert result.rounds["epsilon_pld"][-1].as_py() == pytest.approx(6.0, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"bounding": {"kind": "quantile_clip", "bound": 0.5}},
        {"noise": {"virtual_cohort": 40, "virtual_population": 100}},
    ],
)
def test_the_noise_multiplier_of_the_summary_is_the_mechanisms(sections, tmp_path):
    noise = {"kind": "gaussian", "multiplier": 1.5, **sections.get("noise", {})}
    summary = run(experiment(**{**sections, "noise": noise}), tmp_path / "run").summary
    assert summary["noise_multiplier"] == pytest.approx(1.5, rel=1e-12)
