"""The device that clients train on: which one, how it is set so that bits stay, and whose fault it
is where something goes wrong there.

On a GPU the same experiment gives the same bits on the same model of GPU under the same versions of
CUDA and cuDNN (`facts`), and other bits than on a CPU. For that no operation may add by atomics or
choose its algorithm by timing, and float32 is float32 (`settle`).

>>> choose_device(0)
device(type='cpu')
>>> facts(0)
{}
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from raydpfl.errors import ConfigError, DeviceError, DeviceLost, message

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")  # with which cuBLAS gives the same bits every time
CPU = torch.device("cpu")
# torch's words where cuDNN has no algorithm left: it goes on to the next where one fails, for want
# of memory too, and takes none that adds by atomics
ENGINE = "unable to find an engine"
# in the message of an error other than torch.OutOfMemoryError
FULL = (
    "ALLOC_FAILED", "ALLOCATION_FAILED", "CUDA out of memory", "CUDA error: out of memory", ENGINE,
)  # fmt: skip
SHOWN = 200  # characters of an error
SMALL = 16_000_000_000  # bytes of memory, of a GPU that is not seen
PINNED = 1 << 28  # bytes of a copy at most that goes through pinned memory
GROUP = 1 << 22  # numbers of the vectors whose norms are taken at once
# by `allow_tf32`, in every torch
LEGACY: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
# what undoes each `settle` of this process, the last one last
_undo: list[Callable[[], None]] = []


def choose_device(num_gpus: float, machine: str = "this machine") -> torch.device:
    """Where an actor with such a share of GPUs trains: the CPU for none. Raises `ConfigError`,
    which names the node, where torch finds no GPU.
    """
    if num_gpus <= 0:
        return CPU
    if not torch.cuda.is_available():
        expected = f"0; {machine} has no GPU"
        if not torch.backends.cuda.is_built():
            expected += f" that torch {torch.__version__} can use, which is built without CUDA"
        raise ConfigError("client.num_gpus", num_gpus, expected)
    return torch.device("cuda")


def settle(device: torch.device, num_gpus: float, tf32: bool = False) -> None:
    """Sets this process so that the device gives the same bits every time, and bounds its memory
    there to its share, before CUDA starts in the process; nothing for a CPU. With `tf32` products
    of float32 numbers are taken in TF32. Raises `ConfigError` for another setting of cuBLAS.
    """
    if device.type == "cpu":
        return
    _workspace()
    cudnn = torch.backends.cudnn
    _undo.append(_state())
    torch.use_deterministic_algorithms(True)
    # deterministic algorithms would write over all new memory first, which takes time
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    cudnn.deterministic = True
    cudnn.benchmark = False
    # full float32, or TF32 (10 bits): with it a clipped gradient passed its bound by 1e-3 of it
    for backend in LEGACY:
        backend.allow_tf32 = tf32
    for backend in () if tf32 else _precision_backends():
        # or the process has asked for less than float32 wherever nothing else is said
        low_precision = getattr(torch.backends, "fp32_precision", "none") not in ("ieee", "none")
        if backend.fp32_precision not in ("ieee", "none") or low_precision:
            backend.fp32_precision = "ieee"
    current = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # not in torch 2.6
    fraction = current() if current else 1.0
    _undo.append(lambda: torch.cuda.set_per_process_memory_fraction(fraction))
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_gpus))


def _workspace() -> None:
    value = os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    if value not in WORKSPACES:
        raise ConfigError(WORKSPACE, value, f"unset, {WORKSPACES[0]} or {WORKSPACES[1]}")


def _precision_backends() -> list[Any]:
    """What says by name how exact float32 is, from torch 2.9 on."""
    places = [getattr(torch.backends.cudnn, name, None) for name in ("conv", "rnn")]
    places.append(torch.backends.cuda.matmul)
    return [place for place in places if hasattr(place, "fp32_precision")]


def _state() -> Callable[[], None]:
    """A function that restores what `settle` sets of torch."""
    cudnn = torch.backends.cudnn
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cudnn_flags = (cudnn.deterministic, cudnn.benchmark)
    legacy = []
    for backend in LEGACY:
        with suppress(RuntimeError):  # it was set by the newer names, one by one
            legacy.append((backend, backend.allow_tf32))
    precisions = [(backend, backend.fp32_precision) for backend in _precision_backends()]

    def undo() -> None:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        cudnn.deterministic, cudnn.benchmark = cudnn_flags
        for backend, allow_tf32 in legacy:
            backend.allow_tf32 = allow_tf32
        for backend, precision in precisions:
            backend.fp32_precision = precision

    return undo


@contextmanager
def preserve_settings() -> Iterator[None]:
    """Restores what `settle` sets of torch within."""
    depth = len(_undo)
    try:
        yield
    finally:
        while len(_undo) > depth:
            _undo.pop()()


def facts(num_gpus: float) -> dict[str, str]:
    """What the bits of a GPU depend on, by name; empty without one."""
    if num_gpus <= 0 or not torch.cuda.is_available():
        return {}
    _workspace()
    gpu = _properties()
    return {
        "device": f"{gpu.name}, compute {gpu.major}.{gpu.minor}, "
        f"{gpu.multi_processor_count} multiprocessors",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "cublas": os.environ[WORKSPACE],
    }


def _properties() -> Any:
    """Those of the GPU that this process takes."""
    return torch.cuda.get_device_properties(torch.cuda.current_device())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory left, as far as the error says."""
    full = isinstance(error, RuntimeError) and any(text in str(error) for text in FULL)
    return full or isinstance(error, torch.OutOfMemoryError)


def raise_device_error(device: torch.device, error: BaseException) -> None:
    """Raises `DeviceError` where the device had no memory left, or cuDNN no algorithm, `DeviceLost`
    where it no longer works for this process, and nothing for any other error.
    """
    if device.type == "cpu" or isinstance(error, DeviceError):
        return
    if is_out_of_memory(error):
        remedy = "raise client.num_gpus, or lower client.chunk, local.batch or evaluate.batch"
        cause = "the GPU has no memory left"
        if ENGINE in str(error):
            cause = "cuDNN has no memory, or no algorithm without atomics, for a convolution"
        raise DeviceError(f"{cause}; {remedy} ({message(error, SHOWN)})") from None
    try:
        torch.cuda.synchronize()
    except Exception:
        raise DeviceLost(f"the GPU failed: {message(error, SHOWN)}; go on with --resume") from None


@contextmanager
def device_errors(device: torch.device) -> Iterator[None]:
    """Raises what `raise_device_error` does for an error from within, or that error."""
    try:
        yield
    except Exception as error:
        raise_device_error(device, error)
        raise


def memory(num_gpus: float) -> int:
    """Bytes of GPU memory that are an actor's, 0 for one without; of a small GPU where this process
    sees none.
    """
    if num_gpus <= 0:
        return 0
    whole = _properties().total_memory if torch.cuda.is_available() else SMALL
    return int(min(1.0, num_gpus) * whole)


def move_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on `device`, through pinned memory, which waits for nothing that the
    device was asked before; a large one directly, to take less of the host's memory. The same
    tensor where it is there already, and where `device` is the CPU.
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor
    if tensor.nbytes > PINNED:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def index(places: np.ndarray, device: torch.device) -> torch.Tensor:
    """Places along an axis, int64 [k], for an index without a wait for the device."""
    return move_tensor(torch.from_numpy(places), device)


def norms(vectors: torch.Tensor) -> torch.Tensor:
    """The L2 norms of k vectors, float64 [k, d], on the CPU, for which a GPU is waited for once. A
    GPU sums up a row otherwise among other numbers of rows, so it is given a shape by d alone.
    """
    if vectors.device.type == "cpu":
        return torch.linalg.vector_norm(vectors, dim=1)
    k, d = vectors.shape
    rows = max(1, GROUP // max(d, 1))
    lengths = []
    for part in vectors.split(rows):
        group = part if len(part) == rows else F.pad(part, (0, 0, 0, rows - len(part)))
        lengths.append(torch.linalg.vector_norm(group, dim=1))
    return torch.cat(lengths)[:k].cpu()


def synchronise(device: torch.device) -> None:
    """Waits for what the device has been asked, so that its errors are raised here."""
    if device.type != "cpu":
        torch.cuda.synchronize()


def empty_cache(device: torch.device) -> None:
    """Gives memory that torch keeps for later back to the device."""
    if device.type != "cpu":
        torch.cuda.empty_cache()


def check_numbers(device: torch.device, values: np.ndarray, below: int, kind: str) -> None:
    """Raises IndexError for integers `values` [...] (labels or tokens: `kind` says it) that are not
    from 0 to below `below`, before they reach a GPU, which the process could not use any more. A
    CPU raises it by itself.
    """
    if device.type == "cpu" or values.dtype.kind not in "iu" or not values.size:
        return
    min_value, max_value = int(values.min()), int(values.max())
    if min_value < 0 or max_value >= below:
        wrong = min_value if min_value < 0 else max_value
        raise IndexError(f"{kind} {wrong} is out of bounds: they are from 0 to {below - 1}")
