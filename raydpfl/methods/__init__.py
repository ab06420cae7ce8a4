"""The six choices of an algorithm, and what is measured of them. The bases of the families:

>>> from raydpfl.methods import Bounding, Local, Noise, Probe, Selection, Server, Weights
>>> Bounding.__module__
'raydpfl.methods.bounding.base'
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

FOLDERS = {
    "Bounding": "bounding",
    "Local": "local",
    "Noise": "noise",
    "Probe": "probes",
    "Selection": "selection",
    "Server": "server",
    "Weights": "weights",
}


def __getattr__(name: str) -> Any:  # a family imports its members, which a part of them need not
    if name not in FOLDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{FOLDERS[name]}"), name)
