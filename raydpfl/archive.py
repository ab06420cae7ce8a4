"""Reading what comes back from a cluster: archives of run directories, and text that jobs have
printed. Neither is trusted.

An archive may hold only regular files and folders under one name: no links, no devices, no name
that is absolute, leads up (`..`), differs from another only in case or Unicode form, or occurs
twice, and no more than `Limits` allow. Destination folders are opened one by one, without following
links, so that neither an archive nor what is already in the destination leads out of it. The
gzipped tar archive is read by code of our own, because `tarfile` follows links while it unpacks and
reads headers of any size.

>>> clean = Plain()
>>> clean("\\x1b[31mred\\x1b") + clean("[0m\\tand \\x1b]0;title\\x07plain\\r\\n")
'red\\tand plain\\n'
"""

from __future__ import annotations

import gzip
import os
import re
import stat
import unicodedata
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

BLOCK = 512
HEADER = 64 << 10  # bytes of a long name
PIECE = 1 << 20
STRING = 4096  # characters of a title or the like, after which it is taken for text
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class ArchiveError(ValueError):
    """An archive has something in it that no run directory has."""


@dataclass(frozen=True)
class Limits:
    """How much an archive may hold: bytes and files when unpacked, and, from `ratio_from` bytes on,
    how many times its own size.
    """

    size: int = 64 * 10**9
    files: int = 500_000
    ratio: float = 200.0
    ratio_from: int = 10**9
    name: int = 1024  # bytes of a path
    depth: int = 32


class Plain:
    """Removes what a terminal would obey from a text that is given piece by piece: escape
    sequences, also those that span pieces, and all control characters but newlines and tabs.
    """

    def __init__(self) -> None:
        self._state = "text"
        self._length = 0

    def __call__(self, text: str) -> str:
        if self._state == "text" and not _CONTROL.search(text):
            return text
        return "".join(character for character in text if self._shown(character))

    def _shown(self, character: str) -> bool:
        """Whether this character is text, given what came before it."""
        state = self._state
        self._length = self._length + 1
        if character == "\n" or (state != "text" and self._length > STRING):
            self._state = "text"  # what was not ended by then ends here
            return character == "\n"
        if character == "\x1b":
            self._state = "escape"
            self._length = 0
        elif state == "string":
            if character in "\x07\x9c":
                self._state = "text"
        elif character == "\x9b":
            self._state = "sequence"
            self._length = 0
        elif character in "\x90\x98\x9d\x9e\x9f":
            self._state = "string"
            self._length = 0
        elif state == "escape":
            self._state = self._after_escape(character)
        elif state == "sequence":
            if "@" <= character <= "~":
                self._state = "text"
        else:
            return character == "\t" or not _CONTROL.match(character)
        return False

    @staticmethod
    def _after_escape(character: str) -> str:
        if character == "[":
            return "sequence"
        if character in "PX]^_":
            return "string"
        return "escape" if " " <= character <= "/" else "text"


def plain(text: object) -> str:
    """A whole text, as `Plain` leaves it."""
    return Plain()(str(text))


@dataclass
class _Source:
    """The unpacked bytes of an archive, counted."""

    packed: IO[bytes]
    limits: Limits
    count: int = 0
    stream: gzip.GzipFile = field(init=False)

    def __post_init__(self) -> None:
        self.stream = gzip.GzipFile(fileobj=self.packed)

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes. Raises EOFError, or `ArchiveError` beyond the limits."""
        found = self.stream.read(size)
        if len(found) < size:
            raise EOFError("it ended early")
        self.count += size
        if self.count > self.limits.size:
            raise ArchiveError(f"it holds more than {self.limits.size / 1e9:g} GB")
        packed = self.packed.tell()
        if self.count > self.limits.ratio_from and self.count > self.limits.ratio * packed:
            raise ArchiveError(f"it holds more than {self.limits.ratio:g} times its own size")
        return found

    def pieces(self, size: int) -> Iterator[bytes]:
        while size:
            part = min(size, PIECE)
            yield self.read(part)
            size -= part


def unpack(packed: IO[bytes], name: str, into: Path, limits: Limits | None = None) -> None:
    """Unpacks the folder `name` of a gzipped tar archive into the new folder `into`.

    Args:
        packed: the archive.
        name: the one folder in it.
        into: made here.
        limits: None: the defaults.

    Raises:
        ArchiveError: it holds what it may not, or too much.
        ValueError: it is broken.
        EOFError: it is cut short.
        OSError: a file cannot be written.
    """
    source = _Source(packed, limits or Limits())
    into.mkdir()
    # by a name folded as any file system might: the name itself, and whether it is a folder
    seen: dict[str, tuple[str, bool]] = {}
    files = 0
    for path, folder, size in _members(source):
        parts = _parts(path, name, source.limits)
        if not parts and not folder:
            raise ArchiveError(f"{name} in it is a file")
        _new(parts, folder, seen)
        files += 1
        if files > source.limits.files:
            raise ArchiveError(f"it holds more than {source.limits.files:,} files")
        target = into.joinpath(*parts)
        (target if folder else target.parent).mkdir(parents=True, exist_ok=True)
        if folder:
            continue
        with open(target, "xb") as file:
            for piece in source.pieces(size):
                file.write(piece)
        source.read(-size % BLOCK)


def _members(source: _Source) -> Iterator[tuple[str, bool, int]]:
    """(path, whether it is a folder, size) of each member. The caller reads the bytes of a file
    before the next member.
    """
    long: dict[str, str] = {}
    while True:
        header = source.read(BLOCK)
        if not header.strip(b"\0"):
            return
        kind, size = _header(header)
        if kind in ("L", "x"):
            if size > HEADER:
                raise ArchiveError("a name in it is too long")
            text = source.read(size)
            source.read(-size % BLOCK)
            long |= {"path": _text(text.rstrip(b"\0"))} if kind == "L" else _pax(text)
            continue
        if kind not in ("0", "\0", "5"):
            raise ArchiveError(f"it holds what is neither file nor folder (type {kind!r})")
        path = long.get("path") or _path(header)
        size = _number(long["size"]) if "size" in long else size
        long = {}
        yield path, kind == "5", 0 if kind == "5" else size


def _header(header: bytes) -> tuple[str, int]:
    """Type and size of a member. Raises `ArchiveError` for a block that is no header."""
    told = header[148:156].strip(b"\0 ")
    right = sum(header[:148]) + sum(header[156:]) + 8 * ord(" ")
    if not told or not set(told) <= set(b"01234567") or int(told, 8) != right:
        raise ValueError("it is no tar archive")
    digits = header[124:136]
    if digits[0] & 0x80:
        return chr(header[156]), int.from_bytes(digits[1:], "big")
    digits = digits.strip(b"\0 ") or b"0"
    if not set(digits) <= set(b"01234567"):
        raise ValueError("it is no tar archive")
    return chr(header[156]), int(digits, 8)


def _path(header: bytes) -> str:
    name, prefix = (header[a:b].split(b"\0")[0] for a, b in ((0, 100), (345, 500)))
    ustar = header[257:263] == b"ustar\0"
    return _text(prefix + b"/" + name if ustar and prefix else name)


def _pax(text: bytes) -> dict[str, str]:
    """The keys and values of an extended header, a series of "length key=value\\n"."""
    found: dict[str, str] = {}
    while text:
        digits = text.split(b" ", 1)[0]
        length = _number(_text(digits))
        record = text[len(digits) + 1 : length]
        text = text[length:]
        key, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n") or length <= len(digits):
            raise ValueError("it is no tar archive")
        if key.startswith(b"GNU.sparse"):
            raise ArchiveError("it holds a sparse file")
        found[_text(key)] = _text(value[:-1])
    return found


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,20}", text):
        raise ValueError("it is no tar archive")
    return int(text)


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise ArchiveError("a name in it is no UTF-8") from None


def _parts(path: str, name: str, limits: Limits) -> tuple[str, ...]:
    """The parts of a path below `name`. Raises `ArchiveError` for one that does not stay there."""
    parts = path.removesuffix("/").split("/")
    while parts and parts[0] == ".":
        parts = parts[1:]
    odd = not all(parts) or "\\" in path or _CONTROL.search(path) or "\n" in path or "\t" in path
    if odd or "." in parts or ".." in parts or parts[:1] != [name]:
        raise ArchiveError(f"it holds {path[:100]!r}, which is no path below {name}")
    long = len(path.encode()) > limits.name or len(parts) > limits.depth
    if long or any(len(part.encode()) > 255 for part in parts):
        raise ArchiveError(f"it holds a path that is too long: {path[:60]!r}...")
    return tuple(parts[1:])


def _new(parts: tuple[str, ...], folder: bool, seen: dict[str, tuple[str, bool]]) -> None:
    """Notes a path and its folders. Raises `ArchiveError` for one that is there already, or looks
    the same as another.
    """
    for depth in range(1, len(parts) + 1):
        entry = "/".join(parts[:depth]), folder or depth < len(parts)
        once = unicodedata.normalize("NFKC", entry[0]).casefold()
        known = seen.setdefault(unicodedata.normalize("NFKC", once), entry)
        again = known is not entry and depth == len(parts) and not folder
        if known != entry or again:
            twice = f"it holds {entry[0][:100]!r} twice"
            raise ArchiveError(f"{twice}, or one that differs by case or Unicode form alone")


def place(source: Path, folder: Path) -> None:
    """Copies the contents of `source`, a folder of our own, into `folder`, over files of the same
    names. It follows no link in `folder`.

    Raises:
        ArchiveError: a link or a file is where a folder is needed, or a folder where a file is;
            nothing has been written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for writing in (False, True):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _place(source, descriptor, folder.name, writing)
        finally:
            os.close(descriptor)


def _place(source: Path, into: int, shown: str, writing: bool) -> None:
    """Copies one folder into the folder that is open as `into`; without `writing` only checks."""
    for path in sorted(source.iterdir()):
        at = f"{shown}/{path.name}"
        if path.is_dir():
            if writing:
                with suppress(FileExistsError):
                    os.mkdir(path.name, dir_fd=into)
            try:
                below = os.open(
                    path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=into
                )
            except FileNotFoundError:
                continue
            except OSError:
                raise ArchiveError(f"{at} is here no folder, or a link; move it away") from None
            try:
                _place(path, below, at, writing)
            finally:
                os.close(below)
        elif writing:
            _replace(path, into)
        elif _is_folder(path.name, into):
            raise ArchiveError(f"{at} is here a folder; move it away")


def _is_folder(name: str, into: int) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=into, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _replace(path: Path, into: int) -> None:
    """Puts a file into an open folder, completely or not at all; a link of that name is replaced,
    not followed.
    """
    scratch = f".{uuid.uuid4().hex}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with (
        open(path, "rb") as read,
        os.fdopen(os.open(scratch, flags, 0o666, dir_fd=into), "wb") as file,
    ):
        while True:
            piece = read.read(PIECE)
            if not piece:
                break
            file.write(piece)
    try:
        os.replace(scratch, path.name, src_dir_fd=into, dst_dir_fd=into)
    except OSError:
        os.unlink(scratch, dir_fd=into)
        raise
