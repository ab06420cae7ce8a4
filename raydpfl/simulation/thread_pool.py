"""Threads of this process that take pieces of work up, one after another, and whether that pays.

>>> crew = Crew(2)
>>> sorted(done.value for done in crew.each(lambda thread, piece: piece**2, range(4)))
[0, 1, 4, 9]
>>> crew.close()
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

Piece = TypeVar("Piece")
Value = TypeVar("Value")
TICK = 0.1  # seconds of a wait
PATIENCE = 2.0  # seconds that threads are waited for when their work is broken off
Orders = SimpleQueue[Callable[[], None] | None]


class _Stopped(BaseException):
    """Raised within a thread whose work is broken off, wherever it is."""


@dataclass(frozen=True)
class Done(Generic[Value]):
    """A piece of work that is done."""

    value: Value
    seconds: float
    processor: float  # seconds that the thread had of it


def timed(work: Callable[[], Value]) -> Done[Value]:
    """What work gives, and how long it takes this thread."""
    began = time.perf_counter()
    ran = time.thread_time()
    value = work()
    return Done(value, time.perf_counter() - began, time.thread_time() - ran)


class _Job(Generic[Piece, Value]):
    """Pieces of work, and what comes of them."""

    def __init__(
        self, work: Callable[[int, Piece], Value], pieces: Iterable[Piece], threads: int
    ) -> None:
        self.work = work
        self.pieces = iter(pieces)
        self.claiming = threading.Lock()
        self.arrived: SimpleQueue[Done[Value] | BaseException | None] = SimpleQueue()
        self.at_work: dict[int, int] = {}  # thread -> its identity, the longest at its piece first
        self.left = threads
        self.stopped = False

    def take_up(self, thread: int) -> None:
        """Does one piece after another until there are none. Called in the thread."""
        try:
            while not self.stopped:
                self.at_work.pop(thread, None)
                self.at_work[thread] = threading.get_ident()
                with self.claiming:
                    piece = next(self.pieces, self)
                if piece is self:
                    break
                self.arrived.put(timed(partial(self.work, thread, piece)))  # type: ignore[arg-type]
        except _Stopped:
            pass
        except BaseException as error:
            self.arrived.put(error)
        finally:
            self.at_work.pop(thread, None)
            self.arrived.put(None)

    def results(self) -> Iterator[Done[Value]]:
        """What comes of the pieces, as they are done. Raises what one of them does."""
        while self.left:
            try:
                found = self.arrived.get(timeout=TICK)
            except Empty:  # a signal that came just before the wait is looked at here
                continue
            if isinstance(found, BaseException):
                raise found
            if found is None:
                self.left -= 1
            else:
                yield found

    def stop(self) -> None:
        """Breaks the work off, and waits a while for the threads."""
        self.stopped = True
        for identity in list(self.at_work.values()):
            _raise_in(identity)
        until = time.monotonic() + PATIENCE
        while self.left:
            try:
                self.left -= self.arrived.get(timeout=max(0.0, until - time.monotonic())) is None
            except Empty:  # it hangs, and ends with the process
                return


class Crew:
    """So many threads, which end when they are told to, when nobody holds the crew any more, or
    with the process, whatever they are at.
    """

    def __init__(self, count: int, begin: Callable[[], None] = lambda: None):
        """`begin` is what each does first."""
        self._orders: list[Orders] = [SimpleQueue() for _ in range(count)]
        self._job: _Job[Any, Any] | None = None
        self._broken: list[int] = []
        for orders in self._orders:
            given = (orders, begin)
            threading.Thread(target=_serve, args=given, name="raydpfl-crew", daemon=True).start()
        self._dismissed = weakref.finalize(self, _dismiss, self._orders)

    def __len__(self) -> int:
        """How many threads wait for work, or are at it: none any more once they were dismissed."""
        return len(self._orders) if self._dismissed.alive else 0

    @property
    def at_work(self) -> list[int]:
        """The threads that are at work, the longest at its piece first; or were when the work was
        broken off.
        """
        return list(self._job.at_work) if self._job else self._broken

    def each(
        self, work: Callable[[int, Piece], Value], pieces: Iterable[Piece]
    ) -> Generator[Done[Value]]:
        """What `work(thread, piece)` gives for each piece, as they are done. A thread takes the
        next piece when it is done with one; what gives the pieces is asked by one thread at a time.

        What one raises is raised here. Then, and where it is left before all pieces are done, all
        work is broken off, and the crew is dismissed: it takes up nothing any more.
        """
        if not len(self):
            raise RuntimeError("the crew is dismissed")
        job = self._job = _Job(work, pieces, len(self))
        try:
            for thread, orders in enumerate(self._orders):
                orders.put(partial(job.take_up, thread))
            yield from job.results()
        finally:
            self._broken = self.at_work
            self._job = None
            if job.left:
                self._dismissed()
                job.stop()

    def close(self) -> None:
        """Ends the threads, and what they are at."""
        self._dismissed()
        if self._job:
            self._job.stop()


def _serve(orders: Orders, begin: Callable[[], None]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for who waits
    try:
        begin()
        for order in iter(orders.get, None):
            order()
            del order  # which holds what was worked on
    except _Stopped:  # it has come late
        return


def _dismiss(every: list[Orders]) -> None:
    for orders in every:
        orders.put(None)


def _raise_in(identity: int) -> None:
    """Raises `_Stopped` in another thread, at its next step in Python."""
    given = ctypes.c_ulong(identity), ctypes.py_object(_Stopped)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(*given)


class Pace:
    """Whether work is done sooner by several threads than by one, as it has shown.

    Threads that are in Python most of the time wait for one another, as only one of them may be.
    Those that are in long operations of torch do not, and are on the processor nearly all the time.
    Where they are not, for whatever reason, both are tried by turns. Nothing but time depends on
    it.
    """

    SURE = 0.5  # seconds of work by threads that are enough to judge by
    SHORT = 5e-3  # seconds of a piece, beside which handing it out takes long
    FREE = 0.75  # of their time threads are on the processor: nothing else need be known
    TRIES = 3  # of threads, and of one
    GAIN = 1.1
    AGAIN = 32  # times that one does it before both are tried again; then twice as many

    def __init__(self, most: int):
        """`most`: how many threads there may be."""
        self.most = most
        # how many times as fast as one the threads are; None: not known yet
        self.speed: float | None = 1.0 if most == 1 else None
        self._pieces = 0
        self._seconds = 0.0
        self._processor = 0.0
        # seconds of a unit of work, by whether threads have done it
        self._costs: dict[bool, list[float]] = {True: [], False: []}
        self._rest = self.AGAIN
        self._left = 0

    @property
    def threads(self) -> int:
        """How many are to do the work that comes next."""
        if self.speed is not None:
            return self.most if self.speed > 1 else 1
        return self.most if len(self._costs[True]) <= len(self._costs[False]) else 1

    def did(self, done: Done) -> None:
        """One of several threads has done a piece of work, while others were at work too."""
        if self.speed is not None:
            return
        self._pieces += 1
        self._seconds += done.seconds
        self._processor += done.processor
        long = self._seconds >= self.SHORT * self._pieces
        free = self._processor >= self.FREE * self._seconds
        if self._seconds >= self.SURE and long and free:
            self.speed = float(self.most)

    def took(self, threads: int, amount: float, seconds: float) -> None:
        """So many threads have taken so long for work of this amount."""
        if self._left:  # others may have used the machine when it was tried
            self._left -= 1
            self.speed = self.speed if self._left else None
        elif self.speed is None and self._seconds >= self.SURE:
            self._costs[threads > 1].append(seconds / amount)
            if min(map(len, self._costs.values())) == self.TRIES:
                self._judge()

    def _judge(self) -> None:
        gain = min(self._costs[False]) / min(self._costs[True])
        self.speed = gain if gain >= self.GAIN else 1.0
        for tried in self._costs.values():
            tried.clear()
        if gain < self.GAIN:
            self._left = self._rest
            self._rest *= 2
