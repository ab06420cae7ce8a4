"""TensorBoard's event files, written: an `Event` message of protocol buffers in a record of
TensorFlow, without tensorboard, which takes longer to import than a short run's events to write.

>>> record(event(1.0, version="brain.Event:2")).hex()
'1800000000000000a37f4b2209000000000000f03f1a0d627261696e2e4576656e743a3286bf577a'

The fields are those of tensorboard/compat/proto/event.proto and summary.proto; a record is the
length of its data (uint64), the masked CRC-32C of that, the data and its masked CRC-32C.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import cache

STARTED = 1  # `SessionLog.START`: what other files have from this step on is void


def event(
    seconds: float,
    step: int = 0,
    version: str = "",
    scalars: Mapping[str, float] | None = None,
    started: bool = False,
) -> bytes:
    """An `Event` message.

    Args:
        seconds: since 1970, when it was written.
        step: the round.
        version: of the file, in its first event.
        scalars: values by tag.
        started: a session that starts at this step.
    """
    parts = [b"\x09", struct.pack("<d", seconds)]
    if step:
        parts += [b"\x10", _varint(step)]
    if version:
        parts.append(_field(3, version.encode()))
    if scalars is not None:
        values = [_named(tag) + _single(value) for tag, value in scalars.items()]
        parts.append(_field(5, b"".join(values)))
    if started:
        parts.append(_field(7, b"\x08" + _varint(STARTED)))
    return b"".join(parts)


@cache
def _named(tag: str) -> bytes:
    """What stands before the value of a scalar, a float32 of 4 bytes."""
    name = _field(1, tag.encode()) + b"\x15"
    return _varint(1 << 3 | 2) + _varint(len(name) + 4) + name


def record(data: bytes) -> bytes:
    """A record of an event file."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _single(value: float) -> bytes:
    """A float32; infinite beyond its range."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _field(number: int, data: bytes) -> bytes:
    """A field of a message that holds bytes, text or another message."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """A whole number, zero or above, seven bits a byte."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _table() -> list[int]:
    """The CRC-32C of each byte (reflected polynomial 0x82F63B78)."""
    found = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        found.append(value)
    return found


_CRC = _table()


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C of data, uint32."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
