"""The ledger: spending on disk before anything is released, one line of JSON per round.

>>> import tempfile; from pathlib import Path
>>> path = Path(tempfile.mkdtemp()) / "ledger.jsonl"
>>> ledger = Ledger(path)
>>> ledger.record(round=0, epsilon={"pld": 0.5}, mechanism="5f70bf", bound=1.0, std=4.0)
>>> ledger.record(round=0, epsilon={"pld": 0.5}, mechanism="5f70bf", bound=1.0, std=4.0)  # after a crash: the same noise, one release
>>> Ledger(path, resume=True).spent()
Spent(rounds=1, epsilon={'pld': 0.5})

A round is recorded first and released second, so what a crash can leave is a round recorded and not released: the epsilon
read back is never below what was released. The noise of a round comes from keyed generators, which makes a repeated round
one release, not two; they are for simulation and not cryptographic.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raydpfl.errors import BudgetError, ConfigError, RunError


@dataclass(frozen=True)
class Spent:
    """`rounds` recorded so far, and the epsilon after the last of them by every accountant."""

    rounds: int
    epsilon: dict[str, float] = field(default_factory=dict)


class Ledger:
    """The ledger at `path`, which a fresh run creates and a resumed one (`resume`) continues.

    A last line torn by a kill is cut off: its round was never released. Raises `ConfigError` when a fresh run finds entries
    there, and `RunError` when a complete line is damaged or a round is missing.
    """

    def __init__(self, path: str | Path, resume: bool = False):
        self.path = Path(path)
        self._entries: list[dict[str, Any]] = []
        text = self.path.read_bytes() if self.path.exists() else b""
        if text and not resume:
            raise ConfigError("--out", str(self.path.parent), f"a directory without {self.path.name}, or --resume to go on with that run")
        *complete, torn = text.split(b"\n")
        for number, line in enumerate(complete, 1):
            entry = _parse(line)
            if entry is None or (self._entries and entry["round"] != self._entries[-1]["round"] + 1):
                raise RunError(f"{self.path}, line {number}, is damaged: what this run has spent is unknown")
            self._entries.append(entry)
        if torn:
            entry = _parse(torn)
            if entry is None:
                os.truncate(self.path, len(text) - len(torn))
            else:  # whole but for the end of its line
                self._append(b"\n")
                self._entries.append(entry)

    def record(self, *, round: int, epsilon: Mapping[str, float], **release: Any) -> None:
        """Writes one round: `epsilon` by accountant after it, and what its `release` was (mechanism digest, bound, std, ...; JSON values).

        On return the line is on disk. Does nothing for a round recorded already with the same release. Raises `RunError` if
        that release was another one (its noise key would be used twice), or if `round` is not the one after the last.
        """
        entry = {"round": round, **release, "epsilon": {name: _to_json(value) for name, value in epsilon.items()}}
        line = json.dumps(entry, allow_nan=False)
        entry = json.loads(line)
        place = round - self._entries[0]["round"] if self._entries else 0
        if 0 <= place < len(self._entries):
            before = self._entries[place]
            if _release(before) != _release(entry):
                raise RunError(f"round {round} was released before as {_release(before)}, and cannot be again as {_release(entry)}")
            return
        if place != len(self._entries):
            raise RunError(f"round {round} cannot follow round {self._entries[-1]['round']} in {self.path}")
        self._append(line.encode() + b"\n")
        self._entries.append(entry)

    def spent(self) -> Spent:
        """The rounds recorded and the epsilons after the last."""
        if not self._entries:
            return Spent(0)
        return Spent(self._entries[-1]["round"] + 1, {name: float(value) for name, value in self._entries[-1]["epsilon"].items()})

    def _append(self, line: bytes) -> None:
        # One write to an O_APPEND descriptor: a kill can tear no line but the last.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.write(descriptor, line) != len(line):
                raise RunError(f"{self.path}: no room left for a whole line")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_budget(round: int, epsilon: Mapping[str, float], budget: Mapping[str, float]) -> None:
    """Raises `BudgetError` if after `round` some accountant's `epsilon` would exceed its `budget`; to be called before the round."""
    for name, most in budget.items():
        if epsilon[name] > most:
            raise BudgetError(f"round {round} would spend epsilon {epsilon[name]:.4g} ({name}), above the budget of {most:g}")


def _to_json(value: float) -> float | str:
    return "infinity" if math.isinf(value) else float(value)


def _release(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "epsilon"}


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    good = isinstance(entry, dict) and isinstance(entry.get("round"), int) and isinstance(entry.get("epsilon"), dict)
    return entry if good else None
