"""The ledger: spending on disk before anything is released, one line of JSON per round.

>>> import tempfile; from pathlib import Path
>>> path = Path(tempfile.mkdtemp()) / "ledger.jsonl"
>>> ledger = Ledger(path)
>>> for _ in range(2):  # after a crash: the same noise, one release
...     ledger.record(t=0, epsilon={"pld": 0.5}, mechanism="5f70bf", bound=1.0, std=4.0)
>>> Ledger(path, resume=True).spending()
Spent(rounds=1, epsilon={'pld': 0.5})

A crash can only leave a round that is recorded and not released, so the epsilon read back is never
below what was released (PRIVACY.md sec. 8). Noise comes from keyed generators, for simulation and
not cryptographic: a repeated round is one release, not two. Of a run whose directory is elsewhere
(`raydpfl.storage`), a round is recorded once its line is there.
"""

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raydpfl import storage
from raydpfl.errors import BudgetError, ConfigError, FileError, RunError


@dataclass(frozen=True)
class Spent:
    """The number of rounds recorded so far, and every accountant's epsilon after the last one."""

    rounds: int
    epsilon: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """Rounds `first` to `end` - 1, released one after another under one key of the noise."""

    restart: int  # how often the run had been restarted with fresh noise before
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


class Ledger:
    """What a run has spent, on disk: one line of JSON per round. A last line torn by a kill is cut
    off: its round was never released.

    Args:
        path, resume: of the file, which a new run creates; whether to go on with what is there.

    Raises:
        ConfigError: a new run finds entries there.
        RunError: a complete line is damaged, or a round is missing.
        FileError: what is there is no file that can be read and written.
    """

    def __init__(self, path: str | Path, resume: bool = False):
        self.path = Path(path)
        text = _read(self.path)
        if text and not resume:
            expected = f"a directory without {self.path.name}, or --resume to go on with that run"
            raise ConfigError("--out", str(self.path.parent), expected)
        *lines, torn_line = text.split(b"\n")
        lacks_newline = _parse(torn_line) is not None
        self._lines = lines + [torn_line] * lacks_newline
        self._segments = [*segments_of(read_entries(self.path, self._lines))]
        if lacks_newline:
            self._append(b"\n")
        elif torn_line:
            with _translate_errors(self.path):
                os.truncate(self.path, len(text) - len(torn_line))

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """The lines, oldest first."""
        return tuple(map(json.loads, self._lines))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The recorded rounds, divided where the run was restarted with fresh noise."""
        return tuple(self._segments)

    @property
    def _last(self) -> Segment:
        return _last(self._segments)

    def spending(self) -> Spent:
        """How many rounds are recorded, and the epsilons after the last one."""
        if not self._lines:
            return Spent(0)
        last = json.loads(self._lines[-1])["epsilon"]
        epsilon = {name: float(value) for name, value in last.items()}
        return Spent(self._segments[-1].end, epsilon)

    def record(
        self, *, t: int, epsilon: Mapping[str, float], restart: int = 0, **release: Any
    ) -> None:
        """Writes round t, the one after the last, to disk before it is released, with the epsilons
        after it and what is released, as JSON values; the same release a second time changes
        nothing. A `restart` above the last one starts a new segment, at any round up to the one
        after the last; rounds recorded before then count as releases of their own.

        Raises:
            RunError: the round was recorded with another release (its noise key would be used
                twice), or it does not follow the last one.
        """
        epsilon_values = {
            name: "infinity" if math.isinf(value) else float(value)
            for name, value in epsilon.items()
        }
        segment = {"restart": restart} if restart else {}
        entry = {"round": t, **segment, **release, "epsilon": epsilon_values}
        line = json.dumps(entry, allow_nan=False).encode()
        entry = json.loads(line)
        last = self._last
        if last.restart == restart and last.first <= t < last.end:
            before, again = _release(json.loads(self._lines[t - last.end])), _release(entry)
            if before != again:
                reason = f"was released before as {before}, and cannot be again as {again}"
                raise RunError(f"round {t} {reason}")
            return
        if not _is_successor(self._segments, entry):
            round_before = last.end - 1 if self._segments else None
            raise RunError(f"round {t} cannot follow round {round_before} in {self.path}")
        self._append(line + b"\n")
        _extend(self._segments, entry)
        self._lines.append(line)

    def _append(self, line: bytes) -> None:
        # One write to an O_APPEND descriptor: a kill can tear no line but the last.
        with _translate_errors(self.path):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if os.write(descriptor, line) != len(line):
                    raise OSError(0, "no room left for a whole line")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        storage.push_ledger(self.path)


def read_entries(path: Path, lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The entries of a ledger.

    Args:
        path: by which a message names it.
        lines: all whole lines of the file.

    Raises:
        RunError: for a line that is no entry, or of another round than the next.
    """
    entries: list[dict[str, Any]] = []
    segments: list[Segment] = []
    for line in lines:
        entry = _parse(line)
        if entry is None or not _is_successor(segments, entry):
            location = f"{path}, line {len(entries) + 1}"
            raise RunError(f"{location}, is damaged: what this run has spent is unknown")
        _extend(segments, entry)
        entries.append(entry)
    return entries


def segments_of(entries: Iterable[Mapping[str, Any]]) -> tuple[Segment, ...]:
    """The rounds of the lines of a ledger, divided where the run was restarted."""
    segments: list[Segment] = []
    for entry in entries:
        _extend(segments, entry)
    return tuple(segments)


def _last(segments: Sequence[Segment]) -> Segment:
    """The last of the segments; before the first round an empty one."""
    return segments[-1] if segments else Segment(-1, 0, 0)


def _is_successor(segments: Sequence[Segment], entry: Mapping[str, Any]) -> bool:
    """Whether an entry is the next round, or starts a new segment at any round up to it."""
    t, restart, last = entry["round"], entry.get("restart", 0), _last(segments)
    if restart == last.restart:
        return t == last.end
    return restart == last.restart + 1 and 0 <= t <= last.end


def _extend(segments: list[Segment], entry: Mapping[str, Any]) -> None:
    """Adds the round of an entry to the last of the segments, or as the first of a new one."""
    restart, first_round = entry.get("restart", 0), entry["round"]
    if segments and segments[-1].restart == restart:
        first_round = segments.pop().first
    segments.append(Segment(restart, first_round, entry["round"] + 1))


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    """An OSError within is a `FileError` that names the ledger."""
    try:
        yield
    except OSError as error:
        rule = "as a ledger must be (a round is recorded before it is released)"
        raise FileError(f"{path} cannot be read and written, {rule}: {error.strerror}") from None


def _read(path: Path) -> bytes:
    """The bytes of a ledger, empty if there is none."""
    if not os.path.lexists(path):
        return b""
    with _translate_errors(path):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(0, "it is no file")
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
        return path.read_bytes()


def check_budget(t: int, epsilon: Mapping[str, float], budget: Mapping[str, float]) -> None:
    """Raises `BudgetError` if a round would overspend. To be called before the round.

    Args:
        t: the round.
        epsilon: after that round, by accountant.
        budget: the largest epsilon allowed, by accountant.
    """
    for name, max_epsilon in budget.items():
        if epsilon[name] > max_epsilon:
            raise BudgetError(
                f"round {t} would spend epsilon {epsilon[name]:.4g} ({name}), "
                f"above the budget of {max_epsilon:g}"
            )


def _release(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "epsilon"}


def _parse(line: bytes) -> dict[str, Any] | None:
    """The entry of a line; None: it is damaged."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not (isinstance(entry, dict) and isinstance(entry.get("epsilon"), dict)):
        return None
    counts = entry.get("round"), entry.get("restart", 0)
    return entry if all(type(count) is int and count >= 0 for count in counts) else None
