"""Tables of a run: rows are appended to a log, and copied to a Parquet file for readers.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     table = StoredTable(Path(folder), "rounds", schema(["round", "train_loss", "test_loss"]))
...     table.append({"round": [0, 1], "train_loss": [0.5, 0.25]})
...     extent = table.flush()
...     rows = pq.read_table(Path(folder) / "rounds.parquet").to_pylist()
>>> extent.rows, rows[1]
(2, {'round': 1, 'train_loss': 0.25, 'test_loss': None})

A Parquet file has its directory at the end, so rows cannot be appended while it stays readable. The
rows are therefore in `checkpoints/NAME.arrows`, an Arrow IPC stream. A flush appends one record
batch to it, at a cost in proportion to the new rows, and returns how far the log then reaches. A
checkpoint keeps that `Extent`, and a run that continues from it cuts the log to it: a kill in the
middle of a write costs nothing.

`NAME.parquet` is a copy of the log. It is replaced by the first flush that has rows, by `copy`, and
in between as often as costs about `SHARE` of the run's time. It is complete at any instant, may lag
behind the log, and is repaired by the next copy.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raydpfl.storage.arrow import pack_column
from raydpfl.storage.run_files import Extent, Pace, clear, file_errors, replace_file

COUNTS: tuple[str, ...] = ("round", "client", "cohort", "lost", "dropped", "actors", "replaced")
COUNTS += ("wrapped", "samples", "batch", "participations", "steps", "actual", "predicted")
TYPES = dict.fromkeys(COUNTS, pa.int64())  # of the columns that are not float64
TYPES |= {"conditions_failed": pa.list_(pa.string()), "calibrated_by": pa.string()}


def schema(names: Iterable[str]) -> pa.Schema:
    """The columns of a table, of the types in `TYPES`; of any other name float64."""
    return pa.schema([pa.field(name, TYPES.get(name, pa.float64())) for name in names])


class StoredTable:
    """A table of numbers with these columns, which grows with the run in `folder`."""

    def __init__(self, folder: Path, name: str, schema: pa.Schema):
        self.path = folder / f"{name}.parquet"
        self.log = folder / "checkpoints" / f"{name}.arrows"
        self.schema = schema
        self._pending_columns: list[Mapping[str, Sequence[Any] | np.ndarray]] = []
        self._copied_rows: int | None = None  # rows in the Parquet file; None: unknown
        self._pace = Pace()
        self._digest = hashlib.sha256()
        self._extent = Extent(0, 0, self._digest.hexdigest())

    def append(self, columns: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
        """Adds rows, kept in memory until `flush`: by column arrays or lists of the same length, a
        value per row; None, and a column that is left out, is null. Raises ValueError where the
        table has no such column, or lengths differ.
        """
        unknown = columns.keys() - set(self.schema.names)
        if unknown:
            raise ValueError(f"{self.path.name} has no column {', '.join(sorted(unknown))}")
        if len({len(values) for values in columns.values()}) > 1:
            raise ValueError(f"{self.path.name} is given columns of several lengths")
        self._pending_columns.append(columns)

    def flush(self) -> Extent:
        """Puts pending rows on disk; returns how far the log reaches. Raises `FileError`."""
        batch = self._batch()
        if batch.num_rows:
            head = b"" if self._extent.length else self.schema.serialize().to_pybytes()
            message = head + batch.serialize().to_pybytes()
            self._write(message)
            self._digest.update(message)
            rows = self._extent.rows + batch.num_rows
            length = self._extent.length + len(message)
            self._extent = Extent(rows, length, self._digest.hexdigest())
            self._pending_columns.clear()
        if not self._copied_rows or self._pace.due():
            self.copy()
        return self._extent

    def copy(self) -> None:
        """Copies all flushed rows, if any, to the Parquet file. Raises `FileError`."""
        if self._copied_rows == self._extent.rows:
            return
        start_time = time.monotonic()
        write_table(self.path, self._flushed_rows())
        self._copied_rows = self._extent.rows
        self._pace.record_cost(time.monotonic() - start_time)

    def resume(self, extent: Extent) -> None:
        """Continues from `extent` of a `flush`, and drops what is beyond. Raises as `read`."""
        self.read(extent)
        self._pending_columns.clear()
        self._digest = hashlib.sha256(self._map_log(extent.length))
        self._extent = extent
        self._copied_rows = None

    def read(self, extent: Extent) -> pa.Table:
        """The rows of the log up to `extent`.

        Raises:
            OSError: there is no log.
            ValueError: it is not as it was written, or is not of this table.
            pyarrow.ArrowException: it is no Arrow stream.
        """
        log = self._map_log(extent.length)
        if hashlib.sha256(log).hexdigest() != extent.sha256:
            raise ValueError(f"{self.log.name} has been changed since it was written")
        table = self._rows(log)
        if table.schema != self.schema:
            raise ValueError(f"{self.log.name} has other columns than this run's")
        if table.num_rows != extent.rows:
            raise ValueError(f"it counts {extent.rows} rows and {self.log.name} {table.num_rows}")
        return table

    def arrow(self) -> pa.Table:
        """All rows, flushed or pending."""
        pending_rows = pa.Table.from_batches([self._batch()], self.schema)
        return pa.concat_tables([self._flushed_rows(), pending_rows])

    def _flushed_rows(self) -> pa.Table:
        with file_errors(self.log):
            return self._rows(self._map_log(self._extent.length))

    def _rows(self, log: pa.Buffer) -> pa.Table:
        if not log.size:
            return pa.Table.from_batches([], self.schema)  # which imports no pandas
        with pa.ipc.open_stream(log) as reader:
            return reader.read_all()

    def _map_log(self, length: int) -> pa.Buffer:
        """The first `length` bytes of the log, memory-mapped. Raises OSError, ValueError."""
        if not length:
            return pa.py_buffer(b"")
        if not self.log.is_file():
            raise OSError(0, "it is gone", str(self.log))
        with pa.memory_map(str(self.log)) as file:
            if file.size() < length:
                raise ValueError(f"{self.log.name} has lost rows")
            return file.read_buffer(length)

    def _batch(self) -> pa.RecordBatch:
        """The rows that are pending."""
        columns = [self._column(field) for field in self.schema]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _column(self, field: pa.Field) -> pa.Array:
        parts: list[Any] = [
            columns[field.name] if field.name in columns else [None] * _rows_of(columns)
            for columns in self._pending_columns
        ]
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        if arrays and len(arrays) == len(parts):
            return pack_column(np.concatenate(arrays), field.type)
        values = list(chain.from_iterable(parts))
        if pa.types.is_primitive(field.type):
            return pack_column(values, field.type)
        return pa.array(values, field.type)

    def _write(self, message: bytes) -> None:
        """Writes to the log at the end of its extent, over anything beyond."""
        with file_errors(self.log):
            clear(self.log.parent, folder=True)
            self.log.parent.mkdir(exist_ok=True)
            clear(self.log)
            descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT, 0o644)
            with open(descriptor, "wb") as file:
                if os.fstat(descriptor).st_size < self._extent.length:
                    raise OSError(0, "it has been cut short")
                file.truncate(self._extent.length)
                file.seek(self._extent.length)
                file.write(message)
                file.flush()
                os.fsync(descriptor)


def _rows_of(columns: Mapping[str, Sequence[Any] | np.ndarray]) -> int:
    return len(next(iter(columns.values()), ()))


def write_table(path: Path, table: pa.Table) -> None:
    """Replaces the Parquet file `path`, whole; without rows there is none. Raises `FileError`."""
    if table.num_rows:
        replace_file(path, lambda part: pq.write_table(table, part))
        return
    with file_errors(path):
        clear(path)
        path.unlink(missing_ok=True)


def read_log(folder: Path, name: str) -> pa.Table | None:
    """The rows in a log of the run in `folder`, alive or killed; None: none can be read."""
    path = folder / "checkpoints" / f"{name}.arrows"
    batches = []
    try:
        # read, not mapped: a run that goes on may cut the file meanwhile
        with pa.ipc.open_stream(pa.py_buffer(path.read_bytes())) as reader:
            names = reader.schema
            for batch in reader:
                batches.append(batch)
    except (OSError, pa.ArrowException):
        if not batches:
            return None
    return pa.Table.from_batches(batches, names)
