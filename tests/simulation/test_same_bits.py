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
from dataclasses import dataclass
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
from raydpfl.simulation.client import actor
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.client.contribution import Contribution
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


@dataclass(frozen=True)
class Bits:
    """Of a run that is kept no longer, with the files that it had open."""

    model: np.ndarray
    totals: list[np.ndarray]

    def parameters(self) -> np.ndarray:
        return self.model


def assert_same_bits(found: RecordingCoordinator, expected: RecordingCoordinator | Bits) -> None:
    """Of the model, and of every round's sum, which the model rounds to float32."""
    assert np.array_equal(found.parameters(), expected.parameters())
    assert len(found.totals) == len(expected.totals)
    for total, other in zip(found.totals, expected.totals, strict=True):
        assert np.array_equal(total, other)


ONE_ROW = {
    "seed": 601618,
    "rounds": 2,
    "data": {"clients": 24, "samples": 3, "features": 100, "classes": 62, "test_samples": 24},
    "selection": {"kind": "full"},
    "local": {"kind": "sgd", "epochs": 3, "batch": 1, "lr": 0.05},
    "client": {"backend": "fused", "chunk": 4},
}
UNEQUAL = {
    "seed": 474,
    "rounds": 3,
    "data": {"clients": 24, "samples": 12, "features": 8, "classes": 3, "test_samples": 9},
    "selection": {"kind": "uniform", "cohort": 9},
    "local": {"kind": "sgd", "epochs": 1, "batch": 4, "lr": 0.1},
    "client": {"backend": "fused", "chunk": 2},
    "evaluate": {"every": 9},
}


@pytest.mark.slow
@pytest.mark.parametrize("sections", [ONE_ROW, UNEQUAL], ids=["batches of a row", "unequal"])
def test_losses_are_those_of_chunks_that_train_alone(sections, tmp_path):
    """However soon others of the chunks that train together have made their steps."""
    data = {"kind": "synthetic", "sizes": {"kind": "spread"}, **sections["data"]}
    plan = resolve(experiment(**{**sections, "data": data}))
    runs = [run_plan(plan, tmp_path / str(actors), actors) for actors in (None, 0, 3)]
    for one, *others in zip(*(watched.columns for watched in runs), strict=True):
        for other in others:
            np.testing.assert_array_equal(other["train_loss"], one["train_loss"])


COLUMNS = ("train_loss", "bound", "clipped", "norm_p50", "update_norm", "test_loss")
QUICK = ("clip", "rows not aligned", "one number", "clients without rows")
assert set(QUICK) <= METHODS.keys()
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METHODS]


@cache
def inline_run(method: str) -> tuple[Plan, Bits, pa.Table]:
    """The plan of a method, carried out inline, and the table of its rounds."""
    plan = resolve(experiment(**{"rounds": 3, **METHODS[method]}))
    with tempfile.TemporaryDirectory() as out:
        inline = run_plan(plan, Path(out))
        bits = Bits(inline.parameters(), inline.totals)
        return plan, bits, pq.read_table(Path(out) / "rounds.parquet")


@pytest.mark.parametrize("method", EVERY)
def test_however_chunks_are_assigned_the_bits_are_those_of_the_inline_run(method, tmp_path):
    """To an actor per client, and to three."""
    plan, inline, expected = inline_run(method)
    for actors in (0, 3):
        assert_same_bits(run_plan(plan, tmp_path / str(actors), actors), inline)
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
    inline = run_plan(plan, tmp_path / "inline")
    assert len(set(cut)) > 1 and max(cut) <= 5
    for actors in (0, 3):
        assert_same_bits(run_plan(plan, tmp_path / str(actors), actors), inline)


@pytest.mark.slow
def test_models_of_clients_own_have_the_bits_of_the_inline_run(tmp_path):
    """Whose bits depend on the chunk, though those of what is sent do not."""
    plan = resolve(
        experiment(
            data={**LOGNORMAL, "features": 130, "classes": 17},
            personal={"steps": 2, "batch": 3, "lr": 0.2, "proximal": 0.5},
            client={"backend": "compiled", "chunk": 4},
            rounds=2,
        )
    )
    own = []
    for actors in (None, 0, 3):
        assigned = run_plan(plan, tmp_path / str(actors), actors)
        own.append({client: each.tobytes() for client, each in assigned.state.memory.own.items()})
    assert own[0] == own[1] == own[2]


# On Ray a few, as an actor takes seconds of a core to start; above, every method is assigned to
# actors, pickled, in one process.
@pytest.mark.slow
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
    assert np.array_equal(rest.parameters(), whole.parameters())
    assert np.array_equal(rest.totals, whole.totals[pause:])


@pytest.mark.slow
def test_columns_of_clients_are_the_same_however_chunks_are_assigned_and_after_a_resume(tmp_path):
    """The last global update, which angles are taken to, is a state of the measure."""
    measured = ["clients", {"kind": "bounding", "repeats": 2}]
    plan = resolve(experiment(measure=measured, local={"steps": 3, "batch": 4}))
    run_plan(plan, tmp_path / "inline")
    for actors in (0, 3):
        run_plan(plan, tmp_path / str(actors), actors)
    run_plan(plan, tmp_path / "resumed", stop_round=2)
    run_plan(plan, tmp_path / "resumed", resume=True)
    expected = pq.read_table(tmp_path / "inline" / "clients.parquet")
    assert np.isfinite(expected["angle"].to_numpy()[20:]).all()
    for name in ("0", "3", "resumed"):
        found = pq.read_table(tmp_path / name / "clients.parquet")
        assert found.column_names == expected.column_names
        for column in expected.column_names:
            np.testing.assert_array_equal(found[column].to_numpy(), expected[column].to_numpy())


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


@pytest.mark.slow
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


@pytest.mark.parametrize("multiplier", [0.0, 1.0])
def test_updates_that_are_only_scaled_are_added_up_as_the_vectors_that_clients_send(
    multiplier, tmp_path, monkeypatch
):
    """What takes each client's vector in float64 is the reference."""
    noise = {"kind": "gaussian", "multiplier": multiplier} if multiplier else {"kind": "none"}
    plan = resolve(experiment(noise=noise, weights={"kind": "data"}, rounds=2))
    scaled = run_plan(plan, tmp_path / "scaled")
    monkeypatch.setattr(actor, "choose", lambda state, training: Contribution)
    assert_same_bits(run_plan(plan, tmp_path / "vectors"), scaled)


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
