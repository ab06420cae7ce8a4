"""The trainer, which trains by one backend.

>>> module = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
>>> trainer = Trainer(module, Sgd(steps=20, batch=10), backend="fused", seed=0)
>>> x, y, sizes = torch.ones(2, 20, 1, 28, 28), torch.zeros(2, 20, dtype=torch.long), [20, 13]
>>> for block in trainer.chunk(torch.zeros(7850), x, y, sizes, t=0, clients=[3, 8], draws=[0, 0]):
...     print(block.slots, tuple(block.updates.shape), block.losses.round(2))
[0 1] (2, 7850) [0.12 0.12]
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat

import numpy as np
import torch
from torch import nn

from raydpfl.core import prng
from raydpfl.core.device import index, move_tensor
from raydpfl.core.hardware import Precision
from raydpfl.core.messages import check_bound
from raydpfl.core.prng import Purpose, torch_stream
from raydpfl.methods.local.base import Local
from raydpfl.methods.local.sgd import Sgd  # noqa: F401  (the example above)
from raydpfl.models.shared_and_local import ParameterSplit
from raydpfl.models.tasks import Classification, Task
from raydpfl.training.backends import BACKENDS, check_backend
from raydpfl.training.backends.base import (
    ALIGNMENT,
    Block,
    ChunkData,
    Starts,
    StepNoise,
    Sum,
    spans,
)
from raydpfl.training.minibatches import Integers, batches

CLASSES = Classification()


class Trainer:
    """Trains chunks of clients by one backend (`resolve`); the module is never changed.

    `clip` is the bound on the L2 norm of one sample's gradient. `user_defined`: code of the user
    takes part, whose draws are then keyed by the client. Raises `ConfigError` for a backend that
    cannot do what is asked. Call `single_thread` first: bits depend on the number of threads.

    `chunk` gives the clients of a chunk, in its order, in blocks
    (`raydpfl.training.backends.base.Block`): of one client where the backend trains one by one,
    each trained when its block is asked for; else of as many as lie in the cache. A client without
    rows has an update of zeros and the loss NaN; a diverged update comes back as it is. A client's
    bits depend on its rows, key and slot, the shapes C and n and the steps of the chunk's clients
    (`planned_steps`), not on what else is in the other slots. Arguments:

        parameters: the model, float32 [D], all that is trained. It is read until the last block
            is there, and never written to.
        x: [C, n, *shape], float32, or integers for a module that takes int64; rows from sizes[i] on
            are never looked at.
        y: [C, n, *target], integers or floats, as the task has it.
        sizes: [C].
        t: the round.
        clients: [C], -1 for an empty slot.
        draws: [C], the index of this draw among the client's draws of the round.
        stds: float64 [C], of the Gaussian noise on the mean gradient of every step, in each
            coordinate; needs `clip`.
        corrections: float32 [C, D], added to every gradient after that.
        starts: where every client starts, if not at `parameters`; what it has trained to is in
            `final` by the time that its block is yielded.
        batch_plan: the batches, as `batches` gives them, and `Local.step_counts`, where x holds
            other rows than all of a client's in their order (`pick_rows`); None: they are drawn.
        planned_steps: int64 [C], the steps of all clients of the chunk, where some of them do not
            train here (-1 among `clients`), as bits may depend on them; None: as many as any makes.
        clipped: float64 [C], filled by the time that a slot's block is yielded with the share of
            its (sample, step) pairs whose gradient was longer than `clip` (one that is not finite
            is not); NaN for a slot without rows, and where nothing is clipped.
        into: where the updates are added up in place of being yielded, where the backend `threads`,
            every client has rows, and none local parameters.

    It raises ValueError for stds without `clip`, and for a `local` that needs corrections without
    them.
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
        user_defined: bool = False,
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
        self.user_defined = user_defined
        with prng.keyed_globals(seed):
            self.backend = BACKENDS[backend](module, local, self.device, task)
        self.backend.precision = precision

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
        batch_plan: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
        clipped: np.ndarray | None = None,
        starts: Starts | None = None,
        planned_steps: np.ndarray | None = None,
        into: Sum | None = None,
    ) -> Iterator[Block]:
        """The clients of a chunk in blocks; the class says what of."""
        if stds is not None and self.clip is None:
            raise ValueError("noise on a step needs gradients that are clipped per sample")
        if corrections is None and self.local.corrects:
            raise ValueError(f"{self.local.kind} needs corrections")
        clients, draws = np.asarray(clients), np.asarray(draws)
        members = clients >= 0
        sizes = np.where(members, sizes, 0)
        if batch_plan is None:
            batch_arguments = (self.seed, t, clients, draws, sizes, self.local)
            batch_plan = *batches(*batch_arguments, rows=y.shape[1]), self.local.step_counts(sizes)
        rows, batch_sizes, steps = batch_plan
        # the first batch in the place of those that a client does not make, so that a backend that
        # takes them for all clients reads no other rows
        padding = np.arange(rows.shape[1]) >= steps[:, None]
        noise = None
        if stds is not None:
            key = (self.noise_seed, t, clients, draws, np.asarray(stds))
            noise = StepNoise(*key, len(parameters), self.device)
        if clipped is not None:
            clipped.fill(np.nan)

        def client_key(slot: int) -> dict[str, int]:
            return {"t": t, "client": int(clients[slot]), "draw": int(draws[slot])}

        chunk = ChunkData(
            x=self._to_device(x),
            y=self._to_device(y),
            sizes=sizes,
            index=np.where(padding[:, :, None], rows[:, :1], rows) if padding.any() else rows,
            steps=steps,
            batch_sizes=batch_sizes,
            slots=np.flatnonzero(sizes).tolist(),
            lr=self.local.learning_rate(t),
            generator=lambda slot: torch_stream(self.seed, Purpose.MODULE, **client_key(slot)),
            clip=self.clip,
            corrections=None if corrections is None else self._to_device(corrections),
            noise=noise,
            clipped=clipped,
            within=self.local.within,
            starts=starts,
            planned_steps=planned_steps,
            into=into,
        )
        parameters = parameters.to(self.device, torch.float32).contiguous()
        if parameters.data_ptr() % ALIGNMENT:  # which could change the bits of a product
            parameters = parameters.clone()
        idle = np.flatnonzero(members & (sizes == 0))
        blocks = self._run_backend(parameters, chunk, client_key)
        yield from _add_idle_slots(blocks, idle, parameters)

    def _to_device(self, values: torch.Tensor | np.ndarray) -> torch.Tensor:
        """On the device, in int64 or float32."""
        tensor = torch.as_tensor(values)
        dtype = torch.float32 if tensor.is_floating_point() else torch.int64
        return move_tensor(tensor.to(dtype), self.device)

    def noises(
        self, x: np.ndarray, *, d: int, t: int, client: int, draw: int, std: float, steps: int
    ) -> np.ndarray:
        """Noises of the steps of one client in round t, float64 [steps, d], with which a plain loop
        comes to its update; `x` [n, *shape] are the rows that its batches take, in their order
        (`raydpfl.training.minibatches.pick_rows`), and the rest is as for `chunk`.
        """
        key = np.array([client]), np.array([draw]), np.array([std])
        noise = StepNoise(self.noise_seed, t, *key, d, torch.device("cpu"))
        return self.backend.noises(noise, x, steps, self.local.learning_rate(t))

    def _run_backend(
        self,
        parameters: torch.Tensor,
        chunk: ChunkData,
        client_key: Callable[[int], dict[str, int]],
    ) -> Iterator[Block]:
        """The backend's blocks; a user's draws are keyed by client (`client_key`), or by round."""
        if not chunk.slots:
            return
        blocks = self.backend.run(parameters, chunk)
        by_round = repeat({"t": client_key(0)["t"], "step": 1})
        names = map(client_key, chunk.slots) if self.backend.one_by_one else by_round
        for name in names:
            with self._seed_globals(**name):
                block = next(blocks, None)
            if block is None:
                assert not self.backend.one_by_one, "a client has no block"
                return
            yield block

    def _seed_globals(self, **name: int) -> AbstractContextManager[None]:
        return prng.keyed_globals(self.seed, **name) if self.user_defined else nullcontext()


def _add_idle_slots(
    blocks: Iterator[Block], idle: np.ndarray, parameters: torch.Tensor
) -> Iterator[Block]:
    """The blocks with the `idle` slots, int64, in their places: updates of 0 and losses of NaN."""
    if not len(idle):
        yield from blocks
        return
    for block in blocks:
        first, last = block.slots[[0, -1]]
        yield from _idle(idle[idle < first], parameters)
        for zeros in _idle(idle[(idle > first) & (idle < last)], parameters):
            slots = np.concatenate([block.slots, zeros.slots])
            order = np.argsort(slots)
            updates = torch.cat([block.updates, zeros.updates])
            losses = np.concatenate([block.losses, zeros.losses])[order]
            block = Block(slots[order], updates[index(order, parameters.device)], losses)
        idle = idle[idle > last]
        yield block
    yield from _idle(idle, parameters)


def _idle(slots: np.ndarray, parameters: torch.Tensor) -> Iterator[Block]:
    for span in spans(len(slots), len(parameters)):
        part = slots[span]
        updates = parameters.new_zeros(len(part), len(parameters))
        yield Block(part, updates, np.full(len(part), np.nan))
