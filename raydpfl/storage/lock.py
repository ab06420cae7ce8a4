"""Who may write to a folder of a store: one process at a time.

A process puts a lock of its own, a small file, into the folder and looks for those of others.
Whichever of two puts its own last sees the other's, so that never both go on, on every store that
shows at once what was put (S3, Google Cloud Storage and Azure do); of two that come at the same
instant both may be refused. (pyarrow.fs has no conditional writes, which would do it in one step.)

A lock is renewed every `BEAT` seconds. One that has not been for `LAPSE` seconds of the store's own
clock is a dead process's, and is removed; so, at once, is the last one of this machine's copy of
the folder, which only one process uses at a time. A process that stood still for so long looks
before it goes on: if its lock is gone, or another's is there, it has lost the folder, and writes
nothing more (`check`).
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raydpfl.errors import ConfigError, FileError
from raydpfl.storage.store import Store

FOLDER = ".lock"
LOST = "lost"
BEAT = 5.0
LAPSE = 30.0
MARGIN = 5.0  # seconds before a lock lapses in which nothing is written under it
TICK = 0.1


def uptime() -> float:
    """Seconds since this machine was started, those in which it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def hold_lock(store: Store, note: Path, patience: float = 0.0) -> Iterator[None]:
    """Holds the folder of the store against other processes, on this machine and elsewhere.

    Args:
        note: a file of this machine, for `check`: the lock's name and when it was renewed last. One
            process at a time uses it, so that the lock of an earlier one there is a dead process's.
        patience: seconds that a living process may take to let go of the folder.

    Raises:
        ConfigError: another process holds it; one that may be dead is waited for, up to `LAPSE`.
        FileError: the store does not take the lock.
    """
    with suppress(FileNotFoundError):
        store.remove([note.read_text().split()[0]])
    lock = _Lock(store, note)
    thread = threading.Thread(target=lock.renew, name="raydpfl-lock", daemon=True)
    try:
        lock.put()
        thread.start()
        lock.wait(patience)
        yield
    finally:
        lock.stop_event.set()
        if thread.is_alive():
            thread.join()
        with suppress(FileError):
            store.remove([lock.name])


def check(note: Path) -> None:
    """Raises `FileError` unless the lock of `note` is in force."""
    deadline = uptime() + LAPSE
    while True:
        _, renewal = note.read_text().split()
        if renewal != LOST and uptime() - float(renewal) < LAPSE - MARGIN:
            return
        if renewal == LOST or uptime() > deadline:
            reason = "this process stood still, and another may have taken its directory over"
            raise FileError(f"{reason}; go on with --resume")
        time.sleep(TICK)


class _Lock:
    """Of this process, in a folder of a store."""

    def __init__(self, store: Store, note: Path):
        self.store = store
        self.name = f"{FOLDER}/{uuid.uuid4().hex}.json"
        self.stop_event = threading.Event()
        self._note = note
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": int(time.time())}
        self._owner = json.dumps(owner).encode()
        self._renewal_time = uptime()

    def put(self) -> None:
        """Puts or renews it. Raises `FileError`."""
        start_time = uptime()
        self.store.put(self.name, self._owner)
        self._renewal_time = start_time
        self._write_note(str(start_time))

    def _write_note(self, renewal: str) -> None:
        part = self._note.with_name(f"{self._note.name}.part")
        part.write_text(f"{self.name} {renewal}")
        os.replace(part, self._note)

    def renew(self) -> None:
        """Renews it until `stop_event` is set, or it is lost."""
        while not self.stop_event.wait(BEAT):
            with suppress(FileError, OSError):  # it lapses, if that goes on
                stale = uptime() - self._renewal_time > LAPSE - MARGIN
                if stale and [*self.store.times(FOLDER)] != [self.name]:
                    self._write_note(LOST)
                    return
                self.put()

    def wait(self, patience: float) -> None:
        """Waits until there is no other lock, and removes those of dead processes. Raises
        `ConfigError` where one is renewed after `patience` seconds.
        """
        start = uptime()
        renewals: dict[str, int | None] = {}  # when each was renewed as it was first seen
        while True:
            times = self.store.times(FOLDER)
            own_ns = times.pop(self.name, None)
            for name, time_ns in times.items():
                age = (own_ns - time_ns) / 1e9 if own_ns and time_ns else uptime() - start
                if age >= LAPSE:
                    self.store.remove([name])
                elif renewals.setdefault(name, time_ns) != time_ns and uptime() - start > patience:
                    expected = "a directory that no other run is writing to; this one is held by "
                    expected += self._holder(name)
                    raise ConfigError("--out", self.store.address, expected)
            if not times:
                return
            time.sleep(10 * TICK)

    def _holder(self, name: str) -> str:
        """The owner of another lock, in words."""
        with suppress(FileNotFoundError, ValueError, LookupError, TypeError):
            owner = json.loads(self.store.get(name))
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
            return f"process {owner['pid']} on {owner['host']}, since {since}"
        return "another process"
