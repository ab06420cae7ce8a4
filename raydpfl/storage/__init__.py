"""Directories elsewhere: of a run, a sweep or anything else that is read and written, on `s3://`,
`gs://` and whatever pyarrow.fs and fsspec reach.

`open_folder` gives a folder of this machine to work in: the directory itself, or, of one elsewhere,
a copy whose store is kept up to it (`raydpfl.storage.synced_folder`), under a lock against other
processes (`raydpfl.storage.lock`). `readable_folder` gives one to read from.

>>> with tempfile.TemporaryDirectory() as store:
...     with open_folder(f"local://{store}/run") as folder:
...         length = (folder / "notes.txt").write_text("written to a copy")
...     Path(store, "run", "notes.txt").read_text()
'written to a copy'
"""

import hashlib
import logging
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from filelock import Timeout

from raydpfl.errors import ConfigError, FileError, RunError, rename_fields
from raydpfl.storage import lock, synced_folder
from raydpfl.storage.files import LOCK, cache_root, folder_lock, make, remove
from raydpfl.storage.store import is_address, join_address, local_path, open_store
from raydpfl.storage.synced_folder import origin, push, push_ledger, refetch, times

__all__ = [
    "absolute_name",
    "is_address",
    "join_address",
    "location",
    "open_folder",
    "origin",
    "push",
    "push_ledger",
    "readable_folder",
    "refetch",
    "times",
]

log = logging.getLogger("raydpfl")
WAIT = 1.0  # seconds that a killed process may take to let go of its copy


def location(name: str | Path) -> str | Path:
    """What a directory is called: its address, or its path."""
    return str(name) if is_address(name) else local_path(name)


def new(name: str) -> Path:
    """A directory under runs/ for what begins now, by a name that nothing else takes."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


def absolute_name(name: str | Path) -> str:
    """The address of a directory, or its whole path."""
    return str(name) if is_address(name) else str(local_path(name).resolve())


@contextmanager
def open_folder(name: str | Path, patience: float = WAIT) -> Iterator[Path]:
    """A folder of this machine in which to write the directory `name`, a path or an address.

    Of an address it is a copy, with what is there. What has changed in it is put there when this
    is left, however it is, and by `push` and `push_ledger` before. `patience`: seconds that another
    process may take to let go of an address.

    Raises:
        ConfigError: the address cannot be reached, or another process writes there.
        FileError: the store does not take what it is given.
    """
    if not is_address(name):
        yield local_path(name)
        return
    address = str(name)
    place = cache_root() / "elsewhere" / _legible(address)
    store = open_store(address)
    with ExitStack() as stack:
        try:
            make(place)
            stack.enter_context(folder_lock(place, patience))
        except Timeout:
            expected = "a directory that no other run is writing to"
            raise ConfigError("--out", address, expected) from None
        except OSError as error:
            expected = f"a folder that can be written ({error.strerror})"
            raise ConfigError("RAYDPFL_CACHE", str(cache_root()), expected) from None
        folder = place / "copy"
        stack.callback(_empty, place)
        _empty(place)
        folder.mkdir()
        stack.enter_context(_substitute_address(folder, address))
        stack.enter_context(lock.hold_lock(store, synced_folder.lock_note(folder), patience))
        synced_folder.begin(address, folder)
        try:
            yield folder
        except BaseException:  # which is the news, whether or not it can be pushed
            try:
                push(folder)
            except FileError as error:
                log.warning("%s", error)
            raise
        push(folder)


def _empty(place: Path) -> None:
    """Removes a copy and the files next to it, except for the locks."""
    for path in place.iterdir():
        if path.name not in (LOCK, "copy.held"):
            remove(path)


@contextmanager
def _substitute_address(folder: Path, address: str) -> Iterator[None]:
    """What is raised within names the address, where it would name the copy."""
    path = str(folder)
    try:
        yield
    except ConfigError as error:
        value = error.value.replace(path, address) if isinstance(error.value, str) else error.value
        expected = error.expected.replace(path, address)
        raise ConfigError(error.field, value, expected) from None
    except RunError as error:
        if type(error) not in (RunError, FileError) or path not in str(error):
            raise
        raise type(error)(str(error).replace(path, address)) from None


@contextmanager
def readable_folder(
    name: str | Path, field: str = "run", file_filter: Callable[[str], bool] = lambda name: True
) -> Iterator[Path]:
    """A folder of this machine that holds the directory `name`, a path or an address, to read; of
    a YAML file, the file. `field`: what a refusal calls it; `file_filter`: which files of an
    address are fetched, by name.

    Raises:
        ConfigError: the address cannot be reached.
        FileError: a file there cannot be read.
    """
    if not is_address(name):
        yield local_path(name)
        return
    address = str(name)
    if Path(urlsplit(address).path).suffix in (".yaml", ".yml"):
        whole, _, file = address.partition("?")[0].rpartition("/")
        parent = address.replace(f"{whole}/{file}", whole, 1)
        with readable_folder(parent, field, lambda name: name == file) as folder:
            yield folder / file
        return
    with rename_fields(lambda _: field):
        open_store(address)
    with tempfile.TemporaryDirectory(prefix="raydpfl-") as scratch:
        folder = Path(scratch) / (Path(urlsplit(address).path).name or "run")
        folder.mkdir()
        with _substitute_address(folder, address):
            synced_folder.fetch(address, folder, file_filter)
            yield folder


def _legible(address: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", address.partition("?")[0])[-60:].strip("-.")
    return f"{readable}-{hashlib.sha256(address.encode()).hexdigest()[:16]}"
