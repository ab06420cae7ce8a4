"""Checkpoints: all that determines the rounds to come.

A checkpoint is one `.npz` of arrays and a JSON text. It is read without pickle and put in place by
a rename, so a kill at any instant leaves the last complete one. The rows of the tables are in logs
next to it (`raydpfl.storage.tables`); it says how far they reached, with a digest. A run resumes
from these two alone: `rounds.parquet` and `clients.parquet` are copies for readers, and are written
again whatever happened to them. A checkpoint that is torn or changed, or has lost its rows, is
skipped, with a warning, for the one before it.
"""

import hashlib
import json
import logging
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from raydpfl.core.messages import State
from raydpfl.errors import RunError, one_line
from raydpfl.simulation.client_state import ClientStates
from raydpfl.storage.run_files import Extent, clear, file_errors, replace_file

KEPT_CHECKPOINTS = 2
log = logging.getLogger("raydpfl")


@dataclass
class RunState:
    """Everything that determines the coming rounds of a run."""

    t: int  # rounds done; the round to come
    model: np.ndarray  # float32 [d]
    bound: float | None  # in force in that round
    states: dict[str, State]  # the state of every member, by the name of its section
    memory: ClientStates = field(default_factory=lambda: ClientStates({}, {}))  # what clients keep
    seconds: float = 0.0  # spent so far, over all resumes
    participations: Counter = field(default_factory=Counter)  # client -> times drawn


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after some rounds, as it is stored."""

    state: RunState
    origin: dict[str, str]  # what else the bits depend on: data, versions
    tables: dict[str, Extent]  # by name: how far it reaches


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint, or raises `FileError`; removes all but the last `KEPT_CHECKPOINTS`."""
    with file_errors(folder):
        clear(folder, folder=True)
        folder.mkdir(parents=True, exist_ok=True)
    state = checkpoint.state
    facts: dict[str, Any] = {
        "round": state.t,
        "bound": state.bound,
        "seconds": state.seconds,
        "origin": checkpoint.origin,
        "tables": {name: asdict(extent) for name, extent in checkpoint.tables.items()},
    }
    participations = np.array(sorted(state.participations.items()), np.int64).reshape(-1, 2)
    arrays = {"model": state.model, "participations": participations}
    members, memory = state.memory.arrays()
    for group, values in {"members": members, "memory": memory, **state.states}.items():
        check_state(f"the state of {group} is", values)
        # a name has no dot of its own in the file
        arrays |= {
            f"{group}.{quote(name).replace('.', '%2E')}": value for name, value in values.items()
        }
    facts["check"] = _check(facts, arrays)
    path = folder / f"round-{state.t:08d}.npz"
    npz_arrays = {"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8), **arrays}
    # numpy's stub takes what ** gives for its flag allow_pickle
    replace_file(path, lambda part: np.savez(part, **npz_arrays))  # type: ignore[arg-type]
    # and files that a kill left half written
    for old in [*sorted(folder.glob("round-*.npz"))[:-KEPT_CHECKPOINTS], *folder.glob(".round-*")]:
        with suppress(OSError):
            old.unlink()


def check_state(subject: str, state: Any) -> None:
    """Raises `RunError`, which begins with `subject`, for a state that is not arrays by name."""
    if not isinstance(state, Mapping):
        raise RunError(f"{subject} {type(state).__name__}, not a dict of arrays by name")
    for name, array in state.items():
        is_array = isinstance(array, (np.ndarray, np.generic)) and not array.dtype.hasobject
        if not (is_array and isinstance(name, str)):
            raise RunError(f"{subject} {type(array).__name__} by {name!r}, not an array by a name")


def load(
    folder: Path, check: Callable[[Checkpoint], object] = lambda checkpoint: None
) -> Checkpoint | None:
    """The newest checkpoint in a folder that is as it was written; None: none can be read. Those
    skipped are logged. `check` raises for one whose rows are lost, as readers of damaged files do.
    Raises `RunError` if some can be read and all of those have been changed.
    """
    modification = None
    warnings = []
    for path in sorted(folder.glob("round-*.npz"), reverse=True):
        try:
            checkpoint, intact = _read(path)
            if intact:
                check(checkpoint)
                break
            reason = "it has been changed since it was written"
            modification = modification or f"{path}: {reason}"
        except Exception as error:  # readers of damaged files raise anything
            reason = f"it cannot be read ({one_line(error)})"
        warnings.append(f"{path} is passed over: {reason}")
    else:
        checkpoint = None
        if modification:
            consequence = "without any checkpoint the run would start again from its first round"
            raise RunError(f"no checkpoint can be gone on with; {modification} ({consequence})")
        if warnings:
            start = "the run starts again from its first round"
            warnings.append(f"no checkpoint in {folder} can be read: {start}")
    for warning in warnings:
        log.warning(warning)
    return checkpoint


def _read(path: Path) -> tuple[Checkpoint, bool]:
    """A checkpoint, and whether it is as it was written."""
    if not path.is_file():
        raise OSError("it is no file")
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:  # `save` packs nothing
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is packed, as no checkpoint is")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError("it says that it holds more than its own size")
    with np.load(path, allow_pickle=False) as npz:
        facts = json.loads(npz["facts"].tobytes())
        check = facts.pop("check")
        arrays = {name: npz[name] for name in npz.files if name != "facts"}
        if path.name != f"round-{facts['round']:08d}.npz":
            raise ValueError(f"it is of round {facts['round']}")
        if not isinstance(facts["origin"], dict):
            raise ValueError("it does not say what its bits depend on")
    intact = check == _check(facts, arrays)
    groups: dict[str, dict[str, np.ndarray]] = {"members": {}, "memory": {}}
    for name, array in arrays.items():
        group, _, rest = name.rpartition(".")
        if group:
            groups.setdefault(group, {})[unquote(rest)] = array
    members = groups.pop("members")
    memory = groups.pop("memory")
    if members.keys() != memory.keys():
        raise ValueError("what it holds of clients' memory is not whole")
    state = RunState(
        facts["round"],
        arrays["model"],
        facts["bound"],
        groups,
        ClientStates(members, memory),
        facts["seconds"],
        Counter(dict(arrays["participations"].tolist())),
    )
    tables = {name: Extent(**extent) for name, extent in facts["tables"].items()}
    return Checkpoint(state, facts["origin"], tables), intact


def _check(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """A digest of everything in a checkpoint."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
