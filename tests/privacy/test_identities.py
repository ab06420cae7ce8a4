"""Methods that are one and the same in some setting, as the papers or their formulas say, compared
by the bits of their models.

Noise that is drawn for one run and not for another would tell them apart, so the runs of a pair
have common noise (`noise.common`).
"""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import experiment
from plain_loop import gradient_of
from quadratics import stationary

from raydpfl import models, run
from raydpfl.data import Shards
from raydpfl.methods.weights import FAMILY
from raydpfl.simulation.resolution import resolve

NONE = {"kind": "none"}
STEP = {"kind": "per_sample_clip", "bound": 0.5}


def sha(sections, folder) -> str:
    return run(experiment(**sections), folder).summary["model_sha256"]


# ---- 002: DPNFL and DPFedAvg ----

BALANCED = {
    "data": {"clients": 10, "partition": {"kind": "iid"}, "sizes": {"kind": "balanced"}},
    "selection": {"kind": "uniform", "cohort": 4},
    "local": {"kind": "sgd", "steps": 3, "batch": 5, "lr": 0.1, "schedule": "inverse_sqrt"},
    "bounding": STEP,
    "noise": {"kind": "gaussian", "epsilon": 1.0, "delta": 1e-3, "common": True},
    "privacy": {"accountants": ["pld"]},
    "server": {"kind": "sgd"},
}


@pytest.mark.slow
def test_dpnfl_is_dpfedavg_where_clients_have_as_many_samples_and_accounting_is_equal(tmp_path):
    """002 Alg. 1: its weights (N/r) p_i are 1/r there."""
    dpnfl = {**BALANCED, "weights": {"kind": "data"}}
    one, other = (resolve(experiment(**each)) for each in (dpnfl, BALANCED))
    assert len(set(one.population.sizes.tolist())) == 1
    assert np.array_equal(one.mechanism.stds, other.mechanism.stds)
    assert sha(dpnfl, tmp_path / "dpnfl") == sha(BALANCED, tmp_path / "dpfedavg")
    unequal = {**BALANCED, "data": {"clients": 10, "sizes": {"kind": "power-law"}}}
    weighted = {**unequal, "weights": {"kind": "data"}}
    assert sha(weighted, tmp_path / "weighted") != sha(unequal, tmp_path / "plain")


@pytest.mark.parametrize("clients", [7, 10, 49, 100, 1920])
def test_the_weights_of_equal_clients_are_exactly_one(clients):
    for samples in range(1, 700):
        sizes = np.full(clients, samples)
        assert (FAMILY["data"]().of(sizes, samples * clients, clients) == 1.0).all()


# ---- 002 Fig. 5: FedAvg with stale clients ----


NOISY = {"kind": "gaussian", "multiplier": 1.0, "common": True}


def stale(population: int, cohort: int, noise) -> list[dict]:
    """The sections of uniform, and of stale with the server's rate times N/r."""
    around = {"data": {"clients": population}, "noise": noise, "rounds": 6}
    around |= {"bounding": NONE} if noise == NONE else {}
    rates = {"uniform": 0.7, "fedavg_stale": 0.7 * population / cohort}
    return [
        around
        | {"selection": {"kind": kind, "cohort": cohort}, "server": {"kind": "sgd", "lr": rate}}
        for kind, rate in rates.items()
    ]


@pytest.mark.parametrize("noise", [NONE, NOISY])
def test_stale_clients_only_slow_the_server_down(noise, tmp_path):
    """The divisor is N instead of r. Where N/r is a power of two the server's rate takes that back
    without rounding, so that the bits are the same.
    """
    uniform, left = stale(40, 10, noise)
    assert sha(uniform, tmp_path / "uniform") == sha(left, tmp_path / "stale")


def test_stale_clients_differ_by_a_rounding_where_n_over_r_is_no_power_of_two(tmp_path):
    """(S / N) (eta N/r) and (S / r) eta are rounded twice each in float64. A model in float32 has
    another last bit where that falls on the boundary of two, and the rounds after carry it on.
    """
    found = [
        models.flatten(run(experiment(**each), tmp_path / str(k)).model)
        for k, each in enumerate(stale(50, 7, NONE))
    ]
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-7)


# ---- 000 and 001: clipping and normalising ----


def clipped_and_normalized(bound: float, folder, noise=NONE, scaling: str = "update") -> list[str]:
    """The models by either bounding, and that every client is clipped at the bound of 0.01."""
    found = []
    for kind in ("clip", "normalize"):
        bounding = {"kind": kind, "bound": bound, "scaling": scaling}
        result = run(experiment(bounding=bounding, noise=noise), folder / kind)
        assert bound > 0.01 or result.rounds["clipped"].to_pylist() == [1.0] * 4
        found.append(result.summary["model_sha256"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["update", "gradient"])
@pytest.mark.parametrize("noise", [NONE, NOISY])
def test_clipping_is_normalising_where_every_client_is_clipped_in_each_round_and_else_not(
    noise, scaling, tmp_path
):
    one, other = clipped_and_normalized(0.01, tmp_path / "all", noise, scaling)
    assert one == other
    one, other = clipped_and_normalized(0.6, tmp_path / "some")
    assert one != other


# ---- 000 Claim 2.2: one local step ----

ONE_STEP = {
    "local": {"kind": "sgd", "steps": 1, "batch": 10, "lr": 0.125},
    "noise": NONE,
    "server": {"kind": "sgd"},
}


def test_clipping_the_difference_after_one_step_is_clipping_the_gradient(tmp_path):
    """clip(-eta g, c) = -eta clip(g, c / eta), without rounding where eta is a power of two."""
    found = {}
    for scaling, bound in (("update", 0.4375), ("gradient", 3.5)):
        bounding = {"kind": "clip", "bound": bound, "scaling": scaling}
        result = run(experiment(**ONE_STEP, bounding=bounding), tmp_path / scaling)
        assert all(0 < share < 1 for share in result.rounds["clipped"].to_pylist())
        found[scaling] = result.summary["model_sha256"]
    assert found["update"] == found["gradient"]


@pytest.mark.slow
def test_clipping_the_difference_after_one_full_step_is_a_plain_loop_of_clipped_sgd(tmp_path):
    """x - eta mean_i clip(grad f_i(x), c / eta), client by client in float64."""
    bound = 0.4
    sections = {
        **ONE_STEP,
        "data": {"clients": 6, "partition": {"kind": "dirichlet", "psi": 0.3}},
        "selection": {"kind": "full"},
        "local": {"kind": "sgd", "steps": 1, "batch": "full", "lr": 0.125},
        "bounding": {"kind": "clip", "bound": bound},
        "measure": ["clients"],
        "rounds": 5,
    }
    asked = experiment(**sections)
    result = run(asked, tmp_path / "run")
    clipped = pq.read_table(tmp_path / "run" / "clients.parquet")["clipped"].to_numpy()
    assert 0 < clipped.mean() < 1
    shards = Shards.open(resolve(asked).shards)
    module = models.build(asked.model, shards.form(asked.data.task), asked.seed).double()
    for _ in range(5):
        steps = []
        for client, n in enumerate(shards.sizes.tolist()):
            x, y = (torch.from_numpy(part[0]) for part in shards.chunk([client], n)[:2])
            gradient, _ = gradient_of(module, x.double(), y)
            steps.append(gradient * min(1.0, bound / 0.125 / float(gradient.norm())))
        moved = models.flatten(module) - 0.125 * torch.stack(steps).mean(0)
        models.load(module, moved)
    expected = models.flatten(module)
    assert torch.allclose(models.flatten(result.model).double(), expected, atol=3e-7)


# ---- 000 sec. 2.1: stationary points ----

EQ_8 = ((1, 2, 6), (4, 1, -1))


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1.0, 0.1])
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_a_run_on_eq_8_ends_at_its_stationary_point(steps, bound, tmp_path):
    """000 Table 1. Iterates are float32, so the end is the exact point to their resolution."""
    exact, high = stationary(*EQ_8, steps, 0.05, bound)
    assert exact == pytest.approx(high)
    sections = {
        "data": {"kind": "scalar_quadratics", "a": EQ_8[0], "b": EQ_8[1], "clients": None},
        "model": {"kind": "linear", "start": exact + 0.02},
        "selection": {"kind": "full"},
        "local": {"kind": "sgd", "steps": steps, "batch": "full", "lr": 0.05},
        "bounding": {"kind": "clip", "bound": bound},
        "measure": ["stationary"],
        "rounds": 150,
        "evaluate": {"every": 150},
    }
    quiet = {"noise": NONE, "server": {"kind": "sgd"}}
    found = run(experiment(**quiet, **sections), tmp_path / "run").summary["stationary"]
    assert found["exact_x"] == pytest.approx(exact, abs=1e-10)
    assert found["final_x"] == pytest.approx(exact, abs=1e-6)
