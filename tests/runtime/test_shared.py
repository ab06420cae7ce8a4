"""What processes of a machine put into memory that they share, and calls through their doors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import psutil
import pytest
from conftest import experiment

from raydpfl.errors import RunError
from raydpfl.runtime import shared_memory
from raydpfl.runtime.shared_memory import Gone, Outbox, accepted, listening, opened
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.provenance import of_capability

pytestmark = pytest.mark.skipif(
    not shared_memory.AVAILABLE, reason="shared memory needs memfd_create"
)


@pytest.fixture
def doors():
    """Both ends of a connection."""
    listener, address = listening()
    mine = opened(address)
    theirs = accepted(listener)
    with closing(listener), closing(mine), closing(theirs):
        yield mine, theirs


def test_arrays_of_every_shape_arrive_as_they_were_put(doors):
    mine, theirs = doors
    outbox = Outbox()
    square = np.arange(6.0).reshape(2, 3)
    given = [np.empty(0), square, np.asfortranarray(square), square[:, ::2], np.float32([1, 2])]
    for count in range(1, len(given) + 1):  # the memory grows
        mine.send(*outbox.put(*given[:count]))
        found = theirs.take()
        assert [(each.dtype, each.shape) for each in found] == [
            (each.dtype, each.shape) for each in given[:count]
        ]
        assert all(np.array_equal(*both) for both in zip(found, given, strict=False))


def test_what_is_copied_stays_and_what_is_not_is_read_only(doors):
    mine, theirs = doors
    outbox = Outbox()
    put = outbox.put(np.zeros(3))
    for _ in range(2):
        mine.send(*put)
    (seen,) = theirs.take()
    (kept,) = theirs.take(copied=True)
    outbox.put(None)  # has no array, and takes no other's place
    assert seen.tolist() == [0, 0, 0]
    outbox.put(np.ones(3))
    assert seen.tolist() == [1, 1, 1] and kept.tolist() == [0, 0, 0]
    assert kept.flags.writeable and not seen.flags.writeable


def test_memory_is_given_once_and_again_when_there_is_more_of_it(doors):
    mine, theirs = doors
    outbox = Outbox()
    mapped = []
    for size in (1000, 1000, 10, 100_000, 100_000):
        mine.send(*outbox.put(np.full(size, float(size))))
        (found,) = theirs.take()
        assert (found == size).all() and found.shape == (size,)
        mapped.append(theirs._mapped)
    assert mapped[0] is mapped[1] is mapped[2] is not mapped[3] and mapped[3] is mapped[4]


def test_nobody_and_a_process_of_another_user_is_not_taken_for_ours(monkeypatch):
    with pytest.raises(Gone):  # as on another machine, or in another container
        opened("\0raydpfl-of-another-machine")
    listener, address = listening()
    with closing(listener):
        first = opened(address)
        here = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: here + 1)
        with pytest.raises(Gone):
            opened(address)
        answers = iter([here + 1, here + 1, here])
        monkeypatch.setattr(os, "getuid", lambda: next(answers))
        third = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        third.connect(address)
        with closing(accepted(listener)) as door:  # the third
            door.send(*Outbox().put("come in"))
            assert third.recv(1000) and not first._connection.recv(1)
        third.close()
        first.close()


PUTS = """
import time
import numpy as np
from raydpfl.runtime.shared_memory import Outbox, accepted, listening
listener, address = listening()
print(address, flush=True)
door = accepted(listener)
put = Outbox().put(np.arange(4.0))
door.send(*put)
door.send(*put)
print("sent", flush=True)
time.sleep(60)
"""


def test_memory_of_a_killed_process_holds_where_it_is_mapped_and_is_gone_elsewhere():
    process = subprocess.Popen([sys.executable, "-c", PUTS], stdout=subprocess.PIPE, text=True)
    address = process.stdout.readline().strip("\n")
    with closing(opened(address)) as door:
        assert process.stdout.readline() == "sent\n"
        (before,) = door.take()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert before.tolist() == [0, 1, 2, 3] == door.take()[0].tolist()
        with pytest.raises(Gone, match="closed"):
            door.take()
        with pytest.raises(Gone, match="closed"):
            door.send(*Outbox().put(1))
    with pytest.raises(Gone):
        opened(address)


def test_an_actor_of_this_machine_one_of_another_and_one_whose_door_is_lost_give_inline_bits(
    tmp_path, shared_ray
):
    from raydpfl.runtime.actor_pool import Actors

    plan = Plan.make(experiment(local={"kind": "scaffold", "steps": 5, "batch": 10, "lr": 0.1}))
    pool = Actors(plan.experiment.client, 2)
    pool.told(plan.experiment, str(plan.shards), of_capability(plan.platform))
    pool.up(2, lambda: None)
    assert all(facts.address for facts in pool._facts.values())
    pool._facts[1] = replace(pool._facts[1], address="")
    found = []
    for name, given in (("inline", None), ("actors", pool)):
        (tmp_path / name).mkdir()
        coordinator = Coordinator(plan, str(tmp_path / name), given)
        coordinator.start()
        for t in range(3):
            coordinator.round()
            if given and t == 0:
                pool._served[0].door._connection.shutdown(socket.SHUT_RDWR)
            if given:
                pool.up(2, lambda: None)
        found.append((coordinator.at.model.tobytes(), *coordinator.at.memory.arrays()))
    assert [*pool._served] == [0] and pool.replaced == 1
    pool.close()
    assert found[0][0] == found[1][0]
    assert np.array_equal(found[0][2]["local"], found[1][2]["local"])


@pytest.mark.slow
def test_a_pool_goes_on_after_an_error_a_kill_and_in_other_processes(shared_ray):
    from raydpfl.runtime.actor_pool import Actors

    plan = Plan.make(experiment())
    pool = Actors(plan.experiment.client, 2)
    pool.told(plan.experiment, str(plan.shards), of_capability(plan.platform))
    pool.up(2, lambda: None)
    model = np.zeros(plan.d, np.float32)
    many = np.arange(40)

    def losses(pool: Actors, clients: np.ndarray) -> list[float]:
        return pool.losses(model, 0, clients, plan.noise_seed).tolist()

    expected = losses(pool, many)
    for _ in range(2):  # the answer of the actor without an error is nobody's
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
