"""The backends, by name, and which of them can do what is asked of them."""

from __future__ import annotations

import numpy as np

from raydpfl.core.hardware import Precision
from raydpfl.errors import ConfigError
from raydpfl.methods.local.base import Local
from raydpfl.models.shared_and_local import ParameterSplit
from raydpfl.training.backends.base import Backend
from raydpfl.training.backends.compiled import Compiled
from raydpfl.training.backends.convolutional import Convolutional
from raydpfl.training.backends.frozen_base import OneBatch
from raydpfl.training.backends.fused import Fused
from raydpfl.training.backends.ghost_clipping import Layerwise
from raydpfl.training.backends.loop import Loop
from raydpfl.training.backends.vmap import Vmap

BACKENDS: dict[str, type[Backend]] = {
    "compiled": Compiled,
    "fused": Fused,
    "convolutional": Convolutional,
    "layerwise": Layerwise,
    "one_batch": OneBatch,
    "vmap": Vmap,
    "loop": Loop,
}
REFERENCE = "loop"  # trains any module by any rule


def costs(backend: str, local: Local, sizes: np.ndarray, d: int, gpu: bool) -> np.ndarray | None:
    """See `Backend.costs`. On a GPU a step of a chunk takes as long as that of its largest
    client.
    """
    costs = BACKENDS[backend].costs(local, sizes, d)
    if costs is not None and gpu:
        costs[2] = 0.0
    return costs


def lacking(
    backend: str, local: Local, clip: float | None, precision: Precision, split: ParameterSplit
) -> str | None:
    """What of what is asked of it a backend cannot do, in words; see `Backend.lacks`."""
    kind = BACKENDS[backend]
    if (split.own and not kind.starts) or (split.buffers and not kind.buffers):
        return "parts of the model that are clients' own"
    if precision == "bfloat16" and not kind.half:
        return "products in bfloat16"
    return kind.lacks(local, clip)


def check_backend(
    backend: str, local: Local, clip: float | None, precision: Precision, split: ParameterSplit
) -> None:
    """Raises `ConfigError` for a backend that is none, or that lacks what is asked of it."""
    asked = (local, clip, precision, split)
    lacks = lacking(backend, *asked) if backend in BACKENDS else None
    if backend in BACKENDS and not lacks:
        return
    names = ", ".join(name for name in BACKENDS if not lacking(name, *asked))
    reason = ""
    if lacks:
        reason = f" (local.kind {local.kind}: {backend} cannot do {lacks})"
    raise ConfigError("client.backend", backend, f"auto or one of {names}{reason}")
