"""The trainer, which trains by one backend.

>>> module = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
>>> trainer = Trainer(module, Sgd(steps=20, batch=10), backend="fused", seed=0)
>>> x, y, sizes = torch.ones(2, 20, 1, 28, 28), torch.zeros(2, 20, dtype=torch.long), [20, 13]
>>> for block in trainer.chunk(torch.zeros(7850), x, y, sizes, t=0, clients=[3, 8], draws=[0, 0]):
...     print(block.slots, tuple(block.updates.shape), block.losses.round(2))
[0 1] (2, 7850) [0.12 0.12]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from raydpfl.core import prng
from raydpfl.core.device import index, sent
from raydpfl.core.hardware import Precision
from raydpfl.core.messages import check_bound
from raydpfl.core.prng import Purpose, torch_stream
from raydpfl.methods.local.base import Local
from raydpfl.methods.local.sgd import Sgd  # noqa: F401  (the example above)
from raydpfl.models.shared_and_local import ParameterSplit
from raydpfl.models.tasks import Classification, Task
from raydpfl.training.backends import BACKENDS, check_backend
from raydpfl.training.backends.base import (
    BEGINS,
    VECTORS,
    Block,
    ChunkData,
    Starts,
    StepNoise,
    Sum,
    spans,
)
from raydpfl.training.minibatches import Integers, batches

CLASSES = Classification()
TOGETHER = 1 << 24  # bytes that chunks trained together may take


@dataclass(frozen=True)
class _Draw:
    """Who trains: what its randomness is keyed by."""

    clients: np.ndarray  # int64 [C]
    draws: np.ndarray  # int64 [C]
    t: int

    def key(self, slot: int) -> dict[str, int]:
        return {"t": self.t, "client": int(self.clients[slot]), "draw": int(self.draws[slot])}


class Trainer:
    """Trains chunks of clients by one backend. `backend` is what `resolve` gave; the module is
    never changed.

    `clip` is the bound on the L2 norm of one sample's gradient. `own` says that code of the user's
    takes part: what it draws from the generators of the process is then keyed by the client. Raises
    `ConfigError` for a backend that cannot clip each sample, or cannot add the corrections that
    `local` needs. Call `single_thread` first: a number of threads that changes would change bits.

    `chunk` gives the clients of a chunk, in its order, in blocks
    (`raydpfl.training.backends.base.Block`): of one client where the backend trains one by one,
    each trained when its block is asked for; else of as many as lie in the cache. A client's bits
    depend on its rows, key and slot, the shapes C and n and the steps of the chunk's clients
    (`planned`), not on what else is in the other slots. One without rows has an update of zeros and
    the loss NaN; a diverged update comes back as it is. Its arguments:

        parameters: the model, float32 [D], all that is trained.
        x: [C, n, *shape], float32, or integers for a module that takes int64; rows from sizes[i] on
            are never looked at.
        y: [C, n, *target], integers or floats, as the task has it.
        sizes: [C].
        t: the round.
        clients: [C], -1 for an empty slot.
        draws: [C], which tells apart the times a client was drawn.
        stds: float64 [C], of the Gaussian noise on the mean gradient of each step, in each
            coordinate; needs `clip`.
        corrections: float32 [C, D], added to every gradient after that.
        starts: where each client begins, if not at `parameters`; what it has trained to is written
            into it by the time that its block is yielded.
        drawn: the batches, as `batches` gives them, and `Local.step_counts`, where x holds other
            rows than all of a client's in their order (`picked`); else they are drawn.
        planned: int64 [C], the steps of all clients of the chunk, where some of them do not train
            here (-1 among `clients`): a client's bits may depend on them, as slots that have made
            their steps take no part in later ones. None: as if these made as many as any.
        clipped: float64 [C], into which is written, by the time that a slot's block is yielded, the
            share of its (sample, step) pairs whose gradient was longer than `clip` (one that is not
            finite is not). NaN for a slot without rows, and for all where nothing is clipped.
        width: the C clients are C / `width` chunks one after another, trained together: each client
            has the bits that it has in its chunk alone, and no block holds clients of two. See
            `together`.
        into: where the updates are added up in place of being given, where the backend `threads`,
            every client has rows, and none a part of its own.

    It raises ValueError for stds without `clip`, for a `local` that needs corrections without them,
    and for corrections where the backend cannot add them.
    """

    def __init__(
        self,
        module: nn.Module,
        local: Local,
        *,
        backend: str,
        seed: int,
        device: torch.device | str = "cpu",
        clip: float | None = None,
        own: bool = False,
        task: Task = CLASSES,
        precision: Precision = "float32",
    ):
        check_backend(backend, local, clip, precision, ParameterSplit.of(module))
        if clip is not None:
            check_bound("bounding.bound", clip)
        self.local = local
        self.device = torch.device(device)
        self.clip = clip
        self.seed = self.noise_seed = seed  # a run sets them for each round
        self.own = own
        with prng.keyed_globals(seed):
            self._backend = BACKENDS[backend](module, local, self.device, task)
        self._backend.precision = precision
        self._backend.fits(clip)

    def chunk(
        self,
        parameters: torch.Tensor,
        x: torch.Tensor | np.ndarray,
        y: torch.Tensor | np.ndarray,
        sizes: Integers,
        *,
        t: int,
        clients: Integers,
        draws: Integers,
        stds: np.ndarray | None = None,
        corrections: torch.Tensor | np.ndarray | None = None,
        drawn: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
        clipped: np.ndarray | None = None,
        width: int | None = None,
        starts: Starts | None = None,
        planned: np.ndarray | None = None,
        into: Sum | None = None,
    ) -> Iterator[Block]:
        """The clients of a chunk in blocks; the class says what of."""
        self._check(stds, corrections)
        draw = _Draw(np.asarray(clients), np.asarray(draws), t)
        members = draw.clients >= 0
        present = np.where(members, sizes, 0)
        chunk = self._data(x, y, present, drawn, draw)
        chunk = replace(chunk, clipped=clipped, width=width, starts=starts, planned=planned)
        chunk = replace(chunk, noise=self._noise(draw, stds, len(parameters)), into=into)
        if clipped is not None:
            clipped.fill(np.nan)
        if corrections is not None:
            added = sent(torch.as_tensor(corrections, dtype=torch.float32), self.device)
            chunk = replace(chunk, corrections=added)
        # A copy, in torch's own alignment: how the model is aligned in memory could change the bits
        # of a product.
        parameters = parameters.to(self.device, torch.float32, copy=True)
        trained = self._trained(parameters, chunk, draw)
        idle = np.flatnonzero(members & (present == 0))
        yield from _with_idle(trained, idle, parameters, width or len(members))

    def _data(
        self,
        x: torch.Tensor | np.ndarray,
        y: torch.Tensor | np.ndarray,
        sizes: np.ndarray,
        drawn: tuple[np.ndarray, np.ndarray, np.ndarray] | None,
        draw: _Draw,
    ) -> ChunkData:
        """What is trained on, without what is added to gradients."""
        if drawn is None:
            who = (draw.t, draw.clients, draw.draws)
            found = batches(self.seed, *who, sizes, self.local, rows=y.shape[1])
            drawn = *found, self.local.step_counts(sizes)
        return ChunkData(
            x=self._here(x),
            y=self._here(y),
            sizes=sizes,
            index=_filled(drawn[0], drawn[2]),
            batch_sizes=drawn[1],
            slots=np.flatnonzero(sizes).tolist(),
            steps=drawn[2],
            lr=self.local.learning_rate(draw.t),
            within=self.local.within,
            generator=partial(self._generator, draw),
            clip=self.clip,
        )

    def _noise(self, draw: _Draw, stds: np.ndarray | None, d: int) -> StepNoise | None:
        """See `ChunkData.noise`."""
        if stds is None:
            return None
        drawn_by = (self.noise_seed, draw.t, draw.clients, draw.draws, np.asarray(stds))
        return StepNoise(*drawn_by, d, self.device)

    def _here(self, values: torch.Tensor | np.ndarray) -> torch.Tensor:
        """On the device, in int64 or float32."""
        given = torch.as_tensor(values)
        dtype = torch.float32 if given.is_floating_point() else torch.int64
        return sent(given.to(dtype), self.device)

    def _check(self, stds: object, corrections: object) -> None:
        """Raises ValueError for what cannot be added to the gradients, or is missing."""
        if stds is not None and self.clip is None:
            raise ValueError("noise on a step needs gradients that are clipped per sample")
        if corrections is None and self.local.corrects:
            raise ValueError(f"{self.local.kind} needs corrections")
        if corrections is not None and not self._backend.corrects:
            raise ValueError("this backend adds no corrections")

    def _generator(self, draw: _Draw, slot: int) -> torch.Generator:
        """See `ChunkData.generator`."""
        return torch_stream(self.seed, Purpose.MODULE, **draw.key(slot))

    def noises(
        self, x: np.ndarray, *, d: int, t: int, client: int, draw: int, std: float, steps: int
    ) -> np.ndarray:
        """Noises of the steps of one client in round t, float64 [steps, d], with which a plain loop
        comes to its update; `x` [n, *shape] are the rows that its batches take, in their order
        (`raydpfl.training.minibatches.picked`), and the rest is as for `chunk`.
        """
        whose = np.array([client]), np.array([draw]), np.array([std])
        noise = StepNoise(self.noise_seed, t, *whose, d, torch.device("cpu"))
        return self._backend.noises(noise, x, steps, self.local.learning_rate(t))

    def _trained(self, parameters: torch.Tensor, chunk: ChunkData, draw: _Draw) -> Iterator[Block]:
        """What the backend gives. What the user's own code draws in it is keyed: by the client, or
        by the round where a chunk is trained at once.
        """
        if not chunk.slots:
            return
        running = self._backend.run(parameters, chunk)
        if self._backend.one_by_one:
            for slot in chunk.slots:
                with self._keyed(**draw.key(slot)):
                    block = next(running)
                yield block
            return
        while True:
            with self._keyed(t=draw.t, step=1):
                together = next(running, None)
            if together is None:
                return
            yield together

    def _keyed(self, **name: int) -> AbstractContextManager[None]:
        return prng.keyed_globals(self.seed, **name) if self.own else nullcontext()

    def alike(self, width: int, rows: int) -> tuple[int, ...]:
        """The same for chunks of `width` clients, padded to `rows` rows, that may be trained
        together.
        """
        if self._backend.threads:
            return ()
        batch = self.local.batch_size(rows)
        steps = int(self.local.step_counts(np.array([rows]))[0])
        return width, batch, rows if self._backend.padded or batch == rows else 0, steps

    def joins(self, steps: np.ndarray) -> bool:
        """Whether a chunk whose clients make so many steps, int64 [C], may be trained together with
        others: no step takes so few of it that they are trained one by one (`Backend.few`), nor one
        alone, as products of one matrix may have other bits than those of several.
        """
        if self._backend.threads:
            return True
        taken = int(np.flatnonzero(steps == steps.max())[-1]) + 1  # by the last step
        few = self._backend.few if len(steps) > self._backend.few else 0
        return taken > max(few, 1)

    @property
    def padding(self) -> int:
        """Numbers of padding by which joining another chunk costs about what training it by itself
        does.
        """
        return self._backend.calls // 16

    def together(self, width: int, rows: int, features: int) -> int:
        """How many chunks of `width` clients, padded to `rows` rows of `features` numbers, are to
        be trained in one call of `chunk`: as many as keep within `TOGETHER`, at least 1; and 1 on a
        GPU. But for backends whose clients train one by one in threads, also 1 where a
        chunk's part of some array would begin at another place within `BEGINS` bytes than that of a
        chunk alone, as the bits of a product may depend on it, or within `VECTORS` numbers, where
        those of other functions may (`Backend.placed`); and 1 for chunks of one client, as products
        of one matrix may have other bits than those of several.
        """
        if self.device.type != "cpu" or (width == 1 and not self._backend.threads):
            return 1
        batch = self.local.batch_size(rows)
        arrays = self._backend.arrays(rows, features, batch, clip=self.clip is not None)
        if arrays is None:
            return 1
        if not self._backend.threads:
            if any(4 * width * numbers % BEGINS for numbers in arrays):
                return 1
            if any(width * numbers % VECTORS for numbers in self._backend.placed(rows, batch)):
                return 1
        return max(1, TOGETHER // (4 * width * max(sum(arrays), 1)))

    @property
    def adds(self) -> bool:
        """Whether `chunk` takes an `into`."""
        return self._backend.threads

    @property
    def module(self) -> nn.Module | None:
        """The working copy of the module, where its own code is run; None where its layers are
        taken apart.
        """
        return self._backend.module


def _filled(index: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The batches, int64 [C, Q, B], with a client's first in the place of those that it does not
    make, so that a backend that takes them for all clients reads no other rows.
    """
    beyond = np.arange(index.shape[1]) >= steps[:, None]
    return np.where(beyond[:, :, None], index[:, :1], index) if beyond.any() else index


def _with_idle(
    trained: Iterator[Block], idle: np.ndarray, parameters: torch.Tensor, width: int
) -> Iterator[Block]:
    """The blocks with the `idle` slots, int64, in their places: updates of 0 and losses of NaN. No
    block holds clients of two chunks of `width`.
    """
    if not len(idle):
        yield from trained
        return
    for block in trained:
        first, last = block.slots[[0, -1]]
        yield from _idle(idle[idle < first], parameters, width)
        within = idle[(idle > first) & (idle < last)]
        idle = idle[idle > last]
        for zeros in _idle(within, parameters, width):
            slots = np.concatenate([block.slots, zeros.slots])
            order = np.argsort(slots)
            places = index(order, parameters.device)
            updates = torch.cat([block.updates, zeros.updates])[places]
            losses = np.concatenate([block.losses, zeros.losses])[order]
            block = Block(slots[order], updates, losses)
        yield block
    yield from _idle(idle, parameters, width)


def _idle(slots: np.ndarray, parameters: torch.Tensor, width: int) -> Iterator[Block]:
    for chunk in np.unique(slots // width):
        own = slots[slots // width == chunk]
        for some in spans(0, len(own), len(parameters)):
            given = own[some]
            updates = parameters.new_zeros(len(given), len(parameters))
            yield Block(given, updates, np.full(len(given), np.nan))
