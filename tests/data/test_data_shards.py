"""Prepared folders: what is written, how it is read back, and that a half-written one is never
used.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import shutil
import threading
from itertools import product

import numpy as np
import psutil
import pyarrow as pa
import pytest
from conftest import experiment

from raydpfl import data
from raydpfl.core import native
from raydpfl.data import Room, Shards, prepare, shards, sources
from raydpfl.errors import ConfigError
from raydpfl.runtime.runner import run as carried_out
from raydpfl.simulation.plan import Plan


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "cache"))
    # so that small data sets span several batches
    monkeypatch.setattr(shards, "BATCH_BYTES", 1 << 18)
    return tmp_path / "cache" / "data"


@pytest.fixture
def large(monkeypatch):
    """Every file is too large to stay mapped."""
    monkeypatch.setattr(shards, "HELD", 0)


@pytest.fixture
def plain(monkeypatch):
    """Nothing is compiled."""
    monkeypatch.setattr(native, "library", lambda: None)


def mini(**keys):
    partition = {"kind": "dirichlet", "psi": 0.5}
    sizes = {"kind": "spread"}
    return data.parse(
        {"kind": "fashion_mnist_mini", "clients": 70, "partition": partition, "sizes": sizes} | keys
    )


def synthetic(**keys):
    return data.parse(
        {
            "kind": "synthetic",
            "clients": 40,
            "samples": 30,
            "sizes": {"kind": "balanced"},
            "test_samples": 100,
        }
        | keys
    )


def slow_chunk(described, seed, clients, rows):
    """The reference: row by row from the split, in float64."""
    split = described.split(seed, None)
    x = np.zeros((len(clients), rows, *split.shape))
    y = np.zeros((len(clients), rows))
    n = np.zeros(len(clients), np.int64)
    for chunk, client in enumerate(clients):
        if client >= 0:
            own_x, own_y = split.rows(client, client + 1)
            n[chunk] = len(own_y)
            for row in range(len(own_y)):
                x[chunk, row] = own_x[row].astype(np.float64)
                y[chunk, row] = own_y[row]
                if own_x.dtype == np.uint8:
                    x[chunk, row] /= 255
                for channel in range(len(split.mean)):
                    x[chunk, row, channel] = (
                        x[chunk, row, channel] - split.mean[channel]
                    ) / split.std[channel]
    return x, y, n


@pytest.mark.parametrize(
    "described",
    [
        mini(),
        mini(normalize=True),
        mini(features={"kind": "pca", "components": 7}),
        synthetic(sizes={"kind": "spread"}),
        data.parse({"kind": "quadratics", "clients": 40, "dimension": 30, "rank": 4}),
    ],
    ids=["scaled", "normalized", "principal", "synthetic", "regression"],
)
def test_a_chunk_is_the_clients_rows_padded_with_zeros(described):
    opened = Shards.open(prepare(described, seed=5))
    rows = int(opened.sizes.max()) + 1
    clients = [3, -1, 39, 0, 3, 17]
    x, y, n = opened.chunk(clients, rows)
    slow_x, slow_y, slow_n = slow_chunk(described, 5, clients, rows)
    assert (
        x.dtype == np.float32
        and n.dtype == np.int64
        and y.dtype == (np.int64 if opened.classes else np.float32)
    )
    np.testing.assert_allclose(x, slow_x, atol=2e-6)
    assert np.array_equal(y, slow_y) and np.array_equal(n, slow_n)


SHARED = {
    "even": {"kind": "overlapping", "per_client": 120},
    "skewed": {"kind": "overlapping", "per_client": 120, "classes": 2, "share": 0.92},
}


def shared(form, **keys):
    return data.parse(
        {"kind": "fashion_mnist_mini", "clients": 70, "partition": SHARED[form]} | keys
    )


@pytest.fixture
def repeated(monkeypatch, tmp_path):
    """Prepares data as it was before samples were kept once: every row of every client."""

    def prepared(described, seed, **keys):
        with monkeypatch.context() as patched:
            patched.setattr(sources.Split, "shared", False)
            return prepare(described, seed, cache=tmp_path / "repeated", **keys)

    return prepared


@pytest.mark.parametrize(
    ("form", "batch", "columns"),
    [
        ("even", 1 << 16, {}),
        ("skewed", 256 << 20, {}),
        pytest.param(
            "skewed",
            1 << 16,
            {"features": {"kind": "pca", "components": 5}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_samples_that_clients_share_are_kept_once_and_read_as_the_clients_rows(
    form, batch, columns, repeated, monkeypatch
):
    monkeypatch.setattr(shards, "SHARED_BYTES", batch)
    described = shared(form, **columns)
    once = Shards.open(prepare(described, 5))
    each = Shards.open(repeated(described, 5))
    assert once.folder.name == each.folder.name  # the same data, however they are kept
    clients = [3, -1, 69, 0, 3, 17]
    generator = np.random.default_rng(0)
    picked = [None, None, *(np.sort(generator.permutation(120)[:40]) for _ in range(4))]
    room = Room()
    for some in (None, picked):
        found = once.chunk(clients, 125, some, room)
        assert all(map(np.array_equal, found, each.chunk(clients, 125, some)))
    x, y, _ = slow_chunk(described, 5, clients, 125)
    np.testing.assert_allclose(once.chunk(clients, 125)[0], x, atol=2e-6)
    assert np.array_equal(once.chunk(clients, 125)[1], y)
    once.prefetch(np.arange(70), 120)
    once.release()
    assert np.array_equal(once.chunk([5], 120)[1], each.chunk([5], 120)[1])


def test_what_is_said_of_shared_samples_is_what_is_said_of_their_rows(repeated):
    described = shared("skewed")
    once, each = (Shards.open(folder) for folder in (prepare(described, 5), repeated(described, 5)))
    order = described.split(5, None).samples(0, 70)
    said = once.describe()
    assert said.pop("distinct_samples") == len(np.unique(order)) == 9000 - said["unused"]
    assert said == each.describe() and said["samples"] == 70 * 120
    assert once.unseen == each.unseen


@pytest.mark.parametrize("form", SHARED)
def test_shared_samples_that_are_held_out_are_those_of_the_rows(form, repeated):
    described = shared(form)
    once, each = (
        Shards.open(folder)
        for folder in (
            prepare(described, 5, validation=0.2),
            repeated(described, 5, validation=0.2),
        )
    )
    assert np.array_equal(once.sizes, each.sizes) and once.sizes.max() < 120
    read = [np.concatenate([x for x, _ in s.validation(100)]) for s in (once, each)]
    assert np.array_equal(*read) and len(read[0]) == once.validation_size > 0
    for client in (0, 33):
        assert all(map(np.array_equal, once.chunk([client], 120), each.chunk([client], 120)))


def test_shared_samples_take_the_room_of_the_samples_and_not_of_the_rows(repeated):
    partition = {"kind": "overlapping", "per_client": 600}
    described = shared("even", partition=partition)
    sizes = [
        sum(path.stat().st_size for path in folder.glob("t*ain.arrow"))
        for folder in (prepare(described, 1), repeated(described, 1))
    ]
    # 70 clients x 600 of 9000 samples
    assert sizes[1] / sizes[0] == pytest.approx(70 * 600 / 9000, rel=0.05)


def test_a_guarantee_says_that_it_is_not_for_samples_that_several_clients_hold():
    data = {"kind": "fashion_mnist_mini", "clients": 50, "partition": SHARED["even"]}
    (guarantee,) = Plan.make(experiment(data=data)).guarantees(4, {})[:1]
    assert guarantee.unit == "client"
    assert any("a sample that several clients hold" in each for each in guarantee.exclusions)
    (guarantee,) = Plan.make(experiment()).guarantees(4, {})[:1]
    assert not any("several clients" in each for each in guarantee.exclusions)


def test_fields_that_are_newer_than_a_prepared_folder_leave_its_name():
    partition = data.parse(
        {"kind": "table", "train": "t", "clients": 2, "partition": SHARED["even"]}
    ).facts()["partition"]
    assert partition == SHARED["even"]


def test_targets_of_shared_samples_are_read_from_the_file_where_they_are_many(monkeypatch):
    opened = Shards.open(prepare(shared("even"), 5))
    assert opened._targets is not None
    monkeypatch.setattr(shards, "TARGETS", 10)
    large = Shards.open(opened.folder)
    assert large._targets is None
    picked = [None, np.array([0, 7, 119])]
    assert np.array_equal(opened.chunk([1, 2], 120, picked)[1], large.chunk([1, 2], 120, picked)[1])


def test_a_chunk_normalizes_each_channel_by_its_own_constants(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "t.npz", image=images, label=np.arange(60) % 4)
    described = data.parse(
        {
            "kind": "table",
            "train": str(tmp_path / "t.npz"),
            "clients": 6,
            "mean": [0.1, 0.5, 0.9],
            "std": [0.2, 0.3, 0.4],
        }
    )
    x, _, _ = Shards.open(prepare(described, 0)).chunk([0, 4], 9)
    np.testing.assert_allclose(x, slow_chunk(described, 0, [0, 4], 9)[0], atol=5e-6)


def test_what_a_chunk_and_a_test_batch_return_may_be_written_to():
    opened = Shards.open(prepare(synthetic(), seed=0))
    for read in (lambda: opened.chunk([0, 1], 30), lambda: next(opened.test(50))):
        first = [part.copy() for part in read()]
        for part in read():
            part += 1
        assert all(
            np.array_equal(before, after) for before, after in zip(first, read(), strict=True)
        )


def test_a_chunk_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="client 2 has 30 samples, more than the 29 rows"):
        Shards.open(prepare(synthetic(), seed=0)).chunk([2, -1], 29)


@pytest.mark.parametrize("near", [100, shards.NEAR])
@pytest.mark.parametrize("described", [mini(), synthetic()], ids=["pixels", "floats"])
def test_rows_that_are_picked_are_those_of_the_whole_client(described, near, monkeypatch):
    monkeypatch.setattr(shards, "NEAR", near)
    opened = Shards.open(prepare(described, seed=5))
    clients = [3, -1, 0, 17, 5]
    whole_x, whole_y, sizes = opened.chunk(clients, int(opened.sizes.max()))
    picked = [np.array([1, 4]), None, np.arange(sizes[2] - 1), None, np.array([sizes[4] - 1])]
    x, y, n = opened.chunk(clients, int(sizes.max()), picked)
    assert n.tolist() == [2, 0, sizes[2] - 1, sizes[3], 1]
    for slot, rows in enumerate(picked):
        rows = np.arange(n[slot]) if rows is None else rows
        assert np.array_equal(x[slot, : n[slot]], whole_x[slot, rows]) and np.array_equal(
            y[slot, : n[slot]], whole_y[slot, rows]
        )
        assert not x[slot, n[slot] :].any() and not y[slot, n[slot] :].any()


@pytest.mark.parametrize("described", [mini(), synthetic()], ids=["pixels", "floats"])
def test_a_room_gives_the_same_chunk_whatever_was_in_it_before(described):
    opened = Shards.open(prepare(described, seed=5))
    rows = int(opened.sizes.max()) + 1
    room = Room()
    for clients in ([3, 4, 5, 6], [9, -1, 0], [-1, -1], list(range(12)), [17]):
        expected = opened.chunk(clients, rows)
        for found, part in zip(opened.chunk(clients, rows, room=room), expected, strict=True):
            assert found.dtype == part.dtype and np.array_equal(found, part)
        for part in opened.chunk(clients, rows, room=room)[:2]:
            assert part.ctypes.data % shards.ALIGN == 0
            part[...] = 7
    first, *_ = opened.chunk([1, 2], rows, room=room)
    again, *_ = opened.chunk([3, 4], rows, room=room)
    assert np.shares_memory(first, again)


@pytest.mark.parametrize("described", [mini(), synthetic()], ids=["pixels", "floats"])
def test_several_chunks_read_at_once_are_those_read_one_by_one(described):
    opened = Shards.open(prepare(described, seed=5))
    rows = int(opened.sizes.max())
    chunks = [[3, 8, 19], [20, 21, -1], [5, 5, 6]]
    x, y, n = opened.chunk([client for chunk in chunks for client in chunk], rows)
    for part, clients in zip(range(0, 9, 3), chunks, strict=True):
        for found, expected in zip((x, y, n), opened.chunk(clients, rows), strict=True):
            assert np.array_equal(found[part : part + 3], expected)


@pytest.mark.parametrize("described", [mini(), synthetic()], ids=["pixels", "floats"])
def test_rows_of_a_small_file_and_of_a_large_one_are_the_same(described, monkeypatch):
    small = Shards.open(prepare(described, seed=5))
    monkeypatch.setattr(shards, "HELD", 0)
    large = Shards.open(small.folder)
    assert small._train.held and not large._train.held
    clients = [-1, 3, 8, 19, 2, 20, -1, 5, 5]
    rows = int(small.sizes.max())
    picked = [None] * len(clients)
    picked[3] = np.array([0, 2])
    for more, padded in product((None, picked), (rows, 3 * rows)):  # these client by client
        for found, expected in zip(
            small.chunk(clients, padded, more), large.chunk(clients, padded, more), strict=True
        ):
            assert np.array_equal(found, expected)
    small.prefetch(np.array(clients), rows)
    small.release()  # its pages stay
    assert np.array_equal(small.chunk(clients, rows)[0], large.chunk(clients, rows)[0])


def test_clients_who_follow_one_another_in_the_file_are_read_at_once(large, plain, monkeypatch):
    opened = Shards.open(prepare(synthetic(sizes={"kind": "balanced"}), seed=5))
    rows = int(opened.sizes.min())
    assert rows == opened.sizes.max()
    expected = [opened.chunk([client], rows)[0][0] for client in (4, 5, 6, 7, 9)]
    read = os.preadv
    calls = []
    monkeypatch.setattr(os, "preadv", lambda *given: calls.append(given) or read(*given))
    x, y, _ = opened.chunk([4, 5, 6, 7, 9], rows)
    assert len(calls) == 2 and np.array_equal(x, expected)  # two runs of clients
    monkeypatch.setattr(shards, "TARGETS", 0)
    again = Shards.open(opened.folder)
    calls.clear()
    x, read_y, _ = again.chunk([4, 5, 6, 7, 9], rows)
    assert len(calls) == 4 and np.array_equal(x, expected)  # x and y of both
    assert np.array_equal(y, read_y)


@pytest.mark.skipif(native.library() is None, reason="nothing is compiled here")
@pytest.mark.parametrize("described", [mini(), synthetic()], ids=["pixels", "floats"])
def test_compiled_code_reads_all_clients_at_once_and_what_is_read_one_by_one(
    described, large, monkeypatch
):
    folder = prepare(described, seed=5)
    monkeypatch.setattr(shards, "TARGETS", 0)
    opened = Shards.open(folder)
    rows = int(opened.sizes.max())
    clients = [-1, 3, 8, 19, 20, 2, 21, -1, 5, 5]
    picked = [None] * len(clients)
    picked[3] = np.array([0, 2])
    calls = []
    read = native.read
    monkeypatch.setattr(native, "read", lambda *given: calls.append(given) or read(*given))
    found = [opened.chunk(clients, rows, some) for some in (None, picked)]
    assert len(calls) == 4  # x and y of both
    monkeypatch.setattr(native, "library", lambda: None)
    for (x, y, n), some in zip(found, (None, picked), strict=True):
        expected = opened.chunk(clients, rows, some)
        assert all(map(np.array_equal, (x, y, n), expected))
        alone = slow_chunk(described, 5, clients, rows)
        assert some or (np.allclose(x, alone[0], atol=2e-6) and np.array_equal(y, alone[1]))


@pytest.mark.skipif(native.library() is None, reason="nothing is compiled here")
def test_a_file_that_was_cut_short_is_told(large):
    opened = Shards.open(prepare(synthetic(), seed=5))
    last = int(opened.sizes.nonzero()[0][-1])
    opened.chunk([last], 30)
    os.truncate(opened.folder / "train.arrow", opened._at(0, np.array([last]), 240)[0] + 1)
    with pytest.raises(OSError, match=r"train\.arrow is cut short"):
        opened.chunk([0, last], 30)


@pytest.mark.parametrize(
    "labels,kind",
    [([0, 255, 3, 7], np.uint8), ([-100, 3, 3, 2], np.int16), ([70_000, 0, 1, 1], np.int32)],
)
def test_targets_are_held_in_the_smallest_type_that_keeps_them(labels, kind, monkeypatch):
    opened = Shards.open(prepare(synthetic(), seed=5))
    rng = np.random.default_rng(0)
    columns = [(x, rng.choice(labels, len(y))) for x, y in opened._train.columns]
    columns[-1][1][-4:] = labels
    monkeypatch.setattr(opened._train, "columns", columns)
    expected = np.concatenate([y for _, y in columns])
    assert opened._targets.dtype == kind and np.array_equal(opened._targets, expected)
    more = Shards.open(opened.folder)
    monkeypatch.setattr(more._train, "columns", columns)
    monkeypatch.setattr(shards, "TARGETS", expected.size * np.dtype(kind).itemsize - 1)
    assert more._targets is None  # it would take more


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="needs Linux")
def test_clients_that_are_in_memory_are_not_asked_for(large, monkeypatch):
    monkeypatch.setattr(shards, "TARGETS", 0)
    opened = Shards.open(prepare(synthetic(sizes={"kind": "balanced"}), seed=5))
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: asked.append(given))
    opened.chunk([3, 4], int(opened.sizes.max()))
    opened.prefetch(np.array([3, -1, 4]), 40)
    assert not asked

    def away(*_):
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", away)
    opened.prefetch(np.array([3, -1, 4]), 40)
    assert len(asked) == 4


def test_a_read_that_stops_short_goes_on(large, plain, monkeypatch):
    opened = Shards.open(prepare(synthetic(), seed=5))
    x, y, _ = opened.chunk([3, 7], 30)
    read = os.preadv
    calls = []

    def short(descriptor, buffers, at):  # Linux stops at 2 GiB
        calls.append(at)
        return read(descriptor, [buffers[0][:1001]], at)

    monkeypatch.setattr(os, "preadv", short)
    again_x, again_y, _ = opened.chunk([3, 7], 30)
    assert np.array_equal(again_x, x) and np.array_equal(again_y, y) and len(calls) > 4
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match=r"train\.arrow is cut short"):
        opened.chunk([3], 30)


def test_the_sum_of_the_shards_is_the_data_set():
    described = mini()
    opened = Shards.open(folder := prepare(described, seed=1))
    found = described.samples(1, None)
    stored = pa.ipc.open_file(folder / "train.arrow").read_all()
    pixels = np.stack(stored["x"].to_numpy()).reshape(found.x.shape)
    order = [np.lexsort(part.reshape(len(part), -1).T) for part in (pixels, found.x)]
    assert np.array_equal(pixels[order[0]], found.x[order[1]])
    assert np.array_equal(
        np.bincount(stored["y"]), np.bincount(found.y)
    ) and opened.sizes.sum() == len(found.y)


def test_the_table_of_clients_says_where_each_one_begins(cache):
    folder = prepare(mini(), seed=1)
    clients = pa.ipc.open_file(folder / "clients.arrow").read_all()
    first, size = (clients[name].to_numpy() for name in ("first", "size"))
    assert first[0] == 0 and np.array_equal(first[1:], np.cumsum(size)[:-1])
    reader = pa.ipc.open_file(folder / "train.arrow")
    ends = np.cumsum(
        [reader.get_batch(index).num_rows for index in range(reader.num_record_batches)]
    )
    assert (
        reader.num_record_batches > 5 and np.isin(ends[:-1], first).all() and ends[-1] == size.sum()
    )


def test_test_batches_are_the_test_set_in_order():
    opened = Shards.open(prepare(mini(), seed=0))
    batches = list(opened.test(300))
    assert [len(y) for _, y in batches] == [300] * 6 + [200] and opened.test_size == 2000
    found = mini().samples(0, None)
    np.testing.assert_allclose(
        np.concatenate([x for x, _ in batches]), found.test_x / 255, atol=1e-7
    )
    assert np.array_equal(np.concatenate([y for _, y in batches]), found.test_y)


def test_streamed_synthetic_data_are_those_of_each_client_alone():
    described = synthetic(sizes={"kind": "power-law"})
    split = described.split(9, None)
    alone = zip(*(split.rows(client, client + 1) for client in range(40)), strict=True)
    assert all(
        np.array_equal(whole, np.concatenate(parts))
        for whole, parts in zip(split.rows(0, 40), alone, strict=True)
    )
    more = synthetic(clients=60, samples=30).split(9, None)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(more.rows(7, 8), synthetic().split(9, None).rows(7, 8), strict=True)
    )


@pytest.fixture
def unwritten(monkeypatch):
    """Rows that can be made are not written, however few."""
    monkeypatch.setattr(shards, "MADE", 0)
    monkeypatch.setattr(sources.synthetic, "PIECE", 60 * 7)


@pytest.mark.parametrize("iid", [False, True])
def test_rows_that_are_made_are_those_that_would_be_written(iid, cache, request):
    described = synthetic(sizes={"kind": "power-law"}, iid=iid)
    written = Shards.open(prepare(described, seed=9, cache=cache / "written"))
    request.getfixturevalue("unwritten")
    made = Shards.open(prepare(described, seed=9, cache=cache / "made"))
    assert not (made.folder / "train.arrow").exists()
    assert np.array_equal(made.sizes, written.sizes)
    most = int(made.sizes.max())
    clients = [*range(40), -1, 3]
    picked = [np.arange(int(size))[::2] for size in made.sizes] + [None, np.array([0])]
    for opened in (made, pickle.loads(pickle.dumps(made))):
        for chosen in (None, picked):
            found = opened.chunk(clients, most, chosen, Room())
            wanted = written.chunk(clients, most, chosen)
            assert all(map(np.array_equal, found, wanted))
    for x, y in zip(made.test(64), written.test(64), strict=True):
        assert all(map(np.array_equal, x, y))
    assert np.array_equal(made.class_counts(), written.class_counts())
    assert made.describe().items() <= written.describe().items()


@pytest.mark.parametrize("actors", [0, 2])
def test_a_run_on_rows_that_are_made_is_that_on_rows_that_are_written(
    actors, tmp_path, monkeypatch, request
):
    if actors:
        request.getfixturevalue("shared_ray")
    given = {"kind": "synthetic", "clients": 30, "samples": 20, "test_samples": 50}
    e = experiment(data=given, model={"kind": "softmax"}, client={"actors": 0})
    written = carried_out(e, tmp_path / "written").summary["model_sha256"]
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "other"))
    request.getfixturevalue("unwritten")
    e = experiment(data=given, model={"kind": "softmax"}, client={"actors": actors})
    assert carried_out(e, tmp_path / "made").summary["model_sha256"] == written


def test_rows_are_written_where_some_are_held_out_or_their_source_reads_them(unwritten):
    apart = prepare(synthetic(), seed=1, validation=0.2)
    assert (apart / "train.arrow").exists()
    assert (prepare(mini(), seed=1) / "train.arrow").exists()


def test_data_that_no_disk_holds_are_made(monkeypatch):
    free = shutil.disk_usage("/")._replace(free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    clients = 200_000
    described = synthetic(clients=clients, samples=400, test_samples=100)
    opened = Shards.open(prepare(described, seed=2))
    found = opened.chunk([clients - 1], 400)
    assert all(map(np.array_equal, found, slow_chunk(described, 2, [clients - 1], 400)))
    with pytest.raises(ConfigError, match="MB free"):
        prepare(described, seed=2, validation=0.5)


def test_the_test_samples_of_synthetic_data_are_few_however_many_the_clients():
    for clients in (7, 100, 5000):
        assert (
            len(synthetic(clients=clients, samples=1, test_samples=100).split(0, None).test()[1])
            == 100
        )


def test_what_was_done_is_written_down():
    described = data.describe(
        data.parse(
            {
                "kind": "fashion_mnist_mini",
                "clients": 300,
                "partition": {"kind": "shards", "per_client": 5},
            }
        )
    )
    assert described == {
        "clients": 300,
        "samples": 9000,
        "test_samples": 2000,
        "unused": 0,
        "samples_per_client": {"min": 30, "median": 30.0, "max": 30},
        "classes_per_client": {"min": 2, "median": 4.0, "max": 5},
        "commonest_class_per_client": {"min": 0.2, "median": 0.4, "max": 0.6},
    }
    kinds = ({"kind": "iid"}, {"kind": "dirichlet", "psi": 5}, {"kind": "dirichlet", "psi": 0.1})
    shares = [
        data.describe(mini(clients=20, partition=kind))["commonest_class_per_client"]["median"]
        for kind in kinds
    ]
    assert 0.1 < shares[0] < 0.15 < shares[1] < 0.4 < shares[2] <= 1
    overlapping = data.describe(
        mini(
            clients=3,
            sizes={"kind": "balanced"},
            partition={"kind": "overlapping", "per_client": 1000},
        )
    )
    assert (
        overlapping["samples"] == 3000
        and 6000 < overlapping["unused"] < 8000
        and overlapping["classes_per_client"]["min"] == 10
    )


def test_targets_of_a_regression_are_kept_as_numbers(tmp_path):
    x = np.arange(40.0).reshape(20, 2)
    y = np.linspace(-1, 1, 20)
    who = np.arange(20) % 3
    np.savez(tmp_path / "t.npz", v=x, cost=y, who=who)
    keys = {
        "kind": "table",
        "train": str(tmp_path / "t.npz"),
        "test": str(tmp_path / "t.npz"),
        "x": "v",
        "y": "cost",
        "task": "regression",
    }
    opened = Shards.open(
        prepare(data.parse(keys | {"client": "who", "partition": {"kind": "natural"}}), 0)
    )
    opened.prefetch(np.array([0, -1, 2]), 1)
    _, chunk_y, n = opened.chunk([2, 0], 8)
    assert opened.classes == 0 and "classes_per_client" not in opened.describe()
    for slot, client in enumerate((2, 0)):
        assert (
            np.array_equal(chunk_y[slot, : n[slot]], y[who == client].astype(np.float32))
            and not chunk_y[slot, n[slot] :].any()
        )
    assert np.array_equal(
        np.concatenate([part for _, part in opened.test(7)]), y.astype(np.float32)
    )
    iid = data.describe(data.parse(keys | {"clients": 4}))
    assert iid["samples_per_client"] == {"min": 5, "median": 5.0, "max": 5}
    with pytest.raises(
        ConfigError, match=r"data.partition.kind = 'dirichlet': expected iid or natural for targets"
    ):
        data.describe(
            data.parse(keys | {"clients": 4, "partition": {"kind": "dirichlet", "psi": 1.0}})
        )


class Gaps(data.Data):
    """Clients of 0, 2, 0, 3 and 0 samples."""

    kind: str = "gaps"

    def split(self, seed, root):
        ends = [0, 0, 2, 2, 5, 5]
        x = np.arange(10, dtype=np.float32).reshape(5, 2)
        y = np.arange(5) % 2
        return data.Split(
            np.diff(ends),
            (2,),
            2,
            lambda first, last: (x[ends[first] : ends[last]], y[ends[first] : ends[last]]),
            lambda: (x, y),
        )


def test_clients_without_samples_may_stand_anywhere():
    opened = Shards.open(prepare(Gaps(), 0))
    expected_x, expected_y, expected_n = slow_chunk(Gaps(), 0, [0, 1, 2, 3], 3)
    x, y, n = opened.chunk([0, 1, 2, 3], 3)
    assert (
        np.array_equal(x, expected_x)
        and np.array_equal(y, expected_y)
        and n.tolist() == expected_n.tolist() == [0, 2, 0, 3]
    )
    assert not any(part.any() for part in opened.chunk([4], 3))


@pytest.mark.parametrize(
    "near,rows,wanted",
    [(shards.NEAR, 1, [1, 3]), (7, 2, [1]), (7, 3, [1, 3]), (8, 2, [1]), (12, 2, [1, 3])],
)
def test_clients_that_are_read_whole_are_asked_for_ahead(near, rows, wanted, large, monkeypatch):
    monkeypatch.setattr(shards, "NEAR", near)  # a row is 8 bytes
    monkeypatch.setattr(shards, "TARGETS", 0)
    opened = Shards.open(prepare(Gaps(), 0))
    asked = []
    places = {opened._places[0][0] + 8 * first: client for client, first in ((1, 0), (3, 2))}
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, at, *_: asked.append(at))
    monkeypatch.setattr(opened._train, "cached", lambda places: False)
    opened.prefetch(np.array([0, 1, -1, 2, 3, 4]), rows)
    assert [places[at] for at in asked if at in places] == wanted and len(asked) == 2 * len(wanted)
    monkeypatch.setattr(shards, "TARGETS", 100)
    holds = Shards.open(opened.folder)
    monkeypatch.setattr(holds._train, "cached", lambda places: False)
    asked.clear()
    holds.prefetch(np.array([0, 1, -1, 2, 3, 4]), rows)
    assert [places[at] for at in asked] == wanted  # labels are in memory


def test_shards_are_pickled_by_their_path():
    opened = Shards.open(prepare(mini(), seed=0))
    sent = pickle.dumps(opened)
    assert len(sent) < 1000 and np.array_equal(
        pickle.loads(sent).chunk([4], 4000)[0], opened.chunk([4], 4000)[0]
    )


def test_reading_clients_and_releasing_pages_keep_the_process_small(large):
    opened = Shards.open(
        prepare(synthetic(clients=2000, samples=100, test_samples=100_000), seed=0)
    )
    process = psutil.Process()
    shared = process.memory_info().shared
    for start in range(0, 2000, 100):
        opened.chunk(range(start, start + 100), 100)
    assert process.memory_info().shared - shared < 3e6  # of 48 MB of rows
    first = next(opened.test(50))[0]
    assert sum(len(y) for _, y in opened.test(1000)) == 100_000
    touched = process.memory_info().shared
    opened.release()
    assert touched - process.memory_info().shared > 15e6  # of 24 MB of test rows
    assert np.array_equal(next(opened.test(50))[0], first)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux")
def test_opening_a_large_file_of_many_batches_leaves_none_of_its_pages_in_memory(large):
    opened = Shards.open(prepare(synthetic(features=400), seed=5))
    assert len(opened._train.columns) > 3
    with open("/proc/self/smaps") as maps:
        lines = iter(maps)
        resident = [
            next(line for line in lines if line.startswith("Rss:")).split()[1]
            for mapped in lines
            if mapped.rstrip().endswith(str(opened.folder / "train.arrow"))
        ]
    assert resident == ["0"]


def test_the_same_data_are_prepared_once_and_other_data_apart(cache):
    folder = prepare(mini(), seed=0)
    written = (folder / "train.arrow").stat().st_mtime_ns
    assert (
        prepare(mini(), seed=0) == folder and (folder / "train.arrow").stat().st_mtime_ns == written
    )
    assert (
        len({folder, prepare(mini(), seed=1), prepare(mini(clients=71), seed=0)})
        == len(list(cache.iterdir()))
        == 3
    )


def test_a_changed_source_file_is_other_data(tmp_path):
    for rows in (50, 60):
        np.savez(
            tmp_path / "t.npz",
            image=np.zeros((rows, 4), np.float32),
            label=np.zeros(rows, np.int64),
        )
        opened = Shards.open(
            prepare(
                data.parse({"kind": "table", "train": str(tmp_path / "t.npz"), "clients": 2}), 0
            )
        )
        assert opened.sizes.sum() == rows * 0.9


def test_a_run_that_fails_or_is_refused_leaves_nothing(cache, monkeypatch):
    with pytest.raises(ConfigError, match=r"data\.clients = 9001"):
        prepare(mini(clients=9001), seed=0)
    assert not cache.exists()

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        shards.json,
        "dumps",
        lambda *a, old=json.dumps, **k: old(*a, **k) if "sort_keys" in k else broken(),
    )
    with pytest.raises(KeyboardInterrupt):
        prepare(mini(), seed=0)
    assert list(cache.iterdir()) == []


def test_two_runs_may_prepare_the_same_data_at_once(cache):
    folders = []
    runs = [
        threading.Thread(target=lambda: folders.append(prepare(mini(), seed=3))) for _ in range(4)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert len(set(folders)) == 1 and len(folders) == 4 and list(cache.iterdir()) == [folders[0]]


def _prepare(described):
    prepare(described, seed=0)


def test_a_killed_run_leaves_no_folder_that_a_later_one_would_use(cache):
    run = multiprocessing.get_context("fork").Process(
        target=_prepare, args=(synthetic(clients=200_000),)
    )
    run.start()
    while not list(cache.glob(".*/train.arrow")):
        assert run.is_alive()
    run.kill()
    run.join()
    assert all(folder.name.startswith(".") for folder in cache.iterdir())


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"RAYDPFL_CACHE = .*a folder that can be written"):
        prepare(mini(), seed=0)
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ConfigError, match=r"a folder with 7\.1 MB free; this one has 0\.0"):
        prepare(mini(), seed=0)


@pytest.mark.parametrize("name", ["fashion_mnist_mini", "synthetic"])
def test_rows_that_are_evaluated_begin_where_torchs_own_tensors_do(name):
    """Products may round by it: bits would depend on where memory happened to be free."""
    described = data.parse({"kind": name, "clients": 20})
    opened = Shards.open(prepare(described, 5))
    kept = []  # so that no memory is given out twice
    for batch in (1, 3, 17):
        for x, y in opened.test(batch):
            kept.append((x, y))
            assert x.ctypes.data % shards.ALIGN == 0 and x.dtype == np.float32
            if len(kept) % 40 == 0:
                break


def test_counts_of_classes_are_those_of_the_rows_that_clients_train_on():
    keys = {"kind": "synthetic", "clients": 7, "samples": 30, "classes": 4}
    opened = data.load(data.parse(keys), validation=0.2)
    counts = opened.class_counts()
    assert counts.shape == (7, 4)
    assert counts.sum(1).tolist() == opened.sizes.tolist()
    for client in range(7):
        _, y, n = opened.chunk([client], 210)
        assert counts[client].tolist() == [int((y[0, : n[0]] == each).sum()) for each in range(4)]


def test_data_that_are_let_go_close_their_files():
    """Python would warn of them, which is an error under `python -W error`."""
    folder = Plan.make(experiment()).shards
    before = [each for each in gc.get_objects() if isinstance(each, shards._Mapped)]
    opened = Shards.open(folder)
    next(opened.test(10))
    now = [each for each in gc.get_objects() if isinstance(each, shards._Mapped)]
    files = [each.file for each in now if each not in before]
    assert files and not all(file.closed for file in files)
    del opened, now
    gc.collect()
    assert all(file.closed for file in files)
