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
    """One thread for torch's operations: a client's bits depend on their number, and more than one
    loses to a busy neighbour.
    """
    torch.set_num_threads(1)


# a fork lacks the threads that torch has used before it, and would wait for them for ever
os.register_at_fork(after_in_child=single_thread)


def tune_allocator() -> None:
    """Lets glibc keep the memory of freed tensors, up to `KEEP`, rather than give it back and fault
    it in again at every step. Does nothing where the C library is another.
    """
    library = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, KEEP)
        library.mallopt(M_TRIM_THRESHOLD, KEEP)
