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
    """Within, where torch is not yet imported, nobody looks through what is imported for garbage:
    none of it ever is.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
