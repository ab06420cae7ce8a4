"""The ways of training, by name, and which of them can do what is asked of them."""

from __future__ import annotations

from raydpfl.errors import ConfigError
from raydpfl.local.base import Local
from raydpfl.local.layerwise import Layerwise
from raydpfl.local.linear import Fused, SampleSpace
from raydpfl.local.loop import Loop
from raydpfl.local.noop import Noop
from raydpfl.local.vmap import Vmap
from raydpfl.local.way import Way

WAYS: dict[str, type[Way]] = {
    "sample_space": SampleSpace,
    "fused": Fused,
    "layerwise": Layerwise,
    "vmap": Vmap,
    "loop": Loop,
    "noop": Noop,
}
REFERENCE = "loop"  # trains any module by any rule


def able(kind: type[Way], local: Local, clip: float | None) -> bool:
    """Whether a way can carry out the rule and the corrections of `local`, and clip each sample's
    gradient where `clip` is given.
    """
    clips = kind.private is None or kind.private == (clip is not None)
    corrects = kind.corrects or not local.corrects
    return clips and corrects and not (kind.linear and local.linear() is None)


def check_way(way: str, local: Local, clip: float | None) -> None:
    """Raises `ConfigError` for a way that is none, or that is not `able`."""
    if way in WAYS and able(WAYS[way], local, clip):
        return
    names = ", ".join(name for name, kind in WAYS.items() if able(kind, local, clip))
    reason = ""
    if way in WAYS:
        clipping = "with" if clip is not None else "without"
        reason = f" (local.kind {local.kind}, {clipping} clipping of each sample)"
    raise ConfigError("client.way", way, f"auto or one of {names}{reason}")
