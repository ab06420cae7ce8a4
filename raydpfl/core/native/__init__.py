"""The parts of the engine that are compiled, from C: `kernels.c` and what it includes.

The first process that needs them compiles them, in some two seconds, with the C compiler of the
machine (`cc`, or what CC names), into the cache directory, by a digest of the source and the
command (`raydpfl.core.kernel_build`). What another user could have written there, is not what was
compiled, cannot be loaded, or computes something else is compiled once more; where that cannot be
stored, the process compiles a library for itself. Without a compiler `library` is None: sums then
take numpy, with the same bits, clients' rows are read one by one, and training takes another
backend (`raydpfl.training.backends`).

The bits of what the library computes depend neither on the processor nor on the number of threads
(`use`): every sum has a fixed order, and every vector length gives the same.

>>> rows = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
>>> norms(rows)
array([5., 2.])
>>> total = np.zeros(2)
>>> add(total, rows.numpy(), step=0.5, most=8.0, factors=np.array([0.5, 1.0]))
True
>>> total
array([1.5, 4. ])
"""

import ctypes
import errno
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raydpfl.core import kernel_build

EXACT = (np.float32, np.float64)
SHOWN = 200  # characters of an error
RANKED = 128  # rows of a client, as in random_words.c
VECTOR = 16  # numbers to a multiple of which rows are padded, likewise
PARTIAL = 64  # partial sums of a norm
CHECKED = 100  # cosines, and as many sines, of each stream that is looked at when it is loaded
# SHA-256 of the bits of three streams, their norms and a sum of them, in numpy as in compiled code
COMPUTED = "db27e3a4a118d589a79ce743feb1c40bfc7eb30399640c4fd11ffe257307c29d"
CHUNK = 1 << 14  # numbers that numpy takes at once, so that they lie in the cache


def library() -> ctypes.CDLL | None:
    """The compiled library; None where there is none, as `library_or_reason` says."""
    compiled = library_or_reason()
    return None if isinstance(compiled, str) else compiled


@functools.cache
def library_or_reason() -> ctypes.CDLL | str:
    """The compiled library, or why there is none and what to do: no compiler, or no kind of code
    for this processor (x86-64 from AVX2 on, and 64-bit ARM).
    """
    command = kernel_build.command(torch.backends.cpu.get_cpu_capability())
    if command is None:
        return "no code is written for this processor"
    try:
        return _opened(command, kernel_build.name(command))
    except (OSError, subprocess.SubprocessError) as error:
        reason = _line(error)
        remedy = "install a C compiler, or name one in CC"
        if isinstance(error, OSError) and error.errno is None:  # what was compiled is not loaded
            remedy = "name a folder in TMPDIR that code may be run from"
    return f"nothing is compiled here ({reason}); {remedy}"


def _line(error: Exception) -> str:
    """An error in one line: of a compiler's output the first."""
    text = str(error)
    if isinstance(error, subprocess.CalledProcessError | subprocess.TimeoutExpired):
        output = (error.stderr or b"").decode(errors="replace").splitlines()
        text = f"{error.cmd[0]} fails" + (f": {output[0]}" if output else "")
    return " ".join(text.split())[:SHOWN]


def _opened(command: list[str], name: str) -> ctypes.CDLL:
    """The library, from the cache or else from a folder of this process alone."""
    path = kernel_build.place(name)
    with suppress(OSError):
        return _sound(path)
    with suppress(OSError):  # it is not there, or not as it was compiled
        kernel_build.compiled(command, path)
        return _sound(path)
    with tempfile.TemporaryDirectory() as folder:
        private = Path(folder) / name
        kernel_build.compiled(command, private)
        return _sound(private)


def _sound(path: Path) -> ctypes.CDLL:
    """`kernel_build.loaded`, with a test of its noise, norms and sums (0.2 ms). Raises OSError."""
    loaded = kernel_build.loaded(path)
    names = np.arange(15, dtype=np.uint64).reshape(3, 5)
    drawn = np.empty((3, 2 * CHECKED), np.float32)
    stds = np.array([1.0, 0.5, 3.0], np.float32)
    _call(loaded.raydpfl_normals, 3, CHECKED, names, stds, drawn)
    lengths = np.empty(3)
    _call(loaded.raydpfl_norms32, *drawn.shape, drawn, lengths)
    total = np.zeros(2 * CHECKED)
    _call(loaded.raydpfl_add, *drawn.shape, drawn, lengths, None, 2.0**-30, 2.0**20, total)
    computed = b"".join(array.tobytes() for array in (drawn, lengths, total))
    if hashlib.sha256(computed).hexdigest() != COMPUTED:
        raise OSError(0, "computes something else", str(path))
    return loaded


def _call(function: Callable[..., int], *values: Any) -> int:
    """Calls compiled code with int64 and float64 numbers, and pointers to arrays."""

    def converted(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return ctypes.c_void_p(value.ctypes.data)
        if isinstance(value, float):
            return ctypes.c_double(value)
        return ctypes.c_int64(int(value)) if isinstance(value, (int, np.integer)) else value

    return function(*map(converted, values))


def use(count: int) -> None:
    """Has so many threads of this process, the caller's among them, train clients and add parts of
    sums from now on. Where two threads of Python call at once, one of them has these threads.
    """
    if (compiled := library()) is not None:
        _call(compiled.raydpfl_threads, count)


def threads() -> int:
    """How many `use` has asked for; 1 before, and where nothing is compiled."""
    compiled = library()
    return 1 if compiled is None else compiled.raydpfl_wanted()


def norms(rows: torch.Tensor) -> np.ndarray:
    """The L2 norms of `rows`, float32 or float64 [k, d] in the CPU's memory: float64 [k]. Squares
    are added up in float64: those of every 64th number, then these 64 sums by halves.
    """
    values = rows.numpy()
    compiled = library()
    if compiled is None or not values.flags.c_contiguous or values.dtype not in EXACT:
        return np.array([_norm(row.astype(np.float64)) for row in values])
    lengths = np.empty(len(values))
    single = values.dtype == np.float32
    function = compiled.raydpfl_norms32 if single else compiled.raydpfl_norms64
    _call(function, *values.shape, values, lengths)
    return lengths


def _norm(row: np.ndarray) -> float:
    sums = np.zeros((-(-len(row) // PARTIAL) + 1, PARTIAL))  # the first row is 0, and starts sums
    sums.reshape(-1)[PARTIAL : PARTIAL + len(row)] = row * row
    left = np.add.reduce(sums, axis=0)
    while len(left) > 1:
        left = left[: len(left) // 2] + left[len(left) // 2 :]
    return float(np.sqrt(left[0]))


def add(
    total: np.ndarray,
    rows: np.ndarray,
    step: float,
    most: float,
    factors: np.ndarray | None = None,
    noise: np.ndarray | None = None,
) -> bool:
    """Adds rows[i], or factors[i] rows[i] (+ noise[i]), to `total`: every product and sum rounded,
    and then to multiples of `step`, halves to even ones. Returns whether no number that is added
    exceeds `most` in size: else the total is any.

    Args:
        total: float64 [d], changed in place.
        rows: float64 [k, d], or float32 with factors.
        step: a power of two.
        most: 2^51 steps at most.
        factors: float64 [k].
        noise: float64 [k, d].
    """
    compiled = library()
    doubles = [array for array in (total, factors, noise) if array is not None]
    exact = rows.dtype == (np.float64 if factors is None else np.float32)
    exact = exact and all(array.dtype == np.float64 for array in doubles)
    contiguous = all(array.flags.c_contiguous for array in (rows, *doubles))
    if compiled is None or not (exact and contiguous):
        return _added(total, rows, step, most, factors, noise)
    limits = float(step), float(most)
    return bool(_call(compiled.raydpfl_add, *rows.shape, rows, factors, noise, *limits, total))


def _added(
    total: np.ndarray,
    rows: np.ndarray,
    step: float,
    most: float,
    factors: np.ndarray | None,
    noise: np.ndarray | None,
) -> bool:
    """As `add`, in numpy."""
    for i, row in enumerate(rows):
        sent = row.astype(np.float64)
        if factors is not None:
            sent *= factors[i]
        if noise is not None:
            sent += noise[i]
        if not np.abs(sent).max(initial=0.0) <= most:
            return False
        total += np.rint(sent / step) * step
    return True


def normals(names: np.ndarray, stds: np.ndarray, out: np.ndarray) -> bool:
    """Writes keyed normals (`raydpfl.core.prng.normals`) to `out`; False where nothing is compiled.

    Args:
        names: of the streams, uint64 [C, 5]: seed, purpose, round, client, and the draw over the
            step, of 32 bits each.
        stds: float32 [C].
        out: float32 [C, 2 w]: w cosines, then w sines.
    """
    compiled = library()
    if compiled is None:
        return False
    rows, numbers = out.shape
    _call(compiled.raydpfl_normals, rows, numbers // 2, names, stds, out)
    return True


def read(
    file: int,
    at: np.ndarray,
    lengths: np.ndarray,
    into: np.ndarray,
    places: np.ndarray,
    most: int = 1 << 30,
) -> bool:
    """Reads stretches of a file, those in memory first, while the system fetches the others; False
    where nothing is compiled. Raises EOFError where the file ends before, OSError where it cannot
    be read.

    Args:
        file: its descriptor.
        at, lengths: where each begins in the file, and its length, in bytes, int64 [k].
        into: uint8 [n].
        places: where each goes in `into`, int64 [k].
        most: bytes that are read at once, at most.
    """
    compiled = library()
    if compiled is None:
        return False
    done = np.zeros(len(at), np.int64)
    starts, counts, targets = _whole(at, lengths, places)
    assert (places >= 0).all() and (places + lengths <= into.size).all()
    arrays = (starts, counts, into, targets, most, done)
    failed = errno.EINTR
    while failed == errno.EINTR:  # here Python handles the signal
        failed = _call(compiled.raydpfl_read, ctypes.c_int(file), len(done), *arrays)
    if failed < 0:
        raise EOFError
    if failed:
        raise OSError(failed, os.strerror(failed))
    return True


def shuffled(
    key: tuple[int, int, int],
    clients: np.ndarray,
    draws: np.ndarray,
    steps: np.ndarray,
    sizes: np.ndarray,
    places: np.ndarray,
    batches: np.ndarray,
    index: np.ndarray,
) -> bool:
    """Writes the rows that keyed words shuffle to the front, batch by batch, to `index`
    (`raydpfl.training.minibatches`); False where nothing is compiled, or a client has more than
    `RANKED` rows.

    Args:
        key: seed, purpose and round.
        clients: int64 [k].
        draws: int64 [k], below 2^32.
        steps: int64 [k], how many batches a client has, Q at most.
        sizes: int64 [k], its rows.
        places: int64 [k], its place among the C.
        batches: int64 [k], how many of its rows are in a batch, B at most.
        index: int64 [C, Q, B]; batches that a client does not have hold its first rows.
    """
    compiled = library()
    if compiled is None or sizes.max() > RANKED:
        return False
    rows, width = index.shape[1:]
    most = int(steps.max())
    assert most <= rows and (batches <= np.minimum(sizes, width)).all()
    assert (places < len(index)).all() and index.flags.c_contiguous
    arrays = _whole(clients, draws, steps, sizes, places, batches)
    seeds = map(ctypes.c_uint64, key)
    _call(compiled.raydpfl_shuffled, len(steps), *seeds, *arrays, most, rows, width, index)
    return True


def _whole(*arrays: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(array, np.int64) for array in arrays]
