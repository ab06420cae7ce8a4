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
>>> add(total, rows.numpy(), step=0.5, limit=8.0, factors=np.array([0.5, 1.0]))
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
    library_or_text = library_or_reason()
    return None if isinstance(library_or_text, str) else library_or_text


@functools.cache
def library_or_reason() -> ctypes.CDLL | str:
    """The compiled library, or why there is none and what to do: no compiler, or no kind of code
    for this processor (x86-64 from AVX2 on, and 64-bit ARM).
    """
    command = kernel_build.command(torch.backends.cpu.get_cpu_capability())
    if command is None:
        return "no code is written for this processor"
    try:
        return _open_library(command, kernel_build.name(command))
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


def _open_library(command: list[str], name: str) -> ctypes.CDLL:
    """The library, from the cache or else from a folder of this process alone."""
    path = kernel_build.place(name)
    with suppress(OSError):
        return _load_verified(path)
    with suppress(OSError):  # it is not there, or not as it was compiled
        kernel_build.compile_kernel(command, path)
        return _load_verified(path)
    with tempfile.TemporaryDirectory() as folder:
        private = Path(folder) / name
        kernel_build.compile_kernel(command, private)
        return _load_verified(private)


def _load_verified(path: Path) -> ctypes.CDLL:
    """`kernel_build.load_library`, with a test of noise, norms, sums (0.2 ms). Raises OSError."""
    kernels = kernel_build.load_library(path)
    names = np.arange(15, dtype=np.uint64).reshape(3, 5)
    noise = np.empty((3, 2 * CHECKED), np.float32)
    stds = np.array([1.0, 0.5, 3.0], np.float32)
    _call(kernels.raydpfl_normals, 3, CHECKED, names, stds, noise)
    lengths = np.empty(3)
    _call(kernels.raydpfl_norms32, *noise.shape, noise, lengths)
    total = np.zeros(2 * CHECKED)
    _call(kernels.raydpfl_add, *noise.shape, noise, lengths, None, 2.0**-30, 2.0**20, total)
    test_output = b"".join(array.tobytes() for array in (noise, lengths, total))
    if hashlib.sha256(test_output).hexdigest() != COMPUTED:
        raise OSError(0, "computes something else", str(path))
    return kernels


def _call(function: Callable[..., int], *values: Any) -> int:
    """Calls compiled code with int64 and float64 numbers, and pointers to arrays."""

    def as_ctype(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return ctypes.c_void_p(value.ctypes.data)
        if isinstance(value, float):
            return ctypes.c_double(value)
        return ctypes.c_int64(int(value)) if isinstance(value, (int, np.integer)) else value

    return function(*map(as_ctype, values))


def use(count: int) -> None:
    """Has so many threads of this process, the caller's among them, train clients and add parts of
    sums from now on. Where two threads of Python call at once, one of them has these threads.
    """
    if (kernels := library()) is not None:
        _call(kernels.raydpfl_threads, count)


def threads() -> int:
    """How many `use` has asked for; 1 before, and where nothing is compiled."""
    kernels = library()
    return 1 if kernels is None else kernels.raydpfl_wanted()


def norms(rows: torch.Tensor) -> np.ndarray:
    """The L2 norms of `rows`, float32 or float64 [k, d] in the CPU's memory: float64 [k]. Squares
    are added up in float64: those of every 64th number, then these 64 sums by halves.
    """
    values = rows.numpy()
    kernels = library()
    if kernels is None or not values.flags.c_contiguous or values.dtype not in EXACT:
        return np.array([_norm(row.astype(np.float64)) for row in values])
    lengths = np.empty(len(values))
    single = values.dtype == np.float32
    function = kernels.raydpfl_norms32 if single else kernels.raydpfl_norms64
    _call(function, *values.shape, values, lengths)
    return lengths


def _norm(row: np.ndarray) -> float:
    sums = np.zeros((-(-len(row) // PARTIAL) + 1, PARTIAL))  # the first row is 0, and starts sums
    sums.reshape(-1)[PARTIAL : PARTIAL + len(row)] = row * row
    partials = np.add.reduce(sums, axis=0)
    while len(partials) > 1:
        partials = partials[: len(partials) // 2] + partials[len(partials) // 2 :]
    return float(np.sqrt(partials[0]))


def add(
    total: np.ndarray,
    rows: np.ndarray,
    step: float,
    limit: float,
    factors: np.ndarray | None = None,
    noise: np.ndarray | None = None,
) -> bool:
    """Adds rows[i], or factors[i] rows[i] (+ noise[i]), to `total`: every product and sum rounded,
    and then to multiples of `step`, halves to even ones. Returns whether no number that is added
    exceeds `limit` in size: else the total is any.

    Args:
        total: float64 [d], changed in place.
        rows: float64 [k, d], or float32 with factors.
        step: a power of two.
        limit: 2^51 steps at most.
        factors: float64 [k].
        noise: float64 [k, d].
    """
    kernels = library()
    doubles = [array for array in (total, factors, noise) if array is not None]
    exact = rows.dtype == (np.float64 if factors is None else np.float32)
    exact = exact and all(array.dtype == np.float64 for array in doubles)
    contiguous = all(array.flags.c_contiguous for array in (rows, *doubles))
    if kernels is not None and exact and contiguous:
        limits = float(step), float(limit)
        return bool(_call(kernels.raydpfl_add, *rows.shape, rows, factors, noise, *limits, total))
    for i, row in enumerate(rows):
        contribution = row.astype(np.float64)
        if factors is not None:
            contribution *= factors[i]
        if noise is not None:
            contribution += noise[i]
        if not np.abs(contribution).max(initial=0.0) <= limit:
            return False
        total += np.rint(contribution / step) * step
    return True


def normals(names: np.ndarray, stds: np.ndarray, out: np.ndarray) -> bool:
    """Writes keyed normals (`raydpfl.core.prng.normals`) to `out`; False where nothing is compiled.

    Args:
        names: of the streams, uint64 [C, 5]: seed, purpose, round, client, and the draw over the
            step, of 32 bits each.
        stds: float32 [C].
        out: float32 [C, 2 w]: w cosines, then w sines.
    """
    kernels = library()
    if kernels is None:
        return False
    rows, numbers = out.shape
    _call(kernels.raydpfl_normals, rows, numbers // 2, names, stds, out)
    return True


def read(
    file: int,
    offsets: np.ndarray,
    lengths: np.ndarray,
    into: np.ndarray,
    places: np.ndarray,
    max_bytes: int = 1 << 30,
) -> bool:
    """Reads stretches of a file, those in memory first, while the system fetches the others; False
    where nothing is compiled. Raises EOFError where the file ends before, OSError where it cannot
    be read.

    Args:
        file: its descriptor.
        offsets, lengths: where each begins in the file, and its length, in bytes, int64 [k].
        into: uint8 [n].
        places: where each goes in `into`, int64 [k].
        max_bytes: bytes that are read at once, at most.
    """
    kernels = library()
    if kernels is None:
        return False
    bytes_read = np.zeros(len(offsets), np.int64)
    starts, counts, targets = _contiguous_int64(offsets, lengths, places)
    assert (places >= 0).all() and (places + lengths <= into.size).all()
    arrays = (starts, counts, into, targets, max_bytes, bytes_read)
    error_code = errno.EINTR
    while error_code == errno.EINTR:  # here Python handles the signal
        error_code = _call(kernels.raydpfl_read, ctypes.c_int(file), len(bytes_read), *arrays)
    if error_code < 0:
        raise EOFError
    if error_code:
        raise OSError(error_code, os.strerror(error_code))
    return True


def shuffle_rows(
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
    kernels = library()
    if kernels is None or sizes.max() > RANKED:
        return False
    rows, width = index.shape[1:]
    max_steps = int(steps.max())
    assert max_steps <= rows and (batches <= np.minimum(sizes, width)).all()
    assert (places < len(index)).all() and index.flags.c_contiguous
    arrays = _contiguous_int64(clients, draws, steps, sizes, places, batches)
    seeds = map(ctypes.c_uint64, key)
    _call(kernels.raydpfl_shuffled, len(steps), *seeds, *arrays, max_steps, rows, width, index)
    return True


def _contiguous_int64(*arrays: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(array, np.int64) for array in arrays]
