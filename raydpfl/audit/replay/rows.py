"""Readers of clients' rows for the worlds of a replay."""

import numpy as np
import pyarrow as pa

from raydpfl.audit.canaries import OtherRows, Rows
from raydpfl.data import RowReader, Shards


class ComparedRows(RowReader):
    """A reader whose rows are held against those that the file has for the client (none has those
    that are generated), which are read as plainly as possible.
    """

    def __init__(self, shards: Shards, faults: list[str]):
        self._reader = shards.reader
        self._faults = faults
        files = (shards.folder / f"{name}.arrow" for name in ("train", "clients", "rows"))
        self._train, self._clients, self._index = (
            pa.ipc.open_file(pa.memory_map(str(file))).read_all() if file.exists() else None
            for file in files
        )

    def rows(self, client: int, row_indices: np.ndarray | None) -> Rows:
        x, y = self._reader.rows(client, row_indices)
        self._compare(client, slice(None) if row_indices is None else row_indices, x, y)
        return x, y

    def read(self, clients: np.ndarray, counts: np.ndarray, width: int) -> Rows | None:
        whole = self._reader.read(clients, counts, width)
        if whole is not None:
            for slot in np.flatnonzero(counts).tolist():
                x, y = (column[slot, : counts[slot]] for column in whole)
                self._compare(int(clients[slot]), slice(None), x, y)
        return whole

    def _compare(
        self, client: int, row_indices: slice | np.ndarray, x: np.ndarray, y: np.ndarray
    ) -> None:
        if self._train is None or self._clients is None:
            return
        first_row, size = (column[client].as_py() for column in self._clients.columns)
        places = np.arange(first_row, first_row + size)[row_indices]
        if self._index is not None:
            places = self._index.column(0).to_numpy()[places]
        file_rows = self._train.take(places)
        for rows, name in ((x, "x"), (y, "y")):
            column = file_rows.column(name).combine_chunks()
            flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
            if rows.tobytes() != flat.to_numpy(zero_copy_only=False).tobytes():  # NaN too
                fault = f"client {client} is given rows that are not its own"
                self._faults += [] if fault in self._faults else [fault]

    def release(self) -> None:
        self._reader.release()


def replace_victim_rows(reader: RowReader, victim: int, scale: float) -> OtherRows:
    """A reader of rows that gives others for those of one client."""

    def victim_rows(client: int) -> Rows | None:
        if client != victim:
            return None
        x, y = reader.rows(client, None)
        x = x * x.dtype.type(scale) if x.dtype.kind == "f" else x[:, ::-1]
        return np.ascontiguousarray(x), np.ascontiguousarray(y[::-1])

    return OtherRows(reader, victim_rows)
