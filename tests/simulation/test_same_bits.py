"""The model after round t is a function of (experiment, seed, t) alone: equality of hashes."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import experiment
from processes import client_actors, none_left, wait_for_rounds

from raydpfl import Experiment, run
from raydpfl.check.runs import RecordingCoordinator, run_plan
from raydpfl.core.messages import Grid
from raydpfl.data.sizes import Sizes
from raydpfl.methods.bounding import FAMILY
from raydpfl.methods.selection import Cohort
from raydpfl.runtime.runner import RunResult
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.resolution import resolve
from raydpfl.simulation.scheduler import chunks
from raydpfl.training.backends import BACKENDS

SAMPLE = {"kind": "per_sample_clip", "bound": 0.5}
METHODS = yaml.safe_load(Path(__file__).with_name("methods.yaml").read_text())


class Patient(FAMILY["quantile_clip"]):
    """An adaptive bound that keeps a state: it moves by the mean of the counts so far."""

    def start(self, d):
        return {"sum": np.zeros(1), "rounds": np.zeros(1)}

    def adapt(self, bound, sums, clients, state):
        state["sum"] += sums["count"]
        state["rounds"] += 1
        mean = float((state["sum"] / state["rounds"])[0])
        return super().adapt(bound, {"count": mean}, clients, state)


def normed() -> torch.nn.Module:
    """A net with a BatchNorm."""
    layers = (torch.nn.Flatten(), torch.nn.Linear(784, 6), torch.nn.BatchNorm1d(6))
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(6, 10))


class Gaps(Sizes):
    """Two clients of three have no rows."""

    def weights(self, clients, generator):
        return np.ones(clients)

    def counts(self, total, clients, generator):
        return np.where(np.arange(clients) % 3, 0, 6)


SYNTHETIC = {"kind": "synthetic", "clients": 30, "samples": 10, "test_samples": 50, "features": 7}
LOGNORMAL = {**SYNTHETIC, "sizes": {"kind": "lognormal"}}
TINY = {"model": {"kind": "mlp", "hidden": [3]}, "data": SYNTHETIC, "rounds": 3}


def sha(of, out, **options) -> str:
    return run(of, out, **options).summary["model_sha256"]


Bits = dict[str, np.ndarray]


def bits_of(run: RecordingCoordinator, first: int = 0) -> Bits:
    """The model; every sum from round `first` on, which the model rounds to float32, and what is
    recorded of the clients; what clients keep, and the states of members.
    """
    bits = {"model": run.parameters()}
    for t, (total, columns) in enumerate(zip(run.totals, run.columns, strict=True), first):
        bits |= {f"{name} of round {t}": values for name, values in columns.items()}
        bits[f"total of round {t}"] = total
    memory = zip(("clients", "vectors"), run.state.memory.arrays(), strict=True)
    for group, arrays in (*memory, *run.state.states.items()):
        bits |= {f"{group}.{name}": values for name, values in arrays.items()}
    return bits


def assert_same_bits(found: Bits, expected: Bits) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], name)


COLUMNS = ("train_loss", "bound", "clipped", "norm_p50", "update_norm", "test_loss")
QUICK = ("clip", "rows not aligned", "one number", "clients without rows")
assert set(QUICK) <= METHODS.keys()
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METHODS]


@cache
def inline_run(method: str) -> tuple[Plan, Bits, pa.Table]:
    """The plan of a method, carried out inline, and the table of its rounds."""
    plan = resolve(experiment(**{"rounds": 3, **METHODS[method]}))
    with tempfile.TemporaryDirectory() as out:
        bits = bits_of(run_plan(plan, Path(out)))
        return plan, bits, pq.read_table(Path(out) / "rounds.parquet")


@pytest.mark.parametrize("method", EVERY)
def test_however_chunks_are_assigned_the_bits_are_those_of_the_inline_run(method, tmp_path):
    """To an actor per client, and to three."""
    plan, inline, expected = inline_run(method)
    for actors in (0, 3):
        assert_same_bits(bits_of(run_plan(plan, tmp_path / str(actors), actors)), inline)
        rows = pq.read_table(tmp_path / str(actors) / "rounds.parquet")
        of_clients = [name for name in expected.column_names if name.startswith("client_")]
        for name in (*COLUMNS, *of_clients):
            np.testing.assert_array_equal(rows[name].to_numpy(), expected[name].to_numpy(), name)


@pytest.mark.parametrize("backend", ["fused", "vmap", "one_batch"])
def test_chunks_of_several_widths_are_assigned_with_the_bits_of_the_inline_run(
    backend, tmp_path, monkeypatch
):
    # so that a chunk is of clients that cost the same
    monkeypatch.setattr(BACKENDS[backend], "calls", 0)
    cut = []
    joined = ClientActor.join_chunks

    def noted(actor, given):
        cut.extend(len(chunk.clients) for chunk in given)
        return joined(actor, given)

    monkeypatch.setattr(ClientActor, "join_chunks", noted)
    changes = {
        **TINY,
        "data": LOGNORMAL,
        "local": {"kind": "sgd", "epochs": 2, "batch": 4},
        "client": {"backend": backend, "chunk": 5},
        "rounds": 2,
    }
    if backend == "one_batch":
        changes["model"] = METHODS["adapters, unequal clients"]["model"]
    plan = resolve(experiment(**changes))
    inline = bits_of(run_plan(plan, tmp_path / "inline"))
    assert len(set(cut)) > 1 and max(cut) <= 5
    for actors in (0, 3):
        assert_same_bits(bits_of(run_plan(plan, tmp_path / str(actors), actors)), inline)


# On Ray a few, as an actor takes seconds of a core to start; above, every method is assigned to
# actors, pickled, in one process.
@pytest.mark.parametrize(
    "method,numbers,changes",
    [
        ("clip", (0, 3), {}),
        ("per-sample clipping, cnn", (0, 2), {}),
        ("DPSCAFFOLD", (0, "per-client"), {"data": {"clients": 4}, "selection": {"cohort": 3}}),
    ],
)
def test_any_number_of_ray_actors_gives_the_bits_of_the_inline_run(
    method, numbers, changes, tmp_path, shared_ray
):
    sections = {**METHODS[method], **changes}
    bits = set()
    for actors in numbers:
        client = {"chunk": 4, **sections.get("client", {}), "actors": actors}
        bits.add(sha(experiment(**{**sections, "client": client}), tmp_path / str(actors)))
    assert len(bits) == 1


@pytest.mark.parametrize("method", EVERY)
def test_a_run_taken_up_from_its_checkpoint_gives_the_bits_of_one_that_went_through(
    method, tmp_path
):
    plan, whole, _ = inline_run(method)
    pause = plan.experiment.rounds // 2
    run_plan(plan, tmp_path / "paused", stop_round=pause)
    rest = run_plan(plan, tmp_path / "paused", resume=True)
    found = bits_of(rest, first=pause)
    past = tuple(f" of round {t}" for t in range(pause))
    assert_same_bits(found, {name: whole[name] for name in whole if not name.endswith(past)})
    if method == "individual budgets, noise of clients":
        assert found["individual.left"].any()
    if "measure" in METHODS[method]:
        assert np.isfinite(found[f"angle of round {pause}"]).all()


@pytest.mark.slow
def test_another_seed_gives_other_bits(tmp_path):
    assert sha(experiment(), tmp_path / "a") != sha(experiment(seed=4), tmp_path / "b")


@pytest.mark.slow
def test_the_torch_generator_of_the_process_is_neither_read_nor_moved(tmp_path):
    torch.manual_seed(1)
    first = sha(experiment(), tmp_path / "a")
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert sha(experiment(), tmp_path / "b") == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def _kill_client_actors(ledger, rounds: int, stop: threading.Event, killed: list[int]) -> None:
    """Kills a busy client actor of this process's Ray every now and then, as soon as one has
    started and before the last round.

    In the last one, an actor that has just given its share is missed by nobody.
    """
    while not stop.wait(0.1):
        if ledger.exists() and len(ledger.read_text().splitlines()) >= rounds - 1:
            return
        for process in client_actors(at_work=True):
            with suppress(psutil.NoSuchProcess):
                running = process.status() == psutil.STATUS_RUNNING
                if process.pid not in killed and running:
                    process.kill()
                    killed.append(process.pid)
                    break
        if len(killed) >= 2:
            return


def test_a_killed_client_actor_is_replaced_and_the_bits_stay(tmp_path, shared_ray):
    heavy = {
        "rounds": 6,
        "local": {"kind": "sgd", "steps": 400, "batch": 10, "lr": 0.1},
        "selection": {"kind": "uniform", "cohort": 48},
    }
    quiet = sha(experiment(**heavy, client={"actors": 0, "backend": "fused"}), tmp_path / "quiet")
    stop = threading.Event()
    killed = []
    killer = threading.Thread(
        target=_kill_client_actors,
        args=(tmp_path / "killed" / "ledger.jsonl", heavy["rounds"], stop, killed),
    )
    killer.start()
    try:
        result = run(
            experiment(**heavy, client={"actors": 2, "backend": "fused"}), tmp_path / "killed"
        )
    finally:
        stop.set()
        killer.join()
    assert killed, "no client actor was caught at work"
    assert result.summary["model_sha256"] == quiet
    assert result.summary["replaced_actors"] == len(killed)


RUN = "import sys; from raydpfl.cli.app import main; sys.argv = ['raydpfl', *sys.argv[1:]]; main()"


def start(config, out, *more) -> subprocess.Popen:
    command = [sys.executable, "-c", RUN, "run", str(config), "--out", str(out), "--quiet", *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, start_new_session=True, **pipes)


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL to the run and to all it started, at once."""
    parent = psutil.Process(process.pid)
    for each in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def long(actors: int) -> Experiment:
    return experiment(
        rounds=300,
        client={"actors": actors, "num_cpus": 1},
        evaluate={"every": 100},
        bounding={"kind": "quantile_clip", "bound": 0.1},
    )


@cache
def uninterrupted() -> RunResult:
    """The long run, inline."""
    with tempfile.TemporaryDirectory() as out:
        return run(long(0), Path(out) / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("actors", [0, 2])
def test_a_killed_run_resumes_to_the_bits_and_the_epsilon_of_an_uninterrupted_one(actors, tmp_path):
    config = tmp_path / "long.yaml"
    config.write_text(yaml.safe_dump(long(actors).to_dict()))
    whole = uninterrupted()

    out = tmp_path / "killed"
    process = start(config, out)
    wait_for_rounds(20, out, process)
    kill_tree(process)
    recorded = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    assert len(recorded) < 300

    process = start(config, out, "--resume", "client.actors=0")
    said = process.communicate(timeout=180)[0]
    assert process.returncode == 0, said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["model_sha256"] == whole.summary["model_sha256"]
    stated = zip(summary["guarantees"], whole.guarantees, strict=True)
    assert all(found["epsilon"] >= expected.epsilon for found, expected in stated)
    rows = pq.read_table(out / "rounds.parquet")
    expected = whole.rounds
    assert rows["round"].to_pylist() == list(range(300))
    for name in ("train_loss", "test_accuracy", "bound", "epsilon_rdp", "norm_p50"):
        assert rows[name].to_pylist() == expected[name].to_pylist()


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_and_no_process(tmp_path):
    config = tmp_path / "long.yaml"
    config.write_text(experiment(rounds=100_000, client={"actors": 2, "num_cpus": 1}).to_yaml())
    process = start(config, tmp_path / "out")
    wait_for_rounds(5, tmp_path / "out", process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    assert "--resume" in said and "Traceback" not in said
    assert none_left(children)
    assert list((tmp_path / "out" / "checkpoints").glob("round-*.npz"))
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("backend", ["fused", "compiled"])
def test_chunks_of_unequal_clients_are_joined_for_the_threads_of_compiled_code(backend):
    method = METHODS["lognormal sizes, fused"]
    plan = resolve(experiment(**{**method, "client": {"backend": backend, "chunk": 4}}))
    sizes = plan.experiment.local.max_rows(np.array(plan.population.sizes))
    clients = np.arange(len(sizes))
    cut = chunks(Cohort.of(clients), np.ones(len(sizes)), sizes, 4)
    found = list(ClientActor(plan.experiment, str(plan.shards)).join_chunks(cut))
    together = np.concatenate([chunk.clients for chunk in found])
    assert np.array_equal(np.sort(together[together >= 0]), clients)
    assert all((sizes[chunk.members[chunk.members >= 0]] <= chunk.rows).all() for chunk in found)
    assert len({chunk.rows for chunk in cut}) > 4
    assert len(found) == (1 if backend == "compiled" else len(cut))


def test_sums_are_exact_in_any_order_and_grouping():
    generator = np.random.default_rng(0)
    grid = Grid.of(25, 1.0, 2.0)
    signs = generator.choice([-1.0, 1.0], 50) * grid.most  # all at the limit, to one side
    steps = [generator.uniform(0.9, 1, 50) * signs / grid.step for _ in range(25)]
    sent = [np.rint(each) * grid.step for each in steps]
    exact = [math.fsum(each) for each in np.transpose(sent)]
    assert (np.abs(exact) > 0.9 * 2.0**51 * grid.step).all()
    for _ in range(20):
        order = generator.permutation(25)
        cut = generator.integers(1, 24)
        parts = [np.sum([sent[i] for i in some], axis=0) for some in (order[:cut], order[cut:])]
        assert (parts[0] + parts[1]).tolist() == exact
