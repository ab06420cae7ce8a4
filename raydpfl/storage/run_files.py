"""What a run leaves behind: checkpoints and other files that grow.

A checkpoint is one `.npz` of arrays and a JSON text. It is read without pickle and put in place by
a rename, so a kill at any instant leaves the last complete one. The rows of the tables are in logs
next to it (`raydpfl.storage.tables`); it says how far they reached, with a digest. A run resumes from these
two alone: `rounds.parquet` and `clients.parquet` are copies for readers, and are written again
whatever happened to them. A checkpoint that is torn, does not fit the run, or has lost its rows is
skipped, with a warning, for the one before it. Of the other files that grow with the rounds,
`dropped.jsonl` loses torn lines and rounds that are done again, and `trajectory.bin` has NaN where
it was cut. A directory in place of a file is set aside under another name.

A file that cannot be written (no space, no permission) ends the run with a `FileError` that names
it. The run continues with `--resume` from its last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raydpfl.core.messages import State
from raydpfl.errors import ConfigError, FileError, RunError

KEEP = 2  # checkpoints
SHARE = 0.05  # of a run's time that snapshots may take
COST = 0.05  # seconds that one counts as at least: so there is one a second at most
log = logging.getLogger("raydpfl")


@dataclass(frozen=True)
class Extent:
    """How far the log of a table reaches: see `raydpfl.storage.tables`."""

    rows: int
    length: int  # bytes of its log
    sha256: str  # of these bytes


@dataclass(frozen=True)
class Checkpoint:
    """Everything that determines what comes after `round` rounds."""

    round: int  # rounds done
    model: np.ndarray  # float32 [d]
    states: dict[str, State]  # what each member keeps, by the name of its section
    bound: float | None  # in force in the coming round
    seconds: float  # spent so far, over all resumes
    participations: np.ndarray  # int64 [clients seen, 2]: client, times drawn
    members: dict[str, np.ndarray]  # by member, int64 [m]: the clients that remember something
    memory: dict[str, np.ndarray]  # by member, float32 [m, d]: what
    origin: dict[str, str]  # what else the bits depend on: data, versions
    tables: dict[str, Extent] = field(default_factory=dict)  # by name: how far each table reaches
    intact: bool = True  # whether it is as it was written

    def flaw(
        self,
        d: int,
        clients: int,
        rounds: int,
        states: Mapping[str, State],
        kept: Mapping[str, int],
    ) -> str | None:
        """Why a run cannot continue from it, in words; None: it can.

        Args:
            d: parameters of the model that travel.
            clients: N.
            rounds: of the run.
            states: the members' states before the first round, whose names and shapes never change.
            kept: by name, how many numbers a client remembers, where that is not d.
        """
        return (
            self._of_another_run(d, states, kept)
            or self._not_finite()
            or self._out_of_range(clients, rounds)
            or (None if self.intact else "it has been changed since it was written")
        )

    def _of_another_run(
        self, d: int, states: Mapping[str, State], kept: Mapping[str, int]
    ) -> str | None:
        """What has other shapes or types than in this run, in words."""
        if self.model.shape != (d,) or self.model.dtype != np.float32:
            shape = list(self.model.shape)
            held = f"a model of {shape} parameters in {self.model.dtype}"
            return f"it holds {held}, not of [{d}] in float32"
        for name, vectors in self.memory.items():
            whole = (len(self.members[name]), kept.get(name, d))
            if vectors.shape != whole or vectors.dtype != np.float32:
                return "what it holds of clients' memory is of other clients or another model"
        for member, state in states.items():
            kinds = _kinds(self.states.get(member, {}))
            if any(kinds.get(name) != kind for name, kind in _kinds(state).items()):
                return f"what it holds of the {member} is another {member}'s"
        if not _counts(self.participations):
            return "what it holds of clients' participations is no count of them"
        return None if isinstance(self.origin, dict) else "it does not say what its bits depend on"

    def _not_finite(self) -> str | None:
        """What holds numbers that are not finite, in words."""
        if not all(np.isfinite(each).all() for each in (self.model, *self.memory.values())):
            return "its model has numbers that are not finite"
        for member, state in self.states.items():
            for name, array in state.items():
                if array.dtype.kind == "f" and np.isnan(array).any():
                    return f"the {member}'s {name} is not a number somewhere"
        return None

    def _out_of_range(self, clients: int, rounds: int) -> str | None:
        """What is beyond the clients and rounds of this run, in words."""
        seen = np.concatenate([self.participations[:, 0], *self.members.values()])
        if seen.size and not 0 <= seen.min() <= seen.max() < clients:
            return f"it knows of clients beyond the {clients:,} there are"
        if not 0 <= self.round <= rounds or not 0 <= self.seconds < np.inf:
            return f"it has {self.round} rounds of {rounds}, in {self.seconds} s"
        return None


def _kinds(state: State) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    return {name: (array.shape, array.dtype) for name, array in state.items()}


def _counts(participations: np.ndarray) -> bool:
    """Whether these are clients, each once, and how often each was drawn."""
    if participations.ndim != 2 or participations.shape[1] != 2:
        return False
    clients, times = participations.T
    whole = participations.dtype == np.int64
    return whole and len(np.unique(clients)) == len(clients) and times.min(initial=1) >= 1


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint completely or not at all, and removes all but the last `KEEP`. Raises
    `FileError`.
    """
    with writing(folder):
        clear(folder, folder=True)
        folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "round": checkpoint.round,
        "bound": checkpoint.bound,
        "seconds": checkpoint.seconds,
        "origin": checkpoint.origin,
        "tables": {name: asdict(extent) for name, extent in checkpoint.tables.items()},
    }
    arrays = {"model": checkpoint.model, "participations": checkpoint.participations}
    groups = {"members": checkpoint.members, "memory": checkpoint.memory, **checkpoint.states}
    for group, values in groups.items():
        arrays |= {f"{group}.{name}": value for name, value in values.items()}
    facts["check"] = _check(facts, arrays)
    path = folder / f"round-{checkpoint.round:08d}.npz"
    stored = {"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8), **arrays}
    # numpy's stub takes what ** gives for its flag allow_pickle
    replace_file(path, lambda part: np.savez(part, **stored))  # type: ignore[arg-type]
    # and files that a kill left half written
    for old in [*sorted(folder.glob("round-*.npz"))[:-KEEP], *folder.glob(".round-*")]:
        with suppress(OSError):
            old.unlink()


def load(
    folder: Path,
    flaw: Callable[[Checkpoint], str | None] = lambda found: None,
    most: float = math.inf,
) -> Checkpoint | None:
    """The newest checkpoint in a folder that can be read and has no flaw; None: none can be read.
    Those skipped are logged.

    `flaw` says why the run cannot continue from one, None if it can. A file of more than `most`
    bytes, or that claims to unpack to more than its size, is not read. Raises `RunError` if some
    can be read and all of those have flaws.
    """
    found = None
    flawed = None
    passed = []
    for path in sorted(folder.glob("round-*.npz"), reverse=True):
        try:
            found = _read(path, most)
            reason = flaw(found)
            flawed = flawed or (reason and f"{path}: {reason}")
        except _UNREADABLE as error:
            reason = (
                f"it cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            )
        if not reason:
            break
        found = None
        passed.append(f"{path} is passed over: {reason}")
    if flawed and not found:
        more = "without any checkpoint the run would start again from its first round"
        raise RunError(f"no checkpoint can be gone on with; {flawed} ({more})")
    if passed and not found:
        passed.append(
            f"no checkpoint in {folder} can be read: the run starts again from its first round"
        )
    for warning in passed:
        log.warning(warning)
    return found


# What the readers of damaged files raise.
_UNREADABLE = (
    OSError,
    EOFError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    MemoryError,
    RecursionError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
    pa.ArrowException,
)


def _read(path: Path, most: float) -> Checkpoint:
    if not path.is_file():
        raise OSError("it is no file")
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"it has {size:,} bytes, where this run's have {most:,} at most")
    with zipfile.ZipFile(path) as archive:  # `save` packs nothing
        inside = archive.infolist()
    if any(each.compress_type != zipfile.ZIP_STORED for each in inside):
        raise ValueError("it is packed, as no checkpoint is")
    if sum(each.file_size for each in inside) > size:
        raise ValueError("it says that it holds more than its own size")
    with np.load(path, allow_pickle=False) as stored:
        facts = json.loads(stored["facts"].tobytes())
        check = facts.pop("check")
        every = {name: stored[name] for name in stored.files if name != "facts"}
        if path.name != f"round-{facts['round']:08d}.npz":
            raise ValueError(f"it is of round {facts['round']}")
        if not isinstance(facts["origin"], dict):
            raise ValueError("it does not say what its bits depend on")
        arrays = {name: every[name] for name in ("model", "participations")}
        groups: dict[str, dict[str, np.ndarray]] = {"members": {}, "memory": {}}
        for name, array in every.items():
            group, _, rest = name.rpartition(".")
            if group:
                groups.setdefault(group, {})[rest] = array
    members = groups.pop("members")
    memory = groups.pop("memory")
    if members.keys() != memory.keys():
        raise ValueError("what it holds of clients' memory is not whole")
    intact = check == _check(facts, every)
    facts["tables"] = {name: Extent(**extent) for name, extent in facts["tables"].items()}
    return Checkpoint(
        **facts, **arrays, states=groups, members=members, memory=memory, intact=intact
    )


def _check(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """A digest of everything in a checkpoint."""
    found = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype.str} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


class Trajectory:
    """The models before the first round and after each, float32 [d] one after another in one file.
    A round done again is overwritten.

    If a run is resumed after `rounds` rounds and the file has lost earlier models, they are NaN.
    """

    def __init__(self, path: Path, d: int, rounds: int = 0):
        self.path = path
        self.bytes = 4 * d
        with writing(path):
            clear(path)
            path.touch()
            kept = min(path.stat().st_size // self.bytes, rounds)
        if kept < rounds:
            log.warning(
                "%s has lost the models after rounds %d to %d; they are NaN", path, kept, rounds - 1
            )
        for lost in range(kept, rounds):
            self.write(lost, np.full(d, np.nan, np.float32))

    def write(self, t: int, model: np.ndarray) -> None:
        with writing(self.path), open(self.path, "r+b") as file:
            file.seek(t * self.bytes)
            file.write(model.astype("<f4").tobytes())


class Dropped:
    """The clients whose updates were dropped, a line of JSON each, on disk with their round. There
    is no file before the first.

    A resumed run keeps the lines of the rounds `before` that one; the others come again.
    """

    def __init__(self, path: Path, before: int):
        self.path = path
        if not os.path.lexists(path):
            return
        with writing(path):
            clear(path)
            text = path.read_bytes().decode(errors="replace") if path.exists() else ""
        lines = [f"{line}\n" for line in text.split("\n")]
        lines[-1] = lines[-1].removesuffix("\n")
        lines = [line for line in lines if line]
        entries = [_dropped(line) for line in lines]
        if None in entries:
            log.warning("%s: %d damaged lines are left out", path, entries.count(None))
        kept = [
            line
            for line, entry in zip(lines, entries, strict=True)
            if entry is not None and entry < before
        ]
        replace_file(path, lambda part: part.write("".join(kept).encode()))

    def append(self, t: int, dropped: Sequence[tuple[int, str]]) -> None:
        """Adds one round's pairs of client and what happened. Raises `FileError`."""
        entries = [{"round": t, "client": client, "detail": detail} for client, detail in dropped]
        lines = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
        with writing(self.path):
            # One write to an O_APPEND descriptor: a kill can tear no line but the last.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if os.write(descriptor, lines) != len(lines):
                    raise OSError(0, "no room left")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _dropped(line: str) -> int | None:
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
        now = time.perf_counter()
        self.seconds[f"seconds_{phase}"] = now - self._last
        self._last = now


class Pace:
    """Says when a snapshot is due, so that snapshots cost about `SHARE` of a run at most, and less
    where each costs less than `COST`.
    """

    def __init__(self) -> None:
        self._ended = time.monotonic()
        self._cost = COST

    def due(self) -> bool:
        return time.monotonic() - self._ended >= self._cost / SHARE

    def took(self, seconds: float) -> None:
        self._ended = time.monotonic()
        self._cost = max(seconds, COST)


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    replace_file(path, lambda part: part.write(text.encode()))


def make_folder(path: Path) -> None:
    """Makes the directory that `--out` names if there is none. Raises `ConfigError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "--out", str(path), f"a directory that can be made ({error.strerror})"
        ) from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
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
    with writing(path):
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
