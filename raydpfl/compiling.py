"""How the code of `raydpfl.native` is compiled: when it is first needed, or ahead of that, beside
what a command imports.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Thread

from raydpfl import hardware
from raydpfl.files import cache_root

SOURCE = Path(__file__).with_name("native") / "kernels.c"
FLAGS = ("-O2", "-ffp-contract=off", "-std=gnu11", "-fPIC", "-shared", "-pthread", "-w")
# by what torch calls it; one by one, as compilers before 2021 know no names for them together
AVX2 = ("-mavx2", "-mfma")
AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq")
KINDS = {"AVX512": (*AVX2, *AVX512), "AVX2": AVX2}
LIMIT = 120  # seconds for the compiler

_under_way: dict[Path, Thread] = {}


def command(kind: str) -> list[str] | None:
    """What compiles; None for a processor that nothing is written for.

    Args:
        kind: of an x86 processor, as torch calls it; no other has any.
    """
    compiler = os.environ.get("CC", "").split() or ["cc"]
    if platform.machine() in ("aarch64", "arm64"):
        return [*compiler, *FLAGS]
    return [*compiler, *FLAGS, *KINDS[kind]] if kind in KINDS else None


def name(command: list[str]) -> str:
    """The file of what a command makes of the source."""
    text = SOURCE.read_bytes() + " ".join(command).encode()
    return f"kernels-{hashlib.sha256(text).hexdigest()[:16]}.so"


def place(name: str) -> Path:
    """Where the library of this name is kept, in the cache."""
    return cache_root() / "native" / name


def compiled(command: list[str], path: Path) -> None:
    """Compiles to `path`, where another process may be doing the same; or waits for what this
    process compiles to there.

    Raises:
        OSError: there is no compiler, or nowhere to write to.
        subprocess.SubprocessError: it fails.
    """
    thread = _under_way.pop(path, None)
    if thread is not None:
        thread.join()
        if path.exists():
            return
    _compile(command, path)


def _compile(command: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        done = [*command, "-o", str(made), str(SOURCE), "-lm"]
        subprocess.run(done, check=True, capture_output=True, timeout=LIMIT)
        made.replace(path)


def ahead() -> None:
    """Begins to compile in a thread, where the cache lacks the library, for the processor that
    Linux names. Raises nothing: whoever needs the library meets what is in the way.
    """
    made = command(hardware.vectors())
    if made is None:
        return
    path = place(name(made))
    if path.exists() or path in _under_way:
        return

    def work() -> None:
        with suppress(OSError, subprocess.SubprocessError):
            _compile(made, path)

    _under_way[path] = Thread(target=work, name="raydpfl-compiling")
    _under_way[path].start()
