"""Clients' samples on disk: one Arrow IPC file of training rows sorted by client, shared by whoever
trains on this machine.

>>> import tempfile
>>> from raydpfl.data.synthetic import Synthetic
>>> with tempfile.TemporaryDirectory() as cache:
...     shards = Shards.open(prepare(Synthetic(clients=3, samples=4, sizes={"kind": "balanced"}), seed=0, cache=Path(cache)))
...     x, y, n = shards.lane([2, -1], rows=5)
...     shards.clients, shards.shape, shards.classes, x.shape, n
(3, (60,), 10, (2, 5, 60), array([4, 0]))

A prepared folder is named by a digest of (format, data config, seed, contents of the source files,
code of the user's own members), wherever the files are, and never changes:

| file          | rows        | columns                                                                            |
|---------------|-------------|------------------------------------------------------------------------------------|
| train.arrow   | sample      | x: uint8 or float32 [prod(shape)], y: int64 (its class) or float32 (its target, for  |
|               |             | regression); in batches that end where a client ends                               |
| clients.arrow | client      | first: int64, its first row in train.arrow; size: int64, how many rows              |
| test.arrow    | sample      | as train.arrow, in one batch                                                        |
| data.json     |             | shape, classes (0: regression), unseen, mean and std, how it was dealt |
| digests.json  |             | size and digest of each; what does not agree with them is prepared again            |

It is written beside its place under another name and renamed, so a half-written one is never used,
and of two runs that prepare the same data the later takes the earlier's.

Clients and test rows are memory-mapped; training rows are read at the place in the file that the
map names, straight into the caller's arrays. Both are the page cache's one copy for all processes.
But a page that is mapped counts as memory of the process, and one touch maps its whole
neighbourhood: 4,800 clients of 4.8 kB out of a million made 3 GB, and nothing when read. It is also
faster.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raydpfl.data.sources import Data, Split
from raydpfl.errors import RAISED, ConfigError
from raydpfl.files import STILL, cache_root, put, whole
from raydpfl.member import own_code

FORMAT = 4
ALIGNED = 64  # bytes
# bytes that are read as fast as another call is made: so many for each row wanted, before rows are
# read one by one
NEAR = 32 << 10
BATCH_BYTES = 8 << 20  # of x in a batch of train.arrow, unless a single client has more


def prepare(data: Data, seed: int, root: Path | None = None, cache: Path | None = None) -> Path:
    """The folder that holds `data` dealt to clients, written now unless it is there already, whole
    and unchanged.

    `root` is where the source files are (None: RAYDPFL_DATA), `cache` where folders are kept (None:
    RAYDPFL_CACHE, or raydpfl under XDG_CACHE_HOME or ~/.cache). Raises `ConfigError` before
    anything is written for what the data cannot give.
    """
    with _blamed(data):
        described = _described(data, seed, root)
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]
    folder = (cache or cache_root()) / "data" / name
    if whole(folder):
        return folder
    with _blamed(data):
        split = data.split(seed, root)
    split = replace(split, rows=_blamed(data)(split.rows), test=_blamed(data)(split.test))

    def fill(scratch: Path) -> None:
        _write(split, described["data"], scratch)
        if _described(data, seed, root) != described:
            raise ConfigError("data.kind", data.kind, STILL)

    put(folder, fill)
    return folder


@contextmanager
def _blamed(data: Data) -> Iterator[None]:
    """What a source of the user's own raises within is an error in it, told in one line."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except RAISED as error:
        if not own_code(data):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error}; {place.filename}, line {place.lineno}"
        raise ConfigError(
            "data.kind", data.kind, f"a source that gives its samples ({reason})"
        ) from None


def _described(data: Data, seed: int, root: Path | None) -> dict[str, Any]:
    """All that the prepared files are a function of, in JSON types."""
    return {
        "format": FORMAT,
        "data": data.facts(),
        "seed": seed,
        "sources": data.identity(root),
        "code": own_code(data),
    }


def _write(split: Split, config: dict, folder: Path) -> None:
    ends = np.cumsum(split.sizes)
    some = int(np.argmax(split.sizes > 0))  # a client that has a row
    row_bytes = split.rows(some, some + 1)[0][0].nbytes
    needed = int(ends[-1]) * (row_bytes + 8)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            "RAYDPFL_CACHE",
            str(folder.parent),
            f"a folder with {needed / 1e9:.1f} GB free; this one has {free / 1e9:.1f}",
        )
    # classes of a client, and its samples of the commonest
    held, most = np.zeros((2, len(split.sizes)), np.int64)
    counted = np.zeros(split.classes, np.int64)  # training samples of each class
    writer = None
    first = 0
    while first < len(ends):
        start = ends[first] - split.sizes[first]
        last = max(
            first + 1, int(np.searchsorted(ends, start + BATCH_BYTES // row_bytes, side="right"))
        )
        batch = _batch(*(part := split.rows(first, last)), split.classes)
        writer = writer or pa.ipc.new_file(str(folder / "train.arrow"), batch.schema)
        writer.write_batch(batch)
        owner = np.repeat(np.arange(last - first), split.sizes[first:last])
        if split.classes:
            kinds, counts = np.unique(owner * split.classes + part[1], return_counts=True)
            held[first:last] = np.bincount(kinds // split.classes, minlength=last - first)
            np.maximum.at(most, first + kinds // split.classes, counts)
            np.add.at(counted, kinds % split.classes, counts)
        first = last
    writer.close()
    test = _batch(*split.test(), split.classes)
    clients = pa.record_batch({"first": ends - split.sizes, "size": split.sizes})
    for name, batch in (("test.arrow", test), ("clients.arrow", clients)):
        with pa.ipc.new_file(str(folder / name), batch.schema) as writer:
            writer.write_batch(batch)
    labels = {}
    if split.classes:
        has = split.sizes > 0
        labels = {
            "classes_per_client": _spread(held),
            "commonest_class_per_client": _spread((most[has] / split.sizes[has]).round(4)),
        }
    about = {
        "shape": list(split.shape), "classes": split.classes,
        "unseen": np.flatnonzero(counted == 0).tolist(),
        "mean": list(split.mean), "std": list(split.std), "config": config,
        "description": {
            "clients": len(split.sizes), "samples": int(split.sizes.sum()), "test_samples": test.num_rows, "unused": split.unused,
            "samples_per_client": _spread(split.sizes),
        } | labels | ({} if split.optimum is None else {"optimum": split.optimum}),
    }  # fmt: skip
    (folder / "data.json").write_text(json.dumps(about, indent=1))


def _batch(x: np.ndarray, y: np.ndarray, classes: int) -> pa.RecordBatch:
    flat = pa.FixedSizeListArray.from_arrays(
        pa.array(np.ascontiguousarray(x).reshape(-1)), int(np.prod(x.shape[1:]))
    )
    return pa.record_batch(
        {"x": flat, "y": y.astype(np.int64 if classes else np.float32, copy=False)}
    )


def _spread(values: np.ndarray) -> dict[str, float]:
    return {
        "min": values.min().item(),
        "median": float(np.median(values)),
        "max": values.max().item(),
    }


class _Mapped:
    """An Arrow IPC file, mapped: `columns` of each batch as read-only arrays on the map; `at` is
    where such an array is in the file.
    """

    def __init__(self, path: Path):
        self.file = path.open("rb", buffering=0)
        # cohorts are spread over the file: reading on beyond a client is a waste
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        reader = pa.ipc.open_file(pa.py_buffer(self.map))
        batches = [reader.get_batch(index).columns for index in range(reader.num_record_batches)]
        self.columns = [
            [getattr(column, "values", column).to_numpy() for column in columns]
            for columns in batches
        ]

    def at(self, column: np.ndarray) -> int:
        return column.ctypes.data - np.frombuffer(self.map, np.uint8).ctypes.data

    def read(self, into: np.ndarray, at: int) -> None:
        rest = memoryview(into).cast("B")
        while rest:  # Linux reads 2 GiB at a time at most
            count = os.preadv(self.file.fileno(), [rest], at)
            if not count:
                raise OSError(f"{self.file.name} is cut short")
            rest = rest[count:]
            at = at + count

    def take(self, into: np.ndarray, at: int, count: int, rows: np.ndarray | None) -> None:
        """Of `count` rows from `at` on, those at `rows`, or all for None."""
        if rows is None:
            self.read(into, at)
        elif count * into[0].nbytes <= NEAR * len(rows):
            whole = np.empty((count, *into.shape[1:]), into.dtype)
            self.read(whole, at)
            np.take(whole, rows, axis=0, out=into)
        else:
            for place, row in enumerate(rows.tolist()):
                self.read(into[place : place + 1], at + row * into[0].nbytes)


class Shards:
    """A prepared folder, open for reading. Opening is cheap; pickling sends the path.

    `clients`: how many; `sizes`: int64 [clients], on the map; `shape`: of one sample; `classes` (0:
    regression); `unseen`: classes without a training sample; `test_size`. What `lane` and `test`
    return is the caller's to write to. Where y is said to be int64, it is float32 for regression.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        about = json.loads((folder / "data.json").read_text())
        self.shape = tuple(about["shape"])
        self.classes = about["classes"]
        self.unseen = tuple(about["unseen"])
        self._description = about["description"]
        self._train, self._clients, self._test = (
            _Mapped(folder / f"{part}.arrow") for part in ("train", "clients", "test")
        )
        ((self._first, self.sizes),) = self._clients.columns
        ((test_x, self._test_y),) = self._test.columns
        self._test_x = test_x.reshape(-1, *self.shape)
        # first row of each batch
        self._starts = np.concatenate([[0], np.cumsum([len(y) for _, y in self._train.columns])])
        self._places = [(self._train.at(x), self._train.at(y)) for x, y in self._train.columns]
        self._row_bytes = test_x.itemsize * int(np.prod(self.shape))
        # uint8 v becomes (v / 255 - mean) / std per channel, by one product and one sum.
        per_channel = (-1, *[1] * (len(self.shape) - 1)) if len(about["mean"]) > 1 else ()
        mean, std = (
            np.array(about[key] or [other]).reshape(per_channel)
            for key, other in (("mean", 0.0), ("std", 1.0))
        )
        self._scale = np.float32(1 / (255 * std))
        self._shift = np.float32(-mean / std)

    @classmethod
    def open(cls, folder: Path | str) -> Shards:
        return cls(Path(folder))

    def __reduce__(self) -> tuple:
        return Shards, (self.folder,)

    @property
    def clients(self) -> int:
        return len(self.sizes)

    @property
    def test_size(self) -> int:
        return len(self._test_y)

    def lane(
        self, clients: Sequence[int], rows: int, picked: Sequence[np.ndarray | None] | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The samples of some clients, each padded with zeros to `rows`; a client of -1 is a dummy
        without samples.

        `picked` has the rows to take of each client, ascending, or None for all. Returns x float32
        [len(clients), rows, *shape], y int64 [len(clients), rows] and the numbers of samples taken,
        int64 [len(clients)]. Raises ValueError if that is more than `rows`.
        """
        members = np.asarray(clients, np.int64)
        x = _aligned_zeros(len(members), rows, *self.shape)
        y = np.zeros((len(members), rows), self._test_y.dtype)
        sizes = np.where(members < 0, 0, self.sizes[members])
        picked = [None] * len(members) if picked is None else picked
        n = np.array(
            [size if some is None else len(some) for size, some in zip(sizes, picked, strict=True)],
            np.int64,
        )
        if n.max(initial=0) > rows:
            raise ValueError(
                f"client {members[n.argmax()]} has {n.max()} samples, more than the {rows} rows of the lane"
            )
        raw = np.empty((rows, *self.shape), self._test_x.dtype)
        for lane, (batch, before, count) in enumerate(
            zip(*self._rows_of(members), n.tolist(), strict=True)
        ):
            if count:
                stored = raw[:count] if raw.dtype == np.uint8 else x[lane, :count]
                for into, at in zip((stored, y[lane, :count]), self._places[batch], strict=True):
                    self._train.take(
                        into, at + before * into[0].nbytes, int(sizes[lane]), picked[lane]
                    )
                if raw.dtype == np.uint8:
                    self._scaled(stored, x[lane, :count])
        return x, y, n

    def _rows_of(self, members: np.ndarray) -> tuple[list[int], list[int]]:
        """Of each client, the batch of the file that holds its rows, and how many rows of others
        stand before them there.
        """
        batches = np.searchsorted(self._starts, self._first[members], side="right") - 1
        return batches.tolist(), (self._first[members] - self._starts[batches]).tolist()

    def prefetch(self, clients: np.ndarray, rows: int) -> None:
        """Asks the system to have these clients (int64, -1 for a dummy) in memory soon, but for
        those of whom `rows` are a small part; returns at once.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        members = np.asarray(clients, np.int64)
        members = members[members >= 0]
        sizes = self.sizes[members]
        members = members[
            (sizes > 0) & ((sizes <= rows) | (sizes * self._row_bytes <= NEAR * rows))
        ]
        for batch, before, count in zip(
            *self._rows_of(members), self.sizes[members].tolist(), strict=True
        ):
            for at, width in zip(
                self._places[batch], (self._row_bytes, self._test_y.itemsize), strict=True
            ):
                os.posix_fadvise(
                    self._train.file.fileno(),
                    at + before * width,
                    count * width,
                    os.POSIX_FADV_WILLNEED,
                )

    def test(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The test samples in order, `batch` at a time: x float32 [<= batch, *shape], y int64 [<=
        batch].
        """
        for start in range(0, self.test_size, batch):
            stored = self._test_x[start : start + batch]
            y = self._test_y[start : start + batch]
            yield (
                self._scaled(stored, np.empty(stored.shape, np.float32))
                if stored.dtype == np.uint8
                else stored.copy(),
                y.copy(),
            )

    def _scaled(self, pixels: np.ndarray, x: np.ndarray) -> np.ndarray:
        x[...] = pixels
        x *= self._scale
        if self._shift.any():
            x += self._shift
        return x

    def release(self) -> None:
        """Gives the mapped pages back, so that this process holds no more memory than it works
        with. They return when touched.
        """
        for file in (self._train, self._clients, self._test):
            file.map.madvise(mmap.MADV_DONTNEED)

    def describe(self) -> dict:
        """What the partition did: clients, samples, test samples, unused samples; and per client
        (min, median, max) samples, classes, and the share of its samples that are of its commonest
        class.

        For regression no classes; and `optimum` where the least loss on the test set that a linear
        model can reach is known.
        """
        return dict(self._description)


def _aligned_zeros(*shape: int) -> np.ndarray:
    """float32, from a place in memory where torch would begin a tensor of its own: what trains on
    it need not copy it (see `raydpfl.local.way.LaneData.rows`).
    """
    flat = np.zeros(math.prod(shape) + ALIGNED // 4, np.float32)
    first = -flat.ctypes.data % ALIGNED // 4
    return flat[first : first + math.prod(shape)].reshape(shape)
