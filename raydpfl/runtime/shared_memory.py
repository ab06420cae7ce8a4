"""Objects that one process hands to others of its machine, through memory that all of them map.

What is put is pickled into memory of the process that puts it, where its arrays are copied too. The
others map that memory once: what they take in later rounds costs no page faults. A connection says
that there is something to take, and where; a process that waits at its `Door` knows it in 0.03 ms,
and that the process at the other end has ended, too. The memory is no file in any folder, and the
kernel keeps it while a process has it open or mapped, so that nothing is left of it however these
end.

>>> listener, address = listening()
>>> door = opened(address)
>>> other = accepted(listener)
>>> outbox = Outbox()
>>> door.send(*outbox.put({"model": np.arange(3.0)}, "and more"))
>>> other.take()
[{'model': array([0., 1., 2.])}, 'and more']
>>> door.close()
>>> other.take()
Traceback (most recent call last):
raydpfl.runtime.shared_memory.Gone: the other end is closed
>>> other.close()
>>> listener.close()
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import uuid
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

AVAILABLE = hasattr(os, "memfd_create")  # on Linux
LINE = 64  # bytes; what is put begins at multiples of it
PLACE = struct.Struct("qq")  # of what is put: its first byte, and that after its last
MESSAGE = 1 << 10  # bytes of the longest message
PEER = struct.Struct("iii")  # the process at the other end, its user and their group


class Gone(Exception):
    """There is no process at the other end: it is on another machine, or has ended."""


class Memory:
    """Memory of this process, which others are given by its descriptor."""

    def __init__(self, size: int):
        self.size = size
        self.descriptor = os.memfd_create("raydpfl-outbox", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.posix_fallocate(self.descriptor, 0, size)
        self.bytes = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)


@dataclass(frozen=True)
class Put:
    """Where something is that was put."""

    memory: Memory
    first: int  # byte
    last: int  # the byte after its last


class Outbox:
    """Memory of this process that holds what it has put last."""

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._end = 0  # of the arrays

    def put(self, *things: Any) -> list[Put]:
        """Where each of the things is, until others are put here that have arrays.

        Raises:
            OSError: the machine has no memory left for them.
        """
        packed = [_packed(thing) for thing in things]
        arrays = [array for _, some in packed for array in some]
        spans = _spans(arrays, 0) if arrays else []
        end = spans[-1][1] if arrays else self._end
        left = iter(spans)
        heads = []
        for pickled, some in packed:
            head = pickle.dumps((pickled, [next(left) for _ in some]))
            heads.append(np.frombuffer(head, np.uint8))
        spans += _spans(heads, end)
        if self._memory is None or spans[-1][1] > self._memory.size:
            self._memory = Memory(spans[-1][1])
        for (first, last), array in zip(spans, arrays + heads, strict=True):
            self._memory.bytes[first:last] = array
        self._end = end
        return [Put(self._memory, *span) for span in spans[len(arrays) :]]


def _packed(thing: Any) -> tuple[bytes, list[np.ndarray]]:
    """A thing pickled, but for its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    return pickled, [np.frombuffer(each.raw(), np.uint8) for each in buffers]


def _spans(arrays: list[np.ndarray], end: int) -> list[tuple[int, int]]:
    """The first byte of each array, and that after its last, one after another from `end` on."""
    found = []
    for array in arrays:
        first = -(-end // LINE) * LINE
        end = first + array.nbytes
        found.append((first, end))
    return found


class Door:
    """One end of a connection between two processes of a machine."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._given: Memory | None = None  # what of ours the other end has mapped
        self._mapped = memoryview(b"")  # what of theirs this one has

    def fileno(self) -> int:
        """To wait for what there is to take."""
        return self._connection.fileno()

    def send(self, *puts: Put) -> None:
        """Has the other end take what one call of `Outbox.put` has put.

        Raises:
            Gone: the other end is closed.
        """
        memory = puts[0].memory
        new = [] if memory is self._given else [memory.descriptor]
        message = b"".join(PLACE.pack(put.first, put.last) for put in puts)
        try:
            socket.send_fds(self._connection, [message], new)
        except OSError as error:
            raise Gone(f"the other end is closed ({error})") from None
        self._given = memory

    def take(self, copied: bool = False) -> list[Any]:
        """What the other end has put, which is waited for. Its arrays are read-only, and hold until
        it puts others; those that are `copied` are the caller's.

        Raises:
            Gone: the other end is closed.
        """
        flags = socket.MSG_CMSG_CLOEXEC
        try:
            message, new, *_ = socket.recv_fds(self._connection, MESSAGE, 1, flags)
        except ConnectionError:  # closed with something in it that was not taken
            message = b""
        if not message:
            raise Gone("the other end is closed")
        for descriptor in new:
            self._mapped = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
            os.close(descriptor)
        return [self._at(first, last, copied) for first, last in PLACE.iter_unpack(message)]

    def _at(self, first: int, last: int, copied: bool) -> Any:
        """What is at this place."""
        pickled, spans = pickle.loads(self._mapped[first:last])
        views = [self._mapped[slice(*span)] for span in spans]
        return pickle.loads(pickled, buffers=map(bytearray, views) if copied else views)

    def close(self) -> None:
        self._connection.close()


def listening() -> tuple[socket.socket, str]:
    """Where a process of this machine can be reached, until it closes that or ends; its address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = f"\0raydpfl-{uuid.uuid4().hex}"  # no file
    listener.bind(address)
    listener.listen()
    return listener, address


def accepted(listener: socket.socket) -> Door:
    """The next that has opened the connection, or will, which is waited for."""
    while True:
        connection, _ = listener.accept()
        if _ours(connection):
            return Door(connection)
        connection.close()


def opened(address: str) -> Door:
    """A connection to a process of this machine, which need not have accepted it.

    Raises:
        Gone: there is none of this user's at the address.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
        if _ours(connection):
            return Door(connection)
    except OSError:
        pass
    connection.close()
    raise Gone("nobody of this machine is at that address")


def _ours(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this user: what it puts is unpickled here."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    return PEER.unpack(peer)[1] == os.getuid()
