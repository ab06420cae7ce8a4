"""Trials and settings of a sweep or a study, and what their directories under `trials/` hold.

A directory is named by the complete experiment of its trial (`name_of`), so that `1` and `1.0`, or
a default written out, are one trial. The name says where to look and nothing more: `check` compares
the config that the directory holds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, ValidationError

from raydpfl import storage
from raydpfl.config.overrides import flatten
from raydpfl.config.yaml import read
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.models import metric_columns
from raydpfl.report.run_reader import numbers, read_table
from raydpfl.simulation.plan import DISPLAY_SECTIONS, FREE_KEYS
from raydpfl.simulation.resume import RESOLVED_KEYS
from raydpfl.simulation.user_code import CODE_FOLDER, differing_modules
from raydpfl.storage.files import read_json

FINISHED_STATUSES = ("completed", "budget", "stopped")  # a trial that is not run again
# A directory that holds any of these has a run in it, or the remains of one.
REMAINS = ("ledger.jsonl", "rounds.parquet", "checkpoints", "summary.json")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # the colours of Ray's messages
log = logging.getLogger("raydpfl")


@dataclass(eq=False)
class Trial:
    """One run. `label` is its name in messages, without its seed."""

    label: str
    experiment: Experiment  # `client.actors` is a number or per-client
    folder: Path
    status: str = "waiting"
    report: dict[str, Any] = field(default_factory=dict)  # the latest evaluated row
    summary: dict[str, Any] | None = None
    reason: str | None = None
    before: bool = False  # it had finished before the sweep or study was started or resumed
    window: int = 1  # evaluations, at the end of the run, of which its scores are the mean

    @property
    def seed(self) -> int:
        return self.experiment.seed

    def read(self, fetch: bool = False) -> None:
        """Reads the status from the directory; `fetch`: from its address first, if it has one
        (raises `FileError` if that cannot be read).
        """
        if fetch:
            storage.refetch(self.folder)
        summary = summary_of(self.folder)
        if summary:
            self.summary = summary | last_scores(self.folder, self.window)
            self.status = summary["status"]
            self.reason = summary.get("reason")

    def fail(self, reason: str) -> None:
        self.status = "failed"
        self.reason = reason

    @property
    def finished(self) -> bool:
        return self.status in FINISHED_STATUSES

    @property
    def is_done(self) -> bool:
        return self.finished or self.status == "failed"

    def display_name(self) -> str:
        return f"{self.label} seed={self.seed}".strip()

    def failure(self) -> str:
        """Why it failed: the first line of the reason."""
        plain = _ESCAPES.sub("", self.reason or "").strip()
        return plain.splitlines()[0][:300] if plain else "no reason is known"

    def value(self, name: str) -> float | None:
        """A finite number of its summary, or of its latest evaluation while it runs; None if it
        failed or has none. A dotted name is a number within a mapping of the summary, or
        `rounds.COLUMN`, the mean over the rounds of a column of rounds.parquet.
        """
        value = numbers(self.summary or self.report).get(name)
        if self.summary and name.startswith("rounds."):
            value = mean_of_rounds(self.folder, name.partition(".")[2])
        if self.status == "failed" or value is None or not math.isfinite(value):
            return None
        return value


@dataclass(eq=False)
class SearchSetting:
    """One choice of all searched values, and its trials."""

    values: dict[str, Any]  # by dotted key
    experiment: Experiment  # as `raydpfl run` would take it
    trials: list[Trial] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return all(trial.is_done for trial in self.trials)

    @property
    def whole(self) -> bool:
        """All trials ran to their end."""
        return all(trial.status in ("completed", "budget") for trial in self.trials)

    def mean(self, metric: str) -> float | None:
        """Over the seeds that have reported; None if any failed or has no finite number."""
        trials = [trial for trial in self.trials if trial.summary or trial.report or trial.is_done]
        values = self._values(metric)
        return float(np.mean(values)) if 0 < len(values) == len(trials) else None

    def spread(self, metric: str) -> float | None:
        """The sample standard deviation over the seeds; None below two."""
        values = self._values(metric)
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    def _values(self, metric: str) -> list[float]:
        values = [trial.value(metric) for trial in self.trials]
        return [value for value in values if value is not None]


def best_of(settings: Iterable[SearchSetting], metric: str, sign: int) -> SearchSetting | None:
    """The setting with the best mean, the first of equals: among those whose trials all ran to
    their end, or else among all that are done. `sign`: that which makes more of the metric better.
    """
    done_settings = [setting for setting in settings if setting.is_done]
    pairs = [(sign * mean, s) for s in done_settings if (mean := s.mean(metric)) is not None]
    pairs = [(score, setting) for score, setting in pairs if setting.whole] or pairs
    return max(pairs, key=lambda pair: pair[0], default=(0.0, None))[1]


def override_text(values: Mapping[str, Any]) -> str:
    """Values in print, as overrides."""
    return " ".join(f"{key}={short_text(value)}" for key, value in values.items())


def short_text(value: Any) -> str:
    """A value in print, a section as a config has it.

    >>> short_text({"kind": "clip", "bound": 0.5})
    '{kind: clip, bound: 0.5}'
    """
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {short_text(part)}' for key, part in value.items())}}}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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


def meaning(experiment: Experiment, searched_keys: Collection[str] = ()) -> dict[str, Any]:
    """All by which trials differ, by dotted key: the complete config without the keys that a
    resumed run may change or that only show something, unless they are `searched_keys`.
    """
    searched_prefixes = tuple(f"{key}." for key in searched_keys)
    leaves = flatten(experiment.to_dict())
    for key in (*FREE_KEYS, *DISPLAY_SECTIONS):
        if not f"{key}.".startswith(searched_prefixes):
            leaves.pop(key, None)
    return leaves


def identity(values: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that name these values."""
    text = json.dumps(sorted(values.items()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def name_of(experiment: Experiment, searched_keys: Collection[str] = ()) -> str:
    """The name of the directory of a trial."""
    return identity(meaning(experiment, searched_keys))


def check(folder: Path, experiment: Experiment, searched_keys: Collection[str], name: str) -> None:
    """Raises `ConfigError` unless the directory is this experiment's, or has no run in it yet.
    `name`: the trial, in the message.
    """
    owner = f"the directory of {name}"
    path = folder / "config.yaml"
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise _directory_error(folder, f"{owner}; it is no directory")
    if not os.path.lexists(path):
        remains = [file for file in REMAINS if (folder / file).exists()]
        if remains:
            raise _directory_error(folder, f"{owner}; it has {remains[0]} but no config.yaml")
        return
    owner = f"the config of {name}"
    try:
        tree = read(path)
        if not tree:
            raise _directory_error(path, f"{owner}; it is empty")
        stored_leaves = meaning(Experiment.from_dict(tree), searched_keys)
    except ConfigError as error:
        if error.field == "--resume":
            raise
        reason = f"expected {error.expected}" if error.field == "config" else str(error)
        raise _directory_error(path, f"{owner}; {reason}") from None
    config_leaves = meaning(experiment, searched_keys)
    for key in dict.fromkeys([*config_leaves, *stored_leaves]):
        if not _agrees(key, config_leaves.get(key), stored_leaves.get(key)):
            difference = f"its {key} is {stored_leaves.get(key)!r}, not {config_leaves.get(key)!r}"
            raise _directory_error(path, f"{owner}; {difference}")


def _agrees(key: str, value: Any, stored_value: Any) -> bool:
    """Whether a run with the stored value of a key is one of a config with this value."""
    if key == "model.init" and value is not None:
        value = os.path.abspath(value)
    return value == stored_value or (key in RESOLVED_KEYS and value == RESOLVED_KEYS[key])


def check_code(folder: Path, name: str) -> None:
    """Raises `ConfigError` if the directory has other user-defined code than is imported here."""
    for module, (_, source) in differing_modules(folder / CODE_FOLDER).items():
        difference = f"its code of {module} is not that of {source or 'this process'}"
        raise _directory_error(folder, f"the directory of {name}; {difference}")


def _directory_error(path: Path, expected: str) -> ConfigError:
    place = path if path.parent.name == "trials" else path.parent
    relative_path = path.relative_to(place.parent.parent)
    hint = f"rename {place.name} within trials/, where it still counts, to train the trial again"
    return ConfigError("--resume", str(relative_path), f"{expected} ({hint})")


def summary_of(folder: Path) -> dict[str, Any] | None:
    """How the run in this directory ended; None if it has not, or if its summary is not whole or
    contradicts the rounds table. Of that it warns: the trial continues from its checkpoint.
    """
    path = folder / "summary.json"
    if not os.path.lexists(path):
        return None
    try:
        summary = read_json(path)
        _Summary.model_validate(summary)
        problem = _contradiction(folder, summary)
    except ValidationError:  # a ValueError too, of several lines
        problem = "it is not the summary of a run"
    except (OSError, ValueError) as error:
        problem = str(error)
    if not problem:
        return summary
    consequence = "the trial continues from its checkpoint"
    log.warning("%s/%s is set aside (%s): %s", folder.name, path.name, problem, consequence)
    return None


def _contradiction(folder: Path, summary: Mapping[str, Any]) -> str | None:
    """Where the summary of a run that has ended differs from the rounds table of its directory;
    None also if that table cannot be read.
    """
    table = read_table(folder / "rounds.parquet")
    if not table.column_names or summary["status"] in ("interrupted", "failed"):
        return None
    if table.num_rows != summary["rounds"]:
        return f"it has {summary['rounds']} rounds and rounds.parquet {table.num_rows}"
    scores = [name for name in table.column_names if metric_columns.is_score(name)]
    rows = table.select(["round", *scores]).to_pylist()
    for name, value in metric_columns.last_scores(rows, scores).items():
        if value is not None and summary.get(name) != value:
            return f"its {name} is {summary.get(name)} and that of rounds.parquet {value}"
    return None


def last_scores(folder: Path, count: int) -> dict[str, float]:
    """The means of the scores over the last `count` evaluations of a run, where there are several;
    empty where its rounds cannot be read.
    """
    rows = read_table(folder / "rounds.parquet").to_pylist() if count > 1 else []
    rows = [row for row in rows if metric_columns.is_evaluated(row)][-count:]
    names = metric_columns.score_values(rows[-1]) if rows else ()
    scores = {name: [row.get(name) for row in rows] for name in names}
    return {name: float(np.mean(values)) for name, values in scores.items() if None not in values}


def mean_of_rounds(folder: Path, column: str) -> float | None:
    """The mean over the rounds of a run; None where no round has a number in the column."""
    with suppress(OSError, KeyError, pa.ArrowException):
        rows = pq.read_table(folder / "rounds.parquet", columns=[column])
        return pc.mean(rows[column]).as_py()
    return None


def trained_runs(trials: Path) -> dict[str, bool]:
    """Every directory under `trials/` in which a round was started, by name, and if it was private.

    It counts under any name, however it ended, and whether or not the sweep still has it; as
    private unless it says that it was not. A run that continued after a failure or a kill repeats
    its rounds with the same noise and is one run.
    """
    runs = {}
    for folder in sorted(trials.iterdir()) if trials.is_dir() else ():
        ledger = folder / "ledger.jsonl"
        if ledger.exists():  # a private run writes it ahead of every round, and no other run does
            if ledger.is_dir() or ledger.stat().st_size:
                runs[folder.name] = True
        elif folder.is_dir() and has_rounds(folder):
            path = folder / "config.yaml"
            try:
                runs[folder.name] = _is_private(path, path.stat().st_mtime_ns)
            except (OSError, ConfigError):
                runs[folder.name] = True
    return runs


@functools.cache  # a sweep asks every few seconds, of all of its trials
def _is_private(config: Path, mtime: int) -> bool:
    return Experiment.from_dict(read(config), imports=()).private


def has_rounds(folder: Path, counts_failed: bool = True) -> bool:
    """Whether anything but the ledger says that a round was done; an unreadable file does, and if
    `counts_failed` a failure, as it may have been in the first round.
    """
    checkpoints = {path.name for path in folder.glob("checkpoints/round-*.npz")}
    if checkpoints - {"round-00000000.npz"}:
        return True
    table, path = folder / "rounds.parquet", folder / "summary.json"
    try:
        rows = table.exists() and pq.read_metadata(table).num_rows > 0
        summary = read_json(path) if path.exists() else {"rounds": 0}
        has_failed = summary.get("status") == "failed"
        return rows or summary["rounds"] > 0 or (counts_failed and has_failed)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowInvalid):
        return True
