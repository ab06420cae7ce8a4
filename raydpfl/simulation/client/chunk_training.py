"""Trains the clients of a chunk, within the device's memory, and isolates those that fail."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from traceback import clear_frames

import numpy as np
import torch

from raydpfl.core import device
from raydpfl.core.messages import Chunk
from raydpfl.data import Shards
from raydpfl.errors import RAISED, ConfigError, DeviceError, exited, traceback_text
from raydpfl.experiment import Experiment
from raydpfl.simulation.client.actor_round import ActorRound, ChunkRound
from raydpfl.simulation.client.data_cache import Rows
from raydpfl.simulation.client.personalization import LocalParameters
from raydpfl.simulation.client.progress import ClientProgress
from raydpfl.training.backends.base import Block, Sum
from raydpfl.training.minibatches import batches, picked
from raydpfl.training.trainer import Trainer


class ChunkTraining:
    """Trains chunks of clients with one trainer, on rows from `rows`."""

    def __init__(
        self,
        experiment: Experiment,
        shards: Shards,
        rows: Rows,
        trainer: Trainer,
        personal: LocalParameters,
        progress: ClientProgress,
    ):
        self.experiment = experiment
        self.local = experiment.local
        self.shards = shards
        self.rows = rows
        self.trainer = trainer
        self.personal = personal
        self.progress = progress
        self.device = trainer.device
        self._parts = 1  # that a chunk is trained in, as the device's memory is too small for it

    def train(
        self,
        actor: ActorRound,
        chunk: Chunk,
        members: np.ndarray,
        clipped: np.ndarray | None = None,
        into: Sum | None = None,
    ) -> Iterator[Block]:
        """The updates of `members` (int64 [C], -1 for all others), in blocks; see `Trainer.chunk`.
        Without `clipped` they are trained independently of the round, in separate memory.
        """
        sizes = self.sizes(members)
        index, batch_sizes = batches(
            actor.work.seed, actor.work.t, members, chunk.draws, sizes, self.local, rows=chunk.rows
        )
        rows, index = picked(index, batch_sizes, sizes, self.local)
        x, y, counts = self.rows.chunk(members, chunk.rows, rows, again=clipped is None)
        present = np.flatnonzero(members >= 0)
        self.progress.set(members[present[0]] if len(present) else -1)
        model, starts = self.personal.starts(actor.model, chunk)
        view = actor.view(chunk, "local", np.arange(len(members)))
        trained = self.trainer.chunk(
            *(model, x, y, counts),
            t=actor.work.t,
            clients=members,
            draws=chunk.draws,
            stds=chunk.stds,
            corrections=self.personal.corrections(self.local.correction(view)),
            drawn=(index, batch_sizes, self.local.step_counts(sizes)),
            clipped=clipped,
            starts=starts,
            planned=self.local.step_counts(self.sizes(chunk.clients)),
            into=into,
        )
        done = 0
        for whole in trained:
            block = self.personal.split_block(whole, starts)
            done += len(block.slots)
            self.progress.set(members[present[done]] if done < len(present) else -1)
            for place in np.flatnonzero(counts[block.slots] == 0).tolist():  # without rows
                block.updates[place] = self.idle(actor, chunk, block.slots[place : place + 1])
            device.synchronise(self.device)  # what goes wrong there is raised here
            yield block

    def sizes(self, clients: np.ndarray) -> np.ndarray:
        """Samples of clients, int64 [C]; 0 for -1."""
        return np.where(clients < 0, 0, self.shards.sizes[clients])

    def idle(self, actor: ActorRound, chunk: Chunk, slots: np.ndarray) -> torch.Tensor:
        """The update of a client that has not trained, float32 [d]."""
        return self.local.idle(actor.view(chunk, "local", slots))

    def blocks(self, state: ChunkRound, members: np.ndarray) -> Iterator[Block]:
        """The updates of the chunk's clients `members` (int64 [C], -1 for all other slots), in its
        order. If training raises, every client is trained alone to find those that fail: their
        updates are NaN, and the others train again.
        """
        actor = state.actor
        chunk = state.chunk
        done = 0
        try:
            for block in self._within_memory(state, members):
                if self.trainer.user_defined and actor.sample is None:
                    actor.sample = chunk, int(block.slots[0]), block.updates[0].clone()
                yield block
                done = int(block.slots[-1]) + 1
            return
        except (DeviceError, ConfigError):  # not a client's: the latter of generated rows
            raise
        except RAISED as error:
            device.blame(self.device, error)
            clear_frames(error.__traceback__)  # which hold the tensors of the chunk
            raised = error
        # not in the clause above, where the chunk would stay in memory
        details = self._failures(actor, chunk, members)
        if not details:
            raise raised
        for slot, detail in details.items():
            actor.failed.add((int(chunk.clients[slot]), int(chunk.draws[slot])))
            actor.drop(int(chunk.clients[slot]), detail)
        others = members.copy()
        others[list(details)] = -1
        trained = (
            single for block in self._within_memory(state, others) for single in block.singles()
        )
        for slot in np.flatnonzero(members >= 0).tolist():
            if slot in details:
                update = torch.full_like(actor.model, math.nan)[None]
                block = Block(np.array([slot]), update, np.full(1, math.nan))
            else:
                block = next(trained)
            if slot >= done:
                yield block

    def _failures(self, actor: ActorRound, chunk: Chunk, members: np.ndarray) -> dict[int, str]:
        """Trains these clients of a chunk one by one; the tracebacks of failures, by slot."""
        details = {}
        for slot in np.flatnonzero(members >= 0).tolist():
            alone = replace(chunk, slot=slot)
            try:
                for _ in self.train(actor, alone, alone.members):
                    pass
            except SystemExit as error:
                details[slot] = f"its training {exited(error)}"
            except Exception as error:
                device.blame(self.device, error)
                where = f"the training of client {chunk.clients[slot]} in round {actor.work.t}"
                details[slot] = traceback_text(error, where)
        return details

    def _within_memory(self, state: ChunkRound, members: np.ndarray) -> Iterator[Block]:
        """As `train`. Where the device's memory does not hold the chunk, half as many of its
        clients train at once, from the first block on that has not been yielded.
        """
        done = 0
        while True:
            count = max(1, min(self._parts, len(members) // 2))
            try:
                for block in self._in_parts(state, members, count, done):
                    yield block
                    done = int(block.slots[-1]) + 1
                return
            except RuntimeError as error:
                # one client alone may have other bits than several
                least = len(members) < 4 * count
                if least or self.device.type == "cpu" or not device.exhausted(error):
                    raise
                clear_frames(error.__traceback__)  # which hold the tensors of the chunk
            # not in the clause above, where the chunk would stay in memory
            device.freed(self.device)
            self._parts = 2 * count

    def _in_parts(
        self, state: ChunkRound, members: np.ndarray, count: int, done: int
    ) -> Iterator[Block]:
        """As `train`, of the chunk in `count` parts, from the slot `done` on."""
        chunk = state.chunk
        if count == 1:
            yield from self.train(state.actor, chunk, members, state.clipped)
            return
        edges = np.linspace(0, len(members), count + 1).astype(int).tolist()
        for start, end in pairwise(edges):
            part = slice(start, end)
            if (members[max(start, done) : end] < 0).all():
                continue
            for block in self.train(
                state.actor, chunk.part(part), members[part], state.clipped[part]
            ):
                new = block.slots + start >= done
                if new.any():
                    yield block.part(slice(int(np.argmax(new)), None), start)

    def repeat(self, state: ChunkRound, times: int) -> tuple[torch.Tensor, np.ndarray]:
        """Trains the chunk so many times more, each time with other batches and noise. Returns the
        sum of what every client would send unbounded, float64 [C, d], and of its squared norms,
        float64 [C]; NaN if a client fails.
        """
        actor = state.actor
        chunk = state.chunk
        bounding = self.experiment.bounding
        sums = torch.zeros(len(chunk.clients), actor.d, dtype=torch.float64, device=self.device)
        squares = np.zeros(len(chunk.clients))
        for k in range(1, times + 1):
            repeated = replace(chunk, draws=chunk.draws + (k << 20))  # draws that no cohort has
            try:
                for block in self.train(actor, repeated, chunk.members):
                    view = state.view("bounding", block.slots)
                    sent = bounding.send(block.updates.double(), view)
                    sums[state.index(block.slots)] += sent
                    squares[block.slots] += (sent * sent).sum(1).cpu().numpy()
            except RAISED as error:  # of a client, which is named where the chunk is trained
                device.blame(self.device, error)
                squares[:] = np.nan
                break
        return sums, squares
