"""Readers of the clients' training rows: on a memory map, from the file, or generated.

A small file stays mapped, and rows are gathered from the map. Rows of a large one are read from it,
all of a chunk by one call of compiled code: a mapped page counts as memory of the process, and one
touch maps its neighbourhood, so that 4,800 clients of 4.8 kB out of a million made 3 GB.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from raydpfl.core import native
from raydpfl.data.shard_files import ArrowFile
from raydpfl.data.source_checks import check_rows, source_errors
from raydpfl.data.sources import Data
from raydpfl.errors import ConfigError
from raydpfl.models.tasks import Form

# Of memory, as torch aligns its own: products may round by it, and a training backend need not copy
# what is aligned.
ALIGNMENT = 64
CACHE_PIXELS = 160 << 10  # pixels that are scaled at once: with their float32 they fit the L2 cache
FULL = 0.75  # share of a chunk's rows that are no padding, from which on padding is gathered too
PROBES = 8  # clients by which a chunk is taken to be in the page cache


class Buffers:
    """Memory that is used for one chunk after another: fresh pages cost as much as reading."""

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}

    def array(self, name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """An aligned array of any values; it overwrites the one returned for this name before."""
        needed = math.prod(shape) * dtype.itemsize
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < needed:
            memory = aligned(needed)
            self._memory[name] = memory
        return memory[:needed].view(dtype).reshape(shape)


def aligned(size: int) -> np.ndarray:
    """Bytes, uint8 [size], which begin at a multiple of `ALIGNMENT`."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


class Pixels:
    """Scales pixels: uint8 v becomes (v / 255 - mean) / std per channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], dimensions: int):
        per_channel = (-1, *[1] * (dimensions - 1)) if len(mean) > 1 else ()
        means, stds = (
            np.array(channels).reshape(per_channel) for channels in (mean or [0], std or [1])
        )
        self._scale = np.float32(1 / (255 * stds))
        self._shift = np.float32(-means / stds)
        self._shifted = bool(self._shift.any())

    def scale(self, stored: np.ndarray, x: np.ndarray) -> None:
        """Puts rows as they are stored, [n, *shape], into x of the same shape: pixels scaled to
        float32, all else as it is.
        """
        if stored.dtype != np.uint8:
            x[...] = stored
            return
        step = max(1, CACHE_PIXELS // max(1, stored[:1].size))
        for start in range(0, len(x), step):
            part = x[start : start + step]
            # not by the product, which would convert them again in small parts
            part[...] = stored[start : start + step]
            part *= self._scale
            if self._shifted:
                part += self._shift


@dataclass(frozen=True)
class RowRequest:
    """Rows of the clients of a chunk.

    Args:
        clients: int64 [C]; -1: none, without rows.
        counts: int64 [C], number of rows of each.
        picked: by place in the chunk, which rows of the client, int64, ascending; all of the
            others'.
    """

    clients: np.ndarray
    counts: np.ndarray
    picked: Mapping[int, np.ndarray]

    def rows(self, slot: int) -> np.ndarray:
        """Which rows of the client at a place of the chunk, int64 [counts[slot]]."""
        return self.picked[slot] if slot in self.picked else np.arange(self.counts[slot])


class RowReader(Protocol):
    """What reads training rows of clients."""

    def read(self, x: np.ndarray, y: np.ndarray, request: RowRequest, buffers: Buffers) -> None:
        """Puts rows into x [C, R, *shape] and y [C, R, *targets], from each client's first place
        on; what follows is any. Raises OSError, and `ConfigError` for generated rows that are
        wrong.
        """

    def prefetch(self, clients: np.ndarray, rows: int) -> None:
        """Asks the system to load the rows of these clients, int64, unless they have more than
        `rows`; returns at once.
        """

    def release(self) -> None:
        """Gives mapped memory back."""


class ClientTable:
    """Where the rows of clients are in `train.arrow`.

    `first`, `sizes`: int64 [clients], each client's first row and number of rows, on the map.
    """

    def __init__(self, folder: Path):
        self._clients = ArrowFile(folder / "clients.arrow")
        ((self.first, self.sizes),) = self._clients.batches
        shared = folder / "rows.arrow"
        self._index = ArrowFile(shared) if shared.exists() else None

    @property
    def shared(self) -> bool:
        """Whether clients share samples, so that a client's rows are anywhere in the file."""
        return self._index is not None

    def rows(self, request: RowRequest, width: int) -> np.ndarray:
        """The row of the file for each row of a chunk, int64 [C, width]; any for padding."""
        first = self.first[request.clients]
        rows = first[:, None] + np.arange(width)
        for slot, picked in request.picked.items():
            rows[slot, : len(picked)] = first[slot] + picked
        if self._index is None:
            return rows
        ((index,),) = self._index.batches
        return np.take(index, rows, mode="clip")

    def release(self) -> None:
        for file in (self._clients, self._index):
            if file is not None:
                file.release()


class MappedRows:
    """Rows of a file of one batch, gathered from its map."""

    def __init__(self, file: ArrowFile, form: Form, clients: ClientTable, pixels: Pixels):
        ((self._x, self._y),) = file.rows(form.shape, form.target.shape)
        self._file = file
        self._clients = clients
        self._pixels = pixels

    def read(self, x: np.ndarray, y: np.ndarray, request: RowRequest, buffers: Buffers) -> None:
        if not x.size:
            return
        rows = self._clients.rows(request, x.shape[1])
        self._y.take(rows, axis=0, mode="clip", out=y)
        counts = request.counts
        if counts.sum() < FULL * rows.size:
            for slot in np.flatnonzero(counts).tolist():
                count = counts[slot]
                own = rows[slot, :count]
                if slot in request.picked or self._clients.shared:
                    stored = self._x[own]
                else:
                    stored = self._x[own[0] : own[0] + count]
                self._pixels.scale(stored, x[slot, :count])
            return
        if self._x.dtype == x.dtype:
            self._x.take(rows, axis=0, mode="clip", out=x)
            return
        step = max(1, CACHE_PIXELS // x[0].size)
        for start in range(0, len(x), step):
            part = x[start : start + step]
            stored = buffers.array("stored", part.shape, self._x.dtype)
            self._x.take(rows[start : start + step], axis=0, mode="clip", out=stored)
            self._pixels.scale(stored.reshape(-1, *x.shape[2:]), part.reshape(-1, *x.shape[2:]))

    def prefetch(self, clients: np.ndarray, rows: int) -> None:
        """They are in memory."""

    def release(self) -> None:
        self._file.release()
        self._clients.release()


class FileRows:
    """Rows of a file of any size, read from it."""

    def __init__(self, path: Path, form: Form, clients: ClientTable, pixels: Pixels):
        file = ArrowFile(path)
        self._path = path
        self._clients = clients
        self._pixels = pixels
        self._stored = file.batches[0][0].dtype
        # bytes of a row's x and y
        widths = (math.prod(form.shape), math.prod(form.target.shape))
        columns = zip(file.batches[0], widths, strict=True)
        self._widths = [column.itemsize * width for column, width in columns]
        # the first row of each batch, and where its x and y begin in the file, int64 [batches, 2]
        counts = [len(y) // widths[1] for _, y in file.batches]
        self._starts = np.cumsum([0, *counts[:-1]])
        self._offsets = np.array(
            [[file.offset(column) for column in batch] for batch in file.batches]
        )
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        # clients of a cohort are anywhere in the file: to read ahead would be a waste
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, x: np.ndarray, y: np.ndarray, request: RowRequest, buffers: Buffers) -> None:
        first, counts, places = self._runs(request, x.shape[1])
        scaled = self._stored != x.dtype
        stored = buffers.array("stored", x.shape, self._stored) if scaled else x
        for column, into in enumerate((stored, y)):
            width = self._widths[column]
            memory = into.reshape(-1).view(np.uint8)
            self._read(memory, places * width, self._at(column, first), counts * width)
        if not scaled:
            return
        if (request.counts == x.shape[1]).all():
            self._pixels.scale(stored.reshape(-1, *x.shape[2:]), x.reshape(-1, *x.shape[2:]))
            return
        for slot in np.flatnonzero(request.counts).tolist():
            count = request.counts[slot]
            self._pixels.scale(stored[slot, :count], x[slot, :count])

    def _runs(self, request: RowRequest, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Runs of rows that follow one another in the file and in the chunk: the first row in the
        file, the number of rows, and the first row in the chunk [C * width], int64 [k] each.
        """
        if self._clients.shared or request.picked:
            there = np.arange(width) < request.counts[:, None]
            first = self._clients.rows(request, width)[there]
            places = np.flatnonzero(there)
            counts = np.ones(len(places), np.int64)
        else:
            places = np.flatnonzero(request.counts)
            first = self._clients.first[request.clients[places]]
            counts = request.counts[places]
            places = places * width
        if not len(places):
            return first, counts, places
        batch = self._batch(first)
        follows = first[1:] == first[:-1] + counts[:-1]
        follows &= (places[1:] == places[:-1] + counts[:-1]) & (batch[1:] == batch[:-1])
        begins = np.flatnonzero(np.concatenate([[True], ~follows]))
        return first[begins], np.add.reduceat(counts, begins), places[begins]

    def _batch(self, rows: np.ndarray) -> np.ndarray:
        """The batch of the file that each row is in."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _at(self, column: int, rows: np.ndarray) -> np.ndarray:
        """Where in the file x (0) or y (1) of rows begins, in bytes."""
        batch = self._batch(rows)
        return self._offsets[batch, column] + (rows - self._starts[batch]) * self._widths[column]

    def _read(
        self, into: np.ndarray, places: np.ndarray, at: np.ndarray, lengths: np.ndarray
    ) -> None:
        """Fills `into`, uint8, from each of `places` on with `lengths` bytes of the file from `at`
        on. Raises OSError.
        """
        message = f"{self._path} is cut short"
        try:
            if native.read(self._descriptor, at, lengths, into, places):
                return
        except EOFError:
            raise OSError(message) from None
        for place, start, length in zip(
            places.tolist(), at.tolist(), lengths.tolist(), strict=True
        ):
            done = 0
            while done < length:  # Linux reads 2 GiB at a time at most
                part = into.data[place + done : place + length]
                count = os.preadv(self._descriptor, [part], start + done)
                if not count:
                    raise OSError(message)
                done += count

    def prefetch(self, clients: np.ndarray, rows: int) -> None:
        sizes = self._clients.sizes[clients]
        some = (clients >= 0) & (sizes > 0) & (sizes <= rows)
        first = self._clients.first[clients[some]]
        if self._clients.shared or not hasattr(os, "posix_fadvise"):
            return
        probes = self._at(0, first[:: max(1, len(first) // PROBES)])
        if all(map(self._is_cached, probes.tolist())):
            return
        for column, width in enumerate(self._widths):
            lengths = sizes[some] * width
            for at, length in zip(self._at(column, first).tolist(), lengths.tolist(), strict=True):
                os.posix_fadvise(self._descriptor, at, length, os.POSIX_FADV_WILLNEED)

    def _is_cached(self, at: int) -> bool:
        """Whether a byte of the file is in memory, as far as the system states."""
        try:
            return bool(os.preadv(self._descriptor, [bytearray(1)], at, os.RWF_NOWAIT))
        except (AttributeError, OSError):  # it is not, or this system cannot tell
            return False

    def release(self) -> None:
        self._clients.release()


class GeneratedRows:
    """Rows that their source generates whenever they are read (`Data.maker`).

    Args:
        source: of the data.
        seed: that they were prepared with.
        sizes: int64 [clients], rows of each client.
        form: of the data.
        pixels: scales them, where they are pixels.
    """

    def __init__(self, source: Data, seed: int, sizes: np.ndarray, form: Form, pixels: Pixels):
        maker = source.maker(seed)
        assert maker is not None  # by which it was prepared
        self._maker = maker
        self._source = source
        self._sizes = sizes
        self._form = form
        self._pixels = pixels

    def read(self, x: np.ndarray, y: np.ndarray, request: RowRequest, buffers: Buffers) -> None:
        for slot in np.flatnonzero(request.counts).tolist():
            rows = request.rows(slot)
            for start, part_x, part_y in self._parts(int(request.clients[slot])):
                own = slice(*np.searchsorted(rows, (start, start + len(part_y))).tolist())
                picked = rows[own] - start
                self._pixels.scale(part_x[picked], x[slot, own])
                y[slot, own] = part_y[picked]

    def _parts(self, client: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """All rows of a client, some at a time: the place of the first, x and y."""
        size = int(self._sizes[client])
        start = 0
        with source_errors(self._source):
            for x, y in self._maker(client, size):
                check_rows(self._source, self._form, x, y)
                yield start, x, y
                start += len(y)
        if start != size:
            expected = f"a source that makes {size} rows of client {client} (it makes {start})"
            raise ConfigError("data.kind", self._source.kind, expected)

    def prefetch(self, clients: np.ndarray, rows: int) -> None:
        """There is nothing to load."""

    def release(self) -> None:
        """It holds none."""
