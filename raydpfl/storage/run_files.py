"""Files of a run that grow with its rounds, and how files are written: whole or not at all.

Of the files that grow, `dropped.jsonl` loses torn lines and rounds that are done again, and
`trajectory.bin` has NaN where it was cut. A directory in place of a file is set aside under another
name. A file that cannot be written (no space, no permission) ends the run with a `FileError` that
names it. The run continues with `--resume` from its last checkpoint.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raydpfl.errors import ConfigError, FileError

SHARE = 0.05  # of a run's time that snapshots may take
COST = 0.05  # seconds that one counts as at least: so there is one a second at most
log = logging.getLogger("raydpfl")


@dataclass(frozen=True)
class Extent:
    """How far the log of a table reaches: see `raydpfl.storage.tables`."""

    rows: int
    length: int  # bytes of its log
    sha256: str  # of these bytes


class Trajectory:
    """The models before the first round and after each, float32 [d] one after another in one file.
    A round done again is overwritten.

    If a run is resumed after `rounds` rounds and the file has lost earlier models, they are NaN.
    """

    def __init__(self, path: Path, d: int, rounds: int = 0):
        self.path = path
        self.bytes = 4 * d
        with file_errors(path):
            clear(path)
            path.touch()
            rows = min(path.stat().st_size // self.bytes, rounds)
        if rows < rounds:
            log.warning(
                "%s has lost the models after rounds %d to %d; they are NaN", path, rows, rounds - 1
            )
        for lost_round in range(rows, rounds):
            self.write(lost_round, np.full(d, np.nan, np.float32))

    def write(self, t: int, model: np.ndarray) -> None:
        with file_errors(self.path), open(self.path, "r+b") as file:
            file.seek(t * self.bytes)
            file.write(model.astype("<f4").tobytes())


class Dropped:
    """The clients whose updates were dropped, a line of JSON each, on disk with their round. There
    is no file before the first.

    A resumed run keeps the lines of the rounds before `end`; the others come again.
    """

    def __init__(self, path: Path, end: int):
        self.path = path
        if not os.path.lexists(path):
            return
        with file_errors(path):
            clear(path)
            text = path.read_bytes().decode(errors="replace") if path.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.strip()]
        rounds = [_line_round(line) for line in lines]
        if None in rounds:
            log.warning("%s: %d damaged lines are left out", path, rounds.count(None))
        lines = [line for line, t in zip(lines, rounds, strict=True) if t is not None and t < end]
        replace_file(path, lambda part: part.write("".join(lines).encode()))

    def append(self, t: int, details: Sequence[tuple[int, str]]) -> None:
        """Adds one round's pairs of client and what happened. Raises `FileError`."""
        entries = [{"round": t, "client": client, "detail": detail} for client, detail in details]
        lines = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
        with file_errors(self.path):
            # One write to an O_APPEND descriptor: a kill can tear no line but the last.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if os.write(descriptor, lines) != len(lines):
                    raise OSError(0, "no room left")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _line_round(line: str) -> int | None:
    """The round of a line of `dropped.jsonl`; None for one that is torn or damaged."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = line.endswith("\n") and isinstance(entry, dict) and isinstance(entry.get("round"), int)
    return entry["round"] if whole else None


class Clock:
    """The seconds of a round by phase, from one `lap` to the next: account, select, collect (the
    clients), server, record (measuring), evaluate (or waiting for it)."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds = dict[str, float]()

    def lap(self, phase: str) -> None:
        end_time = time.perf_counter()
        self.seconds[f"seconds_{phase}"] = end_time - self._last
        self._last = end_time


class Pace:
    """Says when a snapshot is due, so that snapshots cost about `SHARE` of a run at most, and less
    where each costs less than `COST`.
    """

    def __init__(self) -> None:
        self._end_time = time.monotonic()
        self._cost = COST

    def due(self) -> bool:
        return time.monotonic() - self._end_time >= self._cost / SHARE

    def record_cost(self, seconds: float) -> None:
        self._end_time = time.monotonic()
        self._cost = max(seconds, COST)


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    replace_file(path, lambda part: part.write(text.encode()))


def make_folder(path: Path) -> None:
    """Makes the directory that `--out` names if there is none. Raises `ConfigError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expected = f"a directory that can be made ({error.strerror})"
        raise ConfigError("--out", str(path), expected) from None


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turns an OSError from within into a `FileError` that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(f"{path} cannot be written ({reason})") from None


def clear(path: Path, folder: bool = False) -> None:
    """Sets aside, under another name, anything at `path` that is not a file (or not a folder, with
    `folder`). Raises OSError.
    """
    if not os.path.lexists(path) or (path.is_dir() if folder else path.is_file()):
        return
    aside = path.with_name(f"{path.name}.aside-{time.time_ns()}")
    path.rename(aside)
    log.warning(
        "%s is no %s; it is set aside as %s", path, "directory" if folder else "file", aside.name
    )


def replace_file(path: Path, write: Callable[[Any], object]) -> None:
    """Writes a file completely or not at all: `write` is given an open file, which then replaces
    that at `path`. Raises `FileError`.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with file_errors(path):
        try:
            with open(part, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            clear(path)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)  # it may take the last space on the disk
            raise
