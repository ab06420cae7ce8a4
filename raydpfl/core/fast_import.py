"""Imports of torch, and of what is built on it, in five sixths of the time.

>>> with quickly():
...     import torch
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quickly() -> Iterator[None]:
    """Within, where torch is not yet imported, nothing is garbage-collected: modules never are."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
