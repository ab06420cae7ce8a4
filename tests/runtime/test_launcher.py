"""Where a run goes: `client.actors: auto` is decided once, before the first round; and what an
error, a kill and another process do to a pool of client actors.
"""

import os
import sys
from dataclasses import replace

import numpy as np
import processes
import psutil
import pytest
from conftest import experiment, refusal

from raydpfl import Experiment, run
from raydpfl.core import hardware, native
from raydpfl.errors import RunError
from raydpfl.runtime import launcher
from raydpfl.runtime.launcher import Launcher
from raydpfl.simulation.resolution import resolve
from raydpfl.training.backend_timing import StepTimes

AUTO = {"actors": "auto", "num_cpus": 1, "backend": "vmap"}


@pytest.fixture
def chosen(monkeypatch):
    """How many actors auto takes by cores and seconds a round, and why it takes none."""

    def chosen(cores: int, seconds: float, **sections) -> tuple[int, str | None]:
        monkeypatch.setattr("ray.is_initialized", lambda: False)
        monkeypatch.setattr(launcher, "cores", lambda: cores)
        monkeypatch.setattr(hardware, "cores", lambda: cores)
        monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
        of = experiment(**{"client": AUTO, "rounds": 10, **sections})
        with Launcher(of.client, None) as starting:
            plan = starting.decide(replace(resolve(of), train_seconds=seconds * of.rounds))
            assert plan.experiment.client.actors == starting.summary()["actors"]
            return plan.experiment.client.actors, starting.summary()["why_not"]

    return chosen


def test_auto_takes_actors_where_they_save_more_than_their_start_takes(chosen):
    assert chosen(2, 1.0)[0] == 0  # half of 10 s are less than 8 s
    assert chosen(2, 2.0) == (2, None)
    assert chosen(2, 1.0, rounds=20) == (2, None)
    assert chosen(3, 1.3, client={**AUTO, "chunk": 4}) == (3, None)  # two thirds of 13 s
    assert "about 1 s, and starting Ray 8 s" in chosen(2, 0.1)[1]


def test_auto_takes_this_process_for_one_core_and_for_one_chunk(chosen):
    assert chosen(1, 9.0) == (0, launcher.NO_GAIN)
    assert chosen(2, 9.0, client={**AUTO, "chunk": 20}) == (0, launcher.NO_GAIN)


@pytest.mark.skipif(native.library() is None, reason="nothing is compiled here")
def test_auto_takes_this_process_where_compiled_code_trains_in_as_many_threads(chosen):
    assert chosen(2, 9.0, client={**AUTO, "backend": "compiled"}) == (0, launcher.NO_GAIN)


def test_all_rounds_of_a_run_are_timed_before_the_first(monkeypatch):
    assert resolve(experiment(client=AUTO, rounds=10)).train_seconds > 0
    monkeypatch.setattr(StepTimes, "of", lambda self, backend: 0.5)
    ten, twenty = (resolve(experiment(client=AUTO, rounds=rounds)) for rounds in (10, 20))
    assert ten.train_seconds == 0.5 * 10 * 20 * 5  # seconds, rounds, clients, steps
    assert twenty.train_seconds == 2 * ten.train_seconds
    assert resolve(experiment(client={**AUTO, "actors": 0})).train_seconds == 0


def test_what_auto_chose_is_in_the_config_and_the_summary(tmp_path, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(launcher, "cores", lambda: 2)
    monkeypatch.setattr(StepTimes, "of", lambda self, backend: 1e-4)  # a busy machine is slower
    inline = run(experiment(client=AUTO), tmp_path / "out")
    assert Experiment.from_yaml(tmp_path / "out" / "config.yaml").client.actors == 0
    ray = inline.summary["ray"]
    assert (ray["used"], ray["actors"]) == (False, 0) and "starting Ray" in ray["why_not"]


@pytest.mark.slow
def test_a_run_on_actors_that_auto_chose_gives_the_bits_of_an_inline_run(
    tmp_path, monkeypatch, shared_ray
):
    monkeypatch.setattr(launcher, "START", 0.0)
    monkeypatch.setattr(launcher, "ACTORS_START", 0.0)
    stages = []
    sections = {"measure": ["clients", "trajectory"], "evaluate": {"every": 1}}
    inline = run(experiment(**sections, client={"backend": "vmap"}), tmp_path / "inline")
    found = run(experiment(**sections, client=AUTO), tmp_path / "out", on_stage=stages.append)
    assert Experiment.from_yaml(tmp_path / "out" / "config.yaml").client.actors == 2
    assert found.summary["ray"] == {"used": True, "actors": 2, "why_not": None}
    assert found.summary["model_sha256"] == inline.summary["model_sha256"]
    assert "0 of 2 client actors started" in stages
    for name in ("train_loss", "test_loss", "norm_p50", "epsilon_rdp", "round"):
        assert found.rounds[name].equals(inline.rounds[name])
    assert found.guarantees == inline.guarantees


@pytest.mark.slow
def test_a_ray_that_does_not_start_ends_the_run_and_says_how_to_do_without(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise ValueError("no room")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", broken)
    with pytest.raises(
        RunError, match=r"not be started: no room; a run with client.actors=0 needs"
    ):
        run(experiment(client={"actors": 2}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_address_is_refused_for_a_run_without_actors():
    with refusal(r"--address = 'auto': expected client.actors auto or"):
        Launcher(experiment().client, "auto")


def test_ray_is_left_although_the_progress_cannot_be_shown(monkeypatch):
    closed = []

    class FakeSession:
        def __init__(self, address: str):
            self.close = lambda: closed.append(address)

    def show(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(launcher, "Session", FakeSession)
    client = experiment(client={"actors": 1}).client
    with pytest.raises(BrokenPipeError), Launcher(client, "auto", show):
        raise KeyboardInterrupt
    assert closed == ["auto"]


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
    found = processes.run([sys.executable, "-c", FORKS])
    assert found.stdout == "ended\n", found.stderr


@pytest.mark.slow
def test_a_pool_goes_on_after_an_error_a_kill_and_in_other_processes(shared_ray):
    from raydpfl.runtime.actor_pool import ActorPool

    plan = resolve(experiment())
    pool = ActorPool(plan.experiment, str(plan.shards), 2, plan.platform)
    pool.wait_until_up(lambda: None)
    model = np.zeros(plan.d, np.float32)
    many = np.arange(40)

    def losses(pool: ActorPool, clients: np.ndarray) -> list[float]:
        return pool.losses(model, 0, clients, plan.noise_seed).tolist()

    expected = losses(pool, many)
    for _ in range(2):  # the answer of the actor without an error is not taken for a later one
        with pytest.raises(RunError, match="IndexError"):
            losses(pool, np.append(many, 10**6))
    assert losses(pool, many[:5]) == expected[:5] and pool.replaced == 0

    psutil.Process(pool._facts[1].pid).kill()
    assert losses(pool, many) == expected and pool.replaced == 1

    there = shared_ray.remote(lambda pool: losses(pool, many))
    assert shared_ray.get(there.remote(pool)) == expected == losses(pool, many)
    ends = shared_ray.remote(lambda pool: (losses(pool, many), os.kill(os.getpid(), 9)))
    with pytest.raises(shared_ray.exceptions.WorkerCrashedError):
        shared_ray.get(ends.options(max_retries=0).remote(pool))
    assert losses(pool, many) == expected and pool.replaced == 1
    pool.close()
