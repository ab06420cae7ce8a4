"""Tables of features, kept in the cache: what takes long is computed once, for all partitions and
seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raydpfl.storage.cache import put, whole
from raydpfl.storage.files import cache_root


def kept(
    about: Sequence[Any], images: np.ndarray, extract: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """What `extract` makes of images or rows, from the cache where it is there as it was computed.

    Args:
        about: what else the columns depend on, in types whose `repr` says all of it.
        images: uint8 or float32 [rows, ...].
        extract: gives an array.
    """
    pixels = hashlib.sha256(np.ascontiguousarray(images).data).hexdigest()
    name = hashlib.sha256(repr([*about, images.shape, pixels]).encode()).hexdigest()
    folder = cache_root() / "features" / name
    if not whole(folder):
        put(folder, lambda scratch: np.save(scratch / "columns.npy", extract(images)))
    return np.load(folder / "columns.npy")
