"""What a process that trains sets once, before it does."""

from __future__ import annotations

import ctypes
import sys

import torch

# malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP = 1 << 30  # bytes


def single_thread() -> None:
    """One thread for torch's operations: a client's bits depend on their number, and more than one
    loses to a busy neighbour.
    """
    torch.set_num_threads(1)


def tune_allocator() -> None:
    """Lets glibc keep the memory of freed tensors, up to `KEEP`, rather than give it back and fault
    it in again at every step.

    Page faults cost up to a quarter of a round of a convolutional net. Does nothing where the C
    library is another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, KEEP)
        mallopt(M_TRIM_THRESHOLD, KEEP)
