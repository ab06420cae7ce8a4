"""What a process that trains sets once, before it does."""

import ctypes
import os
import sys

import torch

# malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP = 1 << 30  # bytes


def single_thread() -> None:
    """One thread for torch's operations: a client's bits depend on their number."""
    torch.set_num_threads(1)


# a fork lacks the threads that torch has used before it, and would wait for them for ever
os.register_at_fork(after_in_child=single_thread)


def tune_allocator() -> None:
    """Lets glibc keep freed memory, up to `KEEP`, rather than fault it in again at every step."""
    library = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, KEEP)
        library.mallopt(M_TRIM_THRESHOLD, KEEP)
