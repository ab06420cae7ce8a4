"""What a run measures beyond its rounds (SPEC sec. 5): each number against its definition."""

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import experiment, messages
from quadratics import stationary
from scipy.optimize import linprog, minimize

from raydpfl import models, run
from raydpfl.data import Shards
from raydpfl.errors import ConfigError
from raydpfl.methods.probes import Probe
from raydpfl.methods.probes.clipping import BoundingProbe, round_columns
from raydpfl.methods.probes.heterogeneity import measure_clients
from raydpfl.methods.probes.trajectory import project_paths
from raydpfl.methods.selection.privacy_aware_solver import solve
from raydpfl.privacy import budget_variance
from raydpfl.simulation.resolution import resolve

QUIET = {"noise": {"kind": "none"}, "bounding": {"kind": "none"}, "server": {"kind": "sgd"}}
SYNTHETIC = {"kind": "synthetic", "clients": 6, "samples": 30, "u": 1.0, "v": 1.0}
SYNTHETIC["sizes"] = {"kind": "spread"}


def path_of(run: Path, d: int) -> np.ndarray:
    """The models of a run, float32 [models, d]."""
    return np.fromfile(run / "trajectory.bin", "<f4").reshape(-1, d)


def heterogeneity_of(*asked, **more) -> dict:
    work = measure_clients(*asked, **more)
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


@pytest.mark.slow
def test_the_trajectory_is_the_model_after_every_round(tmp_path):
    result = run(experiment(measure=["trajectory"]), tmp_path / "out")
    found = path_of(tmp_path / "out", 7850)
    run(experiment(measure=[{"kind": "trajectory", "every": 3}]), tmp_path / "few")
    assert np.array_equal(path_of(tmp_path / "few", 7850), found[::3])
    assert found.shape == (5, 7850)
    assert np.array_equal(found[-1], models.flatten(result.model).numpy())
    steps = np.linalg.norm(np.diff(found.astype(float), axis=0), axis=1)
    # momentum's first step is the update itself
    assert np.allclose(steps[0], result.rounds["update_norm"][0].as_py(), rtol=1e-4)


def test_paths_in_one_plane_keep_all_their_distances_on_common_axes():
    generator = np.random.default_rng(0)
    plane = np.linalg.qr(generator.normal(size=(50, 2)))[0]
    flat = generator.normal(size=(33, 2)) * [3.0, 1.0]
    points = flat @ plane.T + generator.normal(size=50)
    found, marks = project_paths([points[:20], points[20:32]], marks=points[32:])
    whole = np.concatenate([*found, marks])
    assert [len(path) for path in found] == [20, 12] and np.allclose(marks, 0, atol=1e-12)
    for points_of in (whole, flat):
        apart = np.linalg.norm(points_of[:, None] - points_of[None], axis=2)
        assert np.allclose(apart, np.linalg.norm(points[:, None] - points[None], axis=2))
    assert np.argmax(whole[:32].std(0)) == 0


def test_common_axes_are_the_principal_ones_of_all_models_whatever_the_block(monkeypatch):
    """Against the singular vectors of all models in one matrix."""
    generator = np.random.default_rng(1)
    paths = [generator.normal(size=(T, 30)).astype(np.float32) for T in (7, 5)]
    paths[1][2, 4] = np.nan  # a model that a run has lost
    found, marks = project_paths(paths)
    every = np.concatenate(paths).astype(float)
    kept = every[~np.isnan(every).any(axis=1)]
    directions = np.linalg.svd(kept - kept.mean(0), full_matrices=False)[2][:2]
    expected = (kept - paths[0][0]) @ directions.T
    whole = np.concatenate(found)
    assert np.isnan(whole[9]).all() and marks.shape == (0, 2)
    whole = np.delete(whole, 9, axis=0)
    assert np.allclose(np.abs(whole), np.abs(expected))
    assert np.allclose(np.abs(whole[1:] - whole[:-1]), np.abs(expected[1:] - expected[:-1]))
    monkeypatch.setattr("raydpfl.methods.probes.trajectory.BLOCK", 40)
    again = np.concatenate(project_paths(paths)[0])
    assert np.allclose(again, np.concatenate(found), equal_nan=True)


def test_a_path_that_never_moves_has_no_axes():
    found, _ = project_paths([np.ones((4, 3))])
    assert np.array_equal(found[0], np.zeros((4, 2)))


def carried(tmp_path, *measures, **sections):
    """A run with these measures: its rounds, the numbers of its clients, and its summary."""
    out = tmp_path / "out"
    result = run(experiment(measure=[*measures, "clients"], **sections), out)
    clients = pq.read_table(out / "clients.parquet").to_pandas()
    return result.rounds.to_pandas(), clients, result.summary


ALONE = {"data": {"clients": 1}, "selection": {"kind": "full"}}


def test_signal_angles_and_noise_of_every_client_are_those_of_their_definitions(tmp_path):
    bounding = {"kind": "normalize", "bound": 0.5}
    rows, clients, _ = carried(tmp_path, "bounding", bounding=bounding, server={"kind": "sgd"})
    assert np.allclose(clients["bounded_norm"], 0.5)
    # multiplier 1 for 20 clients: each draws std 0.5 / sqrt(20) on 7850 coordinates; the norm's own
    # spread is 0.8 %
    assert np.allclose(clients["noise_norm"], 0.5 / math.sqrt(20) * math.sqrt(7850), rtol=0.05)
    by_round = clients.groupby("round")
    means = by_round[["bounded_norm", "noise_norm"]].mean()
    assert np.allclose(rows["snr"], means["bounded_norm"] / means["noise_norm"])
    assert np.allclose(rows["angle_p50"][1:].astype(float), by_round["angle"].median()[1:])
    assert clients[clients["round"] == 0]["angle"].isna().all()
    assert clients[clients["round"] > 0]["angle"].between(0, 180).all()


def test_a_client_that_failed_is_left_out_of_the_signal():
    columns = {"norm": np.array([1.0, 3.0, np.nan]), "bounded_norm": np.array([1.0, 3.0, 0.0])}
    columns["noise_norm"] = np.array([2.0, 2.0, 2.0])
    assert round_columns(columns, None)["snr"] == 1.0
    assert round_columns({name: each[2:] for name, each in columns.items()}, None)["snr"] is None


def turns_of(run: Path) -> np.ndarray:
    """The angles between the global updates of a run, from its trajectory, in degrees."""
    updates = np.diff(path_of(run, 7850).astype(float), axis=0)
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairwise(updates)]
    return np.degrees(np.arccos(cosines))


def test_angles_are_to_the_last_global_update(tmp_path):
    """Of a single client, without noise or bounding, whose updates are the global ones."""
    _, clients, _ = carried(tmp_path, "bounding", "trajectory", **QUIET, **ALONE)
    assert np.allclose(clients["angle"][1:], turns_of(tmp_path / "out"), atol=0.02)


def test_the_mean_norm_is_over_all_clients_of_all_rounds_and_the_mean_update_has_its_own_angle(
    tmp_path,
):
    """000 Figs 1, 2, 5-11 (the black dot) and sec. 4 (half the mean norm is the bound)."""
    poisson = {"kind": "poisson", "cohort": 6}
    measures = ("bounding", "trajectory")
    rows, clients, summary = carried(tmp_path, *measures, **QUIET, selection=poisson)
    by_round = clients.groupby("round")["norm"]
    assert by_round.size().nunique() > 1  # so that a mean of means would be another number
    assert summary["norm_mean"] == pytest.approx(clients["norm"].mean(), rel=1e-12)
    assert np.allclose(rows["norm_mean"], by_round.mean(), rtol=1e-12)
    angles = rows["update_angle"].astype(float)
    assert np.isnan(angles[0])
    assert np.allclose(angles[1:], turns_of(tmp_path / "out"), atol=0.02)


def test_a_client_that_is_dropped_has_no_part_in_the_mean_norm(tmp_path):
    data = {"kind": "scalar_quadratics", "a": (1, 2, 1e18), "b": (4, 1, -1), "clients": None}
    sections = {"data": data, "model": {"kind": "linear"}, "client": {"on_error": "drop"}}
    selection = {"kind": "full"}
    rows, clients, summary = carried(tmp_path, **QUIET, **sections, selection=selection)
    assert rows["dropped"].tolist() == [1] * 4 and clients["norm"].isna().any()
    assert summary["norm_mean"] == pytest.approx(clients["norm"].mean(), rel=1e-12)


REPEATS = {"kind": "bounding", "repeats": 2}


@pytest.mark.slow
def test_clipping_has_bias_within_where_gradients_are_random(tmp_path):
    local = {"kind": "sgd", "steps": 2, "batch": 2}
    clip = {"kind": "clip", "bound": 0.2}
    rows, _, _ = carried(tmp_path, REPEATS, local=local, bounding=clip)
    assert (rows["bias_within"] > 1e-3).all() and (rows["bias_across"] > 0).all()
    assert rows["alpha_mean"].between(1e-9, 1).all()


def test_the_norm_of_the_expected_update_is_not_that_of_the_mean_of_a_few():
    """Four draws of N(mu, I) on 50 coordinates, ||mu||^2 = 100: the squared norm of their mean is
    112.5 in the mean, that of the expectation 100; the mean over 2,000 clients has std 0.23.
    """
    draw = np.random.default_rng(0)
    updates = math.sqrt(2) + draw.normal(size=(4, 2000, 50))
    sums = torch.from_numpy(updates.sum(0))
    squares = (updates**2).sum((0, 2))
    sent = SimpleNamespace(again=lambda repeats: (sums, squares))
    found = BoundingProbe(repeats=4)._expected_norms(sent)
    assert np.mean(found**2) == pytest.approx(100, abs=1.2)  # 5 of these: 6e-7 of all seeds


class Squares(Probe):
    """The sums of squared norms of one more training and of three."""

    def columns(self, client_noise):
        return ("one", "three")

    def chunk(self, sent):
        return {name: sent.again(count)[1] for name, count in (("one", 1), ("three", 3))}


def test_each_probe_is_given_as_many_trainings_as_it_asks_for(tmp_path):
    local = {"kind": "sgd", "steps": 2, "batch": "full"}
    _, clients, _ = carried(tmp_path, REPEATS, {"kind": "test_measures:Squares"}, local=local)
    assert np.allclose(clients["three"], 3 * clients["one"]) and (clients["one"] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bound"), [("clip", 0.2), ("model_clip", 0.5), ("alpha_norm_ec", 0.2)]
)
def test_with_full_gradients_the_expectation_is_what_is_sent(kind, bound, tmp_path):
    """An update, a model, or a difference to a state: nothing is random."""
    local = {"kind": "sgd", "steps": 2, "batch": "full"}
    bounding = {"kind": kind, "bound": bound}
    rows, clients, _ = carried(tmp_path, REPEATS, local=local, bounding=bounding)
    assert np.allclose(clients["expected_norm"], clients["norm"], rtol=1e-6)
    assert (rows["bias_within"] < 1e-6).all()


def test_the_noise_of_the_server_counts_against_the_sum_of_the_bounded_updates(tmp_path):
    noise = {"kind": "gaussian", "multiplier": 2.0, "placement": "server"}
    bounding = {"kind": "normalize", "bound": 1.0}
    rows, _, _ = carried(tmp_path, "bounding", **ALONE, noise=noise, bounding=bounding)
    assert np.allclose(rows["snr"], 1 / (2 * math.sqrt(7850)), rtol=0.05)


def softmax_loss(w: np.ndarray, shards: Shards, clients: list[int]) -> tuple[float, np.ndarray]:
    """Softmax regression of 60 features and 10 classes, L2 term 0.01: loss by rows, gradient."""
    parameters = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    chunks = [shards.chunk([i], int(shards.sizes[i])) for i in clients]
    x, y = (torch.from_numpy(np.concatenate([chunk[k][0] for chunk in chunks])) for k in (0, 1))
    outputs = x.double() @ parameters[:600].reshape(10, 60).T + parameters[600:]
    loss = torch.nn.functional.cross_entropy(outputs, y) + 0.005 * parameters @ parameters
    loss.backward()
    return loss.item(), parameters.grad.numpy()


def softmax_minimum(shards: Shards, clients: list[int]) -> float:
    options = {"gtol": 1e-7, "ftol": 0.0, "maxiter": 5000, "maxfun": 5000}
    solver = {"method": "L-BFGS-B", "jac": True, "options": options}
    return minimize(softmax_loss, np.zeros(610), args=(shards, clients), **solver).fun


def test_gamma_s_is_the_gap_between_the_joint_and_the_separate_minima(tmp_path):
    data = {**SYNTHETIC, "sizes": {"kind": "balanced"}}
    plan = resolve(experiment(data=data, selection={"kind": "full"}))
    shards = Shards.open(plan.shards)
    module = models.build(plan.experiment.model, shards.form(plan.experiment.data.task), 0)
    model = models.flatten(module).numpy()
    found = heterogeneity_of(module, plan.experiment.data.task, shards, model, weight_decay=0.01)

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


def has_minimum(x: np.ndarray, y: np.ndarray, classes: int) -> bool:
    """Whether no direction raises a margin and lowers none, by a linear program."""
    margins = []
    for row, label in zip(x, y, strict=True):
        for k in set(range(classes)) - {int(label)}:
            one = np.zeros((classes, len(row)))
            one[label] += row
            one[k] -= row
            margins.append(one.ravel())
    rows = np.array(margins)
    found = linprog(-rows.sum(0), A_ub=-rows, b_ub=np.zeros(len(rows)), bounds=(-1, 1))
    return -found.fun < 1e-7


class DrawnLabels:
    """Shards whose rows have labels by chance, of 3 classes."""

    def __init__(self, shards: Shards, seed: int):
        self.shards = shards
        self.seed = seed

    def __getattr__(self, name):
        return getattr(self.shards, name)

    def chunk(self, clients, rows):
        x, _, n = self.shards.chunk(clients, rows)
        drawn = [np.random.default_rng([self.seed, i]).integers(3, size=rows) for i in clients]
        return x, np.array(drawn), n


@pytest.mark.parametrize("features,bias", [(2, True), (3, True), (3, False)])
def test_clients_without_a_minimum_are_left_out_and_counted(features, bias):
    """Of 40 clients without an L2 term a linear program says which these are."""
    data = {"kind": "synthetic", "clients": 40, "features": features, "classes": 3, "samples": 15}
    plan = resolve(experiment(data=data, selection={"kind": "full"}))
    shards = DrawnLabels(Shards.open(plan.shards), features)
    task = plan.experiment.data.task
    module = torch.nn.Linear(features, 3, bias=bias)
    found = heterogeneity_of(module, task, shards, models.flatten(module).numpy())
    exist = []
    for client, n in enumerate(shards.sizes.tolist()):
        x, y, _ = shards.chunk([client], n)
        rows = np.hstack([x[0], np.ones((n, int(bias)))]).astype(float)
        exist.append(has_minimum(rows, y[0], 3))
    rows = found["clients"]
    assert 5 < sum(exist) < 35
    assert [row["gap"] is not None for row in rows] == exist
    assert found["left_out"] == exist.count(False)
    gaps = np.array([row["gap"] for row in rows])[exist].astype(float)
    assert np.isfinite(gaps).all() and gaps.min() > -1e-9
    shares = shards.sizes[exist]
    assert found["gamma_s"] == pytest.approx(float(shares @ gaps / shares.sum()))


@pytest.mark.slow
def test_heterogeneity_without_weight_decay_ends_well_and_is_resumed(tmp_path):
    """Clients with fewer rows than inputs: none has a minimum, and the summary is JSON."""
    asked = experiment(rounds=1, data={"clients": 20}, measure=["heterogeneity"])
    out = tmp_path / "out"
    found = run(asked, out).summary["heterogeneity"]
    assert found["left_out"] == 20 and found["gamma_s"] is None and found["gamma_n"] > 0
    assert pq.read_table(out / "heterogeneity.parquet")["gap"].null_count == 20
    assert run(asked, out, resume=True).summary["heterogeneity"] == found


STEPPED = {
    "data": {"kind": "quadratics", "clients": 8, "dimension": 6, "rank": 3, "variance": 0.3},
    "model": {"kind": "linear", "start": 1.0},
    "selection": {"kind": "full"},
    "local": {"kind": "sgd", "steps": 4, "batch": "full", "lr": 0.1},
}


def rows_of(shards: Shards) -> tuple[np.ndarray, np.ndarray]:
    """All rows of all clients, in float64."""
    every = [shards.chunk([i], int(n)) for i, n in enumerate(shards.sizes)]
    x = np.concatenate([each[0][0] for each in every]).astype(float)
    return x, np.concatenate([each[1][0] for each in every]).astype(float)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_suboptimality_of_quadratics_is_exact(decay, tmp_path):
    """Against least squares, solved in another way, at every model of the trajectory."""
    local = {**STEPPED["local"], "weight_decay": decay}
    sections = {**QUIET, **STEPPED, "local": local, "measure": ["suboptimality", "trajectory"]}
    result = run(experiment(**sections, rounds=6), tmp_path / "out")
    x, y = rows_of(Shards.open(resolve(experiment(**sections)).shards))
    wide = np.concatenate([x / math.sqrt(len(x)), math.sqrt(decay) * np.eye(6)])
    target = np.concatenate([y / math.sqrt(len(x)), np.zeros(6)])
    best = np.linalg.lstsq(wide, target, rcond=None)[0]

    def value(w):
        return 0.5 * np.sum((wide @ w - target) ** 2)

    path = path_of(tmp_path / "out", 6).astype(float)
    gaps = result.rounds["suboptimality"].to_numpy()
    assert gaps == pytest.approx([value(w) - value(best) for w in path[1:]], rel=1e-6, abs=1e-13)
    apart = np.linalg.norm(path - best, axis=1)
    assert result.rounds["distance"].to_numpy() == pytest.approx(apart[1:], rel=1e-9)
    found = result.summary["suboptimality"]
    assert found["optimum"] == pytest.approx(value(best), rel=1e-10)
    assert found["start"] == pytest.approx(value(path[0]) - value(best))
    assert found["start_distance"] == pytest.approx(apart[0])
    assert np.fromfile(tmp_path / "out" / "optimum.bin", "<f8") == pytest.approx(best, abs=1e-9)


def test_where_the_optimum_is_a_plane_the_distance_is_to_its_nearest_point(tmp_path):
    """One client with one row of two features: every w on a line is a minimiser."""
    data = {"kind": "quadratics", "clients": 1, "dimension": 2, "rank": 1}
    sections = {**QUIET, **STEPPED, "data": data, "measure": ["suboptimality", "trajectory"]}
    result = run(experiment(**sections), tmp_path / "out")
    x, y = rows_of(Shards.open(resolve(experiment(**sections)).shards))
    path = path_of(tmp_path / "out", 2).astype(float)
    off = np.abs(path @ x[0] - y[0])
    expected = off / np.linalg.norm(x[0])
    assert result.rounds["distance"].to_numpy() == pytest.approx(expected[1:], rel=1e-6)
    assert result.rounds["suboptimality"].to_numpy() == pytest.approx(off[1:] ** 2 / 2, rel=1e-6)


def test_the_suboptimality_of_softmax_regression_is_that_to_its_minimum(tmp_path):
    sections = {
        **QUIET,
        "data": SYNTHETIC,
        "selection": {"kind": "full"},
        "local": {"kind": "sgd", "steps": 5, "batch": 10, "lr": 0.1, "weight_decay": 0.01},
        "measure": [{"kind": "suboptimality", "every": 2}, "trajectory"],
        "rounds": 5,
    }
    result = run(experiment(**sections), tmp_path / "out")
    shards = Shards.open(resolve(experiment(**sections)).shards)
    best = softmax_minimum(shards, list(range(6)))
    path = path_of(tmp_path / "out", 610).astype(float)
    gaps = [softmax_loss(w, shards, list(range(6)))[0] - best for w in path[1:]]
    found = result.rounds["suboptimality"].to_pylist()
    assert [gap is None for gap in found] == [True, False, True, False, False]
    assert [found[t] for t in (1, 3, 4)] == pytest.approx([gaps[t] for t in (1, 3, 4)], abs=1e-7)
    assert result.summary["suboptimality"]["optimum"] == pytest.approx(best, abs=1e-7)
    optimum = np.fromfile(tmp_path / "out" / "optimum.bin", "<f8")
    assert softmax_loss(optimum, shards, list(range(6)))[0] == pytest.approx(best, abs=1e-7)
    apart = np.linalg.norm(path[5] - optimum)
    assert result.rounds["distance"][4].as_py() == pytest.approx(apart, rel=1e-9)


@pytest.mark.slow
def test_a_resumed_run_has_the_suboptimality_of_the_whole(tmp_path):
    local = {"kind": "sgd", "steps": 5, "batch": 10, "lr": 0.1, "weight_decay": 0.01}
    sections = {"data": SYNTHETIC, "selection": {"kind": "full"}, "local": local}
    asked = experiment(**QUIET, **sections, measure=["suboptimality"])
    whole = run(asked, tmp_path / "whole")
    run(asked, tmp_path / "cut", on_rows=lambda rows: rows[-1]["round"] >= 1)
    resumed = run(asked, tmp_path / "cut", resume=True)
    for name in ("suboptimality", "distance"):
        assert resumed.rounds[name].to_pylist() == whole.rounds[name].to_pylist()
    assert resumed.summary["suboptimality"] == whole.summary["suboptimality"]


EQ_8 = {"kind": "scalar_quadratics", "a": (1, 2, 6), "b": (4, 1, -1), "clients": None}
SCALAR = {
    **QUIET,
    "data": EQ_8,
    "model": {"kind": "linear", "start": 0.3},
    "selection": {"kind": "full"},
    "local": {"kind": "sgd", "steps": 10, "batch": "full", "lr": 0.05},
    "measure": ["stationary"],
}


@pytest.mark.parametrize(
    ("bounding", "sends"),
    [
        ({"kind": "none"}, "update"),
        ({"kind": "clip", "bound": 0.1}, "update"),
        ({"kind": "model_clip", "bound": 0.4}, "model"),
    ],
)
def test_a_scalar_problem_ends_where_the_algorithm_stands_still(bounding, sends, tmp_path):
    """Against the solution in fractions, which the run itself need not reach."""
    sections = {**SCALAR, "bounding": bounding}
    result = run(experiment(**sections, rounds=60), tmp_path / "out")
    found = result.summary["stationary"]
    asked = ((1, 2, 6), (4, 1, -1), 10, 0.05, bounding.get("bound"), sends)
    low, high = stationary(*asked)
    assert (found["exact_low"], found["exact_high"]) == pytest.approx((low, high), abs=1e-9)
    assert found["final_x"] == pytest.approx(found["exact_x"], abs=1e-5)
    assert found["final_x"] == float(models.flatten(result.model)[0])
    assert found["optimum_x"] == pytest.approx(0.0, abs=1e-12)


def test_where_the_algorithm_stands_still_over_an_interval_both_ends_are_given(tmp_path):
    changes = {
        "data": {**EQ_8, "a": (1, 1), "b": (5, -5)},
        "model": {"kind": "linear", "start": 6.0},
        "local": {"kind": "sgd", "steps": 1, "batch": "full", "lr": 0.1},
        "bounding": {"kind": "clip", "bound": 0.01},
    }
    result = run(experiment(**{**SCALAR, **changes}, rounds=2), tmp_path / "out")
    values = result.summary["stationary"]
    assert (values["exact_low"], values["exact_high"]) == pytest.approx((-4.9, 4.9), abs=1e-9)
    assert values["exact_x"] == values["exact_high"]  # it comes from above
    assert values["final_x"] == pytest.approx(6.0 - 2 * 0.01, abs=1e-5)


@pytest.mark.parametrize(("changes", "field"), messages("stationary").items())
def test_no_stationary_point_is_given_where_it_would_be_another_algorithms(changes, field):
    around = {**SCALAR, "bounding": {"kind": "clip", "bound": 1.0}}
    with pytest.raises(ConfigError, match=rf"^{field} = "):
        resolve(experiment(**around | yaml.safe_load(f"{{{changes}}}")))


@pytest.mark.slow
def test_the_table_of_the_selection_is_problem_1_client_by_client(tmp_path):
    """003 Fig. 3: probabilities, sizes, budgets and V_k, against the solver and the formula."""
    sections = {
        "data": {**SYNTHETIC, "clients": 12},
        "selection": {"kind": "privacy_aware", "cohort": 4, "scale": 0.01},
        "bounding": {"kind": "per_sample_clip", "bound": 1.0},
        "noise": {"kind": "gaussian", "epsilon": {"kind": "uniform"}, "delta": 1e-3},
        "measure": ["selection"],
        "rounds": 2,
    }
    asked = experiment(**sections)
    summary = run(asked, tmp_path / "out").summary
    plan = resolve(asked)
    rows = pq.read_table(tmp_path / "out" / "selection.parquet").to_pandas()
    sizes = plan.population.sizes
    assert rows["client"].tolist() == list(range(12))
    assert rows["samples"].tolist() == sizes.tolist()
    assert np.allclose(rows["share"], sizes / sizes.sum())
    budgets = asked.noise.epsilon.draw(asked.seed, 12)
    assert np.array_equal(rows["budget"], budgets)
    batches = np.minimum(10, sizes)
    variance = budget_variance(budgets, 1e-3, batch=batches, samples=sizes)
    assert np.allclose(rows["variance"], variance)
    solved = solve(sizes / sizes.sum(), 0.01 * plan.d * variance).probabilities
    assert np.allclose(rows["probability"], solved, atol=1e-12)
    assert abs(rows["probability"] - rows["share"]).max() > 0.01
    distance = abs(rows["probability"] - rows["share"]).sum() / 2
    assert summary["selection"]["total_variation"] == pytest.approx(distance)
    assert summary["selection"]["support"] == (rows["probability"] > 1e-9).sum()
    mean_of_a_draw = {name: rows["probability"] @ rows[name] for name in ("samples", "budget")}
    assert summary["selection"]["mean_samples"] == pytest.approx(mean_of_a_draw["samples"])
    assert summary["selection"]["mean_budget"] == pytest.approx(mean_of_a_draw["budget"])
    assert rows["participations"].sum() == 2 * 4
    drawn = np.concatenate(plan.draws(2))
    assert rows["participations"].tolist() == np.bincount(drawn, minlength=12).tolist()
    guaranteed = pq.read_table(tmp_path / "out" / "guarantees.parquet").to_pandas()
    stds = rows.set_index("client")["noise_std"][guaranteed["client"]]
    assert np.array_equal(stds, guaranteed["noise_std"])


@pytest.mark.slow
def test_a_selection_without_draws_has_no_probabilities(tmp_path):
    run(experiment(measure=["selection"]), tmp_path / "out")
    rows = pq.read_table(tmp_path / "out" / "selection.parquet")
    for name in ("probability", "budget", "variance", "noise_std"):
        assert rows[name].null_count == 50
    assert sum(rows["participations"].to_pylist()) == 4 * 20


@pytest.mark.slow
def test_a_network_has_no_gamma_s_and_says_so(tmp_path):
    mlp = {"model": {"kind": "mlp", "hidden": [4]}, "rounds": 1, "data": {"clients": 20}}
    result = run(experiment(**mlp, measure=["heterogeneity"]), tmp_path / "out")
    values = result.summary["heterogeneity"]
    assert values["gamma_s"] is None and values["gamma_n"] > 0
    table = pq.read_table(tmp_path / "out" / "heterogeneity.parquet")
    assert table.column_names == ["client", "gradient_gap"]
