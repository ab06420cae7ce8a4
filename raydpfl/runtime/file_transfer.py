"""Files for nodes of a cluster that do not see the disk of the process that started the run: each
such node is sent them once, through Ray's object store, and keeps them in its own cache.

The node that has a file reads it a `PIECE` at a time into the object store; the other writes it to
its disk, while the next pieces come. Of the processes of a node one fetches, and the others wait.
What arrived is compared with the digest of what was sent.
"""

import hashlib
import os
import pickle
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raydpfl.data import Data, prepare
from raydpfl.errors import ConfigError, FileError, RunError
from raydpfl.runtime.session import pin_to_node
from raydpfl.storage import files

PIECE = 16 << 20  # bytes
AHEAD = 4  # pieces in transfer while one is written
RATE = 10e6  # bytes per second that a network has at least


def fetch_folder(folder: str, node: str) -> Path:
    """The folder of prepared data (`raydpfl.storage.files.fill_folder`) that `node` (Ray's id) has
    at this path, on this node: that very folder, or a copy in this node's cache. Raises
    `ConfigError` where the cache has no room, `FileError` where it did not arrive as it is there.
    """
    source = Path(folder)
    if (source / files.SEAL).exists() and not files.foreign(source):
        return source
    target = files.cache_root() / "data" / source.name
    return _copy(source, target, node, lambda: _call(node, _sealed_files, folder))


def fetch_file(path: str, node: str) -> Path:
    """As `fetch_folder`, for one file."""
    source = Path(path)
    if source.is_file():
        return source
    size, sha256 = _call(node, _file_facts, path)
    target = files.cache_root() / "sent" / files.check(source.name, sha256)[:32]
    return _copy(source.parent, target, node, lambda: {source.name: (size, sha256)}) / source.name


@dataclass(frozen=True)
class RemotePreparation:
    """`raydpfl.data.prepare` by another node, with its source files; it sends the folder."""

    node: str
    cache: str  # that node's folder of prepared data
    root: str  # and of data sets
    home: str  # the working directory of the process that started the run
    path: Sequence[str]  # and its module paths

    def __call__(self, data: Data, seed: int, root: Path | None, validation: Any) -> Path:
        folder = _call(self.node, _prepare, pickle.dumps((data, seed, validation)), self)
        return fetch_folder(folder, self.node)


Files = dict[str, tuple[int, str]]  # by name: bytes, and the digest


def _copy(source: Path, target: Path, node: str, list_files: Callable[[], Files]) -> Path:
    """Copies files of a folder of another node to one of the cache, unless it is there."""
    lock = files.cache_root() / "arriving" / target.name
    files.make(lock)
    with files.folder_lock(lock):
        if not files.is_intact(target):
            files.fill_folder(target, lambda scratch: _fetch(list_files(), node, source, scratch))
    return target


def _fetch(listed_files: Files, node: str, source: Path, scratch: Path) -> None:
    need = sum(size for size, _ in listed_files.values())
    room = shutil.disk_usage(scratch).free
    if need > room:
        expected = f"a folder with {need / 1e6:,.1f} MB free; this one has {room / 1e6:,.1f}"
        raise ConfigError("RAYDPFL_CACHE", str(files.cache_root()), expected)
    for name, (size, sha256) in listed_files.items():
        hasher = hashlib.sha256()
        with open(scratch / name, "wb") as target_file:
            for piece in _pieces(str(source / name), size, node):
                target_file.write(piece.data)
                hasher.update(piece.data)
        if hasher.hexdigest() != sha256:
            raise FileError(f"{name} did not arrive as it is in {source} on another node")


def _pieces(path: str, size: int, node: str) -> Iterator[np.ndarray]:
    """A file of another node, in order."""
    transfers: deque[Any] = deque()
    for start in range(0, size, PIECE):
        transfers.append(pin_to_node(_piece, node).remote(path, start, PIECE))
        if len(transfers) > AHEAD:
            yield _result(transfers.popleft())
    while transfers:
        yield _result(transfers.popleft())


def _call(node: str, function: Callable, *arguments: Any) -> Any:
    return _result(pin_to_node(function, node).remote(*arguments))


def _result(future: Any) -> Any:
    import ray

    try:
        return ray.get(future)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, (ConfigError, RunError)):
            raise cause from None
        reason = " ".join(str(error).split())[-300:]
        raise FileError(f"files of another node did not arrive: {reason}") from None


# --- on the node that has them ---


def _prepare(pickled_arguments: bytes, remote: RemotePreparation) -> str:
    with suppress(OSError):
        os.chdir(remote.home)
    sys.path.extend(entry for entry in remote.path if entry not in sys.path)
    data, seed, validation = pickle.loads(pickled_arguments)
    return str(prepare(data, seed, Path(remote.root), Path(remote.cache), validation))


def _sealed_files(folder: str) -> Files:
    seal = files.read_json(Path(folder) / files.SEAL)
    return {name: tuple(facts) for name, facts in seal["files"].items()}


def _file_facts(path: str) -> tuple[int, str]:
    return Path(path).stat().st_size, files.digest(Path(path))


def _piece(path: str, start: int, size: int) -> np.ndarray:
    return np.fromfile(path, np.uint8, size, offset=start)
