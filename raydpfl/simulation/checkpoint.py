"""Checkpoints: all that determines the rounds to come.

A checkpoint is one `.npz` of arrays and a JSON text. It is read without pickle and put in place by
a rename, so a kill at any instant leaves the last complete one. The rows of the tables are in logs
next to it (`raydpfl.storage.tables`); it says how far they reached, with a digest. A run resumes
from these two alone: `rounds.parquet` and `clients.parquet` are copies for readers, and are written
again whatever happened to them. A checkpoint that is torn, does not fit the run, or has lost its
rows is skipped, with a warning, for the one before it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raydpfl.core.messages import State
from raydpfl.errors import RunError
from raydpfl.storage.run_files import Extent, clear, replace_file, writing

KEEP = 2  # checkpoints
log = logging.getLogger("raydpfl")


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
