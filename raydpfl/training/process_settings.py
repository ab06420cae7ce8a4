"""What a process that trains sets once, before it does."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch

# malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP = 1 << 30  # bytes
MADV_HUGEPAGE = 14  # mman.h
HUGE = 1 << 21  # bytes of a huge page
POOL = 1 << 28  # bytes


def single_thread() -> None:
    """One thread for torch's operations: a client's bits depend on their number, and more than one
    loses to a busy neighbour.
    """
    torch.set_num_threads(1)


# a fork lacks the threads that torch has used before it, and would wait for them for ever
os.register_at_fork(after_in_child=single_thread)


def tune_allocator() -> None:
    """Lets glibc keep the memory of freed tensors, up to `KEEP`, rather than give it back and fault
    it in again at every step, and has the next `POOL` bytes of it in huge pages, where the kernel
    has these for who asks.

    Page faults cost up to a quarter of a round of a convolutional net, and finding small pages a
    tenth. Does nothing where the C library is another.
    """
    library: Any = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(library, "mallopt"):
        return
    library.mallopt(M_MMAP_THRESHOLD, KEEP)
    library.mallopt(M_TRIM_THRESHOLD, KEEP)
    library.malloc.restype = ctypes.c_void_p
    at = library.malloc(ctypes.c_size_t(POOL))  # which nothing writes to: no memory yet
    if at:
        first = -(-at // HUGE) * HUGE
        library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(POOL - HUGE), MADV_HUGEPAGE)
        library.free(ctypes.c_void_p(at))
