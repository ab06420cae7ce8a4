"""Threads of this process that take chunks up: the same bits as one after another, whatever happens
in them, and only where it pays.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from conftest import experiment, form
from test_same_bits import METHODS, SAMPLE, STEPS, TINY, TUNE, assert_same_bits
from torch import nn

from raydpfl.check.runs import carried_out
from raydpfl.core import hardware
from raydpfl.data.shards import Made
from raydpfl.data.sources.synthetic import Synthetic
from raydpfl.errors import ClientError, RunError
from raydpfl.methods.selection import Cohort
from raydpfl.simulation import thread_pool
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.client.data_cache import Rows
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.pool import Inline
from raydpfl.simulation.scheduler import chunks
from raydpfl.simulation.thread_pool import Crew, Done, Pace
from raydpfl.training.backends import vmap
from raydpfl.training.validation import draws_torch

COUNT = 3


@pytest.fixture
def several(monkeypatch):
    """Has this process `COUNT` threads from when it is called on, who work whether it pays or not;
    gives the names of what each client did in them, by thread.
    """
    found: dict[threading.Thread, list[str]] = {}

    def spied(name):
        method = getattr(ClientActor, name)

        def call(self, *given):
            thread = threading.current_thread()
            if name not in found.setdefault(thread, []):
                time.sleep(0.02)  # in which others take the next piece
            found[thread].append(name)
            return method(self, *given)

        monkeypatch.setattr(ClientActor, name, call)

    def begin():
        for name in ("train", "losses", "evaluate"):
            spied(name)
        monkeypatch.setattr(hardware, "cores", lambda: COUNT)
        monkeypatch.setenv("OMP_NUM_THREADS", str(COUNT))
        monkeypatch.setattr(Pace, "SURE", np.inf)
        return found

    return begin


MLP = {
    **TINY,
    "model": {"kind": "mlp", "hidden": [3]},
    "client": {"chunk": 3, "backend": "vmap"},
    "evaluate": {"every": 2, "batch": 9},
    "rounds": 2,
}
OF_EACH = {"every": 2, "batch": 9, "validation": 0.2, "per_client": "accuracy"}
SHARED = {
    "narrow cnn": {**METHODS["narrow cnn"], "evaluate": {"every": 2, "batch": 100}},
    "bfloat16": {**MLP, "client": {"chunk": 3, "backend": "vmap", "precision": "bfloat16"}},
    "adam, loop": {
        **MLP,
        "local": {"kind": "adam", "steps": 3, "batch": 3},
        "client": {"chunk": 3, "backend": "loop"},
    },
    "layerwise": {
        **MLP,
        "bounding": SAMPLE,
        "noise": STEPS,
        "client": {"chunk": 3, "backend": "layerwise"},
    },
    "fused, chunks joined": {
        **MLP,
        "client": {"chunk": 2, "backend": "fused"},
        "measure": ["clients", "bounding"],
    },
    "clients remember": {
        **MLP,
        "local": {"kind": "scaffold", "steps": 3, "batch": 3},
    },
    "bounding remembers": {**MLP, "bounding": {"kind": "alpha_norm_ec", "bound": 1.0}},
    "losses are asked for": {
        **MLP,
        "selection": {"kind": "power_of_choice", "cohort": 9, "pool": 20},
        "noise": {"kind": "none"},
    },
    "parts of their own": {
        **MLP,
        "model": {"kind": "mlp", "hidden": [3], "local": ["3.*"]},
        "evaluate": {**OF_EACH, "test": False},
    },
    "Ditto": {**MLP, **METHODS["Ditto"], "evaluate": OF_EACH},
    "fine-tuned": {**MLP, "evaluate": {**OF_EACH, "fine_tune": TUNE}},
    "adapters": {
        **METHODS["adapters, per-sample clipping"],
        "evaluate": MLP["evaluate"],
        "rounds": 2,
    },
}
SLOW = ("narrow cnn", "bfloat16")
EACH = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SHARED]


@pytest.mark.parametrize("method", EACH)
def test_chunks_in_threads_have_the_bits_of_one_after_another(method, several, tmp_path):
    plan = Plan.make(experiment(**SHARED[method]))
    alone = carried_out(plan, tmp_path / "alone")
    found = several()
    threads = carried_out(plan, tmp_path / "threads")
    assert_same_bits(threads, alone)
    for ours, theirs in zip(threads.columns, alone.columns, strict=True):
        for name, values in theirs.items():
            np.testing.assert_array_equal(ours[name], values)
    done = {name for did in found.values() for name in did}
    assert done == {"train", "evaluate"} | ({"losses"} if "losses" in method else set())
    assert threading.main_thread() not in found
    for name in done:
        assert sum(name in did for did in found.values()) == COUNT
    threads.pool.close()


@pytest.fixture
def broken(monkeypatch):
    """The rows of client 5 cannot be read."""
    chunk = Rows.chunk

    def read(self, clients, *given, **more):
        if 5 in clients:
            raise ValueError("not today")
        return chunk(self, clients, *given, **more)

    monkeypatch.setattr(Rows, "chunk", read)


FULL = {**MLP, "selection": {"kind": "full"}, "noise": {"kind": "none"}}


def test_clients_are_dropped_alike(several, broken, tmp_path):
    client = {**MLP["client"], "on_error": "drop"}
    plan = Plan.make(experiment(**{**FULL, "client": client}))
    alone = carried_out(plan, tmp_path / "alone")
    several()
    threads = carried_out(plan, tmp_path / "threads")
    assert_same_bits(threads, alone)
    for each in (alone, threads):
        assert np.isnan(each.columns[0]["norm"][5])


def test_a_client_that_fails_in_a_thread_is_named_and_the_threads_end(several, broken, tmp_path):
    plan = Plan.make(experiment(**FULL))
    several()
    with pytest.raises(ClientError, match=r"not today[^/]*the training of client 5 in"):
        carried_out(plan, tmp_path / "out")
    assert ended()


def test_a_pool_whose_threads_were_broken_off_takes_others(several, broken, tmp_path):
    client = {**MLP["client"], "timeout": 60}
    plan = Plan.make(experiment(**{**FULL, "client": client}))
    several()
    pool = Inline(plan.experiment, str(plan.shards))
    model = np.zeros(plan.d, np.float32)
    for _ in range(2):
        with pytest.raises(RunError, match="not today"):
            pool.losses(model, 0, np.arange(12), 0)
        found = pool.losses(model, 0, np.arange(6, 18), 0)
        assert np.isfinite(found).all()
    assert len(pool._crew) == COUNT
    pool.close()
    with pytest.raises(RuntimeError, match="dismissed"):
        list(Crew.each(_dismissed(), lambda *_: 0, [0]))


def test_threads_begin_with_the_largest_clients_before_anybody_knows_what_they_take(several):
    plan = Plan.make(experiment(**FULL))
    several()
    pool = Inline(plan.experiment, str(plan.shards))
    sizes = np.arange(1, 13)
    cut = chunks(Cohort.of(np.arange(12)), np.ones(12), sizes, 4)
    assert [[chunk.rows for chunk in share] for share in pool.shares(cut)] == [[12], [8], [4]]
    pool.close()


def _dismissed() -> Crew:
    some = Crew(1)
    some.close()
    return some


def ended() -> bool:
    """Whether there soon are no threads of any crew."""
    until = time.monotonic() + 20
    while any(each.name == "raydpfl-crew" for each in threading.enumerate()):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_a_client_that_hangs_in_a_thread_is_named(several, tmp_path, monkeypatch):
    several()
    train = ClientActor.train
    twin = ClientActor.twin
    twins = []
    hung = []
    over = threading.Event()

    def copied(self):
        twins.append(twin(self))
        return twins[-1]

    def hangs(self, broadcast, work, chunks):
        if self in twins:  # all but the first thread's
            hung.append(chunks[0].clients[0])
            self.progress.at(hung[-1])
            over.wait(60)
        return train(self, broadcast, work, chunks)

    monkeypatch.setattr(ClientActor, "train", hangs)
    monkeypatch.setattr(ClientActor, "twin", copied)
    monkeypatch.setattr(thread_pool, "PATIENCE", 0.1)
    plan = Plan.make(experiment(**{**FULL, "client": {**MLP["client"], "timeout": 1}}))
    began = time.monotonic()
    try:
        with pytest.raises(RunError, match=r"client \d+: training did not end within 1 s") as found:
            carried_out(plan, tmp_path / "out")
    finally:
        over.set()
    assert any(f"client {each}:" in str(found.value) for each in hung)
    assert time.monotonic() - began < 30
    assert ended()


def test_what_is_broken_off_is_broken_off_in_every_thread_and_in_no_time():
    some = Crew(COUNT)
    at_work = threading.Barrier(COUNT)

    def work(thread, piece):
        at_work.wait(20)
        if thread == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while True:
            time.sleep(1e-3)

    with pytest.raises(KeyboardInterrupt):
        list(some.each(work, range(9)))
        time.sleep(1)  # where the signal comes late
    assert ended()


def test_a_crew_is_gone_with_who_holds_it_and_works_until_then():
    some = Crew(COUNT)
    for _ in range(3):
        assert sorted(each.value for each in some.each(lambda _, piece: piece, range(50))) == [
            *range(50)
        ]
    assert not some.at_work and list(some.each(lambda *_: 0, [])) == []
    del some
    assert ended()


HANGS = """
import time
from raydpfl.simulation.thread_pool import Crew
crew = Crew(2)
print(next(crew.each(lambda thread, piece: time.sleep(1000 * piece), range(3))).value)
"""


def test_a_thread_that_hangs_does_not_keep_the_process():
    found = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "None\n", "")


def paced(free: float, seconds: float, by_one: float, by_several: float) -> Pace:
    """After rounds of four pieces, which take so long, and this long for each unit of work."""
    pace = Pace(4)
    for _ in range(1000):
        if pace.speed is not None:
            break
        count = pace.threads
        for _ in range(4 if count > 1 else 0):
            pace.did(Done(None, seconds, free * seconds))
        pace.took(count, 4.0, 4.0 * (by_several if count > 1 else by_one))
    return pace


def test_threads_are_for_work_that_takes_less_time_so():
    free = paced(free=0.9, seconds=0.1, by_one=1.0, by_several=9.0)  # nothing else is looked at
    assert (free.speed, free.threads) == (4.0, 4)
    gains = paced(free=0.4, seconds=0.1, by_one=1.0, by_several=0.5)
    assert (gains.speed, gains.threads) == (2.0, 4)
    loses = paced(free=0.4, seconds=0.1, by_one=1.0, by_several=0.95)
    assert (loses.speed, loses.threads) == (1.0, 1)
    short = paced(
        free=0.9, seconds=1e-3, by_one=1.0, by_several=1.0
    )  # what hands it out takes long
    assert (short.speed, short.threads) == (1.0, 1)
    assert (Pace(1).speed, Pace(1).threads, Pace(2).speed, Pace(2).threads) == (1.0, 1, None, 2)


def test_both_are_tried_by_turns_where_threads_wait():
    pace = Pace(2)
    for _ in range(9):
        pace.did(Done(None, 0.1, 0.01))
    tried = []
    while pace.speed is None:
        tried.append(pace.threads)
        pace.took(pace.threads, 1.0, 1.0)
    assert tried == [2, 1] * Pace.TRIES


def test_threads_that_have_lost_are_tried_again_later_and_ever_later():
    pace = Pace(2)
    pace.did(Done(None, 1.0, 0.1))
    tried = []
    for _ in range(3 * (2 * Pace.TRIES) + 32 + 64 + 1):
        tried.append(pace.threads)
        pace.took(pace.threads, 1.0, 1.0)
    turns = [2, 1] * Pace.TRIES
    assert tried == [*turns, *[1] * 32, *turns, *[1] * 64, *turns, 1]
    assert pace.speed == 1.0
    for _ in range(128):
        pace.took(pace.threads, 1.0, 1.0 / pace.threads)
    while pace.speed is None:
        pace.took(pace.threads, 1.0, 1.0 / pace.threads)
    assert (pace.speed, pace.threads) == (2.0, 2)


def test_code_of_the_users_own_and_draws_of_torchs_generator_stay_on_one_thread(
    several, monkeypatch
):
    several()
    plan = Plan.make(experiment(**METHODS["an own bound with a state"], client=MLP["client"]))
    assert Inline(plan.experiment, str(plan.shards)).speed == 1.0
    plan = Plan.make(experiment(**SHARED["adam, loop"]))
    pool = Inline(plan.experiment, str(plan.shards))
    assert pool.speed is None and pool.client.has_twins()
    pool.client.module.append(nn.Dropout())
    assert not pool.client.has_twins()
    monkeypatch.setattr("raydpfl.data.shards.MADE", 0)
    for kind, twins in (("synthetic", True), (f"{__name__}:Read", False)):
        data = {"kind": kind, "clients": 20, "samples": 9, "test_samples": 9}
        plan = Plan.make(experiment(data=data, client={"backend": "vmap"}))
        client = ClientActor(plan.experiment, str(plan.shards))
        assert isinstance(client.shards, Made) and client.has_twins() == twins


class Read(Synthetic):
    """Rows that code of the user's own makes, who may read them from one open file."""


def test_a_module_is_tried_for_what_it_draws():
    still = nn.Sequential(nn.Flatten(), nn.Linear(60, 3))
    drops = nn.Sequential(still, nn.Dropout(0.1))
    other = nn.Linear(7, 3)  # which takes other inputs: nobody knows what it draws
    state = torch.get_rng_state()
    found = [draws_torch(each, form((60,))) for each in (still, drops, other)]
    assert found == [False, True, True]
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_within_attention_do_not_set_it_back_for_one_another():
    flash = torch.backends.cuda.flash_sdp_enabled
    before = flash()
    inside = threading.Event()
    leave = threading.Event()

    def other():
        with vmap._ATTENTION:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with vmap._ATTENTION:
        thread.start()
        assert inside.wait(10) and not flash()
    assert not flash()
    leave.set()
    thread.join()
    assert flash() == before is True
