"""Folders of the cache that machines share, by RAYDPFL_CACHE=s3://bucket/cache or another address:
what one has prepared is put there, and each of the others fetches it once, into the cache of its
own that lies on its disk.

`whole` and `put` are those of `raydpfl.storage.files` too. The seal of a folder is put last,
and what is fetched is compared with it: a folder that was put in half, or is damaged, is none.
"""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from raydpfl.errors import renamed
from raydpfl.storage import files
from raydpfl.storage.files import SEAL, cache_address, cache_root, holding
from raydpfl.storage.store import Store, opened, within

log = logging.getLogger("raydpfl")


def whole(folder: Path) -> bool:
    """Whether a folder that `put` made is here as it was made; it is fetched if it is at the
    address alone. Raises `ConfigError` where the address cannot be reached, or the cache here has
    no room, and `FileError` where it does not answer.
    """
    if files.whole(folder):
        return True
    there = _shared(folder)
    if there is None or SEAL not in there.times():
        return False
    lock = cache_root() / "arriving" / folder.name
    files.make(lock)
    with holding(lock):
        if files.whole(folder):
            return True
        sizes = sealed = None
        with suppress(FileNotFoundError, ValueError, LookupError, TypeError):
            sealed = json.loads(there.get(SEAL))["files"]
            files.put(folder, lambda scratch: there.fetch(sealed, scratch))
            sizes = json.loads((folder / SEAL).read_text())["files"]
        if sizes is not None and sizes == sealed:
            return True
        log.warning("%s is prepared again: it is not whole there", there.address)
        files.remove(folder)
        return False


def put(folder: Path, fill: Callable[[Path], object]) -> None:
    """Has `fill` write files into a folder of the cache (see `raydpfl.storage.files.put`), which
    then are at the address too. Raises as `whole`.
    """
    files.put(folder, fill)
    there = _shared(folder)
    if there is None:
        return
    names = [path.name for path in sorted(folder.iterdir()) if path.name != SEAL]
    for name in (*names, SEAL):
        there.put_file(name, folder / name)


def _shared(folder: Path) -> Store | None:
    """What stands for a folder of the cache at the address, if there is one."""
    address = cache_address()
    if address is None or not folder.is_relative_to(cache_root()):
        return None
    with renamed(lambda _: "RAYDPFL_CACHE"):
        return opened(within(address, *folder.relative_to(cache_root()).parts))
