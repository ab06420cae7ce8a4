"""Prepared data, open for reading: the clients' training rows by chunks, test and validation rows.

>>> import tempfile
>>> from raydpfl.data.shard_writer import prepare
>>> from raydpfl.data.sources.synthetic import Synthetic
>>> data = Synthetic(clients=3, samples=4, sizes={"kind": "balanced"})
>>> with tempfile.TemporaryDirectory() as cache:
...     shards = Shards.open(prepare(data, seed=0, cache=Path(cache)))
...     x, y, n = shards.chunk([2, -1], rows=5)
...     shards.clients, shards.shape, shards.classes, x.shape, n
(3, (60,), 10, (2, 5, 60), array([4, 0]))

The files (`raydpfl.data.shard_writer`) are memory-mapped, the page cache's one copy for all
processes, but for large ones of training rows (`raydpfl.data.row_readers`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raydpfl.data.row_readers import (
    ClientTable,
    FileRows,
    GeneratedRows,
    MappedRows,
    RowReader,
    aligned_array,
)
from raydpfl.data.shard_files import BATCH_BYTES, ArrowFile
from raydpfl.data.sources import parse
from raydpfl.models.tasks import Classification, Form, Target, Task

SCALE_PIXELS = 160 << 10  # pixels that are scaled at once: with their float32 they fit the L2 cache


class Shards:
    """A prepared folder, cheap to open; pickling sends the path.

    `sizes`: int64 [clients], their training rows, on the map; `shape`: of a sample; `classes` (0:
    numbers); `unseen`: those without a training sample; `target`: what y is; `tokens` (0: x is
    float32). What `chunk` and `decode` give is the caller's to write to: x is float32, or int64
    tokens; y int64, or float32 numbers, with an axis more for several targets.
    """

    def __init__(self, folder: Path, metadata: Mapping[str, Any]):
        self.folder = folder
        self.shape: tuple[int, ...] = tuple(metadata["shape"])
        self.classes: int = metadata["classes"]
        self.unseen = tuple(metadata["unseen"])
        self.tokens: int = metadata.get("tokens", 0)
        targets, names = (tuple(metadata.get(key, ())) for key in ("targets", "names"))
        self.target = Target(targets, self.classes, names)
        self._description = metadata["description"]
        # uint8 v becomes (v / 255 - mean) / std per channel
        per_channel = (-1, *[1] * (len(self.shape) - 1)) if len(metadata["mean"]) > 1 else ()
        mean, std = (
            np.array(metadata[key] or [default]).reshape(per_channel)
            for key, default in (("mean", 0), ("std", 1))
        )
        self._scale = np.float32(1 / (255 * std))
        self._shift = np.float32(-mean / std) if metadata["mean"] else None
        table = ClientTable(folder)
        self.sizes = table.sizes
        self._sets = {
            name: ArrowFile(folder / f"{name}.arrow")
            for name in ("test", "validation")
            if (folder / f"{name}.arrow").exists()
        }
        ((_, test_y),) = self._sets["test"].batches
        self._dtypes = (np.dtype(np.int64 if self.tokens else np.float32), test_y.dtype)
        self.reader = self._reader(metadata, table)
        self.release()  # opening touched pages all over the files

    def _reader(self, metadata: Mapping[str, Any], table: ClientTable) -> RowReader:
        if "made" in metadata:
            source = parse(metadata["config"])
            return GeneratedRows(source, metadata["made"], self.sizes, self.form(source.task))
        form = self.form(Classification())
        file = ArrowFile(self.folder / "train.arrow")
        if file.bytes <= BATCH_BYTES and len(file.batches) == 1:
            return MappedRows(file, form, table)
        return FileRows(self.folder / "train.arrow", form, table)

    @classmethod
    def open(cls, folder: Path | str) -> Shards:
        """The prepared folder."""
        folder = Path(folder)
        return cls(folder, json.loads((folder / "data.json").read_text()))

    def __reduce__(self) -> tuple:
        return Shards.open, (self.folder,)

    def form(self, task: Task) -> Form:
        """What a sample is, for a task."""
        return Form(self.shape, self.target, task, self.tokens)

    @property
    def clients(self) -> int:
        return len(self.sizes)

    def _rows(self, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """x and y of each batch of the test or validation rows, on the map."""
        file = self._sets.get(name)
        return file.rows(self.shape, self.target.shape) if file else []

    @cached_property
    def client_rows(self) -> np.ndarray:
        """The number of rows that each client is scored by, int64 [clients]: its validation rows,
        where there are any; else all. Where clients are held out altogether, of each of these.
        """
        if "validation" not in self._sets:
            return np.array(self.sizes)
        ((rows,),) = ArrowFile(self.folder / "held.arrow").batches
        return np.array(rows)

    def client_batch(self, clients: range, first_row: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows that some consecutive clients are scored by, for training; `first_row`: the
        place of their first row among those of all clients.
        """
        rows = self.client_rows[clients.start : clients.stop]
        if "validation" not in self._sets:
            x, y, n = self.chunk(clients, int(rows.max()))
            row_mask = np.arange(x.shape[1]) < n[:, None]
            return x[row_mask], y[row_mask]
        parts = []
        start = 0
        for x, y in self._rows("validation"):
            part = slice(max(first_row - start, 0), max(first_row + int(rows.sum()) - start, 0))
            parts.append((x[part], y[part]))
            start += len(y)
        x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
        return self.decode(x, y)

    def ids(self) -> list[str] | None:
        """The id of each client, as the data have it; None: the data name no clients."""
        path = self.folder / "ids.arrow"
        if not path.exists():
            return None
        with pa.memory_map(str(path)) as file:
            return pa.ipc.open_file(file).read_all()["id"].to_pylist()

    def chunk(
        self,
        clients: Sequence[int] | np.ndarray,
        rows: int,
        row_indices: Sequence[np.ndarray | None] | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The training rows of some clients, each padded with zeros to `rows`.

        Args:
            clients: int [C]; -1 is a dummy without rows.
            rows: that each client is padded to.
            row_indices: the rows to take of each client, ascending; None for all of them.

        Returns:
            x float32 [C, rows, *shape], y int64 [C, rows], numbers of rows taken, int64 [C].

        Raises: ValueError if a client has more than `rows`; OSError; `ConfigError` for generated
        rows that are wrong.
        """
        members = np.asarray(clients, np.int64)
        counts = np.where(members < 0, 0, self.sizes[members])
        for slot, indices in enumerate(row_indices or ()):
            if indices is not None:
                counts[slot] = len(indices)
        if counts.max(initial=0) > rows:
            largest = f"client {members[counts.argmax()]} has {counts.max()} samples"
            raise ValueError(f"{largest}, more than the {rows} rows of the chunk")
        has_subset = row_indices is not None and any(indices is not None for indices in row_indices)
        chunk_rows = None if has_subset else self.reader.read(members, counts, rows)
        shape = (len(members), rows)
        if chunk_rows is None:
            x = aligned_array((*shape, *self.shape), self._dtypes[0])
            y = aligned_array((*shape, *self.target.shape), self._dtypes[1])
            for slot in np.flatnonzero(counts).tolist():
                row_slice = slice(counts[slot])
                indices = row_indices[slot] if row_indices else None
                stored_rows, y[slot, row_slice] = self.reader.rows(int(members[slot]), indices)
                self._scale_rows(stored_rows, x[slot, row_slice])
        else:
            x, y = chunk_rows
            if x.dtype != self._dtypes[0]:
                x = aligned_array(x.shape, self._dtypes[0])
                self._scale_rows(chunk_rows[0], x)
        for slot in np.flatnonzero(counts < rows).tolist():
            x[slot, counts[slot] :] = 0
            y[slot, counts[slot] :] = 0
        return x, y, counts

    def _scale_rows(self, stored_rows: np.ndarray, x: np.ndarray) -> None:
        """Puts rows as they are stored into x: pixels scaled to float32, all else as it is."""
        if stored_rows.dtype != np.uint8:
            x[...] = stored_rows
            return
        step = max(1, SCALE_PIXELS // max(1, stored_rows[:1].size))
        for start in range(0, len(x), step):
            part = x[start : start + step]
            # not by the product, which would convert them again in small parts
            part[...] = stored_rows[start : start + step]
            part *= self._scale
            if self._shift is not None:
                part += self._shift

    def prefetch(self, clients: np.ndarray, rows: int) -> None:
        """Asks the system to load the rows of these clients, int64, -1 for a dummy, unless they
        have more than `rows`; returns at once.
        """
        members = clients[clients >= 0]
        self.reader.prefetch(members[self.sizes[members] <= rows])

    def stored_batches(self, name: str, batch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The `test` or `validation` rows as stored, `batch` at a time, for `decode`."""
        return [
            (x[start : start + batch], y[start : start + batch])
            for x, y in self._rows(name)
            for start in range(0, len(y), batch)
        ]

    def decode(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows for training, x float32 [n, *shape] and y int64 [n], of rows as they are stored."""
        scaled_x = aligned_array(x.shape, self._dtypes[0])
        self._scale_rows(x, scaled_x)
        return scaled_x, y.copy()

    def release(self) -> None:
        """Gives the mapped pages of large files back."""
        for file in self._sets.values():
            file.release()
        self.reader.release()

    def class_counts(self) -> np.ndarray:
        """Training samples of each client and class, int64 [clients, classes]; no columns where
        samples have not one class each.
        """
        counts = np.zeros((self.clients, 0 if self.target.shape else self.classes), np.int64)
        for client in np.flatnonzero(self.sizes).tolist() if counts.shape[1] else ():
            counts[client] = np.bincount(self.reader.rows(client, None)[1], minlength=self.classes)
        return counts

    def describe(self) -> dict:
        """The clients' data in numbers: clients, training, test, unused, validation and distinct
        training samples; per client (min, median, max) training samples, classes and the share of
        the commonest class; names of classes or targets, where they have any. For regression no
        classes, and `optimum`, the least test loss of a linear model, where it is known.
        """
        return dict(self._description)
