"""Files of prepared data: Arrow IPC, written a batch of rows at a time and read on a memory map."""

import math
import mmap
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raydpfl.storage.arrow import numbers, pack_column

# Bytes of x in a batch, unless a single client has more. A file of at most so many bytes has one
# batch, and stays mapped (`raydpfl.data.row_readers.MappedRows`): all of Fashion-MNIST is 47 MB.
BATCH_BYTES = 64 << 20
TYPES = {"u": pa.uint8(), "i": pa.int64(), "f": pa.float32()}  # by numpy's kind


class RowWriter:
    """An Arrow IPC file of rows, of which `write` adds a batch; there is no file without one."""

    def __init__(self, path: Path, stack: ExitStack):
        self._path = path
        self._stack = stack
        self._writer: Any = None

    def write(self, x: np.ndarray, y: np.ndarray) -> None:
        batch = rows_batch(x, y)
        if self._writer is None:
            file = pa.ipc.new_file(str(self._path), batch.schema)
            self._writer = self._stack.enter_context(file)
        self._writer.write_batch(batch)


def write_batch(path: Path, batch: pa.RecordBatch) -> None:
    """Writes a file of one batch."""
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)


def rows_batch(x: np.ndarray, y: np.ndarray) -> pa.RecordBatch:
    """Rows x [n, *shape] and y [n, *targets] as two columns; a row of several numbers is a list."""
    targets = _lists(y) if y.ndim > 1 else pack_column(y, TYPES[y.dtype.kind])
    return pa.RecordBatch.from_arrays([_lists(x), targets], names=["x", "y"])


def _lists(rows: np.ndarray) -> pa.Array:
    flat = pack_column(rows.reshape(-1), TYPES[rows.dtype.kind])
    return pa.FixedSizeListArray.from_arrays(flat, math.prod(rows.shape[1:]))


class ArrowFile:
    """An Arrow IPC file on a memory map; `batches`: of each its columns, flat and read-only."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes = len(self._map)
        reader = pa.ipc.open_file(pa.py_buffer(self._map))
        self.batches = [
            [numbers(getattr(column, "values", column)) for column in reader.get_batch(k).columns]
            for k in range(reader.num_record_batches)
        ]

    def rows(
        self, shape: tuple[int, ...], targets: tuple[int, ...]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """x [n, *shape] and y [n, *targets] of each batch, on the map."""
        return [(x.reshape(-1, *shape), y.reshape(-1, *targets)) for x, y in self.batches]

    def offset(self, column: np.ndarray) -> int:
        """The byte of the file at which a column of `batches` begins."""
        return column.ctypes.data - np.frombuffer(self._map, np.uint8).ctypes.data

    def release(self) -> None:
        """Gives the mapped pages of a large file back; they return when touched."""
        if self.bytes > BATCH_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
