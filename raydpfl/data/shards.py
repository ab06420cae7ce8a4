"""Clients' samples on disk: one Arrow IPC file of training rows sorted by client, shared by whoever
trains on this machine.

>>> import tempfile
>>> from raydpfl.data.sources.synthetic import Synthetic
>>> data = Synthetic(clients=3, samples=4, sizes={"kind": "balanced"})
>>> with tempfile.TemporaryDirectory() as cache:
...     shards = Shards.open(prepare(data, seed=0, cache=Path(cache)))
...     x, y, n = shards.chunk([2, -1], rows=5)
...     shards.clients, shards.shape, shards.classes, x.shape, n
(3, (60,), 10, (2, 5, 60), array([4, 0]))

A prepared folder is named by a digest of (format, data config, seed, contents of the source files,
code of the user's own members, share of rows held out), wherever the files are, and never changes:

- `train.arrow`, a row per sample: x, uint8, float32 or int64 [prod(shape)], and y, int64 (classes)
  or float32 (numbers), a list where a sample has several; in batches that end where a client ends.
- `clients.arrow`, a row per client: first, int64, its first row in `train.arrow`, and size, int64,
  how many rows.
- `rows.arrow`, where clients share samples: `train.arrow` then has each sample once, and this for
  each row of each client, in client order, the row there that it is; `first` is a row of this.
- `test.arrow`, as `train.arrow`, in one batch.
- `held.arrow`: how many rows of each client are held out and scored, where any are.
- `validation.arrow`, as `train.arrow`, where rows are held out of training (`data.heldout`).
- `data.json`: shape, classes (0: numbers), unseen, mean and std, and how it was dealt; where they
  are not 0 or empty, tokens, targets (the shape of a sample's) and names; and the seed, where there
  is no `train.arrow`: rows that would take more than `MADE` bytes are made by their source whenever
  they are read, if it can (`Data.maker`).
- `digests.json`: size and digest of each; what does not agree with them is prepared again.

It is written beside its place under another name and renamed, so a half-written one is never used,
and of two runs that prepare the same data the later takes the earlier's.

All files are memory-mapped, the page cache's one copy for all processes. Training rows of a file
of up to `HELD` bytes are gathered from the map. Those of a larger one are read at the place in the
file that the map names, straight into the caller's arrays: a page that is mapped counts as memory
of the process, and one touch maps its whole neighbourhood, so that 4,800 clients of 4.8 kB out of a
million made 3 GB, and nothing when read. All rows of a chunk are read by one call of compiled code,
those in memory first, while the system fetches the others.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raydpfl.config.registry import choose, own_code
from raydpfl.core import native
from raydpfl.data.sources import FAMILY, Data, Split
from raydpfl.data.validation_split import HeldOutRows, held_out, per_client
from raydpfl.errors import RAISED, ConfigError, in_line
from raydpfl.models.tasks import Form, Target, Task
from raydpfl.storage.arrow import numbers, packed
from raydpfl.storage.cache import put, whole
from raydpfl.storage.files import STILL, cache_root

FORMAT = 4
# bytes that are read as fast as another call is made: so many for each row wanted, before rows are
# read one by one
NEAR = 32 << 10
HELD = 1 << 26  # bytes of a file that stay mapped from round to round
LOOKS = 8  # clients by whom it is told whether a cohort is in memory
CACHED = 160 << 10  # bytes of pixels that are scaled at once
PADDED = 0.75  # share of rows that are no padding, from which on clients are read together
# bytes, as torch aligns its own memory: products may round by it, and what is trained on such rows
# need not copy them (`raydpfl.training.backends.base.ChunkData.rows`)
ALIGN = 64
SHARED_BYTES = 256 << 20  # the same where clients share samples, and read rows from all over it
TARGETS = 1 << 25  # bytes of targets that a process holds beside the map
# who is asked for prepared data by a process whose node may not have the files that they are of
ELSEWHERE: ContextVar[Callable[[Data, int, Any], Path] | None] = ContextVar("asked", default=None)
BATCH_BYTES = 8 << 20  # of x in a batch of train.arrow, unless a single client has more
MADE = 8 << 30  # bytes of rows above which those are not written that can be made (`Data.maker`)


def prepare(
    data: Data,
    seed: int,
    root: Path | None = None,
    cache: Path | None = None,
    validation: float | Mapping[str, float] = 0.0,
) -> Path:
    """The folder that holds `data` dealt to clients, written now unless it is there already, whole
    and unchanged.

    Args:
        data: where samples come from.
        seed: of the experiment.
        root: where the source files are (None: RAYDPFL_DATA).
        cache: where folders are kept (None: RAYDPFL_CACHE, or raydpfl under XDG_CACHE_HOME or
            ~/.cache).
        validation: the share of each client's rows that is held out of training, in [0, 1); or
            `{"clients": share}`, of the clients.

    Raises:
        ConfigError: before anything is written, for what the data cannot give.
    """
    asked = ELSEWHERE.get()
    if asked is not None:
        return asked(data, seed, validation)
    with _blamed(data):
        described = _described(data, seed, root, validation)
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]
    folder = (cache or cache_root()) / "data" / name
    if whole(folder):
        return folder
    split, apart = _divided(data, seed, root, validation)

    def fill(scratch: Path) -> None:
        _write(split, apart, described["data"], _making(data, split, apart, seed), scratch)
        if _described(data, seed, root, validation) != described:
            raise ConfigError("data.kind", data.kind, STILL)

    put(folder, fill)
    return folder


def _split(data: Data, seed: int, root: Path | None) -> Split:
    """The data's samples, with what goes wrong in a source of the user's own told as its error."""
    with _blamed(data):
        return _guarded(data, data.split(seed, root))


def _divided(
    data: Data, seed: int, root: Path | None, validation: float | Mapping[str, float]
) -> tuple[Split, HeldOutRows | None]:
    """The data's samples, nothing of them learnt from rows that are held out of training; and which
    rows these are, None: none.
    """
    split = _split(data, seed, root)
    if not validation:
        return split, None
    with _blamed(data):
        apart = held_out(split, validation, seed, data.overlaps())
        if split.without is not None:
            split = _guarded(data, split.without(_held_samples(split, apart)))
    return split, apart


def _held_samples(split: Split, apart: HeldOutRows) -> np.ndarray:
    """The samples that some client holds out of training and nobody trains on, int64."""
    assert split.samples is not None
    out, _ = apart.rows(0, len(split.sizes))
    samples = split.samples(0, len(split.sizes))
    return np.setdiff1d(samples[out], samples[~out])


def _guarded(data: Data, split: Split) -> Split:
    """The split, with what goes wrong in its parts told as the source's error."""
    form = Form(split.shape, Target(split.targets, split.classes), data.task, split.tokens)
    parts = {name: getattr(split, name) for name in ("rows", "test", "at")}
    given: dict[str, Any] = {
        name: _checked(data, form, part) for name, part in parts.items() if part is not None
    }
    if split.samples is not None:
        given["samples"] = _blamed(data)(split.samples)
    return replace(split, **given)


def _checked(data: Data, form: Form, give: Callable[..., Any]) -> Callable[..., Any]:
    """What gives rows of a source, with what is wrong with them told as its error."""

    def checked(*asked: Any) -> tuple[np.ndarray, np.ndarray]:
        with _blamed(data):
            x, y = give(*asked)
            _check(data, form, x, y)
        return x, y

    return checked


def _check(data: Data, form: Form, x: np.ndarray, y: np.ndarray) -> None:
    """Raises `ConfigError` for rows of a source that are of another form."""
    wrong = _wrong(form, x, y)
    if wrong:
        raise ConfigError("data.kind", data.kind, f"a source whose {wrong}")


def _wrong(form: Form, x: np.ndarray, y: np.ndarray) -> str | None:
    """What is wrong with rows of this form, as what would be right, in words; None: nothing."""
    target = form.target
    if len(x) != len(y):
        return f"rows have a target each ({len(x)} rows, {len(y)} targets)"
    for name, given, shape in (("x", x, form.shape), ("y", y, target.shape)):
        if given.shape[1:] != tuple(shape):
            said = f"{name} of a row is of shape {list(shape)}, as it says"
            return f"{said} (it gives {list(given.shape[1:])})"
    for name, given, most in (("targets", y, target.classes), ("tokens", x, form.tokens)):
        if not most or not given.size:
            continue
        several = name == "targets" and target.shape
        known = given[given != form.task.ignored()] if several else given
        whole = known.dtype.kind in "iu"
        low = known.min(initial=0)
        high = known.max(initial=0)
        if not whole or low < 0 or high >= most:
            return f"{name} are from 0 to {most - 1} (it gives {known.dtype}, {low} to {high})"
    return None


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
        expected = f"a source that gives its samples ({in_line(error)})"
        raise ConfigError("data.kind", data.kind, expected) from None


def _described(
    data: Data, seed: int, root: Path | None, validation: float | Mapping[str, float]
) -> dict[str, Any]:
    """All that the prepared files are a function of, in JSON types."""
    found = {
        "format": FORMAT,
        "data": data.facts(),
        "seed": seed,
        "sources": data.identity(root),
        "code": own_code(data),
    }
    # of whom the rows are that are held out stands in `held.arrow`, which once there was not
    return found | ({"validation": validation, "held": "by client"} if validation else {})


def _making(data: Data, split: Split, apart: HeldOutRows | None, seed: int) -> dict[str, Any]:
    """The seed by which rows are made whenever they are read; empty: they are written."""
    large = int(split.sizes.sum()) * _stored_bytes(split) > MADE
    makes = large and apart is None and data.maker(seed) is not None
    return {"made": seed} if makes else {}


def _write(
    split: Split, apart: HeldOutRows | None, config: dict, making: dict[str, Any], folder: Path
) -> None:
    """Writes the files of a prepared folder but for its seal. Raises `ConfigError` for no room."""
    if making:
        found = _Counts.unknown()
    else:
        _check_room(split, folder)
        write = _write_shared if split.shared else _write_train
        found = write(split, apart, folder)
    sizes = apart.sizes if apart else split.sizes
    held = found.scored
    if apart is not None and apart.clients is not None:
        sizes = sizes[~apart.clients]
        held = held[apart.clients]
        found.leave(apart.clients)
    test = _batch(*split.test())
    columns = [packed(each, pa.int64()) for each in (np.cumsum(sizes) - sizes, sizes)]
    clients = pa.RecordBatch.from_arrays(columns, names=["first", "size"])
    _write_batch(folder / "test.arrow", test)
    _write_batch(folder / "clients.arrow", clients)
    if apart:
        _write_batch(folder / "held.arrow", pa.record_batch({"rows": held}))
    about = {
        "shape": list(split.shape),
        "classes": split.classes,
        "unseen": np.flatnonzero(found.counted == 0).tolist(),
        "mean": list(split.mean),
        "std": list(split.std),
        "config": config,
        "description": _description(split, sizes, found, test.num_rows),
    }
    more = {"tokens": split.tokens, "targets": list(split.targets), "names": list(split.names)}
    about |= {name: value for name, value in more.items() if value} | making
    (folder / "data.json").write_text(json.dumps(about, indent=1))


def _description(split: Split, sizes: np.ndarray, found: _Counts, tested: int) -> dict[str, Any]:
    """See `Shards.describe`."""
    description = {
        "clients": len(sizes),
        "samples": int(sizes.sum()),
        "test_samples": tested,
        "unused": split.unused,
        "samples_per_client": _spread(sizes),
    }
    if split.names:
        description["class_names" if split.classes else "target_names"] = list(split.names)
    if found.shared:
        description["distinct_samples"] = found.shared
    if found.scored.any():
        description["validation_samples"] = int(found.scored.sum())
    if _counted(split) and len(found.held):
        has = sizes > 0
        commonest = (found.most[has] / sizes[has]).round(4)
        description["classes_per_client"] = _spread(found.held)
        description["commonest_class_per_client"] = _spread(commonest)
    if split.optimum is not None:
        description["optimum"] = split.optimum
    return description


def _check_room(split: Split, folder: Path) -> None:
    rows = int(split.sizes.sum())
    width = _stored_bytes(split)
    needed = rows * width
    if split.shared:
        needed = split.distinct() * width + rows * 8
    free = shutil.disk_usage(folder).free
    if needed > free:
        expected = f"a folder with {needed / 1e6:,.1f} MB free; this one has {free / 1e6:,.1f}"
        raise ConfigError("RAYDPFL_CACHE", str(folder.parent), expected)


def _stored_bytes(split: Split) -> int:
    """What a row and its target take of a file."""
    return _row_bytes(split) + 8 * math.prod(split.targets)


def _row_bytes(split: Split) -> int:
    some = int(np.argmax(split.sizes > 0))  # a client that has a row
    return split.rows(some, some + 1)[0][0].nbytes


@dataclass
class _Counts:
    """How the classes are spread over the clients, and how many rows are scored in validation."""

    held: np.ndarray  # int64 [clients]: classes of a client
    most: np.ndarray  # int64 [clients]: its samples of the commonest
    counted: np.ndarray  # int64 [classes]: training samples of each class
    scored: np.ndarray  # int64 [clients]: rows of each that are held out and scored
    shared: int = 0  # samples that are kept once, whoever holds them; 0: rows are as they are dealt

    @classmethod
    def none(cls, split: Split) -> _Counts:
        held = np.zeros(len(split.sizes), np.int64)
        classes = split.classes if _counted(split) else 0
        zeros = np.zeros_like(held)
        return cls(held, zeros, np.zeros(classes, np.int64), zeros.copy())

    @classmethod
    def unknown(cls) -> _Counts:
        """Of rows that nobody has looked at."""
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, nothing, nothing)

    def leave(self, out: np.ndarray) -> None:
        """Counts the clients alone that are not held out; `out`: bool [clients]."""
        self.held = self.held[~out]
        self.most = self.most[~out]


class _Rows:
    """An Arrow IPC file of rows, written a batch at a time."""

    def __init__(self, path: Path, stack: ExitStack):
        self._path = path
        self._stack = stack
        self._writer: Any = None

    def write(self, x: np.ndarray, y: np.ndarray) -> None:
        batch = _batch(x, y)
        if self._writer is None:
            file = pa.ipc.new_file(str(self._path), batch.schema)
            self._writer = self._stack.enter_context(file)
        self._writer.write_batch(batch)


def _write_train(split: Split, apart: HeldOutRows | None, folder: Path) -> _Counts:
    """Writes the clients' rows, some clients at a time, and those held out."""
    ends = np.cumsum(split.sizes)
    rows = BATCH_BYTES // _row_bytes(split)
    found = _Counts.none(split)
    sizes = apart.sizes if apart else split.sizes
    with ExitStack() as stack:
        train = _Rows(folder / "train.arrow", stack)
        validation = _Rows(folder / "validation.arrow", stack)
        first = 0
        while first < len(ends):
            start = ends[first] - split.sizes[first]
            last = max(first + 1, int(np.searchsorted(ends, start + rows, side="right")))
            x, y = split.rows(first, last)
            if apart:
                out, scored = apart.rows(first, last)
                if scored.any():
                    validation.write(x[scored], y[scored])
                    found.scored[first:last] = per_client(scored, split.sizes[first:last])
                x = x[~out]
                y = y[~out]
            train.write(x, y)
            if _counted(split):
                _count(found, sizes[first:last], first, y)
            first = last
    return found


def _write_shared(split: Split, apart: HeldOutRows | None, folder: Path) -> _Counts:
    """Writes each sample that some client trains on once, which of them each row of a client is,
    and those held out.
    """
    assert split.at is not None and split.samples is not None
    found = _Counts.none(split)
    samples = split.samples(0, len(split.sizes))
    sizes = split.sizes
    step = max(1, SHARED_BYTES // _row_bytes(split))
    with ExitStack() as stack:
        if apart:
            sizes = apart.sizes
            out, scored = apart.rows(0, len(sizes))
            validation = _Rows(folder / "validation.arrow", stack)
            found.scored = per_client(scored, split.sizes)
            for start in range(0, int(scored.sum()), step):
                validation.write(*split.at(samples[scored][start : start + step]))
            samples = samples[~out]
        distinct, index = np.unique(samples, return_inverse=True)
        train = _Rows(folder / "train.arrow", stack)
        y = np.empty((len(distinct), *split.targets), np.int64 if split.classes else np.float32)
        for start in range(0, len(distinct), step):
            x, y[start : start + step] = split.at(distinct[start : start + step])
            train.write(x, y[start : start + step])
    _write_batch(folder / "rows.arrow", pa.record_batch({"row": index.astype(np.int32)}))
    if _counted(split):
        _count(found, sizes, 0, y[index])
    found.shared = len(distinct)
    return found


def _write_batch(path: Path, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)


def _count(found: _Counts, sizes: np.ndarray, first: int, y: np.ndarray) -> None:
    """Takes the labels of the clients from `first` on, of so many rows each, into account."""
    classes = len(found.counted)
    last = first + len(sizes)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    kinds, counts = np.unique(owner * classes + y, return_counts=True)
    client = kinds // classes
    found.held[first:last] = np.bincount(client, minlength=len(sizes))
    np.maximum.at(found.most, first + client, counts)
    np.add.at(found.counted, kinds % classes, counts)


def _counted(split: Split) -> bool:
    """Whether each row has a class, by which rows are counted."""
    return bool(split.classes) and not split.targets


def _batch(x: np.ndarray, y: np.ndarray) -> pa.RecordBatch:
    targets = _lists(y) if y.ndim > 1 else _packed(y)
    return pa.RecordBatch.from_arrays([_lists(x), targets], names=["x", "y"])


def _lists(rows: np.ndarray) -> pa.Array:
    """A list of fixed length for each row."""
    flat = _packed(rows.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, int(np.prod(rows.shape[1:])))


def _packed(values: np.ndarray) -> pa.Array:
    """Pixels as they are, all else in int64 or float32."""
    kinds = {"u": pa.uint8(), "i": pa.int64(), "f": pa.float32()}
    return packed(values, kinds[values.dtype.kind])


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
        weakref.finalize(self, self.file.close)
        # cohorts are spread over the file: reading on beyond a client is a waste
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        self.held = len(self.map) <= HELD
        reader = pa.ipc.open_file(pa.py_buffer(self.map))
        self.columns = []
        for index in range(reader.num_record_batches):
            columns = reader.get_batch(index).columns
            self.columns.append([numbers(getattr(each, "values", each)) for each in columns])
            if index % 4 == 0:  # the system maps pages around each place that was looked at
                self.release()

    def shape_targets(self, shape: tuple[int, ...]) -> None:
        """Gives y of each batch this shape for a sample."""
        self.columns = [[x, y.reshape(-1, *shape)] for x, y in self.columns]

    def at(self, column: np.ndarray) -> int:
        return column.ctypes.data - np.frombuffer(self.map, np.uint8).ctypes.data

    def read(self, into: memoryview, at: int) -> None:
        """Fills `into`, of bytes, with what stands from `at` on. Raises OSError."""
        count = os.preadv(self.file.fileno(), [into], at)
        while count < len(into):  # Linux reads 2 GiB at a time at most
            more = os.preadv(self.file.fileno(), [into[count:]], at + count)
            if not more:
                raise OSError(f"{self.file.name} is cut short")
            count += more

    def read_each(
        self, into: np.ndarray, places: np.ndarray, at: np.ndarray, lengths: np.ndarray
    ) -> None:
        """Fills `into`, uint8, from each of `places` on with the bytes that stand from `at` on,
        `lengths` of them, int64 [k] each. Raises OSError.
        """
        try:
            if native.read(self.file.fileno(), at, lengths, into, places):
                return
        except EOFError:
            raise OSError(f"{self.file.name} is cut short") from None
        apart = into.data
        runs = (column.tolist() for column in (places, at, lengths))
        for place, start, length in zip(*runs, strict=True):
            self.read(apart[place : place + length], start)

    def take(self, into: np.ndarray, at: int, count: int, rows: np.ndarray) -> None:
        """Of `count` rows from `at` on, those at `rows`, ascending."""
        width = into[0].nbytes
        if count * width <= NEAR * len(rows):
            near = np.empty((count, *into.shape[1:]), into.dtype)
            self.read(near.data.cast("B"), at)
            np.take(near, rows, axis=0, out=into)
            return
        apart = into.data.cast("B")
        for place, row in enumerate(rows.tolist()):
            self.read(apart[place * width : (place + 1) * width], at + row * width)

    def release(self) -> None:
        """Gives the mapped pages back, but for those of a small file. They return when touched."""
        if not self.held:
            self.map.madvise(mmap.MADV_DONTNEED)

    def cached(self, places: Sequence[int]) -> bool:
        """Whether all these places of the file are in memory, as far as the system tells."""
        if not hasattr(os, "RWF_NOWAIT"):
            return False
        try:
            return all(
                os.preadv(self.file.fileno(), [bytearray(1)], at, os.RWF_NOWAIT) for at in places
            )
        except OSError:  # it is not, or this file system cannot tell
            return False


class Room:
    """Memory that is used again and again: fresh pages of it cost as much as what is put there."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def array(self, name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """An array of any values, which begins at a multiple of `ALIGN` bytes; it is the memory
        that was given out by this name before.
        """
        needed = math.prod(shape) * dtype.itemsize
        held = self._held.get(name)
        if held is None or held.nbytes < needed:
            held = _aligned(needed)
            self._held[name] = held
        return held[:needed].view(dtype).reshape(shape)


def _aligned(size: int) -> np.ndarray:
    """Bytes, uint8 [size], from a multiple of `ALIGN` on."""
    memory = np.empty(size + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + size]


class Shards:
    """A prepared folder, open for reading. Opening is cheap; pickling sends the path.

    `clients`: how many; `sizes`: int64 [clients], on the map; `shape`: of one sample; `classes` (0:
    numbers); `unseen`: classes without a training sample; `target`: what y is; `tokens` (0: x is
    float32); `test_size`, `validation_size`. What `chunk`, `test` and `validation` return is the
    caller's to write to. Where x is said to be float32, it is int64 for tokens; where y is said to
    be int64, it is float32 for numbers, and has an axis more for several targets.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]):
        self.folder = folder
        self.shape = tuple(about["shape"])
        self.classes = about["classes"]
        self.unseen = tuple(about["unseen"])
        self.tokens = about.get("tokens", 0)
        several, names = (tuple(about.get(key, ())) for key in ("targets", "names"))
        self.target = Target(several, self.classes, names)
        self._description = about["description"]
        self._clients = _Mapped(folder / "clients.arrow")
        self._test = _Mapped(folder / "test.arrow")
        ((self._first, self.sizes),) = self._clients.columns
        ((test_x, test_y),) = self._test.columns
        self._test_x = test_x.reshape(-1, *self.shape)
        self._test_y = test_y.reshape(-1, *self.target.shape)
        held_out = folder / "validation.arrow"
        self._validation = _Mapped(held_out) if held_out.exists() else None
        if self._validation:
            self._validation.shape_targets(self.target.shape)
        self._target_bytes = self._test_y.itemsize * math.prod(self.target.shape)
        self._row_bytes = test_x.itemsize * int(np.prod(self.shape))
        self._normalise_by(about)
        self._open_rows(about)
        self.release()  # finding the batches touched pages all over the files

    def _open_rows(self, about: Mapping[str, Any]) -> None:
        """Opens what training rows come from."""
        self._train = _Mapped(self.folder / "train.arrow")
        self._train.shape_targets(self.target.shape)
        rows = self.folder / "rows.arrow"
        self._rows = _Mapped(rows) if rows.exists() else None
        # first row of each batch
        self._starts = np.concatenate([[0], np.cumsum([len(y) for _, y in self._train.columns])])
        # where x and y of each batch are in the file, int64 [batches, 2]
        places = [(self._train.at(x), self._train.at(y)) for x, y in self._train.columns]
        self._places = np.array(places, np.int64)

    def _normalise_by(self, about: Mapping[str, Any]) -> None:
        """Sets by what uint8 v becomes (v / 255 - mean) / std per channel: a product and a sum."""
        per_channel = (-1, *[1] * (len(self.shape) - 1)) if len(about["mean"]) > 1 else ()
        mean, std = (
            np.array(about[key] or [other]).reshape(per_channel)
            for key, other in (("mean", 0.0), ("std", 1.0))
        )
        self._scale = np.float32(1 / (255 * std))
        self._shift = np.float32(-mean / std)
        self._shifted = bool(self._shift.any())

    @cached_property
    def _targets(self) -> np.ndarray | None:
        """y of all rows, in the smallest type that holds it, where that is little: a read for each
        client, who are anywhere in the file, costs more than all of it.
        """
        shape = (int(self._starts[-1]), *self.target.shape)
        if not 0 < math.prod(shape) <= TARGETS:
            return None
        kind = self._target_kind()
        if math.prod(shape) * kind.itemsize > TARGETS:
            return None
        held = np.empty(shape, kind)
        for start, (_, y) in zip(self._starts.tolist(), self._train.columns, strict=False):
            held[start : start + len(y)] = y
            self._train.release()
        return held

    def _target_kind(self) -> np.dtype:
        """The smallest type that every training row's y is kept in unchanged."""
        if np.issubdtype(self._test_y.dtype, np.floating):
            return self._test_y.dtype
        low = 0
        high = 0
        for _, y in self._train.columns:
            low = min(low, int(y.min(initial=0)))
            high = max(high, int(y.max(initial=0)))
            self._train.release()
        every = (np.iinfo(kind) for kind in (np.uint8, np.int16, np.int32, np.int64))
        return next(kind.dtype for kind in every if kind.min <= low and high <= kind.max)

    @classmethod
    def open(cls, folder: Path | str) -> Shards:
        """The prepared folder."""
        folder = Path(folder)
        about = json.loads((folder / "data.json").read_text())
        return (Made if "made" in about else Shards)(folder, about)

    def __reduce__(self) -> tuple:
        return Shards.open, (self.folder,)

    def form(self, task: Task) -> Form:
        """What a sample is, for a task."""
        return Form(self.shape, self.target, task, self.tokens)

    @property
    def clients(self) -> int:
        return len(self.sizes)

    @property
    def test_size(self) -> int:
        return len(self._test_y)

    @property
    def validation_size(self) -> int:
        """How many rows are held out of training, to be scored."""
        if self._validation is None:
            return 0
        return sum(len(y) for _, y in self._validation.columns)

    @cached_property
    def client_rows(self) -> np.ndarray:
        """How many rows of each client, int64 [clients], it is scored by: those held out, where any
        are; else all. Where clients are held out altogether, of each of these.
        """
        if self._validation is None:
            return np.array(self.sizes)
        with pa.OSFile(str(self.folder / "held.arrow")) as file:
            return pa.ipc.open_file(file).read_all()["rows"].to_numpy()

    def client_batch(self, clients: range, first: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows that some clients are scored by, one client's after another's, for training.

        Args:
            clients: one after another.
            first: the place of their first row among the rows of all clients.
        """
        rows = self.client_rows[clients.start : clients.stop]
        if self._validation is None:
            x, y, n = self.chunk(clients, int(rows.max()))
            there = np.arange(x.shape[1]) < n[:, None]
            return x[there], y[there]
        parts = []
        at = 0
        for x, y in self._validation.columns:
            some = slice(max(first - at, 0), max(first + int(rows.sum()) - at, 0))
            parts.append((x.reshape(-1, *self.shape)[some], y[some]))
            at += len(y)
        x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
        return self.ready(x, y)

    def chunk(
        self,
        clients: Sequence[int] | np.ndarray,
        rows: int,
        picked: Sequence[np.ndarray | None] | None = None,
        room: Room | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The samples of some clients (of several chunks, one after another), each padded with
        zeros to `rows`.

        Args:
            clients: int [C]; -1 is a dummy without samples.
            rows: that each client is padded to.
            picked: the rows to take of each client, ascending; None for all of them.
            room: memory to use again: what it gave before is overwritten. None: new memory.

        Returns:
            x float32 [C, rows, *shape], y int64 [C, rows], numbers of samples taken, int64 [C].

        Raises: ValueError if a client has more than `rows`; OSError.
        """
        members = np.asarray(clients, np.int64)
        sizes = np.where(members < 0, 0, self.sizes[members])
        apart = {slot: some for slot, some in enumerate(picked or ()) if some is not None}
        n = _counts(members, sizes, apart, rows)
        room = room or Room()
        x, y = self._arrays(room, len(members), rows)
        self._fill(x, y, members, sizes, apart, n, room)
        for slot in np.flatnonzero(n < rows).tolist():
            x[slot, n[slot] :] = 0
            y[slot, n[slot] :] = 0
        return x, y, n

    def _fill(
        self,
        x: np.ndarray,
        y: np.ndarray,
        members: np.ndarray,
        sizes: np.ndarray,
        apart: Mapping[int, np.ndarray],
        n: np.ndarray,
        room: Room,
    ) -> None:
        """Puts what some clients give, `n` rows each, into x [C, rows, *shape] and y [C, rows]."""
        wanted = self._wanted(members, x.shape[1], apart)
        if self._train.held and self._rows is None:
            if n.sum() < PADDED * n.size * x.shape[1]:
                self._each_from_map(x, members, apart, n)
            else:
                self._from_map(x, members, wanted, room)
        else:
            self._read_x(x, members, sizes, apart, n, room)
        if self._targets is None:
            self._read(1, y, members, sizes, apart)
        else:
            y[...] = np.take(self._targets, wanted, axis=0, mode="clip")

    def _arrays(self, room: Room, clients: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Memory for x and y of some clients."""
        kind = np.dtype(np.int64 if self.tokens else np.float32)
        x = room.array("x", (clients, rows, *self.shape), kind)
        return x, room.array("y", (clients, rows, *self.target.shape), self._test_y.dtype)

    def _read_x(
        self,
        x: np.ndarray,
        members: np.ndarray,
        sizes: np.ndarray,
        apart: Mapping[int, np.ndarray],
        n: np.ndarray,
        room: Room,
    ) -> None:
        """Puts x of some clients, who give `n` rows each, into [C, rows, *shape] from the file."""
        if self._test_x.dtype != np.uint8:
            self._read(0, x, members, sizes, apart)
            return
        stored = room.array("stored", x.shape, self._test_x.dtype)
        self._read(0, stored, members, sizes, apart)
        self._scale_chunk(stored, x, n)

    def _read(
        self,
        part: int,
        into: np.ndarray,
        members: np.ndarray,
        sizes: np.ndarray,
        apart: Mapping[int, np.ndarray],
    ) -> None:
        """Puts x (`part` 0) or y (1) of some clients into [C, rows, ...], as it is stored.

        Clients who follow one another in the file and fill their rows are read at once.
        """
        if not into.size:
            return
        if self._rows is not None:
            self._gather(part, into, members, sizes, apart)
            return
        width = into[0, :1].nbytes
        at = self._at(part, members, width)
        lengths = sizes * width
        lengths[list(apart)] = 0
        slot_bytes = into[0].nbytes
        whole = lengths == slot_bytes
        joined = whole[1:] & whole[:-1] & (at[1:] == at[:-1] + slot_bytes)
        starts = np.flatnonzero(np.concatenate([[True], ~joined]))
        ends = np.append(starts[1:], len(members))
        there = lengths[starts] > 0
        starts = starts[there]
        counts = (ends[there] - starts) * lengths[starts]
        memory = into.reshape(-1).view(np.uint8)
        self._train.read_each(memory, starts * slot_bytes, at[starts], counts)
        for slot, rows in apart.items():
            own = into[slot, : len(rows)]
            self._train.take(own, int(at[slot]), int(sizes[slot]), rows)

    def _gather(
        self,
        part: int,
        into: np.ndarray,
        members: np.ndarray,
        sizes: np.ndarray,
        apart: Mapping[int, np.ndarray],
    ) -> None:
        """`_read` where clients share samples: a client's rows are all over the file, which is
        small beside what all clients hold together, and so is read on the map.
        """
        for slot in np.flatnonzero(sizes).tolist():
            chosen = apart.get(slot, np.arange(sizes[slot]))
            rows = self._place(self._first[members[slot]] + chosen)
            own = into[slot, : len(rows)]
            batches = np.searchsorted(self._starts, rows, side="right") - 1
            for batch in np.unique(batches).tolist():
                here = batches == batch
                stored = self._train.columns[batch][part].reshape(-1, *own.shape[1:])
                picked = rows[here] - self._starts[batch]
                if here.all():
                    np.take(stored, picked, axis=0, mode="clip", out=own)
                else:
                    own[here] = stored[picked]

    def _place(self, rows: np.ndarray) -> np.ndarray:
        """Where in `train.arrow` these rows of clients are, int64 [...]."""
        if self._rows is None:
            return rows
        ((placed,),) = self._rows.columns
        return np.take(placed, rows, mode="clip")

    def _wanted(
        self, members: np.ndarray, rows: int, apart: Mapping[int, np.ndarray]
    ) -> np.ndarray:
        """The rows of the file that some clients train on, int64 [C, rows]; any for padding."""
        first = self._first[members]
        wanted = first[:, None] + np.arange(rows)
        for slot, chosen in apart.items():
            wanted[slot, : len(chosen)] = first[slot] + chosen
        return self._place(wanted)

    def _from_map(
        self, into: np.ndarray, members: np.ndarray, wanted: np.ndarray, room: Room
    ) -> None:
        """Puts x of some clients into [C, rows, *shape] from the map, in pieces that stay in the
        cache; anything for padding.
        """
        if not into.size:
            return
        together = max(1, CACHED // into[0].size)
        batches = self._batches(members)
        runs = np.flatnonzero(np.diff(batches)) + 1
        bounds = np.union1d(np.arange(0, len(members), together), runs)
        for start, end in pairwise([*bounds.tolist(), len(members)]):
            x, y = self._train.columns[batches[start]]
            places = wanted[start:end] - self._starts[batches[start]]
            piece = into[start:end]
            stored = piece if x.dtype == piece.dtype else room.array("stored", piece.shape, x.dtype)
            x.reshape(len(y), *self.shape).take(places, axis=0, mode="clip", out=stored)
            if stored is not piece:
                self._scaled(stored, piece)

    def _each_from_map(
        self, into: np.ndarray, members: np.ndarray, apart: Mapping[int, np.ndarray], n: np.ndarray
    ) -> None:
        """As `_from_map`, client by client, which takes less time than reading what is padding."""
        batches = self._batches(members)
        firsts = (self._first[members] - self._starts[batches]).tolist()
        columns = [x.reshape(len(y), *self.shape) for x, y in self._train.columns]
        for slot in np.flatnonzero(n).tolist():
            stored = columns[batches[slot]][firsts[slot] :]
            own = into[slot, : n[slot]]
            some = stored[apart[slot]] if slot in apart else stored[: len(own)]
            if some.dtype == own.dtype:
                own[...] = some
            else:
                self._scaled(some, own)

    def _batches(self, members: np.ndarray) -> np.ndarray:
        """The batch of the file that each client is in, int64 [C]."""
        batches = np.searchsorted(self._starts, self._first[members], side="right") - 1
        # clients without samples may stand beyond the last row
        return np.minimum(batches, len(self._places) - 1)

    def _at(self, part: int, members: np.ndarray, width: int) -> np.ndarray:
        """Where in the file x or y of each client begins, int64 [C]; a row has `width` bytes."""
        first = self._first[members]
        batches = self._batches(members)
        return self._places[batches, part] + (first - self._starts[batches]) * width

    def prefetch(self, clients: np.ndarray, rows: int) -> None:
        """Asks the system to have these clients (int64, -1 for a dummy) in memory soon, but for
        those of whom `rows` are a small part; returns at once. Where a few of them are there
        already, all are taken to be.
        """
        mapped = self._train.held or self._rows is not None
        if mapped or not hasattr(os, "posix_fadvise"):
            return
        members = np.asarray(clients, np.int64)
        members = members[members >= 0]
        sizes = self.sizes[members]
        wanted = (sizes > 0) & ((sizes <= rows) | (sizes * self._row_bytes <= NEAR * rows))
        members = members[wanted]
        sizes = sizes[wanted]
        places = self._at(0, members, self._row_bytes)
        if self._train.cached(places[:: max(1, len(places) // LOOKS)].tolist()):
            return
        descriptor = self._train.file.fileno()
        widths = (self._row_bytes, self._target_bytes)
        for part, width in enumerate(widths if self._targets is None else widths[:1]):
            at = self._at(part, members, width)
            for place, length in zip(at.tolist(), (sizes * width).tolist(), strict=True):
                os.posix_fadvise(descriptor, place, length, os.POSIX_FADV_WILLNEED)

    def test(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The test samples in order, `batch` at a time: x float32 [<= batch, *shape], y int64 [<=
        batch].
        """
        return starmap(self.ready, self.held_apart("test", batch))

    def validation(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The rows held out of training in client order, as `test` gives those of the test set."""
        return starmap(self.ready, self.held_apart("validation", batch))

    def held_apart(self, name: str, batch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The samples of `test` or `validation` as they are stored, on the map, `batch` at a time:
        for `ready`.
        """
        columns = [(self._test_x, self._test_y)]
        if name == "validation":
            held = self._validation.columns if self._validation else []
            columns = [(x.reshape(-1, *self.shape), y) for x, y in held]
        return [
            (x[start : start + batch], y[start : start + batch])
            for x, y in columns
            for start in range(0, len(y), batch)
        ]

    def ready(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples as they are trained on, from samples as they are stored."""
        kind = np.dtype(np.int64 if self.tokens else np.float32)
        found = _aligned(kind.itemsize * x.size).view(kind).reshape(x.shape)
        if x.dtype == np.uint8:
            self._scaled(x, found)
        else:
            found[...] = x
        return found, y.copy()

    def _scale_chunk(self, stored: np.ndarray, x: np.ndarray, n: np.ndarray) -> None:
        """Scales the first n rows of each client, in pieces that stay in the cache."""
        rows = x.shape[1]
        if (n == rows).all():
            pieces = stored.reshape(-1, *self.shape), x.reshape(-1, *self.shape)
            step = max(1, CACHED // self._row_bytes)
            for start in range(0, len(pieces[0]), step):
                self._scaled(*(piece[start : start + step] for piece in pieces))
            return
        for slot in np.flatnonzero(n).tolist():
            self._scaled(stored[slot, : n[slot]], x[slot, : n[slot]])

    def _scaled(self, pixels: np.ndarray, x: np.ndarray) -> np.ndarray:
        x[...] = pixels  # apart from the product, which would convert them again in small parts
        x *= self._scale
        if self._shifted:
            x += self._shift
        return x

    def release(self) -> None:
        """Gives the mapped pages back, so that this process holds no more memory than it works
        with.
        """
        for file in vars(self).values():
            if isinstance(file, _Mapped):
                file.release()

    def class_counts(self) -> np.ndarray:
        """Samples of each class that each client trains on, int64 [clients, classes]; no columns
        where no sample has just one class.
        """
        counts = np.zeros((self.clients, 0 if self.target.shape else self.classes), np.int64)
        for client, size in enumerate(self.sizes.tolist()):
            if size and counts.shape[1]:
                _, y, _ = self.chunk([client], size)
                counts[client] = np.bincount(y[0], minlength=self.classes)
        return counts

    def describe(self) -> dict:
        """What the partition did: clients, training samples, test samples, unused samples, samples
        held out for validation if any, distinct training samples if clients share them; and per
        client (min, median, max) training samples, classes, and the share of these samples that are
        of its commonest class. The names of classes, or of targets, where they have any.

        For regression no classes; and `optimum` where the least loss on the test set that a linear
        model can reach is known.
        """
        return dict(self._description)


class Made(Shards):
    """A prepared folder without training rows, which their source makes whenever they are read."""

    def _open_rows(self, about: Mapping[str, Any]) -> None:
        self._source = choose("data", about["config"], FAMILY, Data)
        maker = self._source.maker(about["made"])
        assert maker is not None  # by which it was prepared
        self._maker = maker

    def _pieces(self, client: int, size: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """The rows of a client, some at a time: the place of the first, x and y. Raises
        `ConfigError` for what is wrong with them.
        """
        form = self.form(self._source.task)
        at = 0
        with _blamed(self._source):
            for x, y in self._maker(client, size):
                _check(self._source, form, x, y)
                yield at, x, y
                at += len(y)
        if at != size:
            expected = f"a source that makes {size} rows of client {client} (it makes {at})"
            raise ConfigError("data.kind", self._source.kind, expected)

    def _fill(
        self,
        x: np.ndarray,
        y: np.ndarray,
        members: np.ndarray,
        sizes: np.ndarray,
        apart: Mapping[int, np.ndarray],
        n: np.ndarray,
        room: Room,
    ) -> None:
        pixels = self._test_x.dtype == np.uint8
        stored = room.array("stored", x.shape, self._test_x.dtype) if pixels else x
        for slot in np.flatnonzero(n).tolist():
            size = int(sizes[slot])
            wanted = apart.get(slot, np.arange(size))
            for at, some_x, some_y in self._pieces(int(members[slot]), size):
                own = slice(*np.searchsorted(wanted, (at, at + len(some_y))).tolist())
                picked = wanted[own] - at
                stored[slot, own] = some_x[picked]
                y[slot, own] = some_y[picked]
        if pixels:
            self._scale_chunk(stored, x, n)

    def prefetch(self, clients: np.ndarray, rows: int) -> None:
        """Nothing is on its way."""


def _counts(
    members: np.ndarray, sizes: np.ndarray, apart: Mapping[int, np.ndarray], rows: int
) -> np.ndarray:
    """How many rows each client gives, int64 [C]. Raises ValueError for more than `rows`."""
    n = sizes.copy()
    for slot, some in apart.items():
        n[slot] = len(some)
    if n.max(initial=0) > rows:
        most = f"client {members[n.argmax()]} has {n.max()} samples"
        raise ValueError(f"{most}, more than the {rows} rows of the chunk")
    return n
