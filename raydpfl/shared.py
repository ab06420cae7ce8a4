"""Objects that one process hands to others of its machine, through memory that all of them map.

What is put is pickled, but for its arrays, which are copied into memory of the process that puts
it. Others map that memory once: what they take in later rounds costs no page faults, and no message
of the arrays' size. It is no file in any folder, and the kernel keeps it while a process has it
open or mapped, so that nothing is left of it however these end.

>>> outbox = Outbox()
>>> inbox = Inbox()
>>> first, second = outbox.put({"model": np.arange(3.0)}, "and more")
>>> inbox.take(first), inbox.take(second)
({'model': array([0., 1., 2.])}, 'and more')
"""

from __future__ import annotations

import mmap
import os
import pickle
import uuid
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

AVAILABLE = hasattr(os, "memfd_create")  # on Linux
LINE = 64  # bytes; arrays begin at multiples of it


class Gone(Exception):
    """What was put cannot be read here: it is on another machine, or its process has ended or may
    not be looked into.
    """


@dataclass(frozen=True)
class Put:
    """Where others find what a process has put."""

    path: str  # of its memory, while the process lives
    mark: bytes  # with which that begins, as no other does
    size: int  # of that, in bytes
    pickled: bytes  # all but the arrays
    spans: tuple[tuple[int, int], ...]  # of each array the first byte, and that after the last


class Outbox:
    """Memory of this process that holds what it has put last."""

    def __init__(self) -> None:
        self._path = ""
        self._mark = b""
        self._memory = np.empty(0, np.uint8)

    def put(self, *things: Any) -> list[Put]:
        """Where others find each of the things, until others are put here that have arrays.

        Raises:
            OSError: the machine has no memory left for their arrays.
        """
        packed = []
        end = LINE
        for thing in things:
            buffers: list[pickle.PickleBuffer] = []
            pickled = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
            arrays = [np.frombuffer(each.raw(), np.uint8) for each in buffers]
            spans = []
            for array in arrays:
                spans.append((end, end + array.nbytes))
                end += -(-array.nbytes // LINE) * LINE
            packed.append((pickled, spans, arrays))
        if end > len(self._memory):
            self._reserve(end)
        for _, spans, arrays in packed:
            for (first, last), array in zip(spans, arrays, strict=True):
                self._memory[first:last] = array
        where = (self._path, self._mark, len(self._memory))
        return [Put(*where, pickled, tuple(spans)) for pickled, spans, _ in packed]

    def _reserve(self, size: int) -> None:
        """Takes memory of so many bytes; others may still open what there was."""
        descriptor = os.memfd_create("raydpfl-outbox")
        weakref.finalize(self, os.close, descriptor)
        os.posix_fallocate(descriptor, 0, size)
        self._memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        self._mark = uuid.uuid4().bytes
        self._memory[: len(self._mark)] = np.frombuffer(self._mark, np.uint8)
        self._path = f"/proc/{os.getpid()}/fd/{descriptor}"


class Inbox:
    """The memory of another process's outbox, mapped here."""

    def __init__(self) -> None:
        self._mark = b""
        self._memory = memoryview(b"")

    def take(self, put: Put, copied: bool = False) -> Any:
        """What was put. Its arrays are read-only, and hold until something else is put there; those
        that are `copied` are the caller's.

        Raises:
            Gone: it cannot be read here.
        """
        if put.mark != self._mark:
            self._memory = _mapped(put)
            self._mark = put.mark
        views = [self._memory[slice(*span)] for span in put.spans]
        return pickle.loads(put.pickled, buffers=map(bytearray, views) if copied else views)


def _mapped(put: Put) -> memoryview:
    """The memory of another process. Raises `Gone`."""
    try:
        # what is there on another machine may be a pipe, which would be waited for
        descriptor = os.open(put.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = mmap.mmap(descriptor, put.size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise Gone(f"the memory of another process cannot be read ({error})") from None
    if found[: len(put.mark)] != put.mark:
        raise Gone("the memory of another process cannot be read (it is another's)")
    return memoryview(found)
