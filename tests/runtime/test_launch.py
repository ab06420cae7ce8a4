"""Ray behind the rounds: a run begins in its own process, and moves when that pays."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import yaml
from conftest import experiment
from ray._private.node import Node
from ray._private.worker import print_to_stdstream
from test_same_bits import METHODS, RUN, assert_same_bits

from raydpfl import run
from raydpfl.check.runs import Dealt, Watched, carried_out
from raydpfl.core import hardware, native
from raydpfl.errors import RunError
from raydpfl.runtime import launcher, session
from raydpfl.runtime.launcher import Places, Worth
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.pool import Moving
from raydpfl.simulation.thread_pool import Pace

AUTO = {"actors": "auto", "num_cpus": 1}


def judged(
    rounds: list[float], of: int, actors: int = 2, starts: float = 8.0, threads: int = 1
) -> list[bool]:
    """Whether Ray was found worth its start after each round, which took so many seconds."""
    worth = Worth(of, actors, starts, threads)
    worth.begin(0, 0.0)
    ends = np.cumsum(rounds).tolist()
    found = []
    for end in ends:
        worth.round(end)
        found.append(worth.gains(end))
    return found


def test_ray_starts_only_for_rounds_that_take_longer_than_that_gains():
    assert not any(judged([0.5] + [0.015] * 59, of=60))
    long = judged([0.5] + [0.02] * 3999, of=4000)
    assert long.index(True) in (50, 51)  # a second of rounds is enough to judge by
    assert sum(long) == pytest.approx(4000 - 50 - 800, abs=2)  # 800 of 0.02 s are half of 16 s


def test_ray_starts_in_the_midst_of_a_round_that_does_not_end():
    worth = Worth(20, 2, 8.0)
    worth.begin(0, 100.0)
    assert not worth.gains(101.9)
    assert worth.gains(102.1)  # 20 rounds of two seconds or more
    few = Worth(2, 2, 8.0)
    few.begin(0, 0.0)
    assert not few.gains(7.9) and few.gains(8.1)


def test_one_actor_is_never_worth_a_start_and_many_are_sooner():
    slow = [1.0] * 12
    assert not any(judged(slow, of=10_000, actors=1))
    # as long as 15/16 of what is left, a second a round, takes longer than the start: 9 rounds
    assert judged(slow, of=14, actors=16) == [False] + [True] * 4 + [False] * 7
    assert not any(judged(slow, of=14, actors=2))


def test_actors_are_worth_a_start_only_where_they_are_more_than_the_threads_here():
    slow = [1.0] * 12
    for actors in (1, 2, 4):
        assert not any(judged(slow, of=10_000, actors=actors, threads=4))
    # as 2 of 2 threads: half of what is left takes longer than the start, 16 rounds
    assert judged(slow, of=20, actors=8, threads=4) == judged(slow, of=20, actors=2)
    assert any(judged(slow, of=20, actors=8, threads=4))


class Others(Dealt):
    """Two actors in this process, of whom one more is up at every look."""

    healthy = 2


# what the server, clients, a bound and noise keep from round to round has to move with the run
STATES = ("clip", "scaffold, clipped and noised", "banded noise", "adaptive clipping")


@pytest.mark.parametrize(
    ("method", "looks"),
    [(STATES[0], looks) for looks in (0, 1, 2, 3, 4, 7, 20)] + [(each, 4) for each in STATES[1:]],
)
def test_chunks_that_others_take_over_in_the_midst_of_a_round_give_the_same_bits(
    method, looks, tmp_path
):
    plan = Plan.make(experiment(**METHODS[method], client={"chunk": 4}))
    asked = []

    def others():
        asked.append(None)
        return Others(plan.experiment, str(plan.shards), 2) if len(asked) > looks else None

    inline = carried_out(plan, tmp_path / "inline")
    (tmp_path / "moving").mkdir()
    pool = Moving(plan.experiment, str(plan.shards), others)
    coordinator = Watched(plan, str(tmp_path / "moving"), pool=pool)
    coordinator.start()
    rows = [coordinator.round() for _ in range(plan.experiment.rounds)]
    assert_same_bits(coordinator, inline)
    assert rows[-1]["actors"] == (2 if len(asked) > looks else 1)


@pytest.mark.parametrize(
    ("method", "taken"),
    [(STATES[0], 0), (STATES[0], 2), (STATES[0], 3)] + [(each, 1) for each in STATES[1:]],
)
def test_a_run_that_is_taken_over_moves_after_that_round_unless_it_was_the_last(
    method, taken, tmp_path, monkeypatch
):
    plan = Plan.make(experiment(**METHODS[method], client=AUTO))
    inline = carried_out(plan, tmp_path / "inline")
    places = Places(plan.experiment, None)
    places.elastic = True
    moved = []

    def remote(plan, out, resume, anew):
        """The coordinator elsewhere, which knows of the run what is in its directory."""
        moved.append(places._done)
        elsewhere = Coordinator(plan, out, places.clients, resume=resume, anew=anew)
        return launcher._inline(elsewhere)

    monkeypatch.setattr(launcher, "cores", lambda: 2)
    monkeypatch.setattr(places, "_begin", lambda bring_up: None)
    monkeypatch.setattr(places, "_remote", remote)
    assert places.actors(plan) == 2
    (tmp_path / "out").mkdir()
    call = places.coordinator(plan, str(tmp_path / "out"), False, False, lambda _: None)
    places.begun(0)
    for t in range(4):
        if t == taken:  # the actors are up as the round begins
            places.clients = Others(plan.experiment, str(plan.shards), 2)
            places._up.set()
        call("round")
        call = places.after_round(call, str(tmp_path / "out"), t + 1)
    assert moved == ([] if taken == 3 else [taken + 1])
    assert np.array_equal(call("parameters"), inline.parameters())
    told = {"asked": True, "used": True, "from_round": taken, "actors": 2, "why_not": None}
    assert places.told() == told


@pytest.fixture
def at_once(monkeypatch):
    """Ray is found worth its start at once, and after three rounds the run waits until it is up."""
    monkeypatch.setattr(Worth, "gains", lambda *_: True)
    after = Places.after_round

    def waiting(self, call, out, done):
        if done == 3 and self.late:
            assert self._up.wait(120)
        return after(self, call, out, done)

    monkeypatch.setattr(Places, "after_round", waiting)


@pytest.mark.slow
def test_a_run_that_moves_to_actors_gives_the_bits_of_an_inline_run(tmp_path, shared_ray, at_once):
    partition = {"kind": "dirichlet", "psi": 0.3}
    data = {"kind": "fashion_mnist_mini", "clients": 50, "partition": partition}
    sections = {
        "rounds": 8,
        "data": data,
        "measure": ["clients", "trajectory"],
        "evaluate": {"every": 1},
    }
    inline = run(experiment(**sections), tmp_path / "inline")
    moved = run(experiment(**sections, client=AUTO), tmp_path / "moved")
    expected = {"asked": True, "used": True, "from_round": 3, "actors": 2, "why_not": None}
    assert moved.summary["ray"] == expected
    assert moved.summary["model_sha256"] == inline.summary["model_sha256"]
    for name in ("train_loss", "test_loss", "norm_p50", "epsilon_rdp", "round"):
        assert moved.rounds[name].equals(inline.rounds[name])
    assert moved.rounds["actors"].to_pylist()[:3] == [1, 1, 1]
    assert set(moved.rounds["actors"].to_pylist()[4:]) == {2}
    assert len((tmp_path / "moved" / "ledger.jsonl").read_text().splitlines()) == 8
    for name in ("clients.parquet", "trajectory.bin"):
        assert (tmp_path / "moved" / name).exists()
    assert moved.guarantees == inline.guarantees and moved.summary["repeated_rounds"] == 0


def test_a_ray_that_does_not_start_is_warned_of_and_the_run_goes_on(
    tmp_path, at_once, monkeypatch, caplog
):
    def broken(*_, **__):
        raise RunError("Ray could not be started: no room")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(launcher, "Session", broken)
    monkeypatch.setattr(launcher, "cores", lambda: 2)
    found = run(experiment(rounds=5, client=AUTO), tmp_path / "out")
    assert found.summary["ray"]["why_not"] == "Ray could not be started: no room"
    assert not found.summary["ray"]["used"] and found.summary["status"] == "completed"
    assert caplog.text.count("goes on in this process, without Ray: Ray could not be started") == 1


def test_a_short_run_starts_no_ray_and_its_summary_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "cores", lambda: 2)
    found = run(experiment(client=AUTO), tmp_path / "out")
    assert found.summary["ray"] == {
        "asked": True,
        "used": False,
        "from_round": None,
        "actors": 0,
        "why_not": launcher.SHORT,
    }


@pytest.mark.skipif(native.library() is None, reason="nothing is compiled here")
@pytest.mark.parametrize(
    ("backend", "reason"), [("compiled", launcher.NO_GAIN), ("vmap", launcher.SHORT)]
)
def test_no_ray_is_started_for_what_trains_in_threads_here(backend, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "cores", lambda: 2)
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    begun = []
    monkeypatch.setattr(Places, "_begin", lambda places, what: begun.append(what))
    found = run(experiment(client={**AUTO, "backend": backend}), tmp_path / "out")
    native.use(1)
    assert found.summary["ray"]["why_not"] == reason
    assert len(begun) == (backend == "vmap")  # what looks whether Ray would pay


def test_no_ray_is_started_once_threads_of_python_are_known_to_gain(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "cores", lambda: 2)
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for name in ("SURE", "SHORT", "FREE"):  # the first piece tells
        monkeypatch.setattr(Pace, name, 0.0)
    monkeypatch.setattr(Places, "_when_it_pays", lambda places: None)
    found = run(experiment(client={**AUTO, "backend": "vmap"}), tmp_path / "out")
    alone = run(experiment(client={"actors": 0, "backend": "vmap"}), tmp_path / "alone")
    assert found.summary["ray"]["why_not"] == launcher.NO_GAIN
    assert found.summary["model_sha256"] == alone.summary["model_sha256"]


def test_the_clock_of_a_run_that_begins_here_is_that_of_a_thread(monkeypatch):
    ran = iter([10.0, 14.0, 20.0, 26.0])
    monkeypatch.setattr(launcher.time, "process_time", lambda: next(ran))
    monkeypatch.setattr(launcher, "threads", lambda: 4)
    places = Places(experiment(client=AUTO), None)
    places._worth = Worth(100, 2, 8.0)
    places._here = SimpleNamespace(speed=None)
    begun = places._clock()
    assert places._clock() - begun == 1.0  # 4 s of four threads, as long as nobody knows
    places._here.speed = 1.0
    assert places._clock() - begun == 1.0 + 6.0
    places._here.speed = 1.5
    assert places._clock() - begun == 1.0 + 6.0 + 4.0
    assert places._worth.threads == 1.5


BEHIND = "from raydpfl.runtime.launcher import Worth; Worth.gains = lambda *_: True\n" + RUN


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_ends_while_ray_starts_behind_it_leaves_no_process(end, tmp_path):
    config = tmp_path / "long.yaml"
    config.write_text(yaml.safe_dump(experiment(rounds=100_000, client=AUTO).to_dict()))
    command = [sys.executable, "-c", BEHIND, "run", config, "--out", tmp_path / "out", "--quiet"]
    pipes = {"stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 120
    while not any(_named(each, "gcs_server") for each in children):
        assert process.poll() is None and time.monotonic() < deadline
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    process.send_signal(end)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == (130 if end == signal.SIGINT else -9), said
    assert "Traceback" not in said
    assert not psutil.wait_procs(children, timeout=30)[1]
    if end == signal.SIGINT:
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert summary["status"] == "interrupted" and not summary["ray"]["used"]


def _named(process: psutil.Process, name: str) -> bool:
    with suppress(psutil.Error):
        return process.name() == name
    return False


def test_a_ray_that_is_started_here_starts_without_what_nobody_asks_of_it(monkeypatch):
    before = {name: vars(Node)[name] for name in session.UNUSED}
    starting = []

    def init(**options):
        starting.append(options)
        for name, method in before.items():
            assert getattr(Node, name) is not method
            getattr(object.__new__(Node), name)()  # does nothing, as Node knows nothing here

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("ray.init", init)
    session.Session("local", num_cpus=3).close()
    assert {name: vars(Node)[name] for name in before} == before
    (options,) = starting
    assert (options["num_cpus"], options["include_dashboard"]) == (3, False)


def test_a_process_for_each_client_is_no_news_of_rays(monkeypatch, capsys):
    for name in ("ray.init", "ray.shutdown"):
        monkeypatch.setattr(name, lambda **options: None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    session.Session("local", num_cpus=3).close()
    many = "WARNING: 12 PYTHON worker processes have been started on node: 5248, which is 6x the"
    for line in (many, "The node is out of disk space."):
        print_to_stdstream({"lines": [line], "pid": "raylet", "is_err": False}, False)
    said = capsys.readouterr().out
    assert "worker processes" not in said and "out of disk space" in said


def test_how_many_client_actors_have_started_is_said_while_they_do():
    places = Places(experiment(client={"actors": 3}), None)
    places._count = 3
    places.clients = SimpleNamespace(healthy=0)
    said = []

    def on_stage(what):
        said.append(what)
        places.clients.healthy += 1
        if len(said) == 3:
            places._up.set()

    places._wait(places._up, on_stage)
    assert said == [f"{started} of 3 client actors started" for started in range(3)]


def test_a_coordinator_that_is_asked_for_warms_up_while_client_actors_start():
    did = []
    asked = experiment(client={"actors": 2})
    places = Places(asked, None)
    places._plan = Plan.make(asked)
    places._count = 2
    places.clients = SimpleNamespace(
        told=lambda *given: did.append("told"), up=lambda least, check: did.append(least)
    )
    warm = SimpleNamespace(remote=lambda plan, path: did.append(pickle.loads(plan).experiment))
    places._host = SimpleNamespace(warm=warm)
    places._tell()
    assert did == ["told", places._plan.experiment, 2]


FORKS = """
import subprocess, sys, threading
import numpy as np
import scipy.linalg
from raydpfl.core.hardware import single_blas

values = np.ones((600, 600))
started = threading.Event()

def start():
    started.wait()
    for _ in range(200):
        subprocess.run(["true"], preexec_fn=lambda: None)

with single_blas():
    thread = threading.Thread(target=start)
    thread.start()
    started.set()
    while thread.is_alive():
        values @ values
        scipy.linalg.blas.dgemm(1.0, values, values)
print("ended")
"""


@pytest.mark.slow
def test_processes_start_in_a_thread_while_another_one_multiplies():
    found = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120
    )
    assert found.stdout == "ended\n", found.stderr
