"""The bounds of the papers' convergence theorems, against the formulas in fractions of a problem
whose constants are known: f_i(x) = 1/2 a_i (x - o_i)^2, one number, a sample a client.
"""

import math

import numpy as np
import pytest
import yaml
from conftest import experiment, messages

from raydpfl import run
from raydpfl.data import Shards
from raydpfl.errors import ConfigError
from raydpfl.methods.probes import convergence_bound
from raydpfl.methods.probes.client_optima import linear
from raydpfl.simulation.resolution import resolve

OPTIMA, L, MU, C, START = (3.0, 1.0, -1.0, -2.0), 4.0, 0.5, 30.0, 2.0
FREE = {
    "data": {"kind": "scalar_quadratics", "a": [1, 1, 1, 2], "b": [3, 1, -1, -4]},
    "model": {"kind": "linear", "start": START},
    "bounding": {"kind": "per_sample_clip", "bound": C},
    "server": {"kind": "sgd"},
    "rounds": 9,
    "client": {"backend": "loop"},
}
LOCAL = {"kind": "sgd", "steps": 3, "batch": "full"}
CHEN = {
    **FREE,
    "selection": {"kind": "uniform", "cohort": 2},
    "weights": {"kind": "data"},
    "noise": {"kind": "gaussian", "std": 0.5, "delta": 1e-3, "common": True},
}
XU = {
    **FREE,
    "data": {"kind": "quadratics", "clients": 4, "dimension": 1, "rank": 100, "variance": 0.01},
    "selection": {"kind": "privacy_aware", "cohort": 2, "scale": 1e5},
    "noise": {
        "kind": "gaussian",
        "epsilon": {"kind": "uniform", "low": 0.5, "high": 5.0},
        "delta": 1e-3,
        "common": True,
        "calibration": "paper",
    },
}


def bound(theorem: str) -> dict:
    probe = {"kind": "convergence_bound", "theorem": theorem, "smoothness": L, "convexity": MU}
    rate = {"schedule": "inverse", "lr_period": 128, "lr": 1 / (4 * L * 3)}
    if theorem == "chen_2024_theorem2":
        rate = {"lr": 1 / (201 * 3 * L)}
    if theorem == "xu_2026_theorem1":
        rate = {"schedule": "inverse", "lr_period": 5, "lr": 0.5, "steps": 1}
    if theorem == "xu_2026_theorem2":
        rate = {"lr": 1 / 3, "steps": 1}
    around = CHEN if theorem.startswith("chen") else XU
    return {**around, "local": {**LOCAL, **rate}, "measure": [probe, "trajectory"]}


CURVED, BEST = np.array([1, 1, 1, 4]), (3.0 + 1.0 - 1.0 - 8.0) / 7


def f(x: float) -> float:
    return np.mean(0.5 * CURVED * np.subtract(x, OPTIMA) ** 2)


def slopes(x: float) -> np.ndarray:
    """Of every client."""
    return CURVED * np.subtract(x, OPTIMA)


@pytest.mark.parametrize("theorem", ["chen_2024_theorem1", "chen_2024_theorem2"])
def test_the_bounds_of_002_are_those_of_its_formulas(theorem, tmp_path):
    result = run(experiment(**bound(theorem)), tmp_path / "out")
    models = np.fromfile(tmp_path / "out" / "trajectory.bin", "<f4")[1:].tolist()
    rows = result.rounds.to_pylist()
    ratio, noise, q = 4 / 2, 0.5**2, 3
    squares = C**2 + noise
    gamma_s = f(BEST)  # every client's minimum is 0
    for row, x in zip(rows, models, strict=True):
        if theorem == "chen_2024_theorem1":
            rounds = row["round"] + 1
            h = 40 * (C**2 + noise + 4 * q * C**2) + (8 * L * ratio + 16 * L) * gamma_s
            h += 4 * ratio * noise + MU / L * squares
            first = 2 * L / MU**2 * h + 8 * L**2 / MU * (START - BEST) ** 2
            expected, error = first / (16 * L / MU + rounds), f(x) - f(BEST)
        else:
            lr = 1 / (201 * 3 * L)
            upsilon = lr * q / 2 - 15 * (lr * q) ** 3 * L**2 - 90 * ratio * (lr * q) ** 4 * L**3
            upsilon -= ratio * (lr * q) ** 2 * L
            gaps = [np.var(slopes(w)) for w in (START, BEST)]
            spread = (1 + ratio * q + ratio) * lr * squares + (2 * ratio + 1) * lr * q * max(gaps)
            expected = (f(START) - f(BEST)) / (9 * upsilon) + spread / upsilon
            error = np.mean(slopes(x)) ** 2
        assert row["theorem_bound"] == pytest.approx(expected, rel=1e-6)
        assert row["theorem_error"] == pytest.approx(error, rel=1e-4, abs=1e-9)
        assert row["theorem_ratio"] == pytest.approx(error / expected, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("theorem", ["xu_2026_theorem1", "xu_2026_theorem2"])
def test_the_bounds_of_003_are_those_of_its_formulas(theorem, tmp_path):
    asked = experiment(**bound(theorem))
    plan = resolve(asked)
    result = run(asked, tmp_path / "out")
    last = result.rounds.to_pylist()[-1]
    x = float(np.fromfile(tmp_path / "out" / "trajectory.bin", "<f4")[-1])
    rows, targets, _ = Shards.open(plan.shards).chunk(range(4), 100)
    curved = np.mean(rows[:, :, 0].astype(float) ** 2, axis=1)
    pulled = np.mean(rows[:, :, 0].astype(float) * targets, axis=1)
    best = pulled.sum() / curved.sum()
    start = curved.mean() / 2 * (START - best) ** 2
    budgets = asked.noise.epsilon.draw(asked.seed, 4)
    costs = [8 * math.log(math.e + epsilon / 1e-3) / (100 * epsilon) ** 2 for epsilon in budgets]
    p = plan.experiment.selection.probabilities(plan.population)
    g = np.abs(p - 0.25).sum()
    assert g > 0.1
    privacy = p**2 @ costs
    biased = float(p @ pulled / (p @ curved))

    def squared(free: float) -> float:
        beta, gamma, rounds = 2.5, 4, 9
        z = 4.5 * L * free * gamma * (START - biased) ** 2 + gamma * start
        z += (1 + 9 * free) / 2 * beta**2 * rounds * L / (gamma + rounds) * C**2
        other = g + math.sqrt((1 + 1 / free) * g**2 + (1 + 9 * free) * privacy)
        other *= math.sqrt(2 * L) * beta * rounds * C / (2 * (gamma + rounds))
        return (math.sqrt(z / (gamma + rounds)) + other) ** 2

    error = curved.mean() / 2 * (x - best) ** 2
    if theorem == "xu_2026_theorem1":
        assert result.rounds["theorem_bound"].null_count == 8
        expected = min(squared(10.0 ** (k / 1000)) for k in range(-6000, 6001))
    else:
        root = math.sqrt(g**2 + 2 * math.sqrt(9) * L * privacy)
        expected = (C / 2 * (g + root) + math.sqrt(start / 3 + L * C**2 / 6)) ** 2
        error *= 2 * curved.mean()
    assert last["theorem_bound"] == pytest.approx(expected, rel=1e-4)
    assert last["theorem_error"] == pytest.approx(error, rel=1e-4)


def test_theorem_1_of_003_tends_to_corollary_1(tmp_path):
    """eq. 21, with the last term of Theorem 1 for T without end, where no gradient is clipped."""
    plan = resolve(experiment(**bound("xu_2026_theorem1")))
    problem = plan.problem(Shards.open(plan.shards))
    losses = linear(problem.module, problem.task, problem.shards, 0.0)
    of = convergence_bound.BoundConstants(problem, losses)
    g = convergence_bound.GAMMAS
    roots = np.sqrt((1 + 1 / g) * of.selection**2 + (1 + 9 * g) * of.privacy)
    limit = L * 2.5**2 * C**2 / 2 * np.min(of.selection + roots) ** 2
    values = [convergence_bound.xu_theorem1(of, L, 10**k) for k in (9, 12, 15)]
    assert values[0] > values[1] > values[2] > limit
    assert values[2] == pytest.approx(limit, rel=1e-5)


def test_there_is_no_bound_where_a_gradient_is_longer_than_its_clip(tmp_path):
    sections = bound("chen_2024_theorem1")
    sections["bounding"] = {**sections["bounding"], "bound": 14.0}  # the fourth begins at 4 (2 + 2)
    rows = run(experiment(**sections), tmp_path / "out").rounds.to_pylist()
    assert rows[0]["theorem_bound"] is rows[0]["theorem_error"] is None


@pytest.mark.slow
def test_a_resumed_run_has_the_bounds_of_the_whole(tmp_path):
    sections = bound("chen_2024_theorem1")
    whole = run(experiment(**sections), tmp_path / "whole")
    run(experiment(**{**sections, "rounds": 4}), tmp_path / "part")
    resumed = run(experiment(**sections), tmp_path / "part", resume=True)
    for name in convergence_bound.COLUMNS:
        assert resumed.rounds[name].equals(whole.rounds[name])


@pytest.mark.parametrize(("changes", "message"), messages("bounds on convergence").items())
def test_a_run_of_which_a_theorem_says_nothing_is_refused(changes, message):
    theorem, _, sections = changes.partition(" ")
    merged = dict(bound(theorem))
    for name, value in yaml.safe_load(f"{{{sections}}}").items():
        before = merged[name][0] if name == "measure" else merged[name]
        changed = value if "kind" in value else {**before, **value}
        merged[name] = [changed] if name == "measure" else changed
    with pytest.raises(ConfigError, match=message):
        resolve(experiment(**merged))
