"""What a module, or the file that it comes from, keeps in Python next to parameters and buffers.

>>> class Counts(nn.Module):
...     calls = 0
...     def forward(self, x):
...         self.calls += 1
...         return x
>>> module = Counts()
>>> before = python_state(module)
>>> _ = module(torch.ones(1))
>>> changed_names(before, python_state(module))
['calls']

A client's update must not depend on who was trained before it in the same process. Numbers, texts,
arrays, generators and containers of these are looked at: attributes of the module and of those
within it, private attributes of a member, and globals and class attributes of the user's own files.
"""

import pickle
import random
import sys
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import nn

from raydpfl.config.source_code import LIBRARIES, SHIPPED_PACKAGES

MAX_ARRAY_BYTES = 1 << 16  # bytes of an array whose contents are not looked at
MAX_ENTRIES = 1000  # entries of a container that are not looked at
MAX_DEPTH = 4  # containers within containers
MODULE_ATTRIBUTES = {*vars(nn.Module()), "__annotations__"}
LIBRARY_PACKAGES = (*SHIPPED_PACKAGES, *LIBRARIES, "functools")


def python_state(*roots: Any) -> dict[str, bytes]:
    """By name, a text of all that they and their files keep. `roots`: modules, members of the
    user's own, classes, or functions.
    """
    texts: dict[str, bytes] = {}
    files: dict[str, ModuleType] = {}
    for root in roots:
        parts = root.named_modules() if isinstance(root, nn.Module) else [("", root)]
        for name, part in parts:
            owners: tuple[Any, ...] = (part if isinstance(part, type) else type(part)).__mro__
            for owner in (part, *owners) if isinstance(part, FunctionType) else owners:
                file = sys.modules.get(owner.__module__)
                if file and owner.__module__.partition(".")[0] not in LIBRARY_PACKAGES:
                    files[owner.__module__] = file
                    _take(texts, vars(owner), f"{owner.__qualname__}.")
            if isinstance(part, BaseModel):
                _take(texts, part.__pydantic_private__ or {}, "")
            if isinstance(part, nn.Module):
                _take(texts, vars(part), f"{name}." if name else "")
    for name, file in files.items():
        _take(texts, vars(file), f"{name}.")
    return texts


def changed_names(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """The names of what is not as it was."""
    return [name for name in before | after if before.get(name) != after.get(name)]


def _take(texts: dict[str, bytes], values: Any, prefix: str) -> None:
    for name, value in values.items():
        if name not in MODULE_ATTRIBUTES and not name.startswith("__"):
            text = _text(value, MAX_DEPTH)
            if text is not None:
                texts[prefix + name] = text


def _text(value: Any, depth: int) -> bytes | None:
    """None for what is not looked at."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return pickle.dumps((type(value).__name__, value))
    if isinstance(value, random.Random):
        return pickle.dumps(value.getstate())
    if isinstance(value, torch.Generator):
        return pickle.dumps(value.get_state().numpy())
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        return pickle.dumps(value)
    if isinstance(value, np.ndarray):
        small = value.nbytes <= MAX_ARRAY_BYTES and not value.dtype.hasobject
        return pickle.dumps((value.shape, value.tobytes() if small else None))
    if isinstance(value, (dict, list, tuple, set, frozenset)) and len(value) > MAX_ENTRIES:
        return str(len(value)).encode()
    if depth and isinstance(value, dict):
        return b"".join(
            repr(name).encode() + (_text(item, depth - 1) or b"?") for name, item in value.items()
        )
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return b"".join(_text(item, depth - 1) or b"?" for item in value) + str(len(value)).encode()
    return None
