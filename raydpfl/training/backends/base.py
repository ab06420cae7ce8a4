"""What a backend promises: the same mathematics as a plain loop, and bits that depend on
the client alone.

A backend trains a chunk of C clients. What it gives for a client depends on that client's rows,
batches and key, on its slot, on the shapes of the chunk and on how many steps each of its clients
makes (`ChunkData.planned`), never on what else stands in the other slots: so a client alone in its
chunk, the others empty, gets the same bits.
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
from raydpfl.core.device import sent
from raydpfl.core.hardware import Precision
from raydpfl.core.messages import Grid
from raydpfl.core.prng import Purpose
from raydpfl.methods.local.base import Local, Step
from raydpfl.methods.schedules import Schedule
from raydpfl.models.tasks import Task

BLOCK = 1 << 18  # numbers of updates in a block
ALIGNED = 64  # bytes: where torch's own tensors begin
# bytes; seen on an AMD EPYC (Zen 5): a product has other bits where a matrix begins 4 bytes beyond
# a multiple of 16, the same where it begins at one
BEGINS = 16
# numbers: torch takes two of the processor's widest vectors at a time
VECTORS = 32
WEIGHTS = 16  # samples whose products take as long as reading and writing the weights does

Batches = list[tuple[torch.Tensor | None, torch.Tensor]]
"""The rows and the shares of every step; see `ChunkData.batches`."""


@dataclass(frozen=True)
class Block:
    """What consecutive clients of a chunk have trained to, in their order.

    `updates` is not written to again by whoever trained it, and may be by whoever is given it.
    """

    slots: np.ndarray  # int64 [k], ascending
    updates: torch.Tensor  # float32 [k, d], on the device; [0, d] where `ChunkData.into` has them
    losses: np.ndarray  # float64 [k]: the mean over the steps of the batches' losses
    own: torch.Tensor | None = None  # float32 [k, own]: what stays with them, if anything does
    # float64 [k]: the L2 norms of the updates (`native.norms`), where they are known already
    norms: np.ndarray | None = None

    def part(self, some: slice, further: int = 0) -> Block:
        """Some of its clients, at slots that are so much further on."""
        own = None if self.own is None else self.own[some]
        norms = None if self.norms is None else self.norms[some]
        parts = (self.updates[some], self.losses[some], own, norms)
        return Block(self.slots[some] + further, *parts)

    def apart(self) -> Iterator[Block]:
        """A block of each of its clients alone."""
        for place in range(len(self.slots)):
            yield self.part(slice(place, place + 1))

    def clients(self) -> Iterator[tuple[int, torch.Tensor, float]]:
        """(slot, update float32 [d], loss) of each client."""
        yield from zip(self.slots.tolist(), self.updates, self.losses.tolist(), strict=True)


def spans(first: int, end: int, d: int, most: int | None = None) -> Iterator[slice]:
    """The slots from `first` to `end` in parts whose updates, of `d` numbers, are a block, of
    `most` numbers (None: `BLOCK`) unless one client has more.
    """
    together = max(1, (most or BLOCK) // d)
    for start in range(first, end, together):
        yield slice(start, min(start + together, end))


@dataclass(frozen=True)
class Starts:
    """Where each client of a chunk begins, and what it has trained to (`raydpfl.models.trained`).

    `begun` is float32 [C, D + b]; `ended` likewise, of which a backend writes a slot's row by the
    time that it gives the slot. `drawn`: rules pull a client to the round's model and not to where
    it began.
    """

    begun: torch.Tensor
    ended: torch.Tensor
    drawn: bool = False

    @classmethod
    def at(cls, begun: torch.Tensor, drawn: bool = False) -> Starts:
        """Clients that begin here, and have not trained yet."""
        return cls(begun, begun.clone(), drawn)


@dataclass(frozen=True)
class StepNoise:
    """What the noise on the steps of a chunk's clients is drawn by. Called with some slots and a
    step, it gives that of all parameters, float32 [slots, d].
    """

    seed: int
    t: int
    clients: np.ndarray  # int64 [C]
    draws: np.ndarray  # int64 [C]
    stds: np.ndarray  # float64 [C], of the noise on the mean gradient
    d: int
    device: torch.device

    def __call__(self, slots: Sequence[int], step: int) -> torch.Tensor:
        drawn = prng.clients_normals(
            self.seed,
            Purpose.STEP_NOISE,
            self.d,
            t=self.t,
            step=step,
            clients=self.clients[slots],
            draws=self.draws[slots],
            stds=self.stds[slots],
        )
        return sent(drawn, self.device)

    def of_one(self, step: int, count: int) -> np.ndarray:
        """So many numbers of the one client that there is, at a step: float64 [count]."""
        key = {"client": int(self.clients[0]), "draw": int(self.draws[0]), "step": step}
        drawn = prng.normals(self.seed, Purpose.STEP_NOISE, count, t=self.t, **key)
        return drawn.double().numpy() * float(self.stds[0])


@dataclass(frozen=True)
class Sum:
    """Where a backend in `threads` adds up updates as soon as they are trained, while they are in
    the cache, as `raydpfl.core.exact_sum.add` does: each times its factor and weight, with its
    client's noise. An update that is not finite counts as 0.
    """

    closed: tuple[
        float, float, float
    ]  # the factors, see `raydpfl.methods.bounding.Bounding.closed`
    weights: np.ndarray  # float64 [C]
    std: float  # of `raydpfl.methods.noise.keyed_noise.client_noise` on each; 0: none
    seed: int  # of that, and the round, the clients and their draws, int64 [C]
    t: int
    clients: np.ndarray
    draws: np.ndarray
    grid: Grid
    # float64 [threads, d]: what each of the threads has added up, where d is rounded up to a
    # multiple of `raydpfl.core.native.VECTOR`, so that rows lie alike
    found: np.ndarray
    # float64 [C], of those that have trained
    factors: np.ndarray
    # bool [1]: none of those that have trained is out of the grid's range
    fits: np.ndarray


@dataclass(frozen=True)
class ChunkData:
    """What the clients of a chunk train on, on the way's device."""

    # float32 or int64 [C, n, *shape]; rows from sizes[i] on are padding, and may hold anything
    x: torch.Tensor
    y: torch.Tensor  # int64 or float32 [C, n, *target], what the task holds outputs against
    sizes: np.ndarray  # int64 [C]; 0: an empty slot
    index: np.ndarray  # int64 [C, Q, B], rows of each batch; Q of the client with most steps
    steps: np.ndarray  # int64 [C], how many of the Q are the client's own
    batch_sizes: np.ndarray  # int64 [C], how many of the B are real
    slots: Sequence[int]  # the slots to train, none of them empty
    lr: float  # of the round
    generator: Callable[[int], torch.Generator]  # of a slot's client, for what its module draws
    # the bound on the L2 norm of one sample's gradient; None: gradients are taken as they are
    clip: float | None = None
    # float32 [C, d]: what is added to every gradient of the client
    corrections: torch.Tensor | None = None
    noise: StepNoise | None = None  # on the mean gradients of the steps
    # float64 [C], which the backend fills: the share of a slot's (sample, step) pairs with a clip
    # factor below 1
    clipped: np.ndarray | None = None
    # of each of the chunks that the C clients make up one after another, whose shape alone decides
    # how it is trained; None: C
    width: int | None = None
    within: Schedule | None = None  # by which the learning rate goes on from step to step
    starts: Starts | None = None  # None: all begin at the round's model
    # int64 [C]: steps of all clients of the chunk, those that do not train here among them, which
    # settle how many slots a step takes (`active`); None: nobody knows of the others
    planned: np.ndarray | None = None
    into: Sum | None = None  # where updates are added up; None: they are given

    def rate(self, k: int) -> float:
        """The learning rate of step k."""
        return self.lr if self.within is None else self.within.lr_at(self.lr, k)

    def begins(self, parameters: torch.Tensor, slot: int) -> torch.Tensor:
        """Where a client begins, float32 [D + b]; `parameters`: the round's model, [D]."""
        return parameters if self.starts is None else self.starts.begun[slot]

    @cached_property
    def _active(self) -> list[int]:
        """See `active`, of every step."""
        most = self.index.shape[1]
        planned = self.planned
        if planned is None:
            planned = np.where(self.sizes > 0, self.steps, most)
        later = np.maximum.accumulate(planned[::-1])[::-1]  # most steps of a slot or any after it
        return np.searchsorted(-later, -np.arange(most)).tolist()

    def active(self, k: int) -> int:
        """How many slots step k takes, the first ones: up to the last whose client makes it. All
        clients of the chunk settle that, whoever of them trains here, as the bits of a product may
        depend on the number of matrices. It never grows from step to step.
        """
        return self._active[k]

    @cached_property
    def _still(self) -> list[np.ndarray]:
        """See `done`, of every step."""
        slots = np.asarray(self.slots, np.int64)
        ends = self.steps[slots]
        last = [slots < active for active in self._active]
        return [slots[(ends <= k) & within] for k, within in enumerate(last)]

    def done(self, k: int) -> torch.Tensor | None:
        """Those of the slots that step k takes whose client does not make it, int64 [m], where
        there are any: they are to stand still.
        """
        found = self._still[k]
        return self._there(torch.from_numpy(found)) if len(found) else None

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the CPU where the client's rows are."""
        return sent(tensor, self.y.device)

    @property
    def chunks(self) -> list[slice]:
        """The slots of each chunk."""
        width = self.width or len(self.sizes)
        return [slice(first, first + width) for first in range(0, len(self.sizes), width)]

    def blocks(self, d: int, most: int | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """For each block of updates of `d` numbers (see `spans`): the slots that it spans, and
        those of them to train, int64 [k], at least one. All of them are of one chunk.
        """
        wanted = np.asarray(self.slots, dtype=np.int64)
        numbers = d if self.y.device.type == "cpu" else 1  # a GPU takes the chunk as one
        for chunk in self.chunks:
            for span in spans(chunk.start, chunk.stop, numbers, most):
                given = wanted[(wanted >= span.start) & (wanted < span.stop)]
                if len(given):
                    yield span, given

    def step_noise(self, step: int) -> torch.Tensor | None:
        """The noise on the mean gradients of a step, float32 [c, d] of the c slots that it takes, 0
        for those that are empty or done; None if there is none.
        """
        if self.noise is None:
            return None
        slots = [slot for slot in self.slots if step < self.steps[slot]]
        drawn = self.noise(slots, step)
        active = self.active(step)
        if len(drawn) == active:
            return drawn
        return drawn.new_zeros(active, drawn.shape[1]).index_copy_(
            0, sent(torch.tensor(slots), drawn.device), drawn
        )

    def rows(self, picked: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y with zeros for padding, to be read alone. x is copied where it has other padding
        or is not aligned as torch does it, on which the bits of a product may depend.

        With `picked`, x as it is, for a backend that works on copies of a batch's rows (`take`),
        none of which is padding.
        """
        aligned = self.x.is_contiguous() and self.x.data_ptr() % ALIGNED == 0
        if (picked or aligned) and (self.sizes == self.y.shape[1]).all():
            return self.x, self.y
        padding = torch.from_numpy(np.arange(self.y.shape[1]) >= self.sizes[:, None])
        padding = self._there(padding)
        y = self.y.masked_fill(padding.view(*padding.shape, *[1] * (self.y.dim() - 2)), 0)
        if not picked and self.x.device.type != "cpu":  # which a look at the rows would wait for
            shape = (*padding.shape, *[1] * (self.x.dim() - 2))
            return self.x.masked_fill(padding.view(shape), 0), y
        if picked or (aligned and not self.x[padding].any()):
            return self.x, y
        x = self.x.clone(memory_format=torch.contiguous_format)
        x[padding] = 0
        return x, y

    def batches(self, whole: bool = False) -> Batches:
        """For each step, of the c slots that it takes (`active`), its rows, int64 [c B] into `rows`
        and the share of each in its client's mean over the batch, float32 [c, 1, B].

        With `whole`, and wherever a batch is all rows, the rows are None, for all of them in their
        order, and the shares are [c, 1, n]: what a row outside of the batch has is 0, as has a
        place that a smaller batch leaves empty, and every row of a client that is done.
        """
        clients, n = self.y.shape[:2]
        steps, width = self.index.shape[1:]
        real = np.arange(width) < self.batch_sizes[:, None]
        shares = torch.from_numpy(
            (real / np.maximum(self.batch_sizes, 1)[:, None]).astype(np.float32)
        )[:, None]
        index = torch.from_numpy(self.index)
        if whole or width == n:
            placed = torch.zeros(clients, steps, n)
            placed.scatter_add_(2, index, shares.expand(clients, steps, width))
            placed = placed.transpose(0, 1).contiguous()
            if any(map(len, self._still)):
                placed *= self._going()
            every = self._there(placed[:, :, None]).unbind()
            return [(None, each[: self.active(k)]) for k, each in enumerate(every)]
        rows = (index + torch.arange(0, clients * n, n)[:, None, None]).transpose(0, 1).flatten(1)
        shares = self._there(shares)
        at = [each[: self.active(k) * width] for k, each in enumerate(self._there(rows))]
        if not any(map(len, self._still)):
            first = {count: shares[:count] for count in set(self._active)}
            return [(each, first[self.active(k)]) for k, each in enumerate(at)]
        going = (self._there(self._going())[..., None] * shares).unbind()
        return [(each, going[k][: self.active(k)]) for k, each in enumerate(at)]

    def _going(self) -> torch.Tensor:
        """1 where a client makes the step, else 0: float32 [Q, C, 1]."""
        going = np.arange(self.index.shape[1])[:, None] < self.steps
        return torch.from_numpy(going.astype(np.float32))[:, :, None]

    def means(self, sums: torch.Tensor) -> np.ndarray:
        """The clients' mean losses, float64 [C], from the sums over their steps, float32 [C]."""
        steps = torch.from_numpy(np.maximum(self.steps, 1).astype(np.float32))
        return (sums.cpu() / steps).double().numpy()

    def count_clipped(self, factors: list[torch.Tensor]) -> None:
        """Fills `clipped`, where it is wanted, from every step's clip factors, [c, B] or [c, B, 1],
        of the rows that `batches` gave.
        """
        if self.clipped is None or self.clip is None:
            return
        each = factors[0].new_zeros(len(factors), len(self.sizes), factors[0][0].numel())
        for at, found in zip(each, factors, strict=True):
            at[: len(found)] = found.flatten(1)
        below = each.lt(1).transpose(0, 1).cpu().numpy()
        if below.shape[2] == self.y.shape[1]:  # of all rows, whose order a batch need not keep
            below = np.take_along_axis(below, self.index, 2)
        slots = list(self.slots)
        steps, width = self.index.shape[1:]
        own = self.steps[slots, None]
        real = np.arange(width) < self.batch_sizes[slots, None]
        made = np.arange(steps) < own
        counted = below[slots] & real[:, None] & made[:, :, None]
        self.clipped[slots] = counted.sum((1, 2)) / (own[:, 0] * self.batch_sizes[slots])


class Rule:
    """Any local rule, carried out on the parameters of a chunk's clients as one matrix."""

    def __init__(self, local: Local, model: torch.Tensor, chunk: ChunkData):
        """`model` is x_t, float32 [D]; where clients begin elsewhere it may be [C, D]."""
        self.local = local
        self.model = model
        self.chunk = chunk
        self.corrections = chunk.corrections
        self.x = model.expand(len(chunk.sizes), -1).clone()  # float32 [c, d]
        self.left: list[torch.Tensor] = []  # of slots that steps took before, the last ones first
        if chunk.starts is not None:
            self.x = chunk.starts.begun[:, : len(model)].clone()
            self.model = model if chunk.starts.drawn else self.x.clone()
        self.state = local.fresh(self.x)

    @torch.no_grad()
    def step(self, gradient: torch.Tensor, k: int) -> torch.Tensor:
        """x after the k-th step, float32 [c, d] of the c slots that it takes, from the gradients
        before corrections, float32 [c, d].
        """
        count = len(gradient)
        gradient = self._narrowed(gradient)
        if self.corrections is not None:
            gradient = gradient + self.corrections
        x, self.state = self.local.step(self.x, gradient, self.state, self._at(k))
        done = self.chunk.done(k)
        before = self.x
        self.x = x.contiguous() if done is None else x.index_copy(0, done, before[done])
        if count < len(before):
            self.x = torch.cat([self.x[:count], before[count:]])
        return self.x[:count]

    @torch.no_grad()
    def perturbed(self, gradient: torch.Tensor, k: int) -> torch.Tensor:
        """Where the gradient of the k-th step is to be taken, float32 [c, d], from that at x."""
        given = self._narrowed(gradient)
        moved = self.local.perturb(self.x, given, self.state, self._at(k))
        return moved[: len(gradient)].contiguous()

    def ended(self) -> torch.Tensor:
        """x after the last step, of all slots, float32 [C, d]."""
        return torch.cat([self.x, *reversed(self.left)]) if self.left else self.x

    def _narrowed(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradients for as many slots as the rule goes on with: those that they are of, [c, d],
        or all before, with 0, where nobody knows what of the state is each client's.
        """
        count = len(gradient)
        more = len(self.x) - count
        if not more:
            return gradient
        if not all(_of_clients(leaf, len(self.x)) for leaf in tree_leaves(self.state)):
            return torch.cat([gradient, gradient.new_zeros(more, gradient.shape[1])])
        self.left.append(self.x[count:].clone())
        self.x = self.x[:count]
        self.state = tree_map(lambda each: _first(each, count), self.state)
        if self.corrections is not None:
            self.corrections = self.corrections[:count]
        if self.model.dim() == 2:
            self.model = self.model[:count]
        return gradient

    def _at(self, k: int) -> Step:
        return Step(k, self.chunk.rate(k), self.model)


def _of_clients(part: Any, count: int) -> bool:
    """Whether a part of what a rule keeps is a matrix with a row for each of `count` clients, or
    one number for all.
    """
    if isinstance(part, torch.Tensor):
        return part.dim() == 0 or (part.dim() > 1 and len(part) == count)
    return part is None or isinstance(part, (int, float))


def _first(part: Any, count: int) -> Any:
    """A part of what a rule keeps (see `_of_clients`), of the first clients."""
    return part[:count] if isinstance(part, torch.Tensor) and part.dim() else part


def take(source: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """`source` [c, n, ...] at `rows` (see `ChunkData.batches`), [c, B, ...]; or `source` itself."""
    if rows is None:
        return source
    clients, _, *rest = source.shape
    return source.flatten(0, 1).index_select(0, rows).view(clients, -1, *rest)


# at most what the square of a float32 that underflows has lost
LOST = 2.0**-126


def clip_factors(norms: torch.Tensor, bound: float) -> torch.Tensor:
    """min(1, bound / norm), what a gradient is multiplied by; NaN for a norm that is not finite, so
    that it shows in the update. Squares that underflow take 1e-19 sqrt(d) at most from a norm, far
    less than the least bound (`raydpfl.core.messages.BOUNDS`).

    All in float32: a clipped gradient may be longer than the bound by a few 1e-7 of it.
    """
    return (bound / norms).clamp(max=1).add(norms, alpha=0)


class Backend:
    """Carries out a local rule. Made once from the module, which it never changes."""

    # whether it clips each sample's gradient and adds the step's noise; None: it can do both
    private: ClassVar[bool | None] = None
    corrects: ClassVar[bool] = True  # whether it adds `ChunkData.corrections`
    linear: ClassVar[bool] = False  # whether it carries out linear rules alone (`Local.linear`)
    # whether a client's bits may depend on how many rows it is padded to, beyond a batch's
    padded: ClassVar[bool] = True
    # products of a row with a weight that take as long as the calls of a chunk's step
    calls: ClassVar[int] = 1 << 21
    # where a step takes no more than these of a chunk's clients, as the others have made theirs,
    # each is trained by itself, with other bits: such a chunk is not trained together with others
    few: ClassVar[int] = 0
    twice: ClassVar[bool] = False  # whether it can take two gradients a step (`Local.perturb`)
    trains: ClassVar[bool] = False  # whether it can leave training to `Local.train`
    # whether a slot is trained when it is asked for, and not before
    one_by_one: ClassVar[bool] = False

    # whether the threads of compiled code (`raydpfl.core.native.use`) train its clients, each by
    # itself: a client's bits depend on its own rows, batches and steps alone, and updates can be
    # added up as they are trained (`ChunkData.into`)
    threads: ClassVar[bool] = False
    half: ClassVar[bool] = False  # whether it can take products in bfloat16
    # whether clients can begin at `ChunkData.starts`; and with buffers of their own too
    starts: ClassVar[bool] = False
    buffers: ClassVar[bool] = False

    # the working copy of the module, where its own code is run
    module: nn.Module | None = None
    # of products; TF32 is a setting of the process (`raydpfl.core.device.settle`)
    precision: Precision = "float32"

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        self.local = local
        self.device = device
        self.task = task

    def low(self) -> AbstractContextManager[Any]:
        """Where the module's own code is run, in the precision that is asked for."""
        if self.precision != "bfloat16":
            return nullcontext()
        # without a cache: parameters change from step to step
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    @classmethod
    def lacks(cls, local: Local, clip: float | None) -> str | None:
        """What of the rule, the corrections and the clipping of each sample (`clip`) that are asked
        for it cannot carry out, in words; None: it can.
        """
        if cls.private is not None and cls.private != (clip is not None):
            return "clipping of each sample" if clip is not None else "samples that are not clipped"
        if local.corrects and not cls.corrects:
            return "corrections of the gradients"
        if local.trains and not cls.trains:
            return "a train of one's own"
        if local.perturbs and not (cls.twice and clip is None):
            return "a second gradient in a step" + (", clipped" if clip is not None else "")
        if cls.linear and local.linear() is None:
            return "a rule that is not linear"
        return None

    @classmethod
    def costs(cls, local: Local, sizes: np.ndarray, d: int) -> np.ndarray | None:
        """By what chunks are cut, float64 [3, r], for clients that have so many rows: the steps
        that each makes; what the calls of a chunk cost of which it is the largest; and what a step
        of any client of that chunk costs. The latter two in products of a row with a weight:
        `calls` for each of the largest client's steps, and for a step what a batch of its rows
        takes, and the weights, which are read and written.

        Args:
            local: the rule.
            sizes: rows of r clients, int64 [r].
            d: parameters of the model.

        Returns:
            None for a backend that trains clients one by one.
        """
        if cls.threads or cls.one_by_one:
            return None
        steps = local.step_counts(sizes)
        rows = local.batch_sizes(sizes)
        return np.stack([steps, steps * cls.calls, (rows + WEIGHTS) * d]).astype(np.float64)

    def fits(self, clip: float | None) -> None:
        """Raises `raydpfl.models.linear_stack.NoStack` where it can clip each sample of other
        models, and not of this one.
        """
        return

    def arrays(self, rows: int, features: int, batch: int, clip: bool) -> tuple[int, ...] | None:
        """How many numbers of each array it keeps at once for a client, by which chunks are trained
        together: as many as fit, and where every chunk's part of every array is aligned.

        Args:
            rows: the client's, after padding.
            features: numbers of a row.
            batch: rows of a batch.
            clip: whether each sample's gradient is clipped.

        Returns:
            None for a backend that trains every chunk by itself, because it gains nothing or would
            give other bits.
        """
        return None

    def placed(self, rows: int, batch: int) -> tuple[int, ...]:
        """How many numbers of a client each array has whose values' bits may depend on their place
        in it: chunks are trained together where each chunk's part fills vectors of the processor.
        Arguments as for `arrays`.
        """
        return ()

    def noises(self, noise: StepNoise, x: np.ndarray, steps: int, lr: float) -> np.ndarray:
        """Noises of a client's steps, float64 [steps, d], with which a plain loop comes to the
        client's update.

        Args:
            noise: of this client alone.
            x: float32 [n, *shape], the rows that its batches take.
            steps: how many it makes.
            lr: the learning rate of the round.
        """
        return np.stack([noise.of_one(k, noise.d) for k in range(steps)])

    def run(self, parameters: torch.Tensor, chunk: ChunkData) -> Iterator[Block]:
        """The clients of `chunk.slots`, in order, in blocks: of one client where the backend trains
        one by one, else as `ChunkData.blocks` says.

        `parameters` is the model, float32 [D], all that is trained in the order of the module's
        parameters; so are the updates. A diverged update is passed on as it is. A backend that
        clips fills a slot of `chunk.clipped` by the time that it gives it, as does one that takes
        `chunk.starts` theirs.
        """
        raise NotImplementedError
