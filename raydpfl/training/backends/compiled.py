"""Stacks of linear layers, client by client, in compiled code (`raydpfl/core/native/`).

The mathematics is that of a plain loop, up to rounding. A client whose steps are many for its rows
X [n, p] trains in sample space. The first layer's weights move only within the span of the rows,

    W = gamma W_0 + A^T X,
    b = gamma b_0 + A^T 1,

so it carries the layer's outputs on all rows, Z = X W^T + b, and A [n, out]: n coefficients an
output instead of p weights. With K = X X^T + 1 (the 1 is the bias), the step along a batch's
gradient G by the outputs is

    Z <- (1 - lr wd) Z - lr K[:, batch] G,
    A[batch] += c_t G,
    W_Q - W_0 = (gamma - 1) W_0 + A^T X,

where learning rate, weight decay, momentum and the proximal term give the numbers c_t and gamma
(`raydpfl.training.span_noise.responses`). Momentum keeps a second Z, the velocity's outputs. A
proximal term mu keeps the first Z, Z_0: its gradient mu (W - W_0) gives mu (Z - Z_0), for the
outputs are linear in W and b. Noise on the steps is drawn in that span too
(`raydpfl.training.span_noise`). Any other client, and one whose gradients are corrected (SCAFFOLD),
trains the first layer as the later ones, by its weights.

What a client gets depends on its own rows and batches alone, so threads take up one client after
another, and all of a client's arrays stay in the cache. Where the factors of a bounding have a
closed form, each update is added up while it is in the cache, with the client's noise; else Python
adds up those that are done.

>>> net = nn.Sequential(nn.Linear(784, 200), nn.LeakyReLU(0.1), nn.Linear(200, 10))
>>> compilation_refusal(stack(net))
'leaky_relu is not compiled'
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from raydpfl.core import native
from raydpfl.core.prng import Purpose
from raydpfl.methods.local.base import Local
from raydpfl.models.linear_stack import RELU, SIGMOID, TANH, Layer, NoStack, stack
from raydpfl.models.tasks import Task
from raydpfl.training.backends.base import UNCLIPPED, Backend, Block, ChunkData, StepNoise, Sum
from raydpfl.training.backends.fused import closed_form, step_factors
from raydpfl.training.span_noise import lengths, responses, step_noises

LANES = 16  # numbers of a vector
# numbers of updates in a block: every block costs Python 0.1 to 0.3 ms, the sum of so many 0.3
BLOCK = 1 << 20
SUM_BLOCK = 1 << 23  # and of those that are added up in the cache
OVERLAP = 20  # clients of a block that is added: Python records it while threads train the next
MAX_LAYERS = 64  # layers
ACTIVATIONS = (None, RELU, TANH, SIGMOID)  # in the order of linear.c


def _fields(**names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of a struct, in the order of the types."""
    kinds = {"i": ctypes.c_int64, "u": ctypes.c_uint64, "f": ctypes.c_float, "d": ctypes.c_double}
    kinds["p"] = ctypes.c_void_p
    return tuple((name, kinds[key[0]]) for key, part in names.items() for name in part.split())


class _Job(ctypes.Structure):
    """Job of linear.c."""

    _fields_ = _fields(
        i1="n p steps batch d layers",
        p="inputs outputs weights biases activations model columns responses lengths",
        i2="squares noisy",
        u="seed purpose round",
        f="keep step decay proximal momentum lr clip",
    )


class _Sum(ctypes.Structure):
    """Sum of chunk.c."""

    _fields_ = _fields(
        d="most above below step largest std",
        u="seed purpose round",
        p="clients draws weights factors totals",
        i="threads fits",
    )


class Compiled(Backend):
    """See the module. Raises `NoStack` for what is no stack of linear layers with `ACTIVATIONS`
    between them, and where nothing can be compiled.
    """

    capabilities = frozenset({UNCLIPPED})
    threads = True

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        super().__init__(module, local, device, task)
        self.layers = stack(module)
        reason = compilation_refusal(self.layers)
        if device.type != "cpu":
            reason = "compiled code is for the CPU"
        if reason:
            raise NoStack(reason)
        self.squares = closed_form(task) == "squares"
        linear = local.linear()
        assert linear is not None  # as it can do no other rule
        self.linear = linear
        # rows of _Job: inputs, outputs, weights, biases, activations
        self._facts = np.array(
            [
                [layer.inputs for layer in self.layers],
                [layer.outputs for layer in self.layers],
                [layer.weight for layer in self.layers],
                [-1 if layer.bias is None else layer.bias for layer in self.layers],
                [ACTIVATIONS.index(layer.activation) for layer in self.layers],
            ],
            np.int64,
        )

    def run(self, parameters: torch.Tensor, chunk: ChunkData) -> Iterator[Block]:
        layer = self.layers[0]
        _check(chunk, layer.inputs, self.layers[-1].outputs, self.squares)
        columns = np.zeros((layer.inputs + 1, -(-layer.outputs // LANES) * LANES), np.float32)
        weight, *bias = (part.numpy() for part in layer.views(parameters))
        columns[:-1, : layer.outputs] = weight.T
        columns[-1, : layer.outputs] = bias[0][0] if bias else 0
        steps, batch = chunk.index.shape[1:]
        shrink_factors, step_responses = responses(self.linear, chunk.lr, steps)
        model = parameters.contiguous().numpy()
        tables = (model, columns, np.array(step_responses, np.float32), lengths(step_responses))
        noise = chunk.noise
        key = (0, 0, 0) if noise is None else (noise.seed, Purpose.STEP_NOISE, noise.t)
        linear = self.linear
        job = _Job(
            *(chunk.y.shape[1], layer.inputs, steps, batch, len(model), len(self.layers)),
            *(_address(array).value for array in (*self._facts, *tables)),
            *(int(self.squares), int(noise is not None), *key),
            *step_factors(linear, chunk.lr),
            *(linear.decay, linear.proximal, linear.momentum, chunk.lr, chunk.clip or 0),
        )
        noise_arrays: tuple[np.ndarray, ...] = (np.zeros(0),) * 3  # not looked at
        if noise is not None:  # empty slots have the client -1
            names = noise.clients.astype(np.uint64), noise.draws.astype(np.uint64)
            noise_arrays = (noise.stds.astype(np.float32), *names)
        gammas = np.array(shrink_factors, np.float32)[chunk.steps]
        data = (chunk.x.numpy(), chunk.y.numpy(), chunk.sizes, chunk.index, chunk.batch_sizes)
        arrays = [*map(np.ascontiguousarray, (*data, chunk.steps, gammas, *noise_arrays))]
        corrections = None if chunk.corrections is None else chunk.corrections.contiguous().numpy()
        clipped_shares = None if chunk.clip is None else chunk.clipped
        d = parameters.numel()
        max_numbers = BLOCK if chunk.into is None else min(SUM_BLOCK, OVERLAP * d)
        blocks = [slots for _, slots in chunk.blocks(d, max_numbers)]
        training = _Training(job, blocks, (*arrays, corrections, clipped_shares), tables)
        yield from (training.blocks() if chunk.into is None else training.add(chunk.into))

    def noises(self, noise: StepNoise, x: np.ndarray, steps: int, lr: float) -> np.ndarray:
        step_responses = responses(self.linear, lr, steps)[1]
        batch = self.local.batch_size(len(x))
        return step_noises(noise, self.layers, x.reshape(len(x), -1), batch, step_responses)


@dataclass(eq=False)
class _Training:
    """The clients of a chunk in training; `arrays` are raydpfl_begin's, `tables` the job's."""

    job: _Job
    block_slots: Sequence[np.ndarray]
    arrays: Sequence[np.ndarray | None]
    tables: Sequence[np.ndarray]  # alive as long as the job

    def __post_init__(self) -> None:
        self._ends = np.cumsum([0, *map(len, self.block_slots)]).tolist()[1:]
        self._count = sum(map(len, self.block_slots))
        self._places = np.zeros(self._count, np.uintp)
        self._losses, self._norms = np.empty((2, self._count))

    def blocks(self) -> Iterator[Block]:
        """The blocks, of which threads train some ahead of what is asked for."""
        lookahead = 2 * native.threads() - 1
        d = self.job.d
        updates: deque[torch.Tensor] = deque()  # of this block and those ahead
        with self._start_threads(None) as train:
            for k, slots in enumerate(self.block_slots):
                for place in range(k + len(updates), min(k + lookahead, len(self.block_slots))):
                    count = len(self.block_slots[place])
                    end = self._ends[place]
                    updates.append(torch.empty(count, d))
                    address = updates[-1].data_ptr()
                    self._places[end - count : end] = address + 4 * d * np.arange(count)
                train(self._ends[k], self._ends[k + len(updates) - 1])
                yield self._block(k, slots, updates.popleft())

    def add(self, into: Sum) -> Iterator[Block]:
        """The blocks without their updates, which are added up."""
        names = (into.clients.astype(np.uint64), into.draws.astype(np.uint64))
        arrays = (*names, into.weights, into.factors, into.totals)
        key = (into.seed, Purpose.CLIENT_NOISE, into.t)
        limits = into.grid.step, into.grid.most
        places = (_address(array).value for array in arrays)
        sums = _Sum(*into.closed_factors, *limits, into.std, *key, *places, len(into.totals), 1)
        empty_updates = torch.empty(0, self.job.d)
        with self._start_threads(sums) as train:
            for k, slots in enumerate(self.block_slots):
                train(self._ends[k], self._count)
                into.fits[0] = bool(sums.fits)
                yield self._block(k, slots, empty_updates)

    @contextmanager
    def _start_threads(self, into: _Sum | None) -> Iterator[Callable[[int, int], None]]:
        """What trains the first so many clients, and those below a limit where threads are free."""
        library = native.library()
        assert library is not None  # as the backend says
        finished_flags = np.zeros(self._count, np.uint8)
        slots = np.concatenate([np.empty(0, np.int64), *self.block_slots])
        arrays = (slots, *self.arrays, self._places, self._losses, self._norms, finished_flags)
        count = ctypes.c_int64(self._count)
        sums = None if into is None else ctypes.byref(into)
        library.raydpfl_begin.restype = ctypes.c_void_p
        handle = library.raydpfl_begin(ctypes.byref(self.job), count, *map(_address, arrays), sums)
        if not handle:
            raise MemoryError("no memory for the outputs of a client's rows")

        def train(end: int, limit: int) -> None:
            nonlocal handle
            bounds = ctypes.c_int64(end), ctypes.c_int64(limit)
            library.raydpfl_train(ctypes.c_void_p(handle), *bounds)
            if end == self._count:  # the threads are free to add up the last block
                library.raydpfl_end(ctypes.c_void_p(handle))
                handle = None

        try:
            yield train
        finally:
            if handle is not None:
                library.raydpfl_end(ctypes.c_void_p(handle))

    def _block(self, k: int, slots: np.ndarray, updates: torch.Tensor) -> Block:
        span = slice(self._ends[k] - len(slots), self._ends[k])
        return Block(slots, updates, self._losses[span], norms=self._norms[span])


def compilation_refusal(layers: tuple[Layer, ...]) -> str | None:
    """Why such a model is not trained by compiled code here; None where it is."""
    if len(layers) > MAX_LAYERS:
        return f"it has more than {MAX_LAYERS} layers"
    unsupported = [layer.activation.name for layer in layers if layer.activation not in ACTIVATIONS]
    if unsupported:
        return f"{unsupported[0]} is not compiled"
    reason = native.library_or_reason()
    return reason if isinstance(reason, str) else None


def _check(chunk: ChunkData, inputs: int, outputs: int, squares: bool) -> None:
    """Raises RuntimeError, as torch does, for rows or targets that do not fit the model."""
    x = chunk.x.numpy()
    y = chunk.y.numpy()
    if x.dtype != np.float32 or x[0, 0].size != inputs:
        raise RuntimeError(f"{x[0, 0].size} {x.dtype} a row, and the model takes {inputs} float32")
    if y.dtype != (np.float32 if squares else np.int64):
        raise RuntimeError(f"targets are {y.dtype}, which is another task's")
    if squares:
        if y[0, 0].size != outputs:
            raise RuntimeError(f"{y[0, 0].size} targets, and the model has {outputs} outputs")
        return
    real = y[np.arange(y.shape[1]) < chunk.sizes[:, None]]
    if len(real) and not (real.min() >= 0 and real.max() < outputs):
        raise RuntimeError(f"a target is not one of the model's {outputs} classes")


def _address(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)
