"""Folders of the cache that machines share, by RAYDPFL_CACHE=s3://bucket/cache or another address:
what one has prepared is put there, and each of the others fetches it once, into the cache of its
own that lies on its disk.

`is_intact` and `fill_folder` are those of `raydpfl.storage.files` too. The seal of a folder is put
last, and what is fetched is compared with it: a folder that was put in half, or is damaged, is
none.
"""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from raydpfl.errors import rename_fields
from raydpfl.storage import files
from raydpfl.storage.files import SEAL, cache_address, cache_root, folder_lock
from raydpfl.storage.store import Store, join_address, open_store

log = logging.getLogger("raydpfl")


def is_intact(folder: Path) -> bool:
    """Whether a folder that `fill_folder` made is here as it was made; it is fetched if it is at
    the address alone. Raises `ConfigError` where the address cannot be reached, or the cache here
    has no room, and `FileError` where it does not answer.
    """
    if files.is_intact(folder):
        return True
    remote_folder = _remote_folder(folder)
    if remote_folder is None or SEAL not in remote_folder.times():
        return False
    lock = cache_root() / "arriving" / folder.name
    files.make(lock)
    with folder_lock(lock):
        if files.is_intact(folder):
            return True
        sizes = seal_files = None
        with suppress(FileNotFoundError, ValueError, LookupError, TypeError):
            seal_files = json.loads(remote_folder.get(SEAL))["files"]
            files.fill_folder(folder, lambda scratch: remote_folder.fetch(seal_files, scratch))
            sizes = json.loads((folder / SEAL).read_text())["files"]
        if sizes is not None and sizes == seal_files:
            return True
        log.warning("%s is prepared again: it is not whole there", remote_folder.address)
        files.remove(folder)
        return False


def fill_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Has `fill` write files into a folder of the cache (see `raydpfl.storage.files.fill_folder`),
    which then are at the address too. Raises as `is_intact`.
    """
    files.fill_folder(folder, fill)
    remote_folder = _remote_folder(folder)
    if remote_folder is None:
        return
    names = [path.name for path in sorted(folder.iterdir()) if path.name != SEAL]
    for name in (*names, SEAL):
        remote_folder.put_file(name, folder / name)


def _remote_folder(folder: Path) -> Store | None:
    """What stands for a folder of the cache at the address, if there is one."""
    address = cache_address()
    if address is None or not folder.is_relative_to(cache_root()):
        return None
    with rename_fields(lambda _: "RAYDPFL_CACHE"):
        return open_store(join_address(address, *folder.relative_to(cache_root()).parts))
