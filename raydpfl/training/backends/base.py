"""The contract of a backend: the mathematics of a plain loop, and bits that depend on the client
alone.

A backend trains a chunk of C clients. A client's update depends on its rows, batches and key, on
its slot, on the shapes of the chunk and its clients' step counts (`ChunkData.planned_steps`), never
on what else stands in the other slots: a client alone in its chunk has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from raydpfl.core import prng
from raydpfl.core.device import move_tensor
from raydpfl.core.hardware import Precision
from raydpfl.core.messages import Grid
from raydpfl.core.prng import Purpose
from raydpfl.methods.local.base import Local, Step
from raydpfl.methods.schedules import Schedule
from raydpfl.models.tasks import Task

BLOCK = 1 << 18  # numbers of updates in a block
ALIGNMENT = 64  # bytes: where torch's own tensors begin

Batches = list[tuple[torch.Tensor | None, torch.Tensor]]
"""The rows and the shares of every step; see `ChunkData.batches`."""


@dataclass(frozen=True)
class Block:
    """The updates of consecutive clients of a chunk, which the reader may overwrite."""

    slots: np.ndarray  # int64 [k], ascending
    updates: torch.Tensor  # float32 [k, d], on the device; [0, d] where `ChunkData.into` has them
    losses: np.ndarray  # float64 [k]: the mean over the steps of the batches' losses
    local: torch.Tensor | None = None  # float32 [k, count]: local parameters, if there are any
    norms: np.ndarray | None = None  # float64 [k]: `native.norms` of the updates, if computed

    def part(self, span: slice, offset: int = 0) -> Block:
        """The clients of a slice, with `offset` added to their slots."""
        local = None if self.local is None else self.local[span]
        norms = None if self.norms is None else self.norms[span]
        slots = self.slots[span] + offset
        return Block(slots, self.updates[span], self.losses[span], local, norms)

    def singles(self) -> Iterator[Block]:
        """A block for every client."""
        for place in range(len(self.slots)):
            yield self.part(slice(place, place + 1))

    def clients(self) -> Iterator[tuple[int, torch.Tensor, float]]:
        """(slot, update float32 [d], loss) of every client."""
        yield from zip(self.slots.tolist(), self.updates, self.losses.tolist(), strict=True)


def spans(end: int, d: int, max_numbers: int | None = None) -> Iterator[slice]:
    """The slots up to `end` in parts of at most `max_numbers` (`BLOCK`) numbers, or one client."""
    width = max(1, (max_numbers or BLOCK) // d)
    for start in range(0, end, width):
        yield slice(start, min(start + width, end))


@dataclass(frozen=True)
class Starts:
    """Parameters with which clients start and end (`raydpfl.models.trained`); a slot's `final` is
    written by the time that the slot is given. `to_model`: rules pull a client to the round's
    model, not to where it started.
    """

    initial: torch.Tensor  # float32 [C, D + b]
    final: torch.Tensor  # likewise
    to_model: bool = False

    @classmethod
    def at(cls, initial: torch.Tensor, to_model: bool = False) -> Starts:
        """Clients that have not trained yet."""
        return cls(initial, initial.clone(), to_model)


@dataclass(frozen=True)
class StepNoise:
    """The key of the noise on the steps of a chunk's clients. Called with slots and a step, it
    gives the noise on all parameters, float32 [slots, d].
    """

    seed: int
    t: int
    clients: np.ndarray  # int64 [C]
    draws: np.ndarray  # int64 [C]
    stds: np.ndarray  # float64 [C], of the noise on the mean gradient
    d: int
    device: torch.device

    def __call__(self, slots: Sequence[int], step: int) -> torch.Tensor:
        noise = prng.clients_normals(
            self.seed,
            Purpose.STEP_NOISE,
            self.d,
            t=self.t,
            step=step,
            clients=self.clients[slots],
            draws=self.draws[slots],
            stds=self.stds[slots],
        )
        return move_tensor(noise, self.device)

    def client_step_noise(self, step: int, count: int) -> np.ndarray:
        """The first `count` numbers of the only client at a step: float64 [count]."""
        key = {"client": int(self.clients[0]), "draw": int(self.draws[0]), "step": step}
        normals = prng.normals(self.seed, Purpose.STEP_NOISE, count, t=self.t, **key)
        return normals.double().numpy() * float(self.stds[0])


@dataclass(frozen=True)
class Sum:
    """Where a backend in `threads` adds up updates while they are in the cache, as
    `raydpfl.core.exact_sum.add` does: each times its factor and weight, with its client's noise. An
    update that is not finite counts as 0.
    """

    # see `raydpfl.methods.bounding.Bounding.closed`
    closed_factors: tuple[float, float, float]
    weights: np.ndarray  # float64 [C]
    std: float  # of `raydpfl.methods.noise.keyed_noise.client_noise` on each; 0: none
    seed: int  # of that noise, and the round, the clients and their draws, int64 [C]
    t: int
    clients: np.ndarray
    draws: np.ndarray
    grid: Grid
    # float64 [threads, d]: the sum of every thread, with d rounded up to a multiple of
    # `raydpfl.core.native.VECTOR`
    totals: np.ndarray
    factors: np.ndarray  # float64 [C], of those that have trained
    fits: np.ndarray  # bool [1]: all of them are in the grid's range


@dataclass(frozen=True)
class ChunkData:
    """What the clients of a chunk train on, on the backend's device."""

    # float32 or int64 [C, n, *shape]; rows from sizes[i] on are padding, and may hold anything
    x: torch.Tensor
    y: torch.Tensor  # int64 or float32 [C, n, *target]
    sizes: np.ndarray  # int64 [C]; 0: an empty slot
    index: np.ndarray  # int64 [C, Q, B], rows of each batch; Q of the client with most steps
    steps: np.ndarray  # int64 [C], how many of the Q every client makes
    batch_sizes: np.ndarray  # int64 [C], how many of the B are real
    slots: Sequence[int]  # the slots to train, none of them empty
    lr: float  # of the round
    generator: Callable[[int], torch.Generator]  # of a slot's client, for what its module draws
    clip: float | None = None  # the bound on the L2 norm of one sample's gradient
    corrections: torch.Tensor | None = None  # float32 [C, d], added to every gradient
    noise: StepNoise | None = None  # on the mean gradients of the steps
    # float64 [C], which the backend fills: the share of a slot's (sample, step) pairs with a clip
    # factor below 1
    clipped: np.ndarray | None = None
    within: Schedule | None = None  # of the learning rate from step to step
    starts: Starts | None = None  # None: all start at the round's model
    # int64 [C]: steps of all clients of the chunk, also those that do not train here (`active`);
    # None: those of the clients here
    planned_steps: np.ndarray | None = None
    into: Sum | None = None  # where updates are added up; None: blocks have them

    def rate(self, k: int) -> float:
        """The learning rate of step k."""
        return self.lr if self.within is None else self.within.lr_at(self.lr, k)

    def start(self, parameters: torch.Tensor, slot: int) -> torch.Tensor:
        """Where a client starts, float32 [D + b]; `parameters`: the round's model, [D]."""
        return parameters if self.starts is None else self.starts.initial[slot]

    @cached_property
    def active(self) -> list[int]:
        """How many slots every step takes, up to the last whose client makes it: by all clients of
        the chunk, as a product's bits may depend on the number of matrices; never growing.
        """
        max_steps = self.index.shape[1]
        counts = self.planned_steps
        if counts is None:
            counts = np.where(self.sizes > 0, self.steps, max_steps)
        most_steps = np.maximum.accumulate(counts[::-1])[::-1]  # of a slot or any after it
        return np.searchsorted(-most_steps, -np.arange(max_steps)).tolist()

    @cached_property
    def finished_slots(self) -> list[torch.Tensor | None]:
        """Of every step the slots that it takes and whose client does not make it, int64 [m]."""
        slots = np.asarray(self.slots, np.int64)
        ends = self.steps[slots]
        parts = [slots[(ends <= k) & (slots < count)] for k, count in enumerate(self.active)]
        return [self._on_device(torch.from_numpy(part)) if len(part) else None for part in parts]

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return move_tensor(tensor, self.y.device)

    def blocks(self, d: int, max_numbers: int | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """For every block of updates of `d` numbers (see `spans`): the slots that it spans, and
        those of them to train, int64 [k], at least one.
        """
        slots = np.asarray(self.slots, dtype=np.int64)
        numbers = d if self.y.device.type == "cpu" else 1  # a GPU takes the chunk as one
        for span in spans(len(self.sizes), numbers, max_numbers):
            block_slots = slots[(slots >= span.start) & (slots < span.stop)]
            if len(block_slots):
                yield span, block_slots

    def step_noise(self, step: int) -> torch.Tensor | None:
        """The noise on the mean gradients of a step, float32 [c, d] of the c slots that it takes, 0
        for those that are empty or done; None if there is none.
        """
        if self.noise is None:
            return None
        slots = [slot for slot in self.slots if step < self.steps[slot]]
        slot_noise = self.noise(slots, step)
        active = self.active[step]
        if len(slot_noise) == active:
            return slot_noise
        noise = slot_noise.new_zeros(active, slot_noise.shape[1])
        return noise.index_copy_(0, move_tensor(torch.tensor(slots), slot_noise.device), slot_noise)

    @property
    def _is_full_batch(self) -> bool:
        """Whether a batch is all rows."""
        return self.index.shape[2] == self.y.shape[1]

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y. What is padding is 0 in y, and in x where a batch is all rows, which x is then
        aligned for, as the bits of a product may depend on it; else backends `take` copies.
        """
        x, y = self.x, self.y
        full = (self.sizes == y.shape[1]).all()
        is_aligned = x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
        if self._is_full_batch and not (full and is_aligned):
            x = x.clone(memory_format=torch.contiguous_format)
        if full:
            return x, y
        padding = np.arange(y.shape[1]) >= self.sizes[:, None]
        mask = self._on_device(torch.from_numpy(padding).view(*padding.shape, *[1] * (y.dim() - 2)))
        if self._is_full_batch:
            x.masked_fill_(mask.view(*padding.shape, *[1] * (x.dim() - 2)), 0)
        return x, y.masked_fill(mask, 0)

    def batches(self) -> Batches:
        """For each step, of the c slots that it takes (`active`), its rows, int64 [c B] into `rows`
        and the share of each in its client's mean over the batch, float32 [c, 1, B].

        Where a batch is all rows, the rows are None, for all of them in their order, and the shares
        are [c, 1, n]. The share of padding, of a place that a smaller batch leaves empty, and of a
        client that is done, is 0.
        """
        clients, n = self.y.shape[:2]
        steps, width = self.index.shape[1:]
        row_mask = np.arange(width) < self.batch_sizes[:, None]
        step_mask = np.arange(steps)[:, None, None] < self.steps[:, None]
        means = step_mask * (row_mask / np.maximum(self.batch_sizes, 1)[:, None])
        shares = torch.from_numpy(means.astype(np.float32))  # [Q, C, B]
        index = torch.from_numpy(self.index).transpose(0, 1)
        rows: list[torch.Tensor | None] = [None] * steps
        if self._is_full_batch:
            shares = torch.zeros(steps, clients, n).scatter_add_(2, index, shares)
        else:
            places = (index + torch.arange(0, clients * n, n)[:, None]).flatten(1)
            pairs = zip(self._on_device(places), self.active, strict=True)
            rows = [part[: count * width] for part, count in pairs]
        by_step = zip(self._on_device(shares[:, :, None]), self.active, strict=True)
        return list(zip(rows, (part[:count] for part, count in by_step), strict=True))

    def means(self, sums: torch.Tensor) -> np.ndarray:
        """The clients' mean losses, float64 [C], from the sums over their steps, float32 [C]."""
        steps = torch.from_numpy(np.maximum(self.steps, 1).astype(np.float32))
        return (sums.cpu() / steps).double().numpy()

    def count_clipped(self, factors: list[torch.Tensor]) -> None:
        """Fills `clipped`, where wanted, from every step's clip factors, [c, B] or [c, B, 1]."""
        if self.clipped is None or self.clip is None:
            return
        all_factors = factors[0].new_zeros(len(factors), len(self.sizes), factors[0][0].numel())
        for row, factor in zip(all_factors, factors, strict=True):
            row[: len(factor)] = factor.flatten(1)
        clip_mask = all_factors.lt(1).transpose(0, 1).cpu().numpy()
        if self._is_full_batch:  # of all rows, whose order a batch need not keep
            clip_mask = np.take_along_axis(clip_mask, self.index, 2)
        slots = list(self.slots)
        steps, width = self.index.shape[1:]
        counts = self.steps[slots, None]
        batch = self.batch_sizes[slots]
        mask = (np.arange(steps) < counts)[:, :, None] & (np.arange(width) < batch[:, None, None])
        self.clipped[slots] = (clip_mask[slots] & mask).sum((1, 2)) / (counts[:, 0] * batch)


@dataclass(eq=False)
class Rule:
    """The steps of any rule on the clients' parameters `x`, float32 [c, d], or one's, [d]."""

    local: Local
    chunk: ChunkData
    x: torch.Tensor
    model: torch.Tensor  # what the rule pulls to
    corrections: torch.Tensor | None  # added to every gradient

    def __post_init__(self) -> None:
        self.tails: list[torch.Tensor] = []  # x of slots that steps took before, the last first
        self.state = self.local.fresh(self.x)

    @classmethod
    def from_chunk(cls, local: Local, model: torch.Tensor, chunk: ChunkData) -> Rule:
        """The rule at the start of a chunk; `model` is x_t, float32 [D]. It is copied, as
        user-defined code may write to it.
        """
        model = model.clone()
        x = model.expand(len(chunk.sizes), -1).clone()
        if chunk.starts is not None:
            x = chunk.starts.initial[:, : len(model)].clone()
            model = model if chunk.starts.to_model else x.clone()
        return cls(local, chunk, x, model, chunk.corrections)

    @torch.no_grad()
    def client_step(self, gradient: torch.Tensor, k: int) -> torch.Tensor:
        """x after the k-th step of one client, from its gradient before corrections."""
        if self.corrections is not None:
            gradient = gradient + self.corrections
        self.x, self.state = self.local.step(self.x, gradient, self.state, self._make_step(k))
        return self.x

    @torch.no_grad()
    def step(self, gradient: torch.Tensor, k: int) -> torch.Tensor:
        """x after the k-th step, from the gradients before corrections, both float32 [c, d]."""
        count = len(gradient)
        gradient = self._narrow(gradient)
        previous_x = self.x
        x = self.client_step(gradient, k)
        slots = self.chunk.finished_slots[k]
        self.x = x.contiguous() if slots is None else x.index_copy(0, slots, previous_x[slots])
        if count < len(previous_x):
            self.x = torch.cat([self.x[:count], previous_x[count:]])
        return self.x[:count]

    @torch.no_grad()
    def perturbed_parameters(self, gradient: torch.Tensor, k: int) -> torch.Tensor:
        """Where the gradient of the k-th step is to be taken, float32 [c, d], from that at x."""
        count = len(gradient)
        gradient = self._narrow(gradient)
        point = self.local.perturb(self.x, gradient, self.state, self._make_step(k))
        return point[:count].contiguous()

    def final(self) -> torch.Tensor:
        """x after the last step, of all slots, float32 [C, d]."""
        return torch.cat([self.x, *reversed(self.tails)]) if self.tails else self.x

    def _narrow(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradients of the slots that the rule goes on with: [c, d], or all before, with 0,
        where the state may not be cut by clients.
        """
        count = len(gradient)
        extra_rows = len(self.x) - count
        if not extra_rows:
            return gradient
        if not all(_is_by_client(part, len(self.x)) for part in tree_leaves(self.state)):
            return torch.cat([gradient, gradient.new_zeros(extra_rows, gradient.shape[1])])
        self.tails.append(self.x[count:].clone())
        self.x = self.x[:count]
        self.state = tree_map(
            lambda part: part[:count] if isinstance(part, torch.Tensor) and part.dim() else part,
            self.state,
        )
        if self.corrections is not None:
            self.corrections = self.corrections[:count]
        if self.model.dim() == 2:
            self.model = self.model[:count]
        return gradient

    def _make_step(self, k: int) -> Step:
        return Step(k, self.chunk.rate(k), self.model)


def _is_by_client(part: Any, count: int) -> bool:
    """Whether a part of a rule's state is a matrix with a row for every client, or one number. One
    with more axes may be stacked in front, as many as there are clients.
    """
    if isinstance(part, torch.Tensor):
        return part.dim() == 0 or (part.dim() == 2 and len(part) == count)
    return part is None or isinstance(part, (int, float))


def take(source: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """`source` [c, n, ...] at `rows` (see `ChunkData.batches`), [c, B, ...]; or `source` itself."""
    if rows is None:
        return source
    clients, _, *rest = source.shape
    return source.flatten(0, 1).index_select(0, rows).view(clients, -1, *rest)


# at most what the square of a float32 that underflows has lost
UNDERFLOW_SQUARE = 2.0**-126


def clip_factors(norms: torch.Tensor, bound: float) -> torch.Tensor:
    """min(1, bound / norm), what a gradient is multiplied by; NaN for a norm that is not finite, so
    that it shows in the update. Squares that underflow take 1e-19 sqrt(d) at most from a norm, far
    less than the least bound (`raydpfl.core.messages.BOUNDS`).

    All in float32, with squares added up by halves or in blocks, not one after another: a clipped
    gradient may be longer than the bound by a few 1e-7 of it, and of 1e7 numbers by a few 1e-6.
    """
    return (bound / norms).clamp(max=1).add(norms, alpha=0)


# what may be asked of a backend, in the words in which it is refused
LOCAL_PARAMETERS = "local parameters of clients"
LOCAL_BUFFERS = "local buffers of clients"
BFLOAT16 = "products in bfloat16"
UNCLIPPED = "samples that are not clipped"
TRAIN = "a user-defined train"
PERTURBED = "a second gradient in a step"
ANY_RULE = "a rule that is not linear"

CORE = {LOCAL_PARAMETERS, BFLOAT16, UNCLIPPED, PERTURBED, ANY_RULE}  # of most backends


class Backend:
    """Carries out a local rule. Made once from the module, which it never changes. Raises
    `raydpfl.models.linear_stack.NoStack`, or whatever the module does, where it does not fit.
    """

    capabilities: ClassVar[frozenset[str]]  # of what may be asked, see above
    # products of a row with a weight that take as long as the calls of a chunk's step
    calls: ClassVar[int] = 1 << 21
    # whether a slot is trained when it is asked for, and not before
    one_by_one: ClassVar[bool] = False
    # whether the threads of compiled code (`raydpfl.core.native.use`) train its clients: a client's
    # bits depend on its own rows, batches and steps alone, and updates can be added up as they are
    # trained (`ChunkData.into`)
    threads: ClassVar[bool] = False

    # whether the module's own code is called for several samples or clients at once, where the loop
    # calls it for each
    whole_batches: ClassVar[bool] = False

    module: nn.Module | None = None  # the working copy, where its own code is run
    # of products; TF32 is a setting of the process (`raydpfl.core.device.settle`)
    precision: Precision = "float32"

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        self.local = local
        self.device = device
        self.task = task

    def autocast(self) -> AbstractContextManager[Any]:
        """Where the module's own code is run, in the precision that is asked for."""
        if self.precision != "bfloat16":
            return nullcontext()
        # without a cache: parameters change from step to step
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def noises(self, noise: StepNoise, x: np.ndarray, steps: int, lr: float) -> np.ndarray:
        """Noises of a client's steps, float64 [steps, d], with which a plain loop comes to its
        update; `x`: float32 [n, *shape], the rows of its batches.
        """
        return np.stack([noise.client_step_noise(k, noise.d) for k in range(steps)])

    def run(self, parameters: torch.Tensor, chunk: ChunkData) -> Iterator[Block]:
        """The clients of `chunk.slots`, in order, in blocks: of one client where the backend trains
        one by one, else as `ChunkData.blocks` says.

        `parameters` is the model, float32 [D], all that is trained in the order of the module's
        parameters; so are the updates. It is never written to. A diverged update is passed on as it
        is. A slot of `chunk.clipped` and of `chunk.starts` is filled by the time that its block is
        yielded.
        """
        raise NotImplementedError
