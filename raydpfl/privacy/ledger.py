"""The ledger: spending on disk before anything is released, one line of JSON per round.

>>> import tempfile; from pathlib import Path
>>> path = Path(tempfile.mkdtemp()) / "ledger.jsonl"
>>> ledger = Ledger(path)
>>> ledger.record(t=0, epsilon={"pld": 0.5}, mechanism="5f70bf", bound=1.0, std=4.0)
>>> # after a crash: the same noise, one release
>>> ledger.record(t=0, epsilon={"pld": 0.5}, mechanism="5f70bf", bound=1.0, std=4.0)
>>> Ledger(path, resume=True).spent()
Spent(rounds=1, epsilon={'pld': 0.5})

A round is recorded first and released second, so what a crash can leave is a round recorded and not
released: the epsilon read back is never below what was released. The noise of a round comes from
keyed generators, which makes a repeated round one release, not two; they are for simulation and not
cryptographic.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raydpfl.errors import BudgetError, ConfigError, FileError, RunError


@dataclass(frozen=True)
class Spent:
    """`rounds` recorded so far, and the epsilon after the last of them by every accountant."""

    rounds: int
    epsilon: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """Rounds `first` .. `end` - 1, released one after another under one key of the noise.

    `again` counts how often the run had been begun anew with fresh noise: 0 for the rounds it began
    with.
    """

    again: int
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def segments(path: Path) -> tuple[Segment, ...]:
    """The segments of the ledger at `path`, which is only read; none where there is no ledger.

    Raises `FileError` for a ledger that cannot be read, `RunError` for one that is damaged.
    """
    return _segments(_entries(path, _read(path))[0])


class Ledger:
    """The ledger at `path`, which a fresh run creates and a resumed one (`resume`) continues.

    A last line torn by a kill is cut off: its round was never released. Raises `ConfigError` when a
    fresh run finds entries there, `RunError` when a complete line is damaged or a round is missing,
    and `FileError` when what is there is no file that can be read and written.
    """

    def __init__(self, path: str | Path, resume: bool = False):
        self.path = Path(path)
        text = _read(self.path, written=True)
        if text and not resume:
            raise ConfigError(
                "--out",
                str(self.path.parent),
                f"a directory without {self.path.name}, or --resume to go on with that run",
            )
        self._entries, torn = _entries(self.path, text)
        if torn and _parse(torn) is None:
            with _named(self.path):
                os.truncate(self.path, len(text) - len(torn))
        elif torn:  # whole but for the end of its line
            self._append(b"\n")

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """The lines, oldest first."""
        return tuple(self._entries)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The rounds recorded, cut where the run was begun anew with fresh noise."""
        return _segments(self._entries)

    def record(
        self, *, t: int, epsilon: Mapping[str, float], again: int = 0, **release: Any
    ) -> None:
        """Writes one round: `epsilon` by accountant after it, and what its `release` was (mechanism
        digest, bound, std, ...; JSON values).

        `again` above that of the last line begins a new segment, at any round up to the one after
        the last: rounds recorded before it then count as releases of their own.

        On return the line is on disk. Does nothing for a round recorded already with the same
        release. Raises `RunError` if that release was another one (its noise key would be used
        twice), or if `round` is not the one after the last.
        """
        spent = {name: _to_json(value) for name, value in epsilon.items()}
        entry = {"round": t, **({"again": again} if again else {}), **release, "epsilon": spent}
        line = json.dumps(entry, allow_nan=False)
        entry = json.loads(line)
        before = self._recorded(t, again)
        if before is not None:
            if _release(before) != _release(entry):
                raise RunError(
                    f"round {t} was released before as {_release(before)}, "
                    f"and cannot be again as {_release(entry)}"
                )
            return
        if not _may_follow(self._entries, entry):
            last = self._entries[-1]["round"] if self._entries else None
            raise RunError(f"round {t} cannot follow round {last} in {self.path}")
        self._append(line.encode() + b"\n")
        self._entries.append(entry)

    def _recorded(self, t: int, again: int) -> dict[str, Any] | None:
        """The line of a round in the last segment, if that is the one of `again`."""
        if not self._entries or self._entries[-1].get("again", 0) != again:
            return None
        back = self._entries[-1]["round"] - t
        last = self.segments[-1]
        return self._entries[-1 - back] if last.first <= t < last.end else None

    def spent(self) -> Spent:
        """The rounds recorded and the epsilons after the last."""
        if not self._entries:
            return Spent(0)
        return Spent(
            self._entries[-1]["round"] + 1,
            {name: float(value) for name, value in self._entries[-1]["epsilon"].items()},
        )

    def _append(self, line: bytes) -> None:
        # One write to an O_APPEND descriptor: a kill can tear no line but the last.
        with _named(self.path):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if os.write(descriptor, line) != len(line):
                    raise OSError(0, "no room left for a whole line")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An OSError within is a `FileError` that names the ledger."""
    try:
        yield
    except OSError as error:
        what = "as a ledger must be (a round is recorded before it is released)"
        raise FileError(f"{path} cannot be read and written, {what}: {error.strerror}") from None


def _read(path: Path, written: bool = False) -> bytes:
    """What is in a ledger, which is to be `written` too; nothing where there is none. Raises
    `FileError`.
    """
    if not os.path.lexists(path):
        return b""
    with _named(path):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(0, "it is no file")
        if written:
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
        return path.read_bytes()


def check_budget(t: int, epsilon: Mapping[str, float], budget: Mapping[str, float]) -> None:
    """Raises `BudgetError` if after `round` some accountant's `epsilon` would exceed its `budget`;
    to be called before the round.
    """
    for name, most in budget.items():
        if epsilon[name] > most:
            raise BudgetError(
                f"round {t} would spend epsilon {epsilon[name]:.4g} ({name}), "
                f"above the budget of {most:g}"
            )


def _entries(path: Path, text: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """The lines of a ledger, and its last line again where a kill has torn that (one that lacks its
    end alone is among the lines).

    Raises `RunError` for a line that is damaged, or whose round does not follow that before it.
    """
    entries: list[dict[str, Any]] = []
    *complete, torn = text.split(b"\n")
    whole_but_for_its_end = [torn] if torn and _parse(torn) is not None else []
    for number, line in enumerate([*complete, *whole_but_for_its_end], 1):
        entry = _parse(line)
        if entry is None or not _may_follow(entries, entry):
            raise RunError(f"{path}, line {number}, is damaged: what this run has spent is unknown")
        entries.append(entry)
    return entries, torn


def _may_follow(entries: list[dict[str, Any]], entry: dict[str, Any]) -> bool:
    """Whether `entry` may stand after `entries`: the next round, or any up to it where it begins a
    new segment; round 0 first.
    """
    if not entries:
        return entry["round"] == 0 and entry.get("again", 0) == 0
    last = entries[-1]
    if entry.get("again", 0) == last.get("again", 0):
        return entry["round"] == last["round"] + 1
    return (
        entry.get("again", 0) == last.get("again", 0) + 1
        and 0 <= entry["round"] <= last["round"] + 1
    )


def _segments(entries: list[dict[str, Any]]) -> tuple[Segment, ...]:
    found: list[Segment] = []
    for entry in entries:
        again = entry.get("again", 0)
        round_index = entry["round"]
        if found and found[-1].again == again:
            found[-1] = Segment(again, found[-1].first, round_index + 1)
        else:
            found.append(Segment(again, round_index, round_index + 1))
    return tuple(found)


def _to_json(value: float) -> float | str:
    return "infinity" if math.isinf(value) else float(value)


def _release(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "epsilon"}


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    good = isinstance(entry, dict) and isinstance(entry.get("epsilon"), dict)
    counts = [entry.get("round"), entry.get("again", 0)] if good else []
    good = good and all(type(count) is int and count >= 0 for count in counts)
    return entry if good else None
