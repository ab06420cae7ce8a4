"""What the processor is, as far as arithmetic differs by it, and how much of it may be used."""

import functools
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from threadpoolctl import threadpool_limits

INFO = Path("/proc/cpuinfo")
BLAS = "OPENBLAS_NUM_THREADS"
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 and ARM

Precision = Literal["float32", "bfloat16", "tf32"]
"""What the products of training are taken in; parameters and updates are float32."""


@functools.cache
def _cpu_info() -> dict[str, str]:
    """What Linux says of the first processor; nothing elsewhere."""
    lines: list[str] = []
    with suppress(OSError):
        lines = INFO.read_text(errors="replace").split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def maker() -> str:
    """Its maker, as Linux has it: GenuineIntel, AuthenticAMD, ...; "" if unknown."""
    return _cpu_info().get("vendor_id", "")


def has_bfloat16() -> bool:
    """Whether it multiplies bfloat16 numbers; True where Linux does not say it."""
    cpu_info = _cpu_info()
    flags = (cpu_info.get("flags") or cpu_info.get("Features") or "").split()
    return not flags or not BFLOAT16.isdisjoint(flags)


def cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads() -> int:
    """Threads that train here: a core each, or OMP_NUM_THREADS (Ray sets it for trials)."""
    count = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(cores(), int(count))) if count.isdecimal() else cores()


@contextmanager
def single_blas() -> Iterator[None]:
    """Within it products of numpy and scipy have the same bits on any number of cores, and any
    thread may start processes while another one multiplies: OpenBLAS, which sums in another order
    with more threads, and hangs in a fork (`pthread_atfork`) where another thread uses them, has
    one thread, as it is loaded and, by the environment, as it will be.
    """
    saved_setting = os.environ.get(BLAS)
    os.environ[BLAS] = "1"
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        if saved_setting is None:
            del os.environ[BLAS]
        else:
            os.environ[BLAS] = saved_setting


def peak_rss_mb() -> float:
    """The largest resident set this process has had, in MB (10^6 bytes)."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6
