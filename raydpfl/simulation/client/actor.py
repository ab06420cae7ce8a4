"""The client actor: holds the shards of one or many clients, and returns bounded and noised sums.

`ClientActor` is a plain class. The runtime makes it a Ray actor (`client.actors` above 0) or calls
it in the same process (`client.actors: 0`); the bits are the same, because all randomness is keyed
and every chunk has the same shape whoever runs it:

- pooled, an actor trains chunks, or parts of them where a client has the same bits in any
  (`raydpfl.training.backends.base.Backend.alone`), and returns one vector, the exact sum of what
  their clients send;
- per client, it trains its own client at that client's slot of the chunk, the other slots standing
  empty.

A chunk is trained in blocks of clients, [k, d]. `_contribute` makes of a block's updates what its
clients send, which is rounded to the grid (`raydpfl.core.exact_sum`), so that its sum has no order.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from traceback import clear_frames
from typing import ClassVar

import numpy as np
import torch

from raydpfl import models
from raydpfl.core import device, exact_sum, native
from raydpfl.core.hardware import threads
from raydpfl.core.messages import OWN, Broadcast, Chunk, ChunkResult, View, Work
from raydpfl.core.prng import Purpose, stream
from raydpfl.data import Shards
from raydpfl.errors import (
    RAISED,
    ClientError,
    ConfigError,
    DeviceError,
    RunError,
    contained,
    exited,
    in_line,
    told,
)
from raydpfl.experiment import Experiment
from raydpfl.methods.probes import Sent
from raydpfl.models.hidden_state import changed, kept
from raydpfl.simulation.client import personalization
from raydpfl.simulation.client.data_cache import Resident, Rows
from raydpfl.simulation.evaluation import Evaluator, Scored
from raydpfl.simulation.worker import Process, any_own, own_code, peak_rss_mb
from raydpfl.training.backends.base import Block, Sum
from raydpfl.training.minibatches import batches, picked
from raydpfl.training.process_settings import single_thread, tune_allocator
from raydpfl.training.trainer import Trainer

FAINT = 2.0**-450  # norm: squares of such numbers are far from the least of float64
AHEAD = 1 << 31  # bytes of noise that is drawn before it is needed


@dataclass
class Tally:
    """An actor's share of a round, in the making."""

    work: Work
    lr: float  # of all local steps of the round
    model: torch.Tensor  # float32 [d]
    told: Mapping[str, Mapping[str, torch.Tensor]]  # by the member that tells it
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)
    memory: dict[str, list[np.ndarray]] = field(default_factory=dict)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    # (client, draw): those whose training has raised
    failed: set[tuple[int, int]] = field(default_factory=set)
    # the size of the largest coordinate that a block's clients send, where that is on a device
    largest: list[torch.Tensor] = field(default_factory=list)
    # of noise by a class from outside, see `raydpfl.simulation.noise_monitor`
    drawn: dict[str, list[np.ndarray]] = field(default_factory=dict)
    # the chunk that was trained again for its measures, and what came of it (see `_again`)
    again: tuple[Chunk, torch.Tensor, np.ndarray] | None = None

    @cached_property
    def d(self) -> int:
        """Parameters of the model."""
        return self.model.numel()

    def add(self, columns: Mapping[str, np.ndarray]) -> None:
        """More values of each column, for the next clients."""
        for name, values in columns.items():
            self.columns.setdefault(name, []).append(values)

    def keep(self, member: str, vectors: torch.Tensor | None, shape: tuple[int, int]) -> None:
        """What the next clients remember by this member, [k, d] (their own part of the model:
        [k, own]); None: nothing.

        Raises `RunError` for vectors of another shape.
        """
        if vectors is None:
            return
        _check_shape(f"{member} remembers", vectors, shape)
        self.memory.setdefault(member, []).append(vectors.float().cpu().numpy())

    def result(self, total: np.ndarray, seconds: float) -> ChunkResult:
        """What goes back, in client order, in which joined chunks need not be trained."""
        columns = {name: np.concatenate(each) for name, each in self.columns.items()}
        memory = {name: np.concatenate(each) for name, each in self.memory.items()}
        order = np.lexsort((columns["draw"], columns["client"]))
        if (np.diff(order) != 1).any():
            columns = {name: values[order] for name, values in columns.items()}
            memory = {name: vectors[order] for name, vectors in memory.items()}
        dropped = sorted(self.dropped, key=lambda each: each[0])
        drawn = {
            name: np.sum(each, axis=0) if name == "sum" else np.concatenate(each)
            for name, each in self.drawn.items()
        }
        return ChunkResult(total, columns, memory, dropped, drawn, seconds, peak_rss_mb())


class ClientActor(Process):
    """Trains chunks of clients. Raises `ClientError` naming the client whose training failed or
    gave a non-finite update.
    """

    # whether updates may be added up as they are trained, and are not looked at
    adds: ClassVar[bool] = True

    def make(self, experiment: Experiment, shards: str) -> None:
        single_thread()
        tune_allocator()
        native.use(threads() if self.here else int(experiment.client.num_cpus))
        self.experiment = experiment
        self.shards = Shards.open(shards)
        self.form = self.shards.form(experiment.data.task)
        gpus = experiment.client.num_gpus
        self.device = device.chosen(gpus)
        precision = experiment.client.precision
        device.settle(self.device, gpus, tf32=precision == "tf32")
        self.own = own_code(experiment)
        self.any_own = any_own(experiment)
        given = (self.shards, self.form)
        on_host = self.device.type == "cpu"
        self.rows = Rows(*given) if on_host else Resident(*given, self.device, gpus)
        module = models.build(experiment.model, self.form, experiment.seed)
        self.module = copy.deepcopy(module).to(self.device).eval()
        self.personal = personalization.of(experiment, self.shards, self.module)
        self.evaluator = Evaluator(experiment, self.shards, self.module, self.personal)
        self.trainer = Trainer(
            module,
            experiment.local,
            backend=experiment.client.backend,
            seed=experiment.seed,
            device=self.device,
            clip=experiment.bounding.sample_bound,
            own=self.own,
            task=self.form.task,
            precision=experiment.client.precision,
        )
        self._empty()

    def _empty(self) -> None:
        """With nothing of any chunk."""
        self._scaled = self.device.type == "cpu" and _scales(self.experiment)
        self._shares = 0
        self._sample: tuple[Chunk, int, torch.Tensor] | None = None
        self._state = self._kept()
        self._buffer = np.zeros((0, 0))
        # of the chunk in training: float64 [C], see `Trainer.chunk`; norms, factors, losses [3, C]
        self.clipped = np.empty(0)
        self.known = np.empty((3, 0))
        # what its clients have of their own once they have trained, [C, own]
        self.own_parts = torch.empty(0, 0)
        # into how many parts a chunk is cut, as the device's memory does not hold all of it
        self._cut = 1
        # the slots of the chunk in training, and their noise, which a thread draws
        self._drawn: tuple[np.ndarray, Future] | None = None

    def check(self) -> None:
        """Trains two made-up clients where that is on a GPU, which a module may not bear that the
        CPU did: one that makes tensors on the CPU, or needs what has no deterministic form.

        Raises:
            ConfigError: it does not.
        """
        if self.device.type == "cpu":
            return
        local = self.experiment.local
        flat = models.trained(self.module)[: self.personal.split.parameters]
        form = self.form
        x = form.inputs(4).view(2, 2, *form.shape)
        y = form.task.made_up(stream(0, Purpose.DATA), 4, form.outputs)
        added = torch.zeros(2, len(flat)) if local.corrects else None
        given = (flat, x, y.view(2, 2, *y.shape[1:]), [2, 2])
        train = partial(self.trainer.chunk, *given, clients=[0, 1], draws=[0, 0])
        try:
            with device.blamed(self.device):
                for _ in train(t=0, corrections=added):
                    device.synchronise(self.device)
        except DeviceError:
            raise
        except RAISED as error:
            kind = self.experiment.model.kind
            reason = in_line(error)
            expected = "a module that trains on a GPU, with all its tensors where its input is"
            raise ConfigError("model.kind", kind, f"{expected} ({reason})") from None

    def train(self, broadcast: Broadcast, work: Work, chunks: Sequence[Chunk]) -> ChunkResult:
        """The exact sum of what the chunks' clients send, and what is known of each of them."""
        with contained(f"round {work.t}"):
            return self._share(broadcast, work, chunks)

    def _share(self, broadcast: Broadcast, work: Work, chunks: Sequence[Chunk]) -> ChunkResult:
        began = time.perf_counter()
        self.trainer.seed = work.seed
        self.trainer.noise_seed = work.noise_seed
        tally = self._tally(broadcast, work)
        total = self._zeros(tally.d)
        joined = list(self._joined(chunks))
        for chunk in joined[1:]:  # the first is read at once
            self.shards.prefetch(chunk.members, chunk.rows)
        with device.blamed(self.device):
            for chunk in joined:
                self._sum(tally, chunk, total)
            for other in total[1:]:
                total[0] += other
            summed = total[0, : tally.d].cpu().numpy()
            if tally.largest:
                exact_sum.check_range(float(torch.stack(tally.largest).max()), work.grid)
            if self.own:
                self._watch(tally)
        self.shards.release()
        return tally.result(summed, time.perf_counter() - began)

    def _zeros(self, d: int) -> torch.Tensor:
        """To add up in, see `raydpfl.training.backends.base.Sum.found`; all that no thread of
        compiled code adds up goes to the first row, which is the only one where none does.
        """
        width = -(-d // native.VECTOR) * native.VECTOR
        count = native.threads() if self.trainer.adds else 1
        return torch.zeros(count, width, dtype=torch.float64, device=self.device)

    @contained()
    def losses(
        self, model: np.ndarray, t: int, clients: Sequence[int], noise_seed: int
    ) -> list[float]:
        """What each of `clients` answers of the losses of `model` (float32 [d]) on all of its rows.

        With noise of `noise_seed`, where the selection asks for any.
        """
        selection = self.experiment.selection
        models.load(self.module, device.sent(torch.tensor(model), self.device))
        parts = []
        with device.blamed(self.device), torch.inference_mode():
            for client in clients:
                self.progress.at(client)
                x, y, _ = self.rows.chunk([client], int(self.shards.sizes[client]), again=True)
                with self.keyed(self.experiment.seed, t=t, client=client, step=3):
                    outputs = self.module(torch.as_tensor(x[0]))
                    parts.append(self.form.task.loss(outputs, torch.as_tensor(y[0])).double())
            every = torch.cat(parts).cpu().numpy() if parts else np.empty(0)
        apart = np.split(every, np.cumsum([len(part) for part in parts])[:-1])
        answered = zip(clients, apart, strict=True) if parts else ()
        return [selection.answer(each, noise_seed, t, client) for client, each in answered]

    @contained("an evaluation of the model")
    def evaluate(
        self, model: np.ndarray, t: int, which: Sequence[int], own: Mapping[int, np.ndarray]
    ) -> list[Scored]:
        """See `Evaluator.evaluate`."""
        self.progress.at(-1)
        with device.blamed(self.device):
            return self.evaluator.evaluate(model, t, which, own)

    # --- the sum of a chunk ---

    def _tally(self, broadcast: Broadcast, work: Work) -> Tally:
        def here(array: np.ndarray) -> torch.Tensor:
            # a copy: what Ray hands out is its own
            return device.sent(torch.tensor(array), self.device)

        told = {
            member: {name: here(array) for name, array in state.items()}
            for member, state in broadcast.told.items()
        }
        lr = self.experiment.local.learning_rate(work.t)
        return Tally(work, lr, here(broadcast.model), told)

    def _joined(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        """The chunks, joined where the trainer takes them at once and padding hardly grows."""
        features = math.prod(self.shards.shape)
        alike: dict[tuple[int, ...], list[Chunk]] = {}
        for chunk in sorted(chunks, key=lambda each: each.rows):
            steps = self.experiment.local.step_counts(self._held(chunk.clients))
            if chunk.slot is not None or not self.trainer.joins(steps):
                yield chunk
                continue
            same = alike.setdefault(self.trainer.alike(chunk.width, chunk.rows), [])
            if same:
                padded = len(same) * (chunk.rows - same[-1].rows)
                most = self.trainer.together(chunk.width, chunk.rows, features)
                if len(same) >= most or padded * chunk.width * features > self.trainer.padding:
                    yield Chunk.joined(same)
                    same.clear()
            same.append(chunk)
        yield from map(Chunk.joined, filter(None, alike.values()))

    def _sum(self, tally: Tally, chunk: Chunk, found: torch.Tensor) -> None:
        """Adds what the clients of a chunk send, or of several, to `found`, as of `_zeros`."""
        if self._added(tally, chunk, found):
            return
        # What a user's own code computes or draws for one client must not depend on the others.
        apart = self.experiment.bounding.is_user_defined
        self.own_parts = self.personal.had(chunk, np.arange(len(chunk.clients)))
        with self._drawing(tally, chunk):
            for trained in self._trained(tally, chunk):
                if trained.own is not None:
                    self.own_parts[self._index(trained.slots)] = trained.own
                for block in trained.apart() if apart else (trained,):
                    self._send(tally, chunk, block, found[0, : tally.d])
        slots = np.flatnonzero(chunk.members >= 0)
        self._beside(tally, chunk, slots)
        for some in slots[:, None] if apart else [slots]:
            self._know(tally, chunk, some)

    def _added(self, tally: Tally, chunk: Chunk, found: torch.Tensor) -> bool:
        """As `_sum`, by a backend that adds up itself, while each update is in the cache; False
        where none does, or the chunk cannot be trained as it is, and nothing is done.
        """
        work = tally.work
        into = self._into(work, chunk, found)
        if into is None:
            return False
        self._forget(chunk)
        blocks = self._train(tally, chunk, chunk.members, self.clipped, into)
        try:
            first = next(blocks)
        except RAISED:  # before anything is trained
            return False
        for block in chain([first], blocks):
            assert block.norms is not None
            finite = np.isfinite(block.norms)
            norms = np.where(finite, block.norms, np.nan)
            for place in () if finite.all() else (~finite).nonzero()[0]:
                slot = int(block.slots[place])
                self._fault(tally, chunk, slot, float(block.norms[place]))
            self.known[:, block.slots] = norms, into.factors[block.slots], block.losses
        if not into.fits[0]:
            exact_sum.check_range(math.inf, work.grid)
        slots = np.flatnonzero(chunk.members >= 0)
        norms, factors, _ = self.known[:, slots]
        clients = chunk.clients[slots]
        self._check_factors(work, clients, np.where(np.isfinite(norms), norms, 0), factors)
        self._know(tally, chunk, slots)
        return True

    def _into(self, work: Work, chunk: Chunk, found: torch.Tensor) -> Sum | None:
        """Where the backend is to add up what the clients of a chunk send; None: it is not."""
        e = self.experiment
        plain = self._scaled and not self.own and not self.personal.own
        # what a class from outside draws is looked at, vector by vector
        drawn = work.client_std == 0 or not e.noise.is_user_defined
        if not (self.adds and self.trainer.adds and plain and drawn):
            return None
        members = chunk.members[chunk.members >= 0]
        trained = len(members) and self.shards.sizes[members].all()
        closed = e.bounding.closed(math.inf if work.bound is None else work.bound)
        if not trained or closed is None:
            return None
        return Sum(
            closed,
            np.ascontiguousarray(chunk.weights, np.float64),
            *(work.client_std, work.noise_seed, work.t, chunk.clients, chunk.draws),
            *(work.grid, found.numpy()),
            factors=np.empty(len(chunk.clients)),
            fits=np.ones(1, bool),
        )

    def _beside(self, tally: Tally, chunk: Chunk, slots: np.ndarray) -> None:
        """Has the clients at these slots train what they have of their own beside the model, but
        for those that have failed.
        """
        failed = np.isnan(self.known[0])
        members = np.where(failed, -1, chunk.members)
        work = tally.work
        own = self.personal.beside(tally.model, chunk, members, work.t, work.seed)
        if own is None:
            return
        finite = own[self._index(slots)].isfinite().all(1).cpu().numpy()
        for slot in slots[~finite].tolist():
            detail = f"its personal model is not finite in round {work.t}; lower personal.lr"
            self._drop(tally, int(chunk.clients[slot]), detail)
            own[slot] = self.own_parts[slot]
        self.own_parts = own

    def _index(self, slots: np.ndarray) -> torch.Tensor:
        """See `device.index`."""
        return device.index(slots, self.device)

    def _send(self, tally: Tally, chunk: Chunk, block: Block, found: torch.Tensor) -> None:
        """Adds what a block's clients send to `found`, float64 [d]: half of them after the others
        where the device's memory does not hold it of all.
        """
        if self._scaled:
            self._scale(tally, chunk, block, found)
            return
        vectors = None
        try:
            vectors = self._contribute(tally, chunk, block)
        except RuntimeError as error:
            alone = len(block.slots) == 1
            if alone or self.device.type == "cpu" or not device.exhausted(error):
                raise
            clear_frames(error.__traceback__)
        if vectors is not None:
            self._reduce(tally, vectors, found)
            return
        device.freed(self.device)
        half = len(block.slots) // 2
        for part in (slice(half), slice(half, None)):
            self._send(tally, chunk, block.part(part), found)

    def _scale(self, tally: Tally, chunk: Chunk, block: Block, found: torch.Tensor) -> None:
        """Adds what a block's clients send to `found`, float64 [d]: as `_contribute` and `_reduce`
        do, where that is their updates, scaled, without the vectors in float64.
        """
        slots = block.slots
        lengths = native.norms(block.updates) if block.norms is None else block.norms
        norms = lengths.copy()
        finite = np.isfinite(norms)
        for place in () if finite.all() else (~finite).nonzero()[0]:
            self._fault(tally, chunk, int(slots[place]), float(norms[place]))
            alone = slice(place, place + 1)
            block.updates[place] = self._idle(tally, chunk, slots[alone])
            lengths[alone] = native.norms(block.updates[alone])
            norms[place] = math.nan
        factors = self._factors(tally, chunk, slots, lengths).numpy()
        self.known[:, slots] = norms, factors, block.losses
        noise = self._noise(tally, chunk, slots)
        self._look(tally, chunk, slots, noise, block.updates)
        scale = factors * chunk.weights[slots]
        exact_sum.add(found.numpy(), block.updates.numpy(), tally.work.grid, scale, noise)

    def _reduce(self, tally: Tally, vectors: torch.Tensor, found: torch.Tensor) -> None:
        """Adds the rows of `vectors`, float64 [k, d], which may change, to `found`, float64 [d]."""
        if self.device.type == "cpu":
            exact_sum.add(found.numpy(), vectors.contiguous().numpy(), tally.work.grid)
            return
        vectors, largest = exact_sum.snapped(vectors, tally.work.grid)
        found += vectors.sum(0)
        tally.largest.append(largest)

    def _contribute(self, tally: Tally, chunk: Chunk, block: Block) -> torch.Tensor:
        """What a block's clients send: weighted, bounded and noised vectors, float64 [k, d]."""
        slots = block.slots
        bounding = self.experiment.bounding
        view = self._view(tally, chunk, "bounding", slots)
        vectors, norms, lengths = self._sent(tally, chunk, block, view)
        factors = self._factors(tally, chunk, slots, lengths.numpy())
        scale = factors * torch.from_numpy(chunk.weights[slots])
        unbounded = vectors.clone() if bounding.remembers else vectors
        vectors *= device.sent(scale, self.device)[:, None]
        noise = self._noise(tally, chunk, slots)
        measured = self._measured(tally, chunk, block, vectors, noise)
        left = bounding.remember(unbounded, vectors, view)
        if self.any_own:
            self._check_sent(tally.work, chunk, slots, vectors)
        exact = vectors.clone() if self.experiment.noise.is_user_defined else vectors
        if noise is not None:
            vectors += device.sent(torch.from_numpy(noise), self.device)
        local = self.experiment.local
        own = None
        if local.remembers:
            moved = bounding.moved(vectors.clone() if self.any_own else vectors, view)
            own = local.remember(moved, self._view(tally, chunk, "local", slots))
        # at last, as what comes before may be done again where memory is short
        self.known[:, slots] = norms, factors.numpy(), block.losses
        self._look(tally, chunk, slots, noise, exact)
        tally.add(measured)
        tally.keep("bounding", left, (len(slots), tally.d))
        tally.keep("local", own, (len(slots), tally.d))
        return vectors

    def _know(self, tally: Tally, chunk: Chunk, slots: np.ndarray) -> None:
        """Takes note of what is known of clients once they have sent."""
        norms, factors, losses = self.known[:, slots]
        if self.personal.own:
            failed = slots[np.isnan(norms)]
            self.own_parts[self._index(failed)] = self.personal.had(chunk, failed)
            kept = self.own_parts[self._index(slots)]
            tally.keep(OWN, kept, (len(slots), self.personal.own))
        samples = np.where(np.isfinite(norms), self.clipped[slots], np.nan)
        tally.add(
            {
                "client": chunk.clients[slots],
                "draw": chunk.draws[slots],
                "norm": norms,
                "factor": factors,
                "clipped": self.experiment.bounding.clipped(factors, samples),
                "train_loss": losses,
            }
        )

    def _sent(
        self, tally: Tally, chunk: Chunk, block: Block, view: View
    ) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
        """What a block's clients would send unbounded, float64 [k, d], and its norms twice, [k].

        A client whose norm is not finite counts as one that has not moved: the first norms have NaN
        for it, the second that of what it then sends.
        """
        bounding = self.experiment.bounding
        vectors = bounding.send(self._double(block.updates), view).double()
        given = (len(block.slots), tally.d)
        _check_shape(f"bounding.kind {bounding.kind} sends", vectors, given)
        lengths = self._lengths(vectors)
        norms = lengths.numpy().copy()
        for place in (~np.isfinite(norms)).nonzero()[0]:
            self._fault(tally, chunk, int(block.slots[place]), float(norms[place]))
            slot = block.slots[place : place + 1]
            idle = self._idle(tally, chunk, slot)[None]
            alone = self._view(tally, chunk, "bounding", slot)
            vectors[place] = bounding.send(idle.double(), alone)[0]
            lengths[place] = self._lengths(vectors[place : place + 1])[0]
            norms[place] = math.nan
        return vectors, norms, lengths

    def _lengths(self, vectors: torch.Tensor) -> torch.Tensor:
        """The L2 norms of vectors, float64 [k, d]: float64 [k]. One below `FAINT`, where squares
        underflow, is given as `FAINT` unless it is 0, so that none is too small.
        """
        if self.device.type != "cpu":
            lengths = device.norms(vectors)
        else:
            lengths = torch.from_numpy(native.norms(vectors))
        return torch.where((lengths > 0) & (lengths < FAINT), FAINT, lengths)

    def _noise(self, tally: Tally, chunk: Chunk, slots: np.ndarray) -> np.ndarray | None:
        """What the clients draw on what they send, float64 [k, d]; None: nothing."""
        work = tally.work
        if work.client_std == 0:
            return None
        if self._drawn is not None:
            who, drawn = self._drawn
            noise = drawn.result()
            return None if noise is None else noise[np.searchsorted(who, slots)]
        return self._draw(tally, chunk, slots)

    @contextmanager
    def _drawing(self, tally: Tally, chunk: Chunk) -> Iterator[None]:
        """Draws the noise of the chunk's clients in a thread while they train on a device."""
        slots = np.flatnonzero(chunk.members >= 0)
        small = 8 * tally.d * len(slots) <= AHEAD
        if self.device.type == "cpu" or tally.work.client_std == 0 or not small:
            yield
            return
        with ThreadPoolExecutor(1) as thread:
            self._drawn = slots, thread.submit(self._draw, tally, chunk, slots)
            try:
                yield
            finally:
                self._drawn = None

    def _draw(self, tally: Tally, chunk: Chunk, slots: np.ndarray) -> np.ndarray | None:
        work = tally.work
        who = (chunk.clients[slots], chunk.draws[slots])
        d = tally.d
        noise = self.experiment.noise
        drawn = noise.on_clients(work.noise_seed, work.t, *who, work.client_std, d)
        if drawn is None:
            return None
        _check_shape(f"noise.kind {noise.kind} draws", drawn, (len(slots), d))
        return np.ascontiguousarray(drawn, np.float64)

    def _look(
        self,
        tally: Tally,
        chunk: Chunk,
        slots: np.ndarray,
        noise: np.ndarray | None,
        sent: torch.Tensor,
    ) -> None:
        """Takes note of what clients draw by a class from outside, and send without it. Raises
        `RunError` where no noise is drawn that was accounted for.
        """
        std = tally.work.client_std
        if not std:
            return
        kind = self.experiment.noise.kind
        if noise is None:
            raise RunError(
                f"noise.kind {kind} draws no noise of client {chunk.clients[slots[0]]} in round "
                f"{tally.work.t}, where N(0, {std:.6g}^2) was accounted for"
            )
        if self.experiment.noise.is_user_defined:
            from raydpfl.simulation.noise_monitor import numbers  # loads scipy

            hidden = sent.cpu().numpy().astype(np.float64)
            found = {**numbers(noise, std, [hidden]), "client": chunk.clients[slots]}
            for name, values in {**found, "sum": noise.sum(0)}.items():
                tally.drawn.setdefault(name, []).append(values)

    def _double(self, updates: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cpu":
            return updates.double()
        k, d = updates.shape
        if self._buffer.shape[1] != d or self._buffer.shape[0] < k:
            self._buffer = np.zeros((k, d))  # the same memory every time
        return torch.from_numpy(self._buffer[:k]).copy_(updates)

    def _factors(
        self, tally: Tally, chunk: Chunk, slots: np.ndarray, lengths: np.ndarray
    ) -> torch.Tensor:
        """What bounding multiplies vectors of these norms by, float64 [k]. Raises `RunError` where
        that leaves more than the bound.
        """
        work = tally.work
        bounding = self.experiment.bounding
        bound = math.inf if work.bound is None else work.bound
        key = {
            "t": work.t,
            "client": int(chunk.clients[slots[0]]),
            "draw": int(chunk.draws[slots[0]]),
        }
        with self.keyed(work.seed, **key, step=2):
            # a copy, as the norms that what is left is checked by may not be changed
            factors = bounding.factors(torch.from_numpy(lengths.copy()), bound)
        _check_shape(f"bounding.kind {bounding.kind} gives factors", factors, lengths.shape)
        self._check_factors(work, chunk.clients[slots], lengths, factors.numpy())
        return factors

    def _check_factors(
        self, work: Work, clients: np.ndarray, lengths: np.ndarray, factors: np.ndarray
    ) -> None:
        """Raises `RunError` where vectors of these norms, times the factors, pass the bound."""
        if work.bound is None:
            return
        left = factors * lengths
        most = work.bound * (1 + 1e-12)
        if not (left.min() >= 0 and left.max() <= most):
            place = int(np.argmin((left >= 0) & (left <= most)))
            raise RunError(
                f"bounding.kind {self.experiment.bounding.kind} lets client {clients[place]} send "
                f"norm {lengths[place]:g} times factor {factors[place]:g} in round {work.t}, above "
                f"its bound of {work.bound:g}"
            )

    def _check_sent(
        self, work: Work, chunk: Chunk, slots: np.ndarray, vectors: torch.Tensor
    ) -> None:
        """Raises `RunError` where what clients send, weighted and without noise, float64 [k, d], is
        longer than the bound: code from outside that was given it may have changed it.
        """
        if work.bound is None:
            return
        lengths = self._lengths(vectors).numpy()
        within = lengths <= work.bound * np.abs(chunk.weights[slots]) * (1 + 1e-9)
        if not within.all():
            place = int(np.argmin(within))
            sent = lengths[place] / abs(chunk.weights[slots[place]])
            client = chunk.clients[slots[place]]
            raise RunError(
                f"client {client} sends norm {sent:g} in round {work.t}, above the bound of "
                f"{work.bound:g} of bounding.kind {self.experiment.bounding.kind}"
            )

    def _view(self, tally: Tally, chunk: Chunk, member: str, slots: np.ndarray) -> View:
        """What the clients at these slots know of the round, for the hooks of a member."""

        def remembered() -> torch.Tensor:
            own = torch.zeros(len(slots), tally.d)
            stored = chunk.memory.get(member, {})
            for place, slot in enumerate(slots.tolist()):
                if slot in stored:
                    own[place] = torch.tensor(stored[slot])
            return device.sent(own, self.device)

        told = tally.told.get(member, {})
        return View(tally.work.t, tally.lr, tally.work.bound, tally.model, told, remembered)

    def _idle(self, tally: Tally, chunk: Chunk, slots: np.ndarray) -> torch.Tensor:
        """The update of a client that has not trained, float32 [d]."""
        return self.experiment.local.idle(self._view(tally, chunk, "local", slots))

    # --- what is measured on the side ---

    def _measured(
        self,
        tally: Tally,
        chunk: Chunk,
        block: Block,
        vectors: torch.Tensor,
        noise: np.ndarray | None,
    ) -> dict[str, np.ndarray]:
        """What the probes find of a block's clients, float64 [k] each."""
        found: dict[str, np.ndarray] = {}
        for probe in self.experiment.measure:
            told = tally.told.get(f"measure.{probe.kind}", {})
            again = partial(self._again, tally, chunk, block.slots)
            found |= probe.chunk(Sent(block.updates, vectors, noise, told, again))
        return found

    def _again(
        self, tally: Tally, chunk: Chunk, slots: np.ndarray, times: int
    ) -> tuple[torch.Tensor, np.ndarray]:
        """See `raydpfl.methods.probes.Sent.again`. The chunk is trained again once for all
        its blocks.
        """
        if tally.again is None or tally.again[0] is not chunk:
            tally.again = chunk, *self._repeated(tally, chunk, times)
        _, sums, squares = tally.again
        return sums[self._index(slots)], squares[slots]

    def _repeated(self, tally: Tally, chunk: Chunk, times: int) -> tuple[torch.Tensor, np.ndarray]:
        width = len(chunk.clients)
        sums = torch.zeros(width, tally.d, dtype=torch.float64, device=self.device)
        squares = np.zeros(width)
        for k in range(1, times + 1):
            again = replace(chunk, draws=chunk.draws + (k << 20))  # draws that no cohort has
            try:
                for block in self._train(tally, again, chunk.members):
                    view = self._view(tally, chunk, "bounding", block.slots)
                    sent = self.experiment.bounding.send(block.updates.double(), view)
                    sums[self._index(block.slots)] += sent
                    squares[block.slots] += (sent * sent).sum(1).cpu().numpy()
            except RAISED as error:
                # some client's, which is found and named when the chunk is trained
                device.blame(self.device, error)
                squares[:] = np.nan
                break
        return sums, squares

    # --- training ---

    def _forget(self, chunk: Chunk) -> None:
        """Nothing is known yet of a chunk."""
        self.clipped = np.full(len(chunk.clients), np.nan)
        self.known = np.full((3, len(chunk.clients)), np.nan)

    def _trained(self, tally: Tally, chunk: Chunk) -> Iterator[Block]:
        """The updates of the chunk's clients, in its order. A client that raises is found by
        training each alone; its update is NaN.
        """
        members = chunk.members
        self._forget(chunk)
        done = 0
        try:
            for block in self._fitting(tally, chunk, members):
                yield self._sampled(chunk, block)
                done = int(block.slots[-1]) + 1
            return
        except (DeviceError, ConfigError):  # no client's: of rows that a source makes, the latter
            raise
        except RAISED as error:
            device.blame(self.device, error)
            clear_frames(error.__traceback__)  # which hold the tensors of the chunk
            raised = error
        # not in the clause above, where the chunk would be kept in memory
        failures = self._failures(tally, chunk, members)
        if not failures:
            raise raised
        for slot, detail in failures.items():
            tally.failed.add((int(members[slot]), int(chunk.draws[slot])))
            self._drop(tally, int(members[slot]), detail)
        survivors = members.copy()
        survivors[list(failures)] = -1
        pending = self._one_by_one(tally, chunk, survivors)
        for slot in np.flatnonzero(members >= 0).tolist():
            block = self._none(tally, slot) if slot in failures else next(pending)
            if slot >= done:
                yield block

    def _one_by_one(self, tally: Tally, chunk: Chunk, members: np.ndarray) -> Iterator[Block]:
        for block in self._fitting(tally, chunk, members):
            yield from block.apart()

    def _fitting(self, tally: Tally, chunk: Chunk, members: np.ndarray) -> Iterator[Block]:
        """As `_train`. Where the device's memory does not hold the chunk, half as many of its
        clients train at once, from the first on that has not been given.
        """
        done = 0
        while True:
            cut = max(1, min(self._cut, len(members) // 2))
            try:
                for block in self._parts(tally, chunk, members, cut, done):
                    yield block
                    done = int(block.slots[-1]) + 1
                return
            except RuntimeError as error:
                # one client alone may have other bits than several
                least = len(members) < 4 * cut
                if least or self.device.type == "cpu" or not device.exhausted(error):
                    raise
                clear_frames(error.__traceback__)  # which hold the tensors of the chunk
            # not in the clause above, where the chunk would be kept in memory
            device.freed(self.device)
            self._cut = 2 * cut

    def _parts(
        self, tally: Tally, chunk: Chunk, members: np.ndarray, cut: int, done: int
    ) -> Iterator[Block]:
        """As `_train`, of the chunk cut in so many parts, from the slot `done` on."""
        if cut == 1:
            yield from self._train(tally, chunk, members, self.clipped)
            return
        edges = np.linspace(0, len(members), cut + 1).astype(int).tolist()
        for start, end in pairwise(edges):
            part = slice(start, end)
            if (members[max(start, done) : end] < 0).all():
                continue
            for block in self._train(tally, chunk.part(part), members[part], self.clipped[part]):
                new = block.slots + start >= done
                if new.any():
                    yield block.part(slice(int(np.argmax(new)), None), start)

    def _none(self, tally: Tally, slot: int) -> Block:
        """In the place of a client that has failed."""
        updates = torch.full_like(tally.model, math.nan)[None]
        return Block(np.array([slot]), updates, np.full(1, math.nan))

    def _train(
        self,
        tally: Tally,
        chunk: Chunk,
        members: np.ndarray,
        clipped: np.ndarray | None = None,
        into: Sum | None = None,
    ) -> Iterator[Block]:
        """The updates of `members` (int64 [C], -1 for all others), in blocks; see `Trainer.chunk`.
        Without `clipped` they train apart from the round, in memory of their own.
        """
        local = self.experiment.local
        rows, drawn = self._batches(tally, chunk, members)
        x, y, sizes = self.rows.chunk(members, chunk.rows, rows, again=clipped is None)
        present = np.flatnonzero(members >= 0)
        self.progress.at(members[present[0]] if len(present) else -1)
        model, starts = self.personal.begun(tally.model, chunk)
        view = self._view(tally, chunk, "local", np.arange(len(members)))
        trained = self.trainer.chunk(
            *(model, x, y, sizes),
            t=tally.work.t,
            clients=members,
            draws=chunk.draws,
            stds=chunk.stds,
            corrections=self.personal.corrections(local.correction(view)),
            drawn=drawn,
            clipped=clipped,
            width=chunk.width,
            starts=starts,
            planned=local.step_counts(self._held(chunk.clients)),
            into=into,
        )
        done = 0
        for each in trained:
            block = self.personal.parted(each, starts)
            done += len(block.slots)
            self.progress.at(members[present[done]] if done < len(present) else -1)
            self._stand(tally, chunk, block, sizes)
            device.synchronise(self.device)  # what goes wrong there is raised here
            yield block

    def _stand(self, tally: Tally, chunk: Chunk, block: Block, sizes: np.ndarray) -> None:
        """Puts into a block what clients without rows send."""
        for place in (sizes[block.slots] == 0).nonzero()[0].tolist():
            block.updates[place] = self._idle(tally, chunk, block.slots[place : place + 1])

    def _held(self, clients: np.ndarray) -> np.ndarray:
        """Samples of clients, int64 [C]; 0 for -1."""
        return np.where(clients < 0, 0, self.shards.sizes[clients])

    def _batches(
        self, tally: Tally, chunk: Chunk, members: np.ndarray
    ) -> tuple[list[np.ndarray | None], tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Which rows the members train on (see `picked`), and `drawn` of `Trainer.chunk`."""
        local = self.experiment.local
        held = self._held(members)
        who = (tally.work.seed, tally.work.t, members, chunk.draws)
        index, batch_sizes = batches(*who, held, local, rows=chunk.rows)
        rows, index = picked(index, batch_sizes, held, local)
        return rows, (index, batch_sizes, local.step_counts(held))

    def _failures(self, tally: Tally, chunk: Chunk, members: np.ndarray) -> dict[int, str]:
        """What goes wrong where each member is trained alone, by slot."""
        found = {}
        for slot in np.flatnonzero(members >= 0).tolist():
            detail = self._fails_alone(tally, replace(chunk, slot=slot))
            if detail is not None:
                found[slot] = detail
        return found

    def _fails_alone(self, tally: Tally, alone: Chunk) -> str | None:
        try:
            for _ in self._train(tally, alone, alone.members):
                pass
        except SystemExit as error:
            return f"its training {exited(error)}"
        except Exception as error:
            device.blame(self.device, error)
            client = int(alone.clients[alone.slot])
            return told(error, f"the training of client {client} in round {tally.work.t}")
        return None

    def _drop(self, tally: Tally, client: int, detail: str) -> None:
        if self.experiment.client.on_error == "fail":
            raise ClientError(client, detail)
        tally.dropped.append((client, detail))

    def _fault(self, tally: Tally, chunk: Chunk, slot: int, norm: float) -> None:
        """An update is not finite: that of a client that has raised, or the client's own error."""
        client = int(chunk.clients[slot])
        if (client, int(chunk.draws[slot])) not in tally.failed:
            advice = "lower local.lr, or look at its data"
            self._drop(
                tally, client, f"its update has norm {norm} in round {tally.work.t}; {advice}"
            )
            tally.failed.add((client, int(chunk.draws[slot])))

    # --- code of the user's own must keep nothing ---

    def _sampled(self, chunk: Chunk, block: Block) -> Block:
        """The block, of whose first client the update is put aside, where that is to be watched."""
        if self.own and self._sample is None:
            self._sample = chunk, int(block.slots[0]), block.updates[0].clone()
        return block

    def _kept(self) -> dict[str, bytes]:
        things = [self.trainer.module, self.experiment.local, self.experiment.bounding]
        return kept(*(each for each in things if each is not None)) if self.own else {}

    def _watch(self, tally: Tally) -> None:
        """After 1, 2, 4, 8, ... shares the first client of the share is trained again, and must
        give the same bits.

        Raises `RunError` if the user's own code keeps something from one client to the next: by
        what it keeps, and by what it does.
        """
        self._shares += 1
        sample = self._sample
        self._sample = None
        if self._shares & (self._shares - 1):
            return
        state = self._state
        self._state = self._kept()
        names = ", ".join(changed(state, self._state)[:5])
        if not names and sample:
            names = self._differs(tally, *sample)
        if names:
            raise RunError(
                f"{self._whose()} keeps something from one client to the next ({names}), so that "
                "the bits would depend on who trains whom; a model may use its parameters, its "
                "buffers and its input alone, another member what it is given"
            )

    def _whose(self) -> str:
        """The members of the user's own that take part in what a client does."""
        e = self.experiment
        members = {"model": e.model, "local": e.local, "bounding": e.bounding}
        own = [f"{name}.kind {each.kind}" for name, each in members.items() if each.is_user_defined]
        return " or ".join(own)

    def _differs(self, tally: Tally, chunk: Chunk, slot: int, update: torch.Tensor) -> str:
        alone = replace(chunk, slot=slot)
        for block in self._train(tally, alone, alone.members):
            again = block.updates[0].cpu().numpy()
            if not np.array_equal(again, update.cpu().numpy(), equal_nan=True):
                return f"client {chunk.clients[slot]}, trained again, gives another update"
        return ""


def _check_shape(what: str, given: torch.Tensor | np.ndarray, wanted: tuple[int, ...]) -> None:
    """Raises `RunError` for what a member gives of some clients in another shape."""
    if tuple(given.shape) != tuple(wanted):
        raise RunError(f"{what} {list(given.shape)}, not {list(wanted)}")


def _scales(experiment: Experiment) -> bool:
    """Whether what clients send is their updates, scaled, and nobody asks for it in float64."""
    bounding = experiment.bounding
    asked = any(probe.looks for probe in experiment.measure)
    return bounding.scales and not (asked or bounding.remembers or experiment.local.remembers)
