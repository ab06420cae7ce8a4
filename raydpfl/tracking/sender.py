"""Rows for the trackers of a run, each in a thread of its own: a tracker that is slow,
hangs or fails takes no time of a round, and changes nothing of the run.

`trackers.json` in the run's directory has, by tracker, what it calls the run, how many rounds it
has been sent, and why it was left out, if it was. A resumed run goes on with that: rows that a
kill kept from a tracker are sent then, rows that are computed again are not sent twice, and a
new tracker is sent all.
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from raydpfl.errors import FileError
from raydpfl.storage.files import read_json
from raydpfl.storage.run_files import write_json
from raydpfl.tracking.base import Log, Row, Tracked, Tracker

FILE = "trackers.json"
PAUSE = 2.0  # seconds between two writings: rows that come meanwhile go together
OPENING = 10.0  # seconds that a run waits for its trackers before its first round
PATIENCE = 30.0  # seconds that a tracker may take to end
log = logging.getLogger("raydpfl")


class Book:
    """What the trackers of a run have been sent: `trackers.json` of its directory."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self._lock = threading.Lock()
        self._entries: dict[str, dict[str, Any]] = {}
        try:
            entries = read_json(self.path) if self.path.exists() else {}
            self._entries = {
                tracker: {"id": str(entry["id"]), "rounds": int(entry["rounds"])}
                for tracker, entry in entries.items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            log.warning("%s cannot be read (%s): trackers start from nothing", self.path, reason)

    def entry(self, tracker: str) -> tuple[str, int]:
        """What a tracker calls the run, and how many rounds it has been sent."""
        entry = self._entries.get(tracker, {"id": "", "rounds": 0})
        return entry["id"], entry["rounds"]

    def note(self, tracker: str, name: str, rounds: int, failure: str = "") -> None:
        """Keeps that, and why the tracker was left out. Raises `FileError`."""
        with self._lock:
            self._entries[tracker] = {"id": name, "rounds": rounds}
            if failure:
                self._entries[tracker]["failed"] = failure
            write_json(self.path, self._entries)


class Sender:
    """Hands the rows of a run to one tracker. `backlog`: those of the rounds that it was not sent
    before, from `run.first` on.
    """

    def __init__(self, tracker: Tracker, run: Tracked, book: Book, backlog: Sequence[Row] = ()):
        self._tracker = tracker
        self._run = run
        self._book = book
        self._next = run.first
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._end_event = threading.Event()
        self.open_event = threading.Event()  # that it is open, or has failed
        self._summary: Mapping[str, Any] = {}
        self._has_failed = False
        self._position = (run.id, run.first)  # what the tracker calls the run, and rounds it knows
        for row in backlog:
            self.put(row)
        self._thread = threading.Thread(
            target=self._work, name=f"raydpfl-track-{tracker.kind}", daemon=True
        )
        self._thread.start()

    def put(self, row: Row) -> None:
        """Hands over a row, unless the tracker has it. It takes no time."""
        if row["round"] >= self._next and not self._has_failed:
            self._next = row["round"] + 1
            self._rows.put(dict(row))

    def close(self, summary: Mapping[str, Any], patience: float = PATIENCE) -> None:
        """The run ends: the tracker is given the rest, and so many seconds for it."""
        if self._end_event.is_set():
            return
        self._summary = summary
        self._end_event.set()
        self._rows.put(None)
        self._thread.join(patience)
        if self._thread.is_alive():
            self._warn(f"it has not ended after {patience:g} s; --resume sends it the rest")

    def _work(self) -> None:
        try:
            tracker_log = self._tracker.open(self._run)
            self._note(tracker_log, self._run.first)
            self.open_event.set()
            while not self._has_failed and self._write(tracker_log):
                self._end_event.wait(PAUSE)
            tracker_log.close(self._summary)
        except BaseException as error:  # a library may raise anything
            reason = next(iter(str(error).strip().splitlines()), "")[:300]  # SQL is many lines
            name = "" if isinstance(error, FileError) else f"{type(error).__name__}: "
            self._warn(f"{name}{reason}; the run goes on without it")
        finally:
            self.open_event.set()

    def _write(self, tracker_log: Log) -> bool:
        """Waits for rows, and writes all that there are; whether more may come."""
        rows = [self._rows.get()]
        while not self._rows.empty():
            rows.append(self._rows.get())
        new_rows = [row for row in rows if row is not None]
        if new_rows:
            tracker_log.write(new_rows)
            self._note(tracker_log, new_rows[-1]["round"] + 1)
        return len(new_rows) == len(rows)

    def _note(self, tracker_log: Log, rounds: int) -> None:
        if not self._has_failed:  # the run may be another process's by now
            self._position = (tracker_log.id, rounds)
            self._book.note(self._tracker.kind, *self._position)

    def _warn(self, reason: str) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        log.warning("track %s: %s", self._tracker.kind, reason)
        with suppress(FileError):  # the warnings of a trial are not seen
            self._book.note(self._tracker.kind, *self._position, failure=reason)


def senders(
    trackers: Sequence[Tracker],
    run: Tracked,
    book: Book,
    finished_rounds: int,
    rows: Sequence[Row],
    fresh_noise: bool,
) -> list[Sender]:
    """A sender for each tracker of a run, once its library is imported and it shows the run: rounds
    that go on meanwhile would be slower, and be recorded as slow. It is waited for `OPENING` at
    most.

    Args:
        run: as trackers see it, but for what they themselves know of it.
        finished_rounds: rounds that are done, whose rows are `rows`.
        fresh_noise: whether the rounds to come are others than those that were done before.
    """
    open_senders = []
    for tracker in trackers:
        name, first_round = book.entry(tracker.kind)
        first_round = min(first_round, finished_rounds) if fresh_noise else first_round
        tracked_run = replace(run, id=name, first=first_round)
        backlog = [row for row in rows if row["round"] >= first_round]
        open_senders.append(Sender(tracker, tracked_run, book, backlog))
    deadline = time.monotonic() + OPENING
    for sender in open_senders:
        sender.open_event.wait(max(0.0, deadline - time.monotonic()))
    return open_senders
