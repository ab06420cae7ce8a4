"""A folder of this machine that is the copy of a folder elsewhere.

`push` puts what has changed in the copy to the store in an order in which a kill at any instant
leaves what can be gone on with: checkpoints after the logs that they count on, the summary last,
and only then what is gone is removed. A file there is replaced whole.

A round is spent at the store before it is released: `push_ledger` puts the lines that were added
since the ledger was put whole, in a file that says after which byte they come
(`ledger.jsonl.from-BYTE`); `fetch` joins them. The store has the truth: no copy is used twice.

A sweep's trials are in its directory, below `TRIALS`: the process that runs a trial writes it, from
another copy, and the sweep's copy only reads it (`refetch`).
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raydpfl.storage import lock
from raydpfl.storage.store import join_address, open_store

TAIL = 1 << 16  # bytes of a ledger that are put with every round, at most
TRIALS = "trials/"
CHECKPOINT = re.compile(r"(.*/)?checkpoints/round-[^/]*")
TRIAL_CHECKPOINT = re.compile(rf"{TRIALS}{CHECKPOINT.pattern}")
LATER = (r"(.*/)?checkpoints/round-[^/]*", r"(.*/)?summary\.json")  # than all else


def fetch(address: str, folder: Path, file_filter: Callable[[str], bool]) -> list[str]:
    """Copies the files of the folder at `address` whose names pass `file_filter`, without hidden
    ones, into a folder of this machine. Returns the names of all. Raises `FileError`.
    """
    store = open_store(address)
    names = [name for name in store.times() if _is_visible(name)]
    fetched_names = [name for name in names if file_filter(name)]
    store.fetch(fetched_names, folder)
    for name in fetched_names:
        _join(folder / name)
    return names


def _fetch_without_checkpoints(pattern: re.Pattern[str], address: str, folder: Path) -> list[str]:
    """As `fetch`, with an empty file for each of those of this pattern, which are not read here."""
    names = fetch(address, folder, lambda name: not pattern.fullmatch(name))
    for name in filter(pattern.fullmatch, names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return names


def origin(folder: Path) -> str | None:
    """The address of a folder that lies in a copy; None: it lies in none."""
    for copy in (folder, *folder.parents):
        record = _read_record(copy)
        if record:
            return join_address(record["address"], *folder.relative_to(copy).parts)
    return None


def refetch(folder: Path) -> None:
    """Fetches what is read of a trial's directory, if in a copy. Raises `FileError`."""
    address = origin(folder)
    if address is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    _fetch_without_checkpoints(CHECKPOINT, address, folder)


def times(folder: Path) -> tuple[int, ...] | None:
    """When its store wrote the files of a folder in a copy; None: in none. Raises OSError."""
    address = origin(folder)
    if address is None:
        return None
    files = sorted(open_store(address).times().items())
    return tuple(mtime or 0 for name, mtime in files if _is_visible(name))


def _join(path: Path) -> None:
    """Joins a ledger with the lines in `path`, if that is a file of lines that were put later."""
    ledger_name, mark, start_byte = path.name.rpartition(".from-")
    if not mark or not path.exists():
        return
    ledger = path.with_name(ledger_name)
    head = ledger.read_bytes() if ledger.exists() else b""
    joined_bytes = head[: int(start_byte)] + path.read_bytes()
    if int(start_byte) <= len(head) < len(joined_bytes):
        ledger.write_bytes(joined_bytes)
    path.unlink()


def begin(address: str, folder: Path) -> None:
    """Makes an empty folder the copy of what is at `address`. Raises `FileError`."""
    names = _fetch_without_checkpoints(TRIAL_CHECKPOINT, address, folder)
    names = [name for name in names if not name.startswith(TRIALS)]
    local_files = _files(folder)
    # joined, or otherwise not what is there
    ledgers = {name.rpartition(".from-")[0] for name in names if ".from-" in name}
    stored_files = {name: None if name in ledgers else local_files.get(name) for name in names}
    _write_record(folder, {"address": address, "put": stored_files})


def push(folder: Path) -> None:
    """Puts all that has changed in a copy to its store; does nothing with any other folder. Raises
    `FileError` where the store does not take it, or the copy is no longer this process's to write.
    """
    record = _read_record(folder)
    if record is None:
        return
    lock.check(lock_note(folder))
    store = open_store(record["address"])
    files = {name: facts for name, facts in _files(folder).items() if not name.startswith(TRIALS)}
    stored_files = record["put"]
    changes = [name for name in files if files[name] != stored_files.get(name)]
    for name in sorted(changes, key=_order):
        store.put_file(name, folder / name)
        stored_files[name] = files[name]
        _write_record(folder, record)
    removals = stored_files.keys() - files.keys()
    store.remove(sorted(removals))
    record["put"] = {name: facts for name, facts in stored_files.items() if name not in removals}
    _write_record(folder, record)


def push_ledger(ledger: Path) -> None:
    """Puts the lines of a ledger that its store has not, if it lies in a copy. Raises as `push`."""
    record = _read_record(ledger.parent)
    if record is None:
        return
    lock.check(lock_note(ledger.parent))
    stored_files = record["put"]
    facts = _files(ledger.parent, ledger.name)[ledger.name]
    start_byte = (stored_files.get(ledger.name) or [0])[0]
    name = ledger.name if facts[0] - start_byte > TAIL else f"{ledger.name}.from-{start_byte:012d}"
    with open(ledger, "rb") as file:
        file.seek(0 if name == ledger.name else start_byte)
        open_store(record["address"]).put(name, file.read())
    if name == ledger.name or name not in stored_files:
        stored_files[name] = facts if name == ledger.name else None
        _write_record(ledger.parent, record)


def _files(folder: Path, pattern: str = "**/*") -> dict[str, list[int]]:
    """The files of a folder, and the signs that one has been written to: size, time, inode."""
    files = {}
    for path in sorted(folder.glob(pattern)):
        name = path.relative_to(folder).as_posix()
        if _is_visible(name) and path.is_file():
            facts = path.stat()
            files[name] = [facts.st_size, facts.st_mtime_ns, facts.st_ino]
    return files


def _is_visible(name: str) -> bool:
    return not any(part.startswith(".") for part in name.split("/"))


def _order(name: str) -> tuple[int, str]:
    later = [place for place, pattern in enumerate(LATER, 1) if re.fullmatch(pattern, name)]
    return (later[0] if later else 0, name)


def lock_note(folder: Path) -> Path:
    """The file next to a copy that names its lock, and says when that was renewed last."""
    return Path(f"{folder}.held")


def _mark(folder: Path) -> Path:
    """The file next to a copy that has its address, and what was put there."""
    return Path(f"{folder}.elsewhere.json")


def _read_record(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads(_mark(folder).read_text())
    except FileNotFoundError:
        return None


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    part = Path(f"{folder}.part")
    part.write_text(json.dumps(record))
    os.replace(part, _mark(folder))
