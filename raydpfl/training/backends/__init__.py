"""The backends, by name, and which of them can do what is asked of them."""

import numpy as np

from raydpfl.core.hardware import Precision
from raydpfl.errors import ConfigError
from raydpfl.methods.local.base import Local
from raydpfl.models.shared_and_local import ParameterSplit
from raydpfl.training.backends import base
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
WEIGHTS = 16  # samples whose products take as long as reading and writing the weights does


def costs(backend: str, local: Local, sizes: np.ndarray, d: int, gpu: bool) -> np.ndarray | None:
    """By what chunks are cut, float64 [3, r], for clients of `sizes` rows, int64 [r]: the steps of
    each; and in products of a row with a weight, the cost of the calls of a chunk of which it is
    the largest, and of a step of any client of that chunk, for a model of `d` parameters (the last
    is 0 on a `gpu`, where a step takes as long as the largest client's). None for a backend that
    trains clients one by one.
    """
    kind = BACKENDS[backend]
    if kind.threads or kind.one_by_one:
        return None
    steps = local.step_counts(sizes)
    step = np.zeros(len(sizes)) if gpu else (local.batch_sizes(sizes) + WEIGHTS) * d
    return np.stack([steps, steps * kind.calls, step]).astype(np.float64)


def missing_requirement(
    backend: str,
    local: Local,
    clip: float | None,
    precision: Precision = "float32",
    split: ParameterSplit | None = None,
) -> str | None:
    """What of what is asked of it a backend cannot do, in words; None: it can do all."""
    requirements = {
        base.LOCAL_PARAMETERS: split is not None and split.own,
        base.LOCAL_BUFFERS: split is not None and split.buffers,
        base.BFLOAT16: precision == "bfloat16",
        base.UNCLIPPED: clip is None,
        base.TRAIN: local.trains,
        base.PERTURBED: local.perturbs and clip is None,
        f"{base.PERTURBED}, clipped": local.perturbs and clip is not None,
        base.ANY_RULE: local.linear() is None,
    }
    needs = [need for need, is_required in requirements.items() if is_required]
    return next((need for need in needs if need not in BACKENDS[backend].capabilities), None)


def check_backend(
    backend: str, local: Local, clip: float | None, precision: Precision, split: ParameterSplit
) -> None:
    """Raises `ConfigError` for an unknown backend, or one that lacks what is asked of it."""
    demands = (local, clip, precision, split)
    unsupported = missing_requirement(backend, *demands) if backend in BACKENDS else None
    if backend in BACKENDS and not unsupported:
        return
    names = ", ".join(name for name in BACKENDS if not missing_requirement(name, *demands))
    reason = f" (local.kind {local.kind}: {backend} cannot do {unsupported})" if unsupported else ""
    raise ConfigError("client.backend", backend, f"auto or one of {names}{reason}")
