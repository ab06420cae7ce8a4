"""Processes that stop, hang or vanish, and late signals: runs end, and leave nothing behind."""

import gc
import json
import os
import pickle
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import processes
import psutil
import pytest
import yaml
from conftest import experiment
from processes import none_left, wait_for_rounds
from test_same_bits import RUN, start

from raydpfl import run
from raydpfl.core import signals
from raydpfl.errors import ConfigError, RunError
from raydpfl.methods.probes import heterogeneity
from raydpfl.runtime import session
from raydpfl.runtime.actor_pool import Patience
from raydpfl.runtime.worker import start_worker
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.resolution import resolve

pytestmark = pytest.mark.slow


# Actors that stop or hang.


def test_a_stopped_actor_is_replaced_and_the_bits_stay(tmp_path, shared_ray):
    stopped = []

    def stop(rows) -> None:
        if not stopped:
            stopped.append(processes.client_actors()[-1])
            stopped[0].send_signal(signal.SIGSTOP)

    inline = run(experiment(), tmp_path / "inline").summary["model_sha256"]
    found = run(experiment(client={"actors": 2, "timeout": 2}), tmp_path / "out", on_rows=stop)
    assert found.summary["model_sha256"] == inline and found.summary["replaced_actors"] == 1
    assert none_left(stopped)


SLEEPS = """
import os, time
from torch import nn

class Sleeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Conv2d(1, 1, 3, 3), nn.Flatten(), nn.Linear(81, 10))

    def forward(self, x):
        if {asleep}:
            time.sleep(1000)
        return self.layer(x)
"""


def test_a_module_that_hangs_is_named_with_its_round(tmp_path, shared_ray, own_module):
    asleep = f"len(x) == 10 and self.training and os.getpid() != {os.getpid()}"
    own_module("hangs_in_actors", SLEEPS.format(asleep=asleep))
    client = {"actors": 1, "timeout": 1.0, "backend": "loop"}
    hanging = experiment(model={"kind": "hangs_in_actors:Sleeps"}, client=client)
    said = r"training in round 0 .* 3 actors .* model.kind hangs_in_actors:Sleeps"
    with pytest.raises(RunError, match=said):
        run(hanging, tmp_path / "out")


# of the check before a run, of a step, of an evaluation
@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (2, "TimeoutError"),
        (10, r"client \d+: training did not end"),
        (1000, "the evaluation of the model did not end"),
    ],
)
def test_a_module_that_sleeps_in_the_process_of_the_run_is_named(
    samples, said, tmp_path, monkeypatch, own_module
):
    own_module("sleeps_here", SLEEPS.format(asleep=f"len(x) == {samples}"))
    monkeypatch.setattr("raydpfl.models.builder.FORWARD", 2.0)
    client = {"timeout": 3.0, "backend": "loop"}
    said = f"(?s)sleeps_here:Sleeps.*{said}|{said}.*sleeps_here:Sleeps"
    with pytest.raises((ConfigError, RunError), match=said):
        run(experiment(model={"kind": "sleeps_here:Sleeps"}, client=client), tmp_path / "out")


def test_patience_follows_from_the_calls_before():
    auto = Patience("auto")
    assert auto.seconds(100) == auto.FIRST and not auto.certain
    auto.record_call(2.0, cost=100)
    assert auto.certain and auto.seconds(100) == auto.FLOOR + auto.TIMES * 2.0
    assert auto.seconds(1) == auto.seconds(100)
    assert auto.seconds(1000) == auto.FLOOR + auto.TIMES * 20.0
    assert auto.seconds(100, attempts=1) == 2 * auto.seconds(100)
    fixed = Patience(3.0)
    fixed.record_call(50.0, cost=1)
    assert fixed.certain and fixed.seconds(1000, attempts=2) == 3.0


def test_the_timeout_is_no_part_of_what_a_run_computes(tmp_path):
    first = run(experiment(client={"timeout": 5.0}), tmp_path / "out")
    again = run(experiment(client={"timeout": 7.0}), tmp_path / "out", resume=True)
    assert again.summary["model_sha256"] == first.summary["model_sha256"]


# What a node lacks.


def test_a_node_without_the_prepared_data_is_named_with_the_variable_to_set(tmp_path):
    with pytest.raises(ConfigError) as error:
        start_worker(ClientActor(), pickle.dumps(experiment()), str(tmp_path / "data" / "abc"), ())
    assert error.value.field == "RAYDPFL_CACHE" and error.value.value == str(tmp_path)
    assert socket.gethostname() in str(error.value)


def test_a_node_without_the_users_module_is_named_with_the_variable_to_set(tmp_path, monkeypatch):
    shards = str(resolve(experiment()).shards)
    (tmp_path / "only_at_home.py").write_text(
        "from raydpfl.methods.bounding import Clip\n\nclass Mine(Clip):\n    kind: str = 'mine'\n"
    )
    with monkeypatch.context() as home:
        home.syspath_prepend(str(tmp_path))
        pickled = pickle.dumps(experiment(bounding={"kind": "only_at_home:Mine", "bound": 1.0}))
    sys.modules.pop("only_at_home")
    with pytest.raises(ConfigError, match="only_at_home") as error:
        start_worker(ClientActor(), pickled, shards, ("/nowhere",))
    assert error.value.field == "PYTHONPATH" and socket.gethostname() in str(error.value)


def work_in(folder: Path) -> dict:
    """What the process of a trial in this directory of a sweep is told."""
    (folder / "out" / "trials" / "a").mkdir(parents=True)
    told = {
        "experiment": experiment().to_dict(),
        "folder": str(folder / "out" / "trials" / "a"),
        "status": "waiting",
        "bundles": [],
        "driver": {"home": str(folder), "path": [], "node": None},
    }
    return told | {
        "mark": str(folder / "out" / "sweep.yaml"),
        "metric": "test_loss",
        "data_root": None,
        "pause": False,
    }


def test_a_trial_begins_when_it_is_asked_for_a_result_and_not_before(tmp_path, monkeypatch):
    # Ray Tune starts a process for a trial and then, where another one has become free meanwhile,
    # has that one run it.
    from raydpfl.sweep.tune import TrialActor

    monkeypatch.chdir(tmp_path)
    told = work_in(tmp_path)
    (tmp_path / "out" / "sweep.yaml").touch()
    unused = TrialActor(told)
    unused.stop()
    assert not [*(tmp_path / "out" / "trials" / "a").iterdir()]
    used = TrialActor(told)
    assert used.step()["round"] == 2 and used.step()["round"] == 4
    used.stop()


@pytest.mark.parametrize("lacks", ["home", "sweep"])
def test_a_node_without_the_directories_of_a_sweep_refuses_its_trial_by_name(
    lacks, tmp_path, monkeypatch
):
    from raydpfl.sweep.tune import TrialActor

    monkeypatch.chdir(tmp_path)
    told = work_in(tmp_path)
    if lacks == "home":
        told["driver"]["home"] = str(tmp_path / "nowhere")
    field, value, accepted = TrialActor(told).step()["refused"]
    assert (field, value) == {
        "home": ("working directory", told["driver"]["home"]),
        "sweep": ("--out", str(tmp_path / "out")),
    }[lacks]
    assert socket.gethostname() in accepted


# Ray's own processes, and the driver.


@pytest.fixture
def running(tmp_path):
    """A run on a Ray of its own, in its rounds, and all processes that it has started."""
    config = tmp_path / "long.yaml"
    long = experiment(rounds=100_000, client={"actors": 1, "num_cpus": 1})
    config.write_text(yaml.safe_dump(long.to_dict()))
    process = start(config, tmp_path / "out")
    wait_for_rounds(2, tmp_path / "out", process)
    children = psutil.Process(process.pid).children(recursive=True)
    yield process, children
    for each in children:
        with suppress(psutil.Error):
            each.kill()
    process.kill()


def test_the_death_of_the_control_store_ends_a_run_in_one_line_and_leaves_no_process(running):
    process, children = running
    next(each for each in children if each.name() == "gcs_server").kill()
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 1, said
    assert said.strip().splitlines()[-1].startswith("raydpfl: Ray's control store"), said
    assert "Traceback" not in said and none_left(children)


def test_a_driver_that_is_killed_leaves_no_process(running):
    process, children = running
    actor = next(each for each in children if each.name().startswith("ray::ClientAct"))
    actor.send_signal(signal.SIGSTOP)
    process.kill()
    process.communicate(timeout=60)
    assert none_left(children)


def test_what_listens_but_is_no_control_store_is_told_apart_soon(monkeypatch):
    monkeypatch.setattr(session, "ANSWER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match="takes connections but says nothing"):
            session._greet(f"127.0.0.1:{port}")

        def answer() -> None:
            server.accept()  # the connection before
            connection = server.accept()[0]
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(OSError, match="is no control store of Ray"):
            session._greet(f"127.0.0.1:{port}")
    with pytest.raises(OSError):
        session._greet(f"127.0.0.1:{port}")


def test_a_control_store_answers(shared_ray):
    session._greet(shared_ray.get_runtime_context().gcs_address)


# Signals.

LOSES = """
import os, signal, ray
def init(*args, **options):
    try:
        os.kill(os.getpid(), signal.{name})
        import time; time.sleep(1)
    except KeyboardInterrupt:
        pass
    {then}
ray.init = init
"""
THEN = ["raise RuntimeError('Ray is confused')", "signal.signal(signal.SIGTERM, signal.SIG_DFL)"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("then", ["pass", *THEN])
def test_a_signal_that_is_lost_while_ray_starts_ends_the_run_all_the_same(name, then, tmp_path):
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(experiment(client={"actors": 2}).to_dict()))
    code = LOSES.format(name=name, then=then) + RUN
    command = [sys.executable, "-c", code, "run", str(config), "--out", str(tmp_path / "out")]
    done = processes.run([*command, "--quiet"])
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr


def test_a_second_signal_raises_at_once():
    with signals.handle_signals(), signals.defer_signals():
        signal.raise_signal(signal.SIGINT)
        assert signals.is_stop_requested()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert not signals.is_stop_requested()


def test_an_interrupt_while_heterogeneity_is_measured_keeps_the_finished_run(tmp_path, monkeypatch):
    local = {"kind": "sgd", "steps": 5, "batch": 10, "lr": 0.1, "weight_decay": 0.1}
    measured = experiment(data={"clients": 20}, local=local, measure=["heterogeneity"])
    whole = run(measured, tmp_path / "whole")
    sound = heterogeneity.measure_clients

    def interrupted(*parts):
        yield next(sound(*parts))
        signal.raise_signal(signal.SIGINT)
        yield 1, 41

    monkeypatch.setattr(heterogeneity, "measure_clients", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(measured, tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["heterogeneity"] is None
    assert "--resume" in summary["reason"]
    assert summary["model_sha256"] == whole.summary["model_sha256"]

    monkeypatch.setattr(heterogeneity, "measure_clients", sound)
    steps = []
    progress = lambda done, of: steps.append((done, of))  # noqa: E731
    resumed = run(measured, tmp_path / "out", resume=True, on_measure=progress).summary
    assert resumed["heterogeneity"] == whole.summary["heterogeneity"] and not resumed["reason"]
    assert steps[0] == (0, 41) and steps[-1] == (41, 41)


# What runs leave in their process.


def test_many_rounds_and_many_runs_leave_nothing_in_their_process(tmp_path):
    """Open files, threads and children after 10 runs are those after 3, without the help of the
    garbage collector.

    What one run leaves would be there 7 times; a file that something else has open for a moment may
    be there once. Memory, with the collector's help, grows by less than 20 MB.
    """
    process = psutil.Process()
    counts = []
    memory = []
    try:
        for k in range(10):
            gc.collect()
            memory.append(process.memory_info().rss / 1e6)
            gc.disable()
            small = experiment(rounds=20, measure=["clients"], track=["tensorboard"])
            run(small, tmp_path / str(k))
            files = len(os.listdir("/proc/self/fd"))
            counts.append((files, threading.active_count(), len(process.children())))
            gc.enable()
    finally:
        gc.enable()
    first, last = (np.array(some) for some in (counts[:3], counts[-3:]))
    assert (last.min(0) <= first.max(0)).all() and memory[-1] - memory[2] < 20, (counts, memory)
