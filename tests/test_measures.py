"""What a run measures beyond its rounds (SPEC sec. 5): each number against its definition."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import experiment
from scipy.optimize import minimize

from raydpfl import models, run
from raydpfl.data import Shards
from raydpfl.heterogeneity import of_clients
from raydpfl.measure.trajectory import projection
from raydpfl.plan import Plan
from raydpfl.tracking import Trajectory


def test_measuring_changes_no_bit_of_the_model(tmp_path):
    everything = ["clients", {"kind": "bounding", "repeats": 2}, "trajectory"]
    shas = [
        run(experiment(measure=each), tmp_path / str(k)).summary["model_sha256"]
        for k, each in enumerate(([], everything))
    ]
    assert shas[0] == shas[1]


def test_the_trajectory_is_the_model_after_every_round(tmp_path):
    result = run(experiment(measure=["trajectory"]), tmp_path / "out")
    found = Trajectory.read(tmp_path / "out" / "trajectory.bin", 7850)
    assert found.shape == (5, 7850)
    assert np.array_equal(found[-1], models.flatten(result.model).numpy())
    steps = np.linalg.norm(np.diff(found.astype(float), axis=0), axis=1)
    # momentum's first step is the update itself
    assert np.allclose(steps[0], result.rounds["update_norm"][0].as_py(), rtol=1e-4)


def test_a_plane_trajectory_keeps_its_distances_in_the_projection():
    generator = np.random.default_rng(0)
    plane = np.linalg.qr(generator.normal(size=(50, 2)))[0]
    path = generator.normal(size=(20, 2)) @ plane.T + generator.normal(size=50)
    flat = projection(path)
    assert flat.shape == (20, 2) and np.allclose(flat[0], 0)
    assert np.allclose(np.linalg.norm(flat, axis=1), np.linalg.norm(path - path[0], axis=1))


def test_signal_angles_and_noise_of_every_client_are_those_of_their_definitions(tmp_path):
    sections = {
        "measure": ["bounding", "clients", "trajectory"],
        "bounding": {"kind": "normalize", "bound": 0.5},
        "server": {"kind": "sgd"},
    }
    run(experiment(**sections), tmp_path / "out")
    rows = pq.read_table(tmp_path / "out" / "rounds.parquet").to_pylist()
    clients = pq.read_table(tmp_path / "out" / "clients.parquet").to_pandas()
    assert np.allclose(clients["bounded_norm"], 0.5)
    # multiplier 1 for 20 clients: each draws std 0.5 / sqrt(20) on 7850 coordinates; the norm's own
    # spread is 0.8 %
    assert np.allclose(clients["noise_norm"], 0.5 / math.sqrt(20) * math.sqrt(7850), rtol=0.05)
    for row in rows:
        mine = clients[clients["round"] == row["round"]]
        assert row["snr"] == pytest.approx(mine["bounded_norm"].mean() / mine["noise_norm"].mean())
        if row["round"]:
            assert row["angle_p50"] == pytest.approx(mine["angle"].median())
    assert clients[clients["round"] == 0]["angle"].isna().all()
    assert clients[clients["round"] > 0]["angle"].between(0, 180).all()


def test_angles_are_to_the_last_global_update(tmp_path):
    """Without noise or bounding, in full participation: the mean of the next round's updates is the
    next global update, known from the trajectory.
    """
    sections = {
        "data": {"clients": 1},
        "selection": {"kind": "full"},
        "bounding": {"kind": "none"},
        "noise": {"kind": "none"},
        "server": {"kind": "sgd"},
        "measure": ["bounding", "clients", "trajectory"],
    }
    run(experiment(**sections), tmp_path / "out")
    updates = np.diff(
        Trajectory.read(tmp_path / "out" / "trajectory.bin", 7850).astype(float), axis=0
    )
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairwise(updates)]
    angles = pq.read_table(tmp_path / "out" / "clients.parquet")["angle"].to_numpy()[1:]
    assert np.allclose(angles, np.degrees(np.arccos(cosines)), atol=0.02)


def test_the_mean_norm_is_over_all_clients_of_all_rounds_and_the_mean_update_has_its_own_angle(
    tmp_path,
):
    """000 Figs 1, 2, 5-11 (the black dot) and sec. 4 (half the mean norm is the bound)."""
    sections = {
        "selection": {"kind": "poisson", "cohort": 6},
        "bounding": {"kind": "none"},
        "noise": {"kind": "none"},
        "server": {"kind": "sgd"},
        "measure": ["bounding", "clients", "trajectory"],
    }
    result = run(experiment(**sections), tmp_path / "out")
    clients = pq.read_table(tmp_path / "out" / "clients.parquet").to_pandas()
    sizes = clients.groupby("round").size()
    assert sizes.nunique() > 1  # so that a mean of means would be another number
    assert result.summary["norm_mean"] == pytest.approx(clients["norm"].mean(), rel=1e-12)
    by_round = clients.groupby("round")["norm"].mean().to_numpy()
    assert np.allclose(result.rounds["norm_mean"].to_numpy(), by_round, rtol=1e-12)
    path = Trajectory.read(tmp_path / "out" / "trajectory.bin", 7850).astype(float)
    updates = np.diff(path, axis=0)
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairwise(updates)]
    angles = result.rounds["update_angle"].to_pylist()
    assert angles[0] is None
    assert np.allclose(angles[1:], np.degrees(np.arccos(cosines)), atol=0.02)


def test_a_client_that_is_dropped_has_no_part_in_the_mean_norm(tmp_path):
    sections = {
        "data": {"kind": "scalar_quadratics", "a": (1, 2, 1e18), "b": (4, 1, -1), "clients": None},
        "model": {"kind": "linear"},
        "client": {"on_error": "drop"},
        "bounding": {"kind": "none"},
        "noise": {"kind": "none"},
        "selection": {"kind": "full"},
        "measure": ["clients"],
    }
    result = run(experiment(**sections), tmp_path / "out")
    assert result.rounds["dropped"].to_pylist() == [1] * 4
    norms = pq.read_table(tmp_path / "out" / "clients.parquet")["norm"].to_numpy()
    assert np.isnan(norms).any()
    assert result.summary["norm_mean"] == pytest.approx(np.nanmean(norms), rel=1e-12)


def test_with_full_gradients_the_expected_update_is_the_update_and_clipping_has_no_bias_within(
    tmp_path,
):
    sections = {
        "local": {"kind": "sgd", "steps": 2, "batch": "full"},
        "bounding": {"kind": "clip", "bound": 0.2},
        "measure": [{"kind": "bounding", "repeats": 2}],
    }
    rows = run(experiment(**sections), tmp_path / "full").rounds.to_pylist()
    assert all(row["bias_within"] < 1e-6 for row in rows)
    sections["local"] = {"kind": "sgd", "steps": 2, "batch": 2}
    rows = run(experiment(**sections), tmp_path / "few").rounds.to_pylist()
    assert all(row["bias_within"] > 1e-3 for row in rows)
    assert all(0 < row["alpha_mean"] <= 1 and row["bias_across"] > 0 for row in rows)


@pytest.mark.parametrize(
    "bounding", [{"kind": "model_clip", "bound": 0.5}, {"kind": "alpha_norm_ec", "bound": 0.2}]
)
def test_the_expectation_is_of_what_is_sent_be_it_a_model_or_a_difference_to_what_is_remembered(
    bounding, tmp_path
):
    """With full gradients nothing is random, so that it is what is sent."""
    sections = {
        "local": {"kind": "sgd", "steps": 2, "batch": "full"},
        "bounding": bounding,
        "measure": [{"kind": "bounding", "repeats": 2}, "clients"],
    }
    rows = run(experiment(**sections), tmp_path / "out").rounds.to_pylist()
    clients = pq.read_table(tmp_path / "out" / "clients.parquet")
    assert np.allclose(clients["expected_norm"].to_numpy(), clients["norm"].to_numpy(), rtol=1e-6)
    assert all(row["bias_within"] < 1e-6 for row in rows)


def test_the_noise_of_the_server_counts_against_the_sum_of_the_bounded_updates(tmp_path):
    sections = {
        "bounding": {"kind": "normalize", "bound": 1.0},
        "measure": ["bounding"],
        "data": {"clients": 1},
        "selection": {"kind": "full"},
        "noise": {"kind": "gaussian", "multiplier": 2.0, "placement": "server"},
    }
    rows = run(experiment(**sections), tmp_path / "out").rounds.to_pylist()
    assert all(row["snr"] == pytest.approx(1 / (2 * math.sqrt(7850)), rel=0.05) for row in rows)


def softmax_loss(w: np.ndarray, shards: Shards, clients: list[int]) -> tuple[float, np.ndarray]:
    """The plain formula, in numpy, and its gradient: softmax regression of 60 features and 10
    classes with an L2 term of 0.01, weighted by rows.
    """
    weight = w[: 60 * 10].reshape(10, 60)
    bias = w[600:]
    total = 0.005 * w @ w
    gradient = 0.01 * w
    rows = sum(int(shards.sizes[i]) for i in clients)
    for i in clients:
        x, y, n = shards.lane([i], int(shards.sizes[i]))
        x = x[0].astype(float)
        y = y[0]
        z = x @ weight.T + bias
        z -= z.max(1, keepdims=True)
        log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
        total += -log_p[np.arange(n[0]), y].sum() / rows
        g = (np.exp(log_p) - np.eye(10)[y]) / rows
        gradient = gradient + np.concatenate([(g.T @ x).ravel(), g.sum(0)])
    return total, gradient


def softmax_minimum(shards: Shards, clients: list[int]) -> float:
    found = minimize(
        softmax_loss,
        np.zeros(610),
        args=(shards, clients),
        jac=True,
        method="L-BFGS-B",
        options={"gtol": 1e-7, "ftol": 0.0, "maxiter": 5000, "maxfun": 5000},
    )
    return found.fun


def test_gamma_s_is_the_gap_between_the_joint_and_the_separate_minima(tmp_path):
    data = {
        "kind": "synthetic",
        "clients": 6,
        "samples": 30,
        "sizes": {"kind": "balanced"},
        "u": 1.0,
        "v": 1.0,
    }
    plan = Plan.make(experiment(data=data, selection={"kind": "full"}))
    shards = Shards.open(plan.shards)
    module = models.build(plan.experiment.model, shards.shape, shards.classes, 0)
    model = models.flatten(module).numpy()
    found = of_clients(module, shards, model, weight_decay=0.01)

    everyone = list(range(6))
    shares = np.asarray(shards.sizes) / shards.sizes.sum()
    best = softmax_minimum(shards, everyone)
    alone = [softmax_minimum(shards, [i]) for i in everyone]
    assert found["optimum"] == pytest.approx(best, abs=1e-6)
    assert found["gamma_s"] == pytest.approx(best - shares @ alone, abs=1e-5)
    gradients = [softmax_loss(model.astype(float), shards, [i])[1] for i in everyone]
    mean = softmax_loss(model.astype(float), shards, everyone)[1]
    gaps = [np.linalg.norm(g - mean) for g in gradients]
    assert found["gamma_n"] == pytest.approx(math.sqrt(shares @ np.square(gaps)), rel=1e-5)
    rows = found["clients"]
    assert [row["client"] for row in rows] == everyone
    assert [row["optimum"] for row in rows] == pytest.approx(alone, abs=1e-5)
    assert [row["gradient_gap"] for row in rows] == pytest.approx(gaps, rel=1e-5)
    assert shares @ [row["gap"] for row in rows] == pytest.approx(found["gamma_s"])
    assert max(row["gap"] for row in rows) == found["gap"]["max"]


@pytest.mark.slow
def test_clients_with_the_same_data_are_not_heterogeneous(tmp_path):
    plan = Plan.make(experiment(data={"clients": 1}, selection={"kind": "full"}))
    shards = Shards.open(plan.shards)
    module = models.build(plan.experiment.model, shards.shape, shards.classes, 0)
    found = of_clients(module, shards, models.flatten(module).numpy(), weight_decay=0.1)
    assert found["gamma_n"] == pytest.approx(0, abs=1e-9) and found["gamma_s"] == pytest.approx(
        0, abs=1e-9
    )


def test_a_network_has_no_gamma_s_and_says_so(tmp_path):
    result = run(
        experiment(
            model={"kind": "mlp", "hidden": [4]},
            rounds=1,
            data={"clients": 20},
            measure=["heterogeneity"],
        ),
        tmp_path / "out",
    )
    assert (
        result.summary["heterogeneity"]["gamma_s"] is None
        and result.summary["heterogeneity"]["gamma_n"] > 0
    )
    assert pq.read_table(tmp_path / "out" / "heterogeneity.parquet").column_names == [
        "client",
        "gradient_gap",
    ]


@pytest.mark.parametrize(
    "values", [[{"kind": "clients", "repeats": 2}], [{"kind": "bounding", "repeats": 1}]]
)
def test_repeats_are_of_the_measure_they_are_for_and_more_than_one(values):
    from raydpfl.errors import ConfigError

    with pytest.raises(ConfigError, match=r"measure\.repeats"):
        experiment(measure=values)
