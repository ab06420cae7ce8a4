"""Where files are looked for and kept: the root of data sets and the cache."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raydpfl.errors import ConfigError


def cache_root() -> Path:
    """RAYDPFL_CACHE, or raydpfl under XDG_CACHE_HOME, or ~/.cache/raydpfl."""
    if found := os.environ.get("RAYDPFL_CACHE"):
        return Path(found)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raydpfl"


def data_root(root: Path | None) -> Path:
    """`root`, or RAYDPFL_DATA, or a folder of downloads in the cache."""
    return Path(root or os.environ.get("RAYDPFL_DATA") or cache_root() / "downloads")


def find_file(field: str, name: str, root: Path | None) -> Path:
    """The file `name`, absolute, or relative to the data root or the working folder. Raises `ConfigError` naming `field`."""
    for path in (data_root(root) / name, Path(name)):
        if path.is_file():
            return path
    raise ConfigError(field, name, f"a file, absolute or under {data_root(root)} (--data-root) or {Path.cwd()}")


def file_identity(path: Path, name: str) -> list:
    """What tells a changed file apart without reading it."""
    stat = path.stat()
    return [name, stat.st_size, stat.st_mtime_ns]


@contextmanager
def impatient(seconds: float = 30) -> Iterator[None]:
    """A network that does not answer is an error after so many seconds."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
