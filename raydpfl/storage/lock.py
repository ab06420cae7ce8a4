"""Who may write to a folder of a store: one process at a time.

A process puts a ticket of its own into the folder and looks for those of others. Whichever of two
puts its own last sees the other's, so that never both go on, on every store that shows at once
what was put (S3, Google Cloud Storage and Azure do); of two that come at the same instant both may
be refused. (Writes on condition, which would do it in one step, pyarrow.fs has not.)

A ticket is renewed every `BEAT` seconds. One that has not been for `LAPSE` seconds of the store's
own clock is a dead process's, and is taken away; so, at once, is one of a process of this machine
that is no more. A process that stood still for so long looks before it goes on: if its ticket is
gone, or another's is there, it has `lost` the folder, and writes nothing more (`check`).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from raydpfl.errors import ConfigError, FileError
from raydpfl.storage.store import Store

FOLDER = ".lock"
LOST = "lost"
BEAT = 5.0
LAPSE = 30.0
MARGIN = 5.0  # seconds before a ticket lapses in which nothing is written under it
TICK = 0.1


def now() -> float:
    """Seconds since this machine was started, those in which it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def held(store: Store, beat: Path, patience: float = 0.0) -> Iterator[None]:
    """Holds the folder of the store against other processes, on this machine and elsewhere.

    Args:
        store: the folder.
        beat: a file of this machine that says when the ticket was renewed last, for `check`.
        patience: seconds that a living process may take to let go of it.

    Raises:
        ConfigError: another process holds it; one that may be dead is waited for, up to `LAPSE`.
        FileError: the store does not take the ticket.
    """
    ticket = _Ticket(store, beat)
    thread = threading.Thread(target=ticket.renew, name="raydpfl-ticket", daemon=True)
    try:
        ticket.put()
        thread.start()
        ticket.enter(patience)
        yield
    finally:
        ticket.over.set()
        if thread.is_alive():
            thread.join()
        with suppress(FileError):
            store.remove([ticket.name])


def check(beat: Path) -> None:
    """Raises `FileError` unless the ticket is in force whose last renewal the file `beat` tells."""
    until = now() + LAPSE
    while True:
        told = beat.read_text()
        if told != LOST and now() - float(told) < LAPSE - MARGIN:
            return
        if told == LOST or now() > until:
            why = "this process stood still, and another may have taken its directory over"
            raise FileError(f"{why}; go on with --resume")
        time.sleep(TICK)


class _Ticket:
    """Of this process, in a folder of a store."""

    def __init__(self, store: Store, beat: Path):
        self.store = store
        self.name = f"{FOLDER}/{uuid.uuid4().hex}.json"
        self.over = threading.Event()
        self._beat = beat
        self._said = json.dumps({**_process(os.getpid()), "since": int(time.time())}).encode()
        self._renewed = now()

    def put(self) -> None:
        """Puts or renews it. Raises `FileError`."""
        began = now()
        self.store.put(self.name, self._said)
        self._renewed = began
        part = self._beat.with_name(f"{self._beat.name}.part")
        part.write_text(str(began))
        os.replace(part, self._beat)

    def renew(self) -> None:
        """Renews it until it is `over`, or lost."""
        while not self.over.wait(BEAT):
            try:
                if now() - self._renewed > LAPSE - MARGIN and [*self._all()] != [self.name]:
                    self._beat.write_text(LOST)
                    return
                self.put()
            except (FileError, OSError):  # it lapses here, too, if that goes on
                continue

    def enter(self, patience: float) -> None:
        """Takes away the tickets of the dead. Raises `ConfigError` where another is alive."""
        until = now() + patience
        while True:
            others = self._living()
            if not others:
                return
            if now() > until:
                owner = others[0]
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.get("since", 0)))
                who = f"process {owner.get('pid')} on {owner.get('host')}, since {since}"
                expected = f"a directory that no other run is writing to; this one is held by {who}"
                raise ConfigError("--out", self.store.address, expected)
            time.sleep(TICK * 10)

    def _living(self) -> list[dict[str, Any]]:
        """The other processes that have tickets here; of the dead they are taken away."""
        times = self._all()
        found = []
        for name in sorted(times.keys() - {self.name}):
            owner = self._owner(name)
            if owner and not self._dead(name, owner, times):
                found.append(owner)
            else:
                self.store.remove([name])
        return found

    def _all(self) -> dict[str, int | None]:
        """All tickets, and when they were renewed."""
        return self.store.times(FOLDER)

    def _owner(self, name: str) -> dict[str, Any]:
        """The process whose ticket it is; empty if that is gone by now."""
        try:
            found = json.loads(self.store.get(name))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _dead(self, name: str, owner: dict[str, Any], times: dict[str, int | None]) -> bool:
        """Whether a ticket's process is no more. One elsewhere is watched until it is renewed, or
        has lapsed.
        """
        known = _process(owner["pid"]) if isinstance(owner.get("pid"), int) else {}
        if known and all(known[key] == owner.get(key) for key in ("host", "boot", "space")):
            return known["started"] is None or known["started"] != owner.get("started")
        mine = times.get(self.name)
        theirs = times[name]
        old = (mine - theirs) / 1e9 if mine and theirs else 0.0
        began = now()
        while old + now() - began < LAPSE:
            time.sleep(TICK * 10)
            again = self._all()
            if name not in again:
                return True
            if again[name] != theirs:
                return False
        return True


def _process(pid: int) -> dict[str, Any]:
    """What tells a process of this machine from any other, on any machine. `started`: None if there
    is no such process.
    """
    try:
        started = psutil.Process(pid).create_time()
    except psutil.Error:
        started = None
    return {
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "space": os.readlink("/proc/self/ns/pid"),
        "pid": pid,
        "started": started,
    }
