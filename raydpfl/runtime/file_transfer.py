"""Files for nodes of a cluster that do not see the disk of the process that started the run: each
such node is sent them once, through Ray's object store, and keeps them in its own cache.

The node that has a file reads it a `PIECE` at a time, into the object store, which takes it across;
the other writes it to its disk, while the next pieces come. Of the processes of a node one fetches,
and the others wait for it. What arrived is compared with the digest of what was sent.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raydpfl.data import Data, prepare
from raydpfl.errors import ConfigError, FileError, RunError
from raydpfl.storage.files import (
    SEAL,
    cache_root,
    digest,
    foreign,
    holding,
    make,
    put,
    read_json,
    whole,
)

PIECE = 16 << 20  # bytes
AHEAD = 4  # pieces that are on their way while one is written
RATE = 10e6  # bytes per second that a network has at least


def prepared(folder: str, node: str) -> Path:
    """The folder of prepared data (`raydpfl.storage.files.put`) that `node` has, as this node sees
    it: that very folder, or one of this node's cache, where it is put unless it is there.

    Args:
        folder: its path on `node`.
        node: Ray's id of a node that has it.

    Raises:
        ConfigError: this node's cache has no room.
        FileError: it did not arrive as it is there.
    """
    there = Path(folder)
    if (there / SEAL).exists() and not foreign(there):
        return there
    place = cache_root() / "data" / there.name
    return _kept(place, node, lambda: _sealed(node, folder), there)


@dataclass(frozen=True)
class Asking:
    """`raydpfl.data.prepare` by another node, which has the source files and sends the folder here.

    `cache` and `root` are where that node keeps prepared data, and has the files they are of;
    `home` and `path`, where the process stands that started the run, and finds modules.
    """

    node: str
    cache: str
    root: str
    home: str
    path: Sequence[str]

    def __call__(self, data: Data, seed: int, root: Path | None, validation: Any) -> Path:
        """See `raydpfl.data.prepare`; source files are in the other node's `root`."""
        given = pickle.dumps((data, seed, validation))
        call = _on(self.node, _prepare).remote(given, self)
        return prepared(_got(call), self.node)


def file(path: str, node: str) -> Path:
    """As `prepared`, for one file."""
    there = Path(path)
    if there.is_file():
        return there
    found = _on(node, _about).remote(path)
    sizes = {there.name: _got(found)}
    place = cache_root() / "sent" / sizes[there.name][1][:32]
    return _kept(place, node, lambda: sizes, there.parent) / there.name


def _kept(place: Path, node: str, about: Any, there: Path) -> Path:
    lock = cache_root() / "arriving" / place.name
    make(lock)
    with holding(lock):
        if not whole(place):
            put(place, lambda scratch: _fetch(about(), node, there, scratch))
    return place


def _fetch(files: dict[str, tuple[int, str]], node: str, there: Path, scratch: Path) -> None:
    needed = sum(size for size, _ in files.values())
    free = shutil.disk_usage(scratch).free
    if needed > free:
        expected = f"a folder with {needed / 1e6:,.1f} MB free; this one has {free / 1e6:,.1f}"
        raise ConfigError("RAYDPFL_CACHE", str(cache_root()), expected)
    for name, (size, sent) in files.items():
        found = hashlib.sha256()
        with open(scratch / name, "wb") as written:
            for piece in _pieces(str(there / name), size, node):
                written.write(piece.data)
                found.update(piece.data)
        if found.hexdigest() != sent:
            raise FileError(f"{name} did not arrive as it is in {there} on another node")


def _pieces(path: str, size: int, node: str) -> Iterator[np.ndarray]:
    """A file of another node, in order."""
    read = _on(node, _piece)
    coming: deque[Any] = deque()
    for start in range(0, size, PIECE):
        coming.append(read.remote(path, start, PIECE))
        if len(coming) > AHEAD:
            yield _got(coming.popleft())
    while coming:
        yield _got(coming.popleft())


def _sealed(node: str, folder: str) -> dict[str, tuple[int, str]]:
    """Size and digest of each file of a prepared folder of another node."""
    return _got(_on(node, _seal).remote(folder))


def _on(node: str, function: Any) -> Any:
    """A function that is called on a node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=there)


def _got(call: Any) -> Any:
    import ray

    try:
        return ray.get(call)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, (ConfigError, RunError)):
            raise cause from None
        reason = " ".join(str(error).split())[-300:]
        raise FileError(f"files of another node did not arrive: {reason}") from None


# --- on the node that has them ---


def _prepare(given: bytes, asking: Asking) -> str:
    with suppress(OSError):
        os.chdir(asking.home)
    sys.path.extend(entry for entry in asking.path if entry not in sys.path)
    data, seed, validation = pickle.loads(given)
    return str(prepare(data, seed, Path(asking.root), Path(asking.cache), validation))


def _seal(folder: str) -> dict[str, tuple[int, str]]:
    return {name: tuple(facts) for name, facts in read_json(Path(folder) / SEAL)["files"].items()}


def _about(path: str) -> tuple[int, str]:
    return Path(path).stat().st_size, digest(Path(path))


def _piece(path: str, start: int, size: int) -> np.ndarray:
    return np.fromfile(path, np.uint8, size, offset=start)
