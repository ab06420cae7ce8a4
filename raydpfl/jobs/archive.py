"""Reading what comes back from a cluster: archives of run directories, and text that jobs print.
Neither is trusted.

>>> plain("\\x1b[31mred\\x07\\tand plain\\r\\n")
'[31mred\\tand plain\\n'
"""

import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

SIZE = 10 * 10**9  # bytes that an archive may hold
FILES = 50_000
# all control characters but newlines and tabs, and marks that turn the direction of text
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class ArchiveError(ValueError):
    """An archive has something in it that no run directory has."""


def plain(text: object) -> str:
    """A text without what a terminal would obey."""
    return _CONTROL.sub("", str(text))


def unpack(
    file: IO[bytes], name: str, folder: Path, on_verified: Callable[[], object] = lambda: None
) -> None:
    """Unpacks the one folder `name` of a gzipped tar archive, which can be sought in, into `folder`
    (made where it is missing), over files of the same names. All members are looked at before
    `on_verified` is called and any is written, by `tarfile` under its filter "data" (PEP 706).

    Raises:
        ArchiveError: it holds anything but files and folders below `name`, more than `SIZE` bytes
            or `FILES` files, or more than the disk has room for; or a link in `folder` leads
            elsewhere.
        tarfile.TarError, EOFError, zlib.error: it is broken or cut short.
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=file, mode="r:gz") as archive:
        members = [*_check_members(archive, name, min(SIZE, shutil.disk_usage(folder).free))]
        while archive.fileobj.read(1 << 20):  # to its checksum
            pass
        on_verified()
        try:
            for member in members:
                archive.extract(member, folder, set_attrs=False, filter="data")
        except tarfile.FilterError as error:
            raise ArchiveError(f"it holds {error}") from None


def _check_members(archive: tarfile.TarFile, name: str, limit: int) -> Iterator[tarfile.TarInfo]:
    """The members, by their paths below `name`. Raises `ArchiveError`."""
    rest = limit
    for count, member in enumerate(archive, 1):
        root, *parts = PurePosixPath(member.name).parts or ("",)
        rest -= member.size
        if root != name or ".." in parts or _CONTROL.search(member.name):
            raise ArchiveError(f"it holds {member.name[:100]!r}, which is no path below {name}")
        if not (member.isdir() or (member.isreg() and parts)):
            raise ArchiveError(f"it holds {member.name[:100]!r}, which is neither file nor folder")
        if rest < 0 or member.size < 0 or count > FILES:
            raise ArchiveError(f"it holds more than {limit / 1e9:g} GB, or than {FILES:,} files")
        if parts:
            yield member.replace(name="/".join(parts), deep=False)
