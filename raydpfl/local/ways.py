"""The ways of training, by name, and which of them can do what is asked of them."""

from __future__ import annotations

from raydpfl.errors import ConfigError
from raydpfl.hardware import Precision
from raydpfl.local.base import Local
from raydpfl.local.compiled import Compiled
from raydpfl.local.convolutional import Convolutional
from raydpfl.local.layerwise import Layerwise
from raydpfl.local.linear import Fused, SampleSpace
from raydpfl.local.loop import Loop
from raydpfl.local.noop import Noop
from raydpfl.local.vmap import Vmap
from raydpfl.local.way import Way

WAYS: dict[str, type[Way]] = {
    "compiled": Compiled,
    "sample_space": SampleSpace,
    "fused": Fused,
    "convolutional": Convolutional,
    "layerwise": Layerwise,
    "vmap": Vmap,
    "loop": Loop,
    "noop": Noop,
}
REFERENCE = "loop"  # trains any module by any rule


def lacking(way: str, local: Local, clip: float | None, precision: Precision) -> str | None:
    """What of what is asked of it a way cannot do, in words; see `Way.lacks`."""
    kind = WAYS[way]
    if precision == "bfloat16" and not kind.half:
        return "products in bfloat16"
    return kind.lacks(local, clip)


def check_way(way: str, local: Local, clip: float | None, precision: Precision = "float32") -> None:
    """Raises `ConfigError` for a way that is none, or that lacks what is asked of it."""
    lacks = lacking(way, local, clip, precision) if way in WAYS else None
    if way in WAYS and not lacks:
        return
    names = ", ".join(name for name in WAYS if not lacking(name, local, clip, precision))
    reason = ""
    if lacks:
        reason = f" (local.kind {local.kind}: {way} cannot do {lacks})"
    raise ConfigError("client.way", way, f"auto or one of {names}{reason}")
