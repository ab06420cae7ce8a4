"""What a run leaves behind: rounds table, clients table, checkpoints, TensorBoard events.

A checkpoint is one `.npz` of arrays and a JSON text, read without pickle and put in place by a rename, so that a kill at any
instant leaves the last whole one. The tables are written just before it: a run that is resumed from round t keeps the rows
below t and makes the others again.
"""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raydpfl.errors import ConfigError

KEEP = 2  # checkpoints
SHARE = 0.05  # of a run's time that snapshots may take


@dataclass(frozen=True)
class Checkpoint:
    """All that decides what comes after `round` rounds."""

    round: int  # rounds done
    model: np.ndarray  # float32 [d]
    server: dict[str, np.ndarray]
    bound: float | None  # in force in the coming round
    seconds: float  # spent so far, over all resumes
    participations: np.ndarray  # int64 [clients seen, 2]: client, times drawn
    members: np.ndarray  # int64 [m]: the clients that remember something
    memory: np.ndarray  # float32 [m, d]: what
    origin: dict[str, str]  # what else the bits depend on: data, versions


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes it whole or not at all, and drops all but the last `KEEP`."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"round": checkpoint.round, "bound": checkpoint.bound, "seconds": checkpoint.seconds, "origin": checkpoint.origin}
    arrays = {name: getattr(checkpoint, name) for name in ("model", "participations", "members", "memory")}
    arrays |= {f"server.{name}": value for name, value in checkpoint.server.items()}
    path = folder / f"round-{checkpoint.round:08d}.npz"
    replace_file(path, lambda part: np.savez(part, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8), **arrays))
    for old in [*sorted(folder.glob("round-*.npz"))[:-KEEP], *folder.glob(".round-*")]:  # and what a kill left half written
        old.unlink()


def load(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that can be read, or None."""
    for path in sorted(folder.glob("round-*.npz"), reverse=True):
        try:
            with np.load(path, allow_pickle=False) as stored:
                facts = json.loads(stored["facts"].tobytes())
                server = {name.removeprefix("server."): stored[name] for name in stored.files if name.startswith("server.")}
                arrays = {name: stored[name] for name in ("model", "participations", "members", "memory")}
                return Checkpoint(**facts, **arrays, server=server)
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
            continue
    return None


# What may be missing from every row are numbers, and lists of words.
_UNFILLED = {pa.null(): pa.float64(), pa.list_(pa.null()): pa.list_(pa.string())}


class Table:
    """Rows in memory, a Parquet file on disk at every flush. A column's dtype does not depend on whether it holds anything."""

    def __init__(self, path: Path):
        self.path, self.rows = path, list[dict[str, Any]]()

    def resume(self, before: int) -> None:
        """Takes up the rows of rounds below `before`."""
        stored = pq.read_table(self.path).to_pylist() if self.path.exists() else []
        self.rows = [row for row in stored if row["round"] < before]

    def flush(self) -> None:
        table = self.arrow()
        replace_file(self.path, lambda part: pq.write_table(table, part))

    def arrow(self) -> pa.Table:
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        table = pa.table({name: [row.get(name) for row in self.rows] for name in names})
        return table.cast(pa.schema([(column.name, _UNFILLED.get(column.type, column.type)) for column in table.schema]))


class Trajectory:
    """The model before the first round and after each, float32 [d] one after another in one file; a round done again is written over."""

    def __init__(self, path: Path, d: int):
        self.path, self.bytes = path, 4 * d
        path.touch()

    def write(self, round: int, model: np.ndarray) -> None:
        with open(self.path, "r+b") as file:
            file.seek(round * self.bytes)
            file.write(model.astype("<f4").tobytes())

    @staticmethod
    def read(path: Path, d: int) -> np.ndarray:
        """Float32 [rounds + 1, d]."""
        return np.fromfile(path, "<f4").reshape(-1, d)


class Clock:
    """The seconds of a round by phase, from one `lap` to the next: account, select, collect (the clients), server, record (measuring too)."""

    def __init__(self) -> None:
        self._last, self.seconds = time.perf_counter(), dict[str, float]()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[f"seconds_{phase}"], self._last = now - self._last, now


class Pace:
    """Says when a snapshot is due, so that snapshots cost about `SHARE` of a run at most."""

    def __init__(self) -> None:
        self._ended, self._cost = time.monotonic(), 0.05

    def due(self) -> bool:
        return time.monotonic() - self._ended >= self._cost / SHARE

    def took(self, seconds: float) -> None:
        self._ended, self._cost = time.monotonic(), seconds


class TensorBoard:
    """The numbers of every row as scalars."""

    def __init__(self, folder: Path, first: int):
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._writer, self._summary = SummaryWriter(str(folder), purge_step=first if first else None), Summary

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """One event a row: an event for each of its numbers, as `add_scalar` writes them, takes seven times as long."""
        for row in rows:
            numbers = [(name, value) for name, value in row.items() if name != "round" and isinstance(value, (int, float))]
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers]
            self._writer.file_writer.add_summary(self._summary(value=values), row["round"])

    def close(self) -> None:
        self._writer.close()


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    replace_file(path, lambda part: part.write(text.encode()))


def make_folder(path: Path) -> None:
    """Makes the directory that `--out` names, unless it is there. Raises `ConfigError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", str(path), f"a directory that can be made ({error.strerror})") from None


def replace_file(path: Path, write: Any) -> None:
    """What `write` puts into a file that it is given, at `path` whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with open(part, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
