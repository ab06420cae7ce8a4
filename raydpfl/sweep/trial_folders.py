"""What the directories under a sweep's `trials/` say: what each holds, how it ended, if it trained.

A directory is named by the complete experiment of its trial (`name_of`), so that `1` and `1.0`, or
a default written out, are one trial. The name says where to look and nothing more: `check` compares
the config that the directory holds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, ValidationError

from raydpfl.config.yaml import read
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment, flat
from raydpfl.models import metric_columns
from raydpfl.simulation.plan import FREE, SHOWS
from raydpfl.storage.files import read_text
from raydpfl.sweep.spaces import put

FREE_KEYS = frozenset(f"{section}.{key}" for section, keys in FREE.items() for key in keys)
# What a run settles before it writes its config, by the value that leaves it open.
SETTLED = {"client.chunk": "auto", "client.backend": "auto", "noise.coefficients": None}
# A directory that holds any of these has a run in it, or the remains of one.
REMAINS = ("ledger.jsonl", "rounds.parquet", "checkpoints", "summary.json")
log = logging.getLogger("raydpfl")


class _Guarantee(BaseModel):
    accountant: str
    epsilon: float  # or "infinity", which pydantic reads as the number


class _Summary(BaseModel):
    """What a sweep reads of a trial's summary.json."""

    status: Literal["completed", "budget", "stopped", "interrupted", "failed"]
    rounds: int = Field(ge=0)
    seed: int
    test_accuracy: float | None
    test_loss: float | None
    seconds: float
    model_sha256: str
    guarantees: list[_Guarantee]
    reason: str | None = None


def meaning(experiment: Experiment, searched: Collection[str] = ()) -> dict[str, Any]:
    """All that tells a trial from another, by dotted key: the complete config.

    What a resumed run may change, and what only shows it, is left out, unless the sweep has
    `searched` it.
    """
    kept = tuple(f"{each}." for each in searched)
    free = {key for key in (*FREE_KEYS, *SHOWS) if not f"{key}.".startswith(kept)}
    leaves = flat(experiment.to_dict())
    return {key: value for key, value in leaves.items() if key not in free}


def settled(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with what the run in `folder` has settled, where it leaves that open.

    So a trial that goes on never settles it anew, on another node or another day.
    """
    stored = flat(read(folder / "config.yaml"))
    asked = flat(experiment.to_dict())
    found = {
        key: stored[key]
        for key, left_open in SETTLED.items()
        if key in stored and key in asked and asked[key] == left_open
    }
    return Experiment.from_dict(put(experiment.to_dict(), found))


def identity(values: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that name these values."""
    text = json.dumps(sorted(values.items()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def name_of(experiment: Experiment, searched: Collection[str] = ()) -> str:
    """The name of the directory of a trial."""
    return identity(meaning(experiment, searched))


def check(folder: Path, experiment: Experiment, searched: Collection[str], named: str) -> None:
    """Raises `ConfigError` unless the directory is this experiment's, or has no run in it yet.

    `named` is what the trial is called in the message.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise _refused(folder, f"the directory of {named}; it is no directory")
    path = folder / "config.yaml"
    if not os.path.lexists(path):
        remains = [name for name in REMAINS if (folder / name).exists()]
        if remains:
            why = f"it has {remains[0]} but no config.yaml"
            raise _refused(folder, f"the directory of {named}; {why}")
        return
    stored = _stored(path, named)
    asked, there = (meaning(each, searched) for each in (experiment, stored))
    for key in dict.fromkeys([*asked, *there]):
        open_at_first = key in SETTLED and asked.get(key) == SETTLED[key]
        if asked.get(key) != there.get(key) and not open_at_first:
            differs = f"its {key} is {there.get(key)!r}, not {asked.get(key)!r}"
            raise _refused(path, f"the config of {named}; {differs}")


def _stored(path: Path, named: str) -> Experiment:
    try:
        tree = read(path)
        if tree in ({}, [], ""):
            raise _refused(path, f"the config of {named}; it is empty")
        return Experiment.from_dict(tree)
    except ConfigError as error:
        if error.field == "--resume":
            raise
        why = f"expected {error.expected}" if error.field == "config" else error
        raise _refused(path, f"the config of {named}; {why}") from None


def _refused(path: Path, expected: str) -> ConfigError:
    place = path if path.parent.name == "trials" else path.parent
    shown = path.relative_to(place.parent.parent)
    hint = (
        f"rename {place.name} within trials/, where it still counts, to have the trial trained anew"
    )
    return ConfigError("--resume", str(shown), f"{expected} ({hint})")


def summary_of(folder: Path) -> dict[str, Any] | None:
    """How the run in this directory ended; None if it has not, or if its summary is not believed.

    A summary that is not whole, or is not of the rounds beside it, is warned of: the trial goes on
    from its checkpoint and writes another.
    """
    path = folder / "summary.json"
    if not os.path.lexists(path):
        return None
    try:
        found = json.loads(read_text(path))
        why = _contradiction(folder, _Summary.model_validate(found), found)
    except ValidationError:  # a ValueError too, of several lines
        why = "it is not the summary of a run"
    except (OSError, ValueError, RecursionError) as error:
        why = str(error)
    if why:
        goes_on = "the trial goes on from its checkpoint"
        log.warning("%s/%s is set aside (%s): %s", folder.name, path.name, why, goes_on)
    return None if why else found


def _contradiction(folder: Path, summary: _Summary, written: Mapping[str, Any]) -> str | None:
    """Where the summary of a run that has ended, as it was `written`, is not that of the rounds
    table beside it.

    None, too, if that table cannot be read.
    """
    if summary.status in ("interrupted", "failed"):
        return None
    try:
        table = pq.read_table(folder / "rounds.parquet")
        known = [name for name in table.column_names if metric_columns.is_score(name)]
        rows = table.select(["round", *known]).to_pylist()
    except (OSError, KeyError, pa.ArrowInvalid):  # a directory is read, and has no columns
        return None
    if len(rows) != summary.rounds:
        return f"it has {summary.rounds} rounds and rounds.parquet {len(rows)}"
    for name, value in metric_columns.last(rows, known).items():
        if value is not None and written.get(name) != value:
            there = f"that of rounds.parquet {value}"
            return f"its {name} is {written.get(name)} and {there}"
    return None


def trained(trials: Path) -> dict[str, bool]:
    """Every directory under `trials/` in which a round was begun, by name, and if it was private.

    Whatever it is called, whether or not it belongs to the sweep as it is now, however it ended.
    A run that went on after a failure or a kill repeats its rounds with the same noise and is one
    run. Where nothing says that a run was not private, it counts as one that was.
    """
    if not trials.is_dir():
        return {}
    found = {each.name: _trained(each) for each in sorted(trials.iterdir()) if each.is_dir()}
    return {name: private for name, private in found.items() if private is not None}


def _trained(folder: Path) -> bool | None:
    """Whether the run that was trained here was private; None if there was none."""
    ledger = folder / "ledger.jsonl"
    if ledger.exists():  # a private run writes it ahead of every round, and no other run does
        return True if ledger.is_dir() or ledger.stat().st_size else None
    if not _has_rounds(folder):
        return None
    try:
        return Experiment.from_dict(read(folder / "config.yaml"), imports=()).private
    except ConfigError:
        return True


def _has_rounds(folder: Path) -> bool:
    """Whether anything but the ledger says that a round was done; what cannot be read does."""
    checkpoints = {path.name for path in folder.glob("checkpoints/round-*.npz")}
    if checkpoints - {"round-00000000.npz"}:
        return True
    try:
        table = folder / "rounds.parquet"
        summary = folder / "summary.json"
        rows = table.exists() and pq.read_metadata(table).num_rows > 0
        found = json.loads(read_text(summary)) if summary.exists() else {"rounds": 0}
        # one that failed may have done so in the midst of its first round
        return rows or found["rounds"] > 0 or found.get("status") == "failed"
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowInvalid):
        return True
