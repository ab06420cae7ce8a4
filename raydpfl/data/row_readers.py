"""Readers of the clients' training rows: on a memory map, from the file, or generated.

A small file stays mapped, and rows are gathered from the map. Rows of a large one are read from it:
a mapped page counts as memory of the process, and one touch maps its neighbourhood, so that 4,800
clients of 4.8 kB out of a million made 3 GB.
"""

import math
import os
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

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
# share of a chunk's rows that are no padding, from which on padding is gathered too
MIN_FILL = 0.75

Rows = tuple[np.ndarray, np.ndarray]


def aligned_array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array of any values, which begins at a multiple of `ALIGNMENT`."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


class RowReader:
    """Reads training rows of clients."""

    def rows(self, client: int, row_indices: np.ndarray | None) -> Rows:
        """x [n, *shape] and y [n, *targets] of a client as stored, not to be written to; of the
        rows `row_indices`, int64, ascending, or all. Raises OSError, and `ConfigError` for
        generated rows.
        """
        raise NotImplementedError

    def read(self, clients: np.ndarray, counts: np.ndarray, width: int) -> Rows | None:
        """All rows of a chunk's clients, int64 [C] (-1: none), as stored: x [C, width, *shape] and
        y [C, width, *targets], any values after each client's `counts`. None where `rows` has to
        give them client by client. Raises as `rows`.
        """
        return None

    def prefetch(self, clients: np.ndarray) -> None:
        """Asks the system to load the rows of these clients, int64; returns at once."""

    def release(self) -> None:
        """Gives mapped memory back."""


class ClientTable:
    """Where clients' rows are in `train.arrow`: `first` and `sizes`, int64 [clients], mapped."""

    def __init__(self, folder: Path):
        self._clients = ArrowFile(folder / "clients.arrow")
        ((self.first, self.sizes),) = self._clients.batches
        path = folder / "rows.arrow"
        self.index = ArrowFile(path) if path.exists() else None  # where clients share samples

    def rows(self, client: int, row_indices: np.ndarray | None) -> np.ndarray:
        """The rows of the file that these rows of a client are, int64."""
        places = np.arange(self.sizes[client]) if row_indices is None else row_indices
        rows = self.first[client] + places
        if self.index is None:
            return rows
        ((index,),) = self.index.batches
        return index[rows]

    def release(self) -> None:
        for file in (self._clients, self.index):
            if file is not None:
                file.release()


class MappedRows(RowReader):
    """Rows of a file of one batch, on its map."""

    def __init__(self, file: ArrowFile, form: Form, clients: ClientTable):
        ((self._x, self._y),) = file.rows(form.shape, form.target.shape)
        self._file = file
        self._clients = clients

    def rows(self, client: int, row_indices: np.ndarray | None) -> Rows:
        if row_indices is None and self._clients.index is None:
            start = self._clients.first[client]
            stretch = slice(start, start + self._clients.sizes[client])
            return self._x[stretch], self._y[stretch]
        places = self._clients.rows(client, row_indices)
        return self._x[places], self._y[places]

    def read(self, clients: np.ndarray, counts: np.ndarray, width: int) -> Rows | None:
        if self._clients.index is not None or counts.sum() < MIN_FILL * len(counts) * width:
            return None
        rows = self._clients.first[clients][:, None] + np.arange(width)
        x, y = (
            part.take(rows, 0, aligned_array((*rows.shape, *part.shape[1:]), part.dtype), "clip")
            for part in (self._x, self._y)
        )
        return x, y

    def release(self) -> None:
        self._file.release()
        self._clients.release()


class FileRows(RowReader):
    """Rows of a file of any size, read from it."""

    def __init__(self, path: Path, form: Form, clients: ClientTable):
        file = ArrowFile(path)
        self._path = path
        self._clients = clients
        self._columns = [
            (column.dtype, shape, column.itemsize * math.prod(shape))  # bytes of a row
            for column, shape in zip(file.batches[0], (form.shape, form.target.shape), strict=True)
        ]
        # the first row of each batch, and where its x and y begin in the file
        counts = [y.size // math.prod(form.target.shape) for _, y in file.batches]
        self._starts = [0, *accumulate(counts[:-1])]
        self._offsets = [[file.offset(column) for column in batch] for batch in file.batches]
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        # clients of a cohort are anywhere in the file: to read ahead would be a waste
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def rows(self, client: int, row_indices: np.ndarray | None) -> Rows:
        runs = self._runs(client, row_indices)
        x, y = (
            np.frombuffer(
                b"".join([self._read(*self._byte_range(column, *run)) for run in runs]), dtype
            ).reshape(-1, *shape)
            for column, (dtype, shape, _) in enumerate(self._columns)
        )
        return x, y

    def read(self, clients: np.ndarray, counts: np.ndarray, width: int) -> Rows | None:
        if self._clients.index is not None or native.library() is None:
            return None
        slots = np.flatnonzero(counts)
        first_rows = self._clients.first[clients[slots]]
        batch = np.searchsorted(self._starts, first_rows, side="right") - 1
        first_rows = first_rows - np.array(self._starts)[batch]
        columns = []
        for column, (dtype, shape, size) in enumerate(self._columns):
            buffer = aligned_array((len(clients), width, *shape), dtype)
            offsets = np.array(self._offsets)[batch, column] + first_rows * size
            try:
                memory = buffer.reshape(-1).view(np.uint8)
                places = slots * (width * size)
                native.read(self._descriptor, offsets, counts[slots] * size, memory, places)
            except EOFError:
                raise OSError(f"{self._path} is cut short") from None
            columns.append(buffer)
        return columns[0], columns[1]

    def _runs(self, client: int, row_indices: np.ndarray | None) -> list[tuple[int, int]]:
        """The first row and the length of each run of rows that are consecutive in the file."""
        if row_indices is None and self._clients.index is None:
            return [(int(self._clients.first[client]), int(self._clients.sizes[client]))]
        rows = self._clients.rows(client, row_indices)
        batches = np.searchsorted(self._starts, rows, side="right")
        gap_mask = np.diff(rows, prepend=-2) != 1
        run_starts = np.flatnonzero(gap_mask | (np.diff(batches, prepend=0) != 0))
        counts = np.diff(run_starts, append=len(rows))
        return list(zip(rows[run_starts].tolist(), counts.tolist(), strict=True))

    def _byte_range(self, column: int, first_row: int, count: int) -> tuple[int, int]:
        """Where in the file x (0) or y (1) of some rows of a batch begins, and its bytes."""
        batch = bisect_right(self._starts, first_row) - 1
        width = self._columns[column][2]
        offset = self._offsets[batch][column] + (first_row - self._starts[batch]) * width
        return offset, count * width

    def _read(self, offset: int, length: int) -> bytes:
        """Some bytes of the file. Raises OSError."""
        content = os.pread(self._descriptor, length, offset)
        while len(content) < length:  # Linux reads 2 GiB at a time at most
            chunk = os.pread(self._descriptor, length - len(content), offset + len(content))
            if not chunk:
                raise OSError(f"{self._path} is cut short")
            content += chunk
        return content

    def prefetch(self, clients: np.ndarray) -> None:
        if self._clients.index is not None or not hasattr(os, "posix_fadvise"):
            return
        for client in clients[self._clients.sizes[clients] > 0].tolist():
            for column in range(len(self._columns)):
                offset, length = self._byte_range(column, *self._runs(client, None)[0])
                os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def release(self) -> None:
        self._clients.release()


class GeneratedRows(RowReader):
    """Rows that their source generates at every read (`Data.maker`), by the `seed` of the data."""

    def __init__(self, source: Data, seed: int, sizes: np.ndarray, form: Form):
        maker = source.maker(seed)
        assert maker is not None  # by which it was prepared
        self._maker = maker
        self._source = source
        self._sizes = sizes
        self._form = form

    def rows(self, client: int, row_indices: np.ndarray | None) -> Rows:
        columns: tuple[list, list] = ([], [])
        for start, *part in self._parts(client):
            for column, values in zip(columns, part, strict=True):
                if row_indices is not None:
                    ends = np.searchsorted(row_indices, (start, start + len(part[1])))
                    values = values[row_indices[slice(*ends)] - start]
                column.append(values)
        x, y = map(np.concatenate, columns)
        return x, y

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
