"""Prepared data: all readers give the same rows, and no half-written folder is used."""

import gc
import math
import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import psutil
import pyarrow as pa
import pytest
from conftest import batches, experiment, form, refusal

from raydpfl import data
from raydpfl.check.tasks import random_split
from raydpfl.data import Shards, prepare, row_readers, shard_writer
from raydpfl.data.row_readers import ClientTable, FileRows, GeneratedRows, MappedRows
from raydpfl.data.shard_files import BATCH_BYTES
from raydpfl.data.source_checks import add_checks
from raydpfl.models import tasks
from raydpfl.runtime.runner import run
from raydpfl.simulation.resolution import resolve

pytestmark = pytest.mark.usefixtures("cache")


def mini(**keys):
    partition = {"kind": "dirichlet", "psi": 0.5}
    given = {"kind": "fashion_mnist_mini", "clients": 70, "partition": partition}
    return data.parse({**given, "sizes": {"kind": "spread"}, **keys})


def synthetic(**keys):
    given = {"kind": "synthetic", "clients": 40, "samples": 30, "test_samples": 100}
    return data.parse({**given, "sizes": {"kind": "balanced"}, **keys})


SHARED = {
    "even": {"kind": "overlapping", "per_client": 120},
    "skewed": {"kind": "overlapping", "per_client": 120, "classes": 2, "share": 0.92},
}


def shared(form, **keys):
    return mini(partition=SHARED[form], sizes={"kind": "balanced"}, **keys)


class Gaps(data.Data):
    """Clients of 0, 2, 0, 3 and 0 samples, and others without any."""

    def split(self, seed, root):
        return random_split(form((2,), 2), np.array([0, 2, 0, 3, *[0] * 36]), 5, seed)


class Letters(data.Data):
    """Tokens with a target at each position."""

    task: tasks.Task = tasks.parse("sequence")

    def split(self, seed, root):
        letters = form((8,), 4, self.task, (8,), tokens=7)
        return random_split(letters, np.arange(40) % 4 + 2, 9, seed)


class Repeated(data.Data):
    """Shared samples, written for each client that holds them."""

    form: str

    def overlaps(self):
        return True

    def split(self, seed, root):
        return replace(shared(self.form).split(seed, root), at=None)


CASES: dict[str, Callable[[], data.Data]] = {
    "pixels": mini,
    "normalized": lambda: mini(normalize=True),
    "principal components": lambda: mini(features={"kind": "pca", "components": 7}),
    "floats": synthetic,
    "of uneven sizes": lambda: synthetic(sizes={"kind": "spread"}),
    "regression": lambda: data.parse({"kind": "quadratics", "clients": 40, "dimension": 30}),
    "shared": lambda: shared("even"),
    "shared, skewed": lambda: shared("skewed", features={"kind": "pca", "components": 5}),
    "without rows": Gaps,
    "tokens and targets by position": Letters,
}


def plain_chunk(described, seed, clients, rows):
    """The reference: row by row from the split, in float64."""
    split = described.split(seed, None)
    x = np.zeros((len(clients), rows, *split.shape))
    y = np.zeros((len(clients), rows, *split.targets))
    n = np.zeros(len(clients), np.int64)
    channels = (-1, *[1] * (len(split.shape) - 1))
    mean, std = (
        np.reshape(each or other, channels) for each, other in ((split.mean, 0), (split.std, 1))
    )
    for slot, client in enumerate(clients):
        if client >= 0:
            own_x, own_y = split.rows(client, client + 1)
            n[slot] = len(own_y)
            scaled = own_x / 255 if own_x.dtype == np.uint8 else own_x
            x[slot, : n[slot]] = (scaled - mean) / std if split.mean else scaled
            y[slot, : n[slot]] = own_y
    return x, y, n


def opened(described, reader, seed=5):
    """Prepared data with such a reader of training rows."""
    shards = Shards.open(prepare(described, seed))
    assert isinstance(shards.reader, MappedRows)
    if reader == "file":
        path = shards.folder / "train.arrow"
        shards.reader = FileRows(path, shards.form(described.task), ClientTable(shards.folder))
    return shards


@pytest.mark.parametrize("reader", ["mapped", "file"])
@pytest.mark.parametrize("case", CASES)
def test_a_chunk_is_the_clients_rows_padded_with_zeros(case, reader):
    described = CASES[case]()
    shards = opened(described, reader)
    most = int(shards.sizes.max())
    for clients, rows in (([3, -1, 39, 0, 3, 17, 18, 19], most + 1), ([20, 21, 22], most)):
        x, y, n = plain_chunk(described, 5, clients, rows)
        kept = [np.arange(size)[:: 1 + slot % 3] for slot, size in enumerate(n)]
        picked = [None if slot % 4 == 1 else some for slot, some in enumerate(kept)]
        for some in (None, picked):
            chunk = shards.chunk(clients, rows, some)
            assert chunk[0].dtype == (np.int64 if shards.tokens else np.float32)
            assert chunk[2].dtype == np.int64
            assert chunk[1].dtype == (np.int64 if shards.classes else np.float32)
            for slot, size in enumerate(n):
                own = np.arange(size) if some is None or some[slot] is None else some[slot]
                assert chunk[2][slot] == len(own)
                np.testing.assert_allclose(chunk[0][slot, : len(own)], x[slot, own], atol=3e-6)
                assert np.array_equal(chunk[1][slot, : len(own)], y[slot, own])
                assert not any(part[slot, len(own) :].any() for part in chunk[:2])
            for part in chunk[:2]:
                assert part.ctypes.data % row_readers.ALIGNMENT == 0


@pytest.mark.parametrize("case", ["pixels", "floats", "shared"])
def test_all_readers_give_the_same_bits(case):
    described = CASES[case]()
    one, other = (opened(described, reader) for reader in ("mapped", "file"))
    rows = int(one.sizes.max())
    picked = [None, np.array([0, 2]), None, np.array([1])]
    for clients in ([3, 8, 19, 20], [2, 20, -1, 5]):
        for padded in (rows, 3 * rows):
            for some in (None, picked):
                found = one.chunk(clients, padded, some), other.chunk(clients, padded, some)
                assert all(map(np.array_equal, *found))


def test_what_is_read_is_the_callers_to_write_to():
    shards = Shards.open(prepare(mini(), seed=5))
    rows = int(shards.sizes.max())
    for read in (lambda: shards.chunk([0, 1], rows), lambda: next(batches(shards, "test", 50))):
        before = [part.copy() for part in read()]
        for part in read():
            part += 1
        assert all(map(np.array_equal, before, read()))


def test_each_channel_is_normalized_by_its_own_constants(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "t.npz", image=images, label=np.arange(60) % 4)
    keys = {"kind": "table", "train": str(tmp_path / "t.npz"), "clients": 6}
    described = data.parse({**keys, "mean": [0.1, 0.5, 0.9], "std": [0.2, 0.3, 0.4]})
    x, _, _ = Shards.open(prepare(described, 0)).chunk([0, 4], 9)
    np.testing.assert_allclose(x, plain_chunk(described, 0, [0, 4], 9)[0], atol=5e-6)


def test_a_chunk_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="client 2 has 30 samples, more than the 29 rows"):
        Shards.open(prepare(synthetic(), seed=0)).chunk([2, -1], 29)


# --- a file that is too large to stay mapped ---


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """100 MB of training rows and 24 MB of test rows."""
    described = synthetic(clients=4000, samples=100, test_samples=100_000)
    return described, prepare(described, 0, cache=tmp_path_factory.mktemp("large"))


@pytest.mark.slow
def test_rows_of_a_large_file_are_read_and_leave_the_process_small(large):
    described, folder = large
    shards = Shards.open(folder)
    assert isinstance(shards.reader, FileRows)
    clients = [3999, 0, -1, *range(2690, 2720)]  # on both sides of the end of a batch
    chunk = shards.chunk(clients, 100)
    assert all(map(np.array_equal, chunk, plain_chunk(described, 0, clients, 100)))
    process = psutil.Process()
    before = process.memory_info().shared
    for start in range(0, 4000, 100):
        shards.chunk(range(start, start + 100), 100)
    assert process.memory_info().shared - before < 3e6  # of 100 MB of rows
    first = next(batches(shards, "test", 50))[0]
    assert sum(len(y) for _, y in batches(shards, "test", 1000)) == 100_000
    assert np.array_equal(next(batches(shards, "test", 50))[0], first)


def test_batches_end_where_clients_end(large):
    _, folder = large
    clients = pa.ipc.open_file(folder / "clients.arrow").read_all()
    first, size = (clients[name].to_numpy() for name in ("first", "size"))
    assert first[0] == 0 and np.array_equal(first[1:], np.cumsum(size)[:-1])
    reader = pa.ipc.open_file(folder / "train.arrow")
    assert reader.num_record_batches == math.ceil(4000 * 100 * 248 / BATCH_BYTES) == 2
    assert reader.get_batch(0).num_rows in first


def test_clients_that_are_read_whole_are_loaded_ahead(large, monkeypatch):
    shards = Shards.open(large[1])
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: asked.append(given[1:3]))
    shards.prefetch(np.array([3, -1, 1000, 7]), 99)
    assert not asked  # not all of their rows are wanted
    shards.prefetch(np.array([3, -1, 1000, 7]), 100)
    assert [length for _, length in asked] == [100 * 240, 100 * 8] * 3
    assert [(at - asked[0][0]) / 24_000 for at, _ in asked[::2]] == [0, 997, 4]


def test_a_read_that_stops_short_goes_on_and_a_file_that_is_cut_is_refused(monkeypatch):
    shards = opened(synthetic(), "file")
    before = shards.chunk([3, 7], 30)
    read = os.pread
    # Linux stops at 2 GiB
    monkeypatch.setattr(os, "pread", lambda file, size, at: read(file, min(size, 1001), at))
    assert all(map(np.array_equal, shards.chunk([3, 7], 30), before))
    os.truncate(shards.folder / "train.arrow", 100_000)
    with pytest.raises(OSError, match=r"train\.arrow is cut short"):
        shards.chunk([0, 39], 30)


# --- samples that clients share ---


def stored_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("t*ain.arrow"))


@pytest.mark.parametrize("validation", [0.0, 0.2])
@pytest.mark.parametrize("form", SHARED)
def test_samples_that_clients_share_are_stored_once(form, validation):
    folders = [
        prepare(described, 5, validation=validation)
        for described in (shared(form), Repeated(form=form))
    ]
    once, each = map(Shards.open, folders)
    assert np.array_equal(once.sizes, each.sizes)
    for client in (0, 33):
        assert all(map(np.array_equal, once.chunk([client], 120), each.chunk([client], 120)))
    held = (batches(shards, "validation") for shards in (once, each))
    for one, other in zip(*held, strict=True):
        assert all(map(np.array_equal, one, other))
    described = once.describe()
    assert bool(validation) == ("validation_samples" in described)
    distinct = described.pop("distinct_samples")
    assert described == each.describe() and once.unseen == each.unseen
    ratio = distinct / int(once.sizes.sum())
    assert stored_bytes(folders[0]) / stored_bytes(folders[1]) == pytest.approx(ratio, rel=0.05)
    if not validation:
        order = shared(form).split(5, None).samples(0, 70)
        assert distinct == len(np.unique(order)) == 9000 - described["unused"]


def test_a_guarantee_says_that_it_is_not_for_samples_that_several_clients_hold():
    keys = {"kind": "fashion_mnist_mini", "clients": 50, "partition": SHARED["even"]}
    for more, expected in (({"data": keys}, True), ({}, False)):
        (guarantee,) = resolve(experiment(**more)).guarantees(4, {})[:1]
        assert guarantee.unit == "client"
        said = any("a sample that several clients hold" in each for each in guarantee.exclusions)
        assert said == expected


def test_fields_that_are_newer_than_a_prepared_folder_leave_its_name():
    assert shared("even").facts()["partition"] == SHARED["even"]


# --- what is written ---


def test_test_batches_are_the_test_set_in_order():
    shards = Shards.open(prepare(mini(), seed=0))
    found = list(batches(shards, "test", 300))
    assert [len(y) for _, y in found] == [300] * 6 + [200]
    samples = mini().samples(0, None)
    x, y = map(np.concatenate, zip(*found, strict=True))
    np.testing.assert_allclose(x, samples.test_x / 255, atol=1e-7)
    assert np.array_equal(y, samples.test_y)


@pytest.mark.parametrize("described", [mini(), synthetic()], ids=["pixels", "floats"])
def test_rows_that_are_evaluated_begin_where_torchs_own_tensors_do(described):
    """Products may round by it: bits would depend on where memory happened to be free."""
    shards = Shards.open(prepare(described, 5))
    # none is given out twice
    kept = [x for size in (3, 17) for x, _ in batches(shards, "test", size)]
    assert all(x.ctypes.data % row_readers.ALIGNMENT == 0 for x in kept)


def test_the_description_says_what_the_clients_have():
    shards = {"kind": "shards", "per_client": 5}
    keys = {"kind": "fashion_mnist_mini", "clients": 300, "partition": shards}
    assert Shards.open(prepare(data.parse(keys), 0)).describe() == {
        "clients": 300,
        "samples": 9000,
        "test_samples": 2000,
        "unused": 0,
        "samples_per_client": {"min": 30, "median": 30.0, "max": 30},
        "classes_per_client": {"min": 2, "median": 4.0, "max": 5},
        "commonest_class_per_client": {"min": 0.2, "median": 0.4, "max": 0.6},
    }
    kinds = ({"kind": "iid"}, {"kind": "dirichlet", "psi": 5}, {"kind": "dirichlet", "psi": 0.1})
    prepared = [Shards.open(prepare(mini(clients=20, partition=kind), 0)) for kind in kinds]
    shares = [each.describe()["commonest_class_per_client"]["median"] for each in prepared]
    assert 0.1 < shares[0] < 0.15 < shares[1] < 0.4 < shares[2] <= 1


def test_counts_of_classes_are_those_of_the_rows_that_clients_train_on():
    described = synthetic(clients=7, classes=4, sizes={"kind": "power-law"})
    shards = Shards.open(prepare(described, 0, validation=0.2))
    counts = shards.class_counts()
    assert counts.shape == (7, 4) and counts.sum(1).tolist() == shards.sizes.tolist()
    for client in range(7):
        _, y, n = shards.chunk([client], 210)
        assert counts[client].tolist() == [int((y[0, : n[0]] == each).sum()) for each in range(4)]


# --- rows that are generated ---


@pytest.mark.parametrize("iid", [False, True])
def test_generated_rows_are_those_that_would_be_written(iid, monkeypatch):
    monkeypatch.setattr(data.sources.synthetic, "PIECE", 60 * 7)  # several parts to a client
    described = synthetic(sizes={"kind": "power-law"}, iid=iid)
    shards = Shards.open(prepare(described, seed=9))
    most = int(shards.sizes.max())
    clients = [*range(40), -1, 3]
    picked = [np.arange(int(size))[::2] for size in shards.sizes] + [None, np.array([0])]
    expected = [shards.chunk(clients, most, some) for some in (None, picked)]
    form = shards.form(described.task)
    shards.reader = GeneratedRows(described, 9, shards.sizes, form)
    for some, chunk in zip((None, picked), expected, strict=True):
        assert all(map(np.array_equal, shards.chunk(clients, most, some), chunk))


def test_data_that_would_take_much_of_a_disk_are_generated():
    described = synthetic(clients=200_000, samples=400)
    shards = Shards.open(prepare(described, seed=2))
    assert not (shards.folder / "train.arrow").exists()
    chunk = pickle.loads(pickle.dumps(shards)).chunk([199_999], 400)
    assert all(map(np.array_equal, chunk, plain_chunk(described, 2, [199_999], 400)))


@pytest.mark.slow
@pytest.mark.parametrize("actors", [0, 2])
def test_a_run_on_generated_rows_has_the_bits_of_one_on_written_rows(
    actors, tmp_path, monkeypatch, request
):
    if actors:
        request.getfixturevalue("shared_ray")
    given = {"kind": "synthetic", "clients": 30, "samples": 20, "test_samples": 50}

    def bits(actors, name):
        asked = experiment(data=given, model={"kind": "softmax"}, client={"actors": actors})
        return run(asked, tmp_path / name).summary["model_sha256"]

    written = bits(0, "written")
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(shard_writer, "GENERATED_BYTES", 0)
    assert bits(actors, "generated") == written


# --- folders ---


def test_shards_are_pickled_by_their_path():
    shards = Shards.open(prepare(mini(), seed=0))
    sent = pickle.dumps(shards)
    assert len(sent) < 1000
    assert np.array_equal(pickle.loads(sent).chunk([4], 4000)[0], shards.chunk([4], 4000)[0])


def test_the_same_data_are_prepared_once_and_other_data_in_other_folders(cache, tmp_path):
    folder = prepare(mini(), seed=0)
    written = (folder / "train.arrow").stat().st_mtime_ns
    assert prepare(mini(), seed=0) == folder
    assert (folder / "train.arrow").stat().st_mtime_ns == written
    others = {prepare(mini(), seed=1), prepare(mini(clients=71), seed=0)}
    path = tmp_path / "t.npz"
    for rows in (50, 60):  # a file that changes is other data
        np.savez(path, image=np.zeros((rows, 4), np.float32), label=np.zeros(rows, np.int64))
        described = data.parse({"kind": "table", "train": str(path), "clients": 2})
        others.add(prepare(described, 0))
        assert Shards.open(prepare(described, 0)).sizes.sum() == rows * 0.9
    assert len({folder, *others}) == len(list((cache / "data").iterdir())) == 5


def test_as_many_clients_as_the_config_says():
    with refusal("data.clients = 60: expected 40, the number of clients in the data"):
        prepare(Gaps(clients=60), 0)
    few = replace(synthetic().split(0, None), ids=["a", "b"])
    with refusal("data.kind = 'synthetic': expected a source with an id for each of 40 clients"):
        add_checks(synthetic(), few)


def test_a_change_in_a_module_that_a_users_class_imports_makes_other_data(own_module):
    imported_path = own_module("imported_skew", "SKEW = 0.25")
    source = "from imported_skew import SKEW\nfrom raydpfl.data.partitions import Iid\n"
    own_module("importing_parts", source + "class Mine(Iid):\n    pass\n")
    described = mini(partition={"kind": "importing_parts:Mine"})
    folders = {prepare(described, 0), prepare(described, 0)}
    imported_path.write_text("SKEW = 9")
    assert prepare(described, 0) not in folders and len(folders) == 1


def test_a_run_that_fails_or_is_refused_leaves_nothing(cache, monkeypatch):
    with refusal(r"data\.clients = 9001"):
        prepare(mini(clients=9001), seed=0)
    assert not (cache / "data").exists()

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shard_writer, "_description", broken)
    with pytest.raises(KeyboardInterrupt):
        prepare(mini(), seed=0)
    assert list((cache / "data").iterdir()) == []


def test_two_runs_may_prepare_the_same_data_at_once(cache):
    with ThreadPoolExecutor(4) as runs:
        folders = list(runs.map(lambda _: prepare(mini(), seed=3), range(4)))
    assert len(set(folders)) == 1 and len(folders) == 4
    assert list((cache / "data").iterdir()) == [folders[0]]


@pytest.mark.slow
def test_a_killed_run_leaves_no_folder_that_a_later_one_would_use(cache):
    folders = cache / "data"
    context = multiprocessing.get_context("fork")
    process = context.Process(target=prepare, args=(synthetic(clients=200_000), 0))
    process.start()
    while not list(folders.glob(".*/train.arrow")):
        assert process.is_alive()
    process.kill()
    process.join()
    assert all(folder.name.startswith(".") for folder in folders.iterdir())


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "file"))
    with refusal(r"RAYDPFL_CACHE = .*a folder that can be written"):
        prepare(mini(), seed=0)


def test_data_that_are_let_go_close_their_files(large):
    gc.collect()  # what other tests let go
    process = psutil.Process()
    before = process.num_fds(), len(process.memory_maps(grouped=False))
    shards = Shards.open(large[1])
    next(batches(shards, "test", 10))
    assert process.num_fds() > before[0]
    del shards
    assert process.num_fds() == before[0]
