"""How the code of `raydpfl.core.native` is compiled, kept in the cache and loaded from there.

>>> place(name(["cc", *FLAGS])).parts[-2:]  # doctest: +ELLIPSIS
('native', 'kernels-....so')
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from raydpfl.storage.files import cache_root, foreign, keep_json, make, open_own_file, read_own_json

SOURCE = Path(__file__).with_name("native") / "kernels.c"
FLAGS = ("-O2", "-ffp-contract=off", "-std=gnu11", "-fPIC", "-shared", "-pthread", "-w")
# by what torch calls it; one by one, as compilers before 2021 know no names for them together
AVX2 = ("-mavx2", "-mfma")
AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq")
KINDS = {"AVX512": (*AVX2, *AVX512), "AVX2": AVX2}
LIMIT = 120  # seconds for the compiler


def command(kind: str) -> list[str] | None:
    """The compiler and its flags, for the kind of an x86 processor, as torch calls it; None for a
    processor that nothing is written for.
    """
    compiler = os.environ.get("CC", "").split() or ["cc"]
    if platform.machine() in ("aarch64", "arm64"):
        return [*compiler, *FLAGS]
    return [*compiler, *FLAGS, *KINDS[kind]] if kind in KINDS else None


def name(command: list[str]) -> str:
    """The file name of what a command makes of the source: all files next to `SOURCE`."""
    files = sorted(path for path in SOURCE.parent.iterdir() if path.suffix in (".c", ".h"))
    text = b"".join(path.read_bytes() for path in files) + " ".join(command).encode()
    return f"kernels-{hashlib.sha256(text).hexdigest()[:16]}.so"


def place(name: str) -> Path:
    """Where the library of this name is in the cache."""
    return cache_root() / "native" / name


def compile_kernel(command: list[str], path: Path) -> None:
    """Compiles to `path`, where another process may be doing the same, and writes its digest next
    to it. Raises OSError without a compiler, or for a folder that others can write to;
    subprocess.SubprocessError where it fails.
    """
    make(path.parent)
    _check_folder(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder) / path.name
        words = [*command, "-o", str(output), str(SOURCE), "-lm"]
        subprocess.run(words, check=True, capture_output=True, timeout=LIMIT)
        output.chmod(0o700)  # whatever the umask is
        keep_json(path.with_suffix(".json"), hashlib.sha256(output.read_bytes()).hexdigest())
        output.replace(path)


def load_library(path: Path) -> ctypes.CDLL:
    """The library that `compile_kernel` has put there: the open file that was checked, and nothing
    that takes its place meanwhile. Raises OSError where there is none, another user could have
    written it, it is not what was compiled, or it cannot be loaded.
    """
    _check_folder(path)
    try:
        digest = read_own_json(path.with_suffix(".json"))
    except ValueError:
        digest = None
    with open_own_file(path) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise OSError(0, "is not what was compiled", str(path))
        # the loader knows a library by its path: this one stays open
        place = Path(f"/proc/self/fd/{os.dup(file.fileno())}")
        return ctypes.CDLL(str(place if place.exists() else path))


def _check_folder(path: Path) -> None:
    reason = foreign(path.parent)
    if reason:
        raise OSError(0, reason, str(path.parent))
