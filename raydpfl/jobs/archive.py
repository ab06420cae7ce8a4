"""Reading what comes back from a cluster: archives of run directories, and text that jobs have
printed. Neither is trusted.

An archive may hold only regular files and folders under one name: no links, no devices, no path
that leads elsewhere, and no more than `Limits` allow. It is unpacked by `tarfile` under its filter
"data" (PEP 706) as it is read, so that what is too much is refused before it is written.
Destination folders are opened one by one, without following links, so that what is already in the
destination does not lead out of it.

>>> clean = Plain()
>>> clean("\\x1b[31mred\\x1b") + clean("[0m\\tand \\x1b]0;title\\x07plain\\r\\n")
'red\\tand plain\\n'
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import stat
import tarfile
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

HEADER = 64 << 10  # bytes from one file to the next at most: a long name, padding
LONG = 1024  # characters of a path at most
DEEP = 32  # folders in one another at most
PIECE = 1 << 20
STRING = 4096  # characters of a title or the like, after which it is taken for text
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class ArchiveError(ValueError):
    """An archive has something in it that no run directory has."""


@dataclass(frozen=True)
class Limits:
    """How much an archive may hold: bytes and members when unpacked, and, from `ratio_from` bytes
    on, how many times its own size.
    """

    size: int = 10 * 10**9
    files: int = 50_000
    ratio: float = 100.0
    ratio_from: int = 20 * 10**6


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


class _Source:
    """The unpacked bytes of an archive, counted: at most `header` of them from one member's content
    to the next, as `tarfile` would read a name of any length into memory.
    """

    def __init__(self, packed: IO[bytes], limits: Limits):
        self._packed = packed
        self._limits = limits
        self._stream = gzip.GzipFile(fileobj=packed)
        self._count = 0
        self.allowed = HEADER
        self.last = b""  # the last two blocks

    def read(self, size: int) -> bytes:
        """Up to `size` bytes. Raises `ArchiveError` beyond the limits."""
        piece = self._stream.read(size)
        self._count += len(piece)
        self.allowed -= len(piece)
        self.last = (self.last + piece)[-2 * tarfile.BLOCKSIZE :]
        limits = self._limits
        if self._count > limits.size:
            raise ArchiveError(_too_large(limits))
        most = limits.ratio * self._packed.tell()
        if self._count > limits.ratio_from and self._count > most:
            raise ArchiveError(f"it holds more than {limits.ratio:g} times its own size")
        if self.allowed < 0:
            raise ArchiveError(f"it holds more than {HEADER:,} bytes that are in no file")
        return piece


def _too_large(limits: Limits) -> str:
    return f"it holds more than {limits.size / 1e9:g} GB"


def unpack(packed: IO[bytes], name: str, into: Path, limits: Limits | None = None) -> None:
    """Unpacks the folder `name` of a gzipped tar archive into the new folder `into`.

    Args:
        packed: the archive.
        name: the one folder in it.
        into: made here.
        limits: None: the defaults.

    Raises:
        ArchiveError: it holds what it may not, or too much; also for the disk.
        ValueError: it is broken.
        EOFError: it is cut short.
        OSError: a file cannot be written.
    """
    limits = limits or Limits()
    source = _Source(packed, limits)
    into.mkdir()
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:  # type: ignore[call-overload]
            _unpack(archive, source, name, into, limits)
        while source.read(PIECE):  # to its checksum
            pass
    except tarfile.FilterError as error:
        raise ArchiveError(f"it holds {error}") from None
    except tarfile.TarError as error:
        raise ValueError(f"it is no tar archive, or ends early ({error})") from None
    if source.last.strip(b"\0"):
        raise EOFError("it ended early")


def _unpack(
    archive: tarfile.TarFile, source: _Source, name: str, into: Path, limits: Limits
) -> None:
    left = limits.size
    free = shutil.disk_usage(into).free
    for count, member in enumerate(archive, 1):
        path = _checked(member, name)
        left -= member.size
        if count > limits.files:
            raise ArchiveError(f"it holds more than {limits.files:,} files")
        if left < 0:
            raise ArchiveError(_too_large(limits))
        if limits.size - left > free:
            raise ArchiveError(f"it holds more than the disk of {into.parent} has room for")
        source.allowed = member.size + HEADER
        if path:
            moved = member.replace(name=path, deep=False)
            archive.extract(moved, into, set_attrs=False, filter="data")


def _checked(member: tarfile.TarInfo, name: str) -> str:
    """The path of a member below `name`. Raises `ArchiveError` for one that is elsewhere, or is
    neither a file nor a folder.
    """
    path = member.name.removeprefix("./")
    parts = PurePosixPath(path).parts
    if member.size < 0:
        raise tarfile.ReadError("a negative size")
    if parts[:1] != (name,) or ".." in parts or _CONTROL.search(path) or set("\n\t") & set(path):
        raise ArchiveError(f"it holds {path[:100]!r}, which is no path below {name}")
    if len(path) > LONG or len(parts) > DEEP:
        raise ArchiveError(f"it holds a path that is too long: {path[:60]!r}...")
    if not (member.isdir() or (member.isreg() and not member.issparse() and parts[1:])):
        raise ArchiveError(f"it holds {path[:100]!r}, which is neither file nor folder")
    return "/".join(parts[1:])


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
