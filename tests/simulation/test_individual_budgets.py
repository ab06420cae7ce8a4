"""Clients that leave by budgets of their own, in a run."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import experiment, refusal

from raydpfl import privacy, run
from raydpfl.check.runs import run_plan
from raydpfl.errors import ConfigError
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.planned_guarantee import planned_budget
from raydpfl.simulation.resolution import resolve

FEW = {
    "rounds": 5,
    "local": {"steps": 3, "batch": 4},
    "measure": ["clients"],
    "privacy": {"individual": {"kind": "uniform", "low": 1.0, "high": 7.0}},
}


def test_a_client_leaves_before_the_lengths_of_what_it_sends_exceed_its_budget(tmp_path):
    asked = experiment(**FEW, bounding={"bound": 0.4}, weights={"kind": "data"})
    plan = resolve(asked)
    result = run(asked, tmp_path / "run")
    clients = pq.read_table(tmp_path / "run" / "clients.parquet").to_pylist()
    weights = plan.weights(np.arange(50))
    squares, left = np.zeros(50), np.zeros(50, bool)
    for row in clients:  # in the order of rounds
        k = row["client"]
        most = min(1.0, 0.4 / row["norm"])
        std = plan.sum_std(row["round"], 0.4)
        more = squares[k] + (2 * row["norm"] * most * weights[k] / std) ** 2
        over = privacy.gaussian_epsilon(np.sqrt(more), 1e-5) > plan.individual.epsilons[k]
        left[k] |= over
        squares[k] = squares[k] if left[k] else more
        assert row["factor"] == (0.0 if left[k] else pytest.approx(most))
    assert 0 < left.sum() < 50
    said = result.summary["individual"]
    assert said["left"] == left.sum()
    spent = privacy.gaussian_epsilon(np.sqrt(squares), 1e-5)
    assert said["epsilon_spent"][::4] == pytest.approx([spent.min(), spent.max()])
    own = [one for one in result.guarantees if "individual budgets" in str(one.sampling)]
    assert [one.accountant for one in own] == ["pld", "pld"]
    assert own[0].epsilon == pytest.approx(plan.individual.epsilons.max())
    # who leaves has a memory, by which nothing is known to be amplified
    assert result.guarantees[0].kind == "unproven"


@pytest.mark.slow
def test_a_round_that_nobody_is_in_spends_nothing(tmp_path):
    asked = experiment(
        rounds=6, selection={"kind": "poisson", "cohort": 1}, privacy={"individual": 50.0},
        noise={"kind": "gaussian", "multiplier": 1.0, "placement": "server"},
    )  # fmt: skip
    result = run(asked, tmp_path / "run")
    assert 0 in result.rounds["cohort"].to_pylist()


@pytest.mark.slow
def test_budgets_that_nobody_reaches_change_no_bit(tmp_path):
    noise = {"kind": "gaussian", "multiplier": 1.0, "common": True}
    hashes = {
        run(experiment(noise=noise, privacy=spent), tmp_path / f"{i}").summary["model_sha256"]
        for i, spent in enumerate([{}, {"individual": 1e4}])
    }
    assert len(hashes) == 1


def test_what_clients_had_spent_cannot_be_lost_by_fresh_noise(tmp_path):
    plan = resolve(experiment(**FEW))
    run_plan(plan, tmp_path, stop_round=2)
    with pytest.raises(ConfigError, match=r"none with privacy\.individual"):
        Coordinator(plan, str(tmp_path), resume=True, fresh_noise=True).start()


@pytest.mark.parametrize("validation", [0.0, {"clients": 0.2}])
@pytest.mark.parametrize("at_steps", [True, False])
def test_a_budget_is_looked_up_by_the_id_that_the_data_have(at_steps, validation, tmp_path):
    ids = np.repeat(np.arange(12), np.arange(1, 13))  # client k has k + 1 rows, and epsilon k + 1
    columns = {"a": np.arange(78.0), "label": np.arange(78) % 2, "user": list(map(str, ids))}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    rows = "".join(f"{k},{k + 1}\n" for k in range(12))
    (tmp_path / "budgets.csv").write_text(f"user,epsilon\n{rows}")
    budgets = {"kind": "column", "path": "budgets.csv", "client": "user"}
    sections = {
        "data": {
            "kind": "table", "train": "t.parquet", "test": "t.parquet", "x": "a",
            "client": "user", "partition": {"kind": "natural", "least": 3},
        },
        "evaluate": {"validation": validation},
        "privacy": {"individual": budgets},
        "selection": {"kind": "uniform", "cohort": 4},
    }  # fmt: skip
    if at_steps:
        sections |= {
            "privacy": {},
            "selection": {"kind": "privacy_aware", "cohort": 4},
            "bounding": {"kind": "per_sample_clip", "bound": 1.0},
            "noise": {"kind": "gaussian", "delta": 1e-3, "epsilon": budgets},
        }
    plan = resolve(experiment(**sections), tmp_path)
    epsilons = plan.mechanism.claims if at_steps else plan.individual.epsilons
    assert len(epsilons) == (8 if validation else 10)
    assert epsilons.tolist() == plan.population.sizes.tolist()
    (tmp_path / "budgets.csv").write_text(f"user,epsilon\n{rows.replace('5,6', 'x,6')}")
    with refusal("client = 'user': expected ids of all clients; 1 lack a row, the first '5'"):
        resolve(experiment(**sections), tmp_path)


def test_a_poisson_cohort_stays_amplified_and_a_plan_says_what_budgets_hold():
    sections = {**FEW, "selection": {"kind": "poisson", "cohort": 20}}
    budget = planned_budget(experiment(**sections))
    assert budget.guarantees[0].kind == "rigorous"
    assert "cohort hidden" in str(budget.guarantees[0].sampling)
    assert any("individual budgets" in note for note in budget.notes)


def test_the_budget_command_shows_own_budgets_in_its_table_and_its_sentence(tmp_path, typed):
    asked = experiment(privacy={"individual": 4.0, "accountants": ["pld"]}).to_yaml()
    (tmp_path / "c.yaml").write_text(asked)
    code, said, _ = typed("budget", tmp_path / "c.yaml")
    rows = [" ".join(line.split()) for line in said.splitlines()]
    assert code == 0 and "every aggregate, cohort known, own budgets 4" in rows
    assert "Epsilon 4 at delta 1e-05, by its whole" in said.split("\n\n")[-1]
    amplified = "a hidden cohort amplifies"
    for one in planned_budget(experiment(privacy={"individual": 4.0})).guarantees:
        knows = "cohort known" in one.sampling.knows
        assert knows == (amplified not in one.sentence().partition("Not accounted for")[2])
