"""What processes of a machine put into memory that they share."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import experiment

from raydpfl import shared
from raydpfl.coordinator import Coordinator
from raydpfl.origin import of_capability
from raydpfl.plan import Plan
from raydpfl.shared import Gone, Inbox, Outbox

pytestmark = pytest.mark.skipif(not shared.AVAILABLE, reason="shared memory needs memfd_create")


def test_arrays_of_every_shape_arrive_as_they_were_put():
    outbox = Outbox()
    inbox = Inbox()
    square = np.arange(6.0).reshape(2, 3)
    given = [np.empty(0), square, np.asfortranarray(square), square[:, ::2], np.float32([1, 2])]
    for count in range(1, len(given) + 1):  # the memory grows
        found = [inbox.take(put) for put in outbox.put(*given[:count])]
        assert [(each.dtype, each.shape) for each in found] == [
            (each.dtype, each.shape) for each in given[:count]
        ]
        assert all(np.array_equal(*both) for both in zip(found, given, strict=False))


def test_what_is_copied_stays_and_what_is_not_is_read_only():
    outbox = Outbox()
    inbox = Inbox()
    (first,) = outbox.put(np.zeros(3))
    seen = inbox.take(first)
    kept = inbox.take(first, copied=True)
    outbox.put(None)  # has no array, and takes no other's place
    assert seen.tolist() == [0, 0, 0]
    outbox.put(np.ones(3))
    assert seen.tolist() == [1, 1, 1] and kept.tolist() == [0, 0, 0]
    assert kept.flags.writeable and not seen.flags.writeable


def test_what_another_machine_would_have_at_that_path_is_not_taken_for_it():
    outbox = Outbox()
    other = Outbox()
    (put,) = outbox.put(np.zeros(3))
    (wrong,) = other.put(np.zeros(3))
    reading, writing = os.pipe()
    paths = [wrong.path, f"/proc/self/fd/{reading}", "/proc/self/fd/123456"]
    for path in paths:
        with pytest.raises(Gone):
            Inbox().take(replace(put, path=path))
    os.close(reading)
    os.close(writing)


PUTS = """
import pickle, sys, time
import numpy as np
from raydpfl.shared import Outbox
outbox = Outbox()
sys.stdout.buffer.write(pickle.dumps(outbox.put(np.arange(4.0))))
sys.stdout.buffer.flush()
time.sleep(60)
"""


def test_memory_of_a_killed_process_holds_where_it_is_mapped_and_is_gone_elsewhere():
    process = subprocess.Popen([sys.executable, "-c", PUTS], stdout=subprocess.PIPE)
    (put,) = pickle.load(process.stdout)
    inbox = Inbox()
    before = inbox.take(put)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert before.tolist() == [0, 1, 2, 3] == inbox.take(put).tolist()
    with pytest.raises(Gone, match="cannot be read"):
        Inbox().take(put)


def test_an_actor_of_this_machine_one_of_another_and_one_whose_memory_is_lost_give_inline_bits(
    tmp_path, shared_ray, monkeypatch
):
    from raydpfl.actors import Actors

    plan = Plan.make(experiment(local={"kind": "scaffold", "steps": 5, "batch": 10, "lr": 0.1}))
    pool = Actors(plan.experiment.client, 2)
    pool.told(plan.experiment, str(plan.shards), of_capability(plan.platform))
    pool.up(2, lambda: None)
    assert pool._near == {0, 1}
    pool._near = {0}
    pool._inboxes.clear()
    found = []
    mapped = shared._mapped
    opened = []

    def lost(put: shared.Put) -> memoryview:
        opened.append(put)
        if len(opened) == 1:
            raise Gone("lost")
        return mapped(put)

    monkeypatch.setattr(shared, "_mapped", lost)
    for name, given in (("inline", None), ("actors", pool)):
        (tmp_path / name).mkdir()
        coordinator = Coordinator(plan, str(tmp_path / name), given)
        coordinator.start()
        for _ in range(3):
            coordinator.round()
        found.append((coordinator.at.model.tobytes(), *coordinator.at.memory.arrays()))
    pool.close()
    assert pool.replaced == 1
    assert found[0][0] == found[1][0]
    assert np.array_equal(found[0][2]["local"], found[1][2]["local"])
