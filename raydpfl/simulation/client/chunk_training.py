"""Trains the clients of a chunk, within the device's memory, isolates those that fail, and checks
that user-defined code keeps nothing from one client to the next.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from traceback import clear_frames

import numpy as np
import torch

from raydpfl.core import device
from raydpfl.errors import (
    USER_EXCEPTIONS,
    ConfigError,
    DeviceError,
    RunError,
    exit_message,
    traceback_text,
)
from raydpfl.experiment import Experiment
from raydpfl.models.hidden_state import changed_names, python_state
from raydpfl.simulation.client.actor_round import ActorRound, ChunkRound
from raydpfl.simulation.client.data_cache import Rows
from raydpfl.simulation.client.personalization import LocalParameters
from raydpfl.training.backends.base import Block, Sum
from raydpfl.training.trainer import Trainer


@dataclass
class ChunkTraining:
    """Trains chunks of clients with one trainer, on rows from `rows`."""

    experiment: Experiment
    rows: Rows
    trainer: Trainer
    personal: LocalParameters
    client: int = -1  # that trains at this moment, -1: none
    _parts: int = 1  # that a chunk is trained in, as the device's memory is too small for it

    def __post_init__(self) -> None:
        self.local = self.experiment.local
        self.device = self.trainer.device

    def train(
        self,
        state: ChunkRound,
        members: np.ndarray,
        independent: bool = False,
        accumulator: Sum | None = None,
    ) -> Iterator[Block]:
        """The updates of `members` (int64 [C], -1 for all others), in blocks; see `Trainer.chunk`.
        With `independent` they are trained independently of the round.
        """
        chunk = state.chunk
        present = np.flatnonzero(members >= 0)
        self.client = int(members[present[0]]) if len(present) else -1
        model, starts = self.personal.starts(state.actor.model, chunk)
        view = state.view("local", np.arange(len(members)))
        full_blocks = self.rows.train(
            *(self.trainer, model, chunk, members, state.work.t),
            stds=chunk.stds,
            corrections=self.personal.corrections(self.local.correction(view)),
            starts=starts,
            clipped=None if independent else state.clipped,
            into=accumulator,
        )
        sizes = self.rows.sizes(members)
        count = 0
        for full_block in full_blocks:
            block = self.personal.split_block(full_block, starts)
            count += len(block.slots)
            self.client = int(members[present[count]]) if count < len(present) else -1
            for place in np.flatnonzero(sizes[block.slots] == 0).tolist():  # without rows
                block.updates[place] = self.idle(state, block.slots[place : place + 1])
            device.synchronise(self.device)  # what goes wrong there is raised here
            yield block

    def idle(self, state: ChunkRound, slots: np.ndarray) -> torch.Tensor:
        """The update of a client that has not trained, float32 [d]."""
        return self.local.idle(state.view("local", slots))

    def blocks(self, state: ChunkRound, members: np.ndarray) -> Iterator[Block]:
        """The updates of the chunk's clients `members` (int64 [C], -1 for all other slots), in its
        order. If training raises, every client is trained alone to find those that fail: their
        updates are NaN, and the others train again.
        """
        next_slot = 0
        try:
            for block in self._train_in_parts(state, members):
                if self.trainer.user_defined and state.actor.sample is None:
                    state.actor.sample = state, int(block.slots[0]), block.updates[0].clone()
                yield block
                next_slot = int(block.slots[-1]) + 1
            return
        except (DeviceError, ConfigError):  # not a client's: the latter of generated rows
            raise
        except USER_EXCEPTIONS as error:
            device.raise_device_error(self.device, error)
            clear_frames(error.__traceback__)  # which hold the tensors of the chunk
            training_error = error
        # not in the clause above, where the chunk would stay in memory
        failures = self._failures(state, members)
        if not failures:
            raise training_error
        for slot, detail in failures.items():
            state.drop(slot, detail)
        remaining_members = members.copy()
        remaining_members[list(failures)] = -1
        blocks = self._train_in_parts(state, remaining_members)
        singles = (single for block in blocks for single in block.singles())
        for slot in np.flatnonzero(members >= 0).tolist():
            if slot in failures:
                update = torch.full_like(state.actor.model, math.nan)[None]
                block = Block(np.array([slot]), update, np.full(1, math.nan))
            else:
                block = next(singles)
            if slot >= next_slot:
                yield block

    def _failures(self, state: ChunkRound, members: np.ndarray) -> dict[int, str]:
        """Trains these clients of a chunk one by one; the tracebacks of failures, by slot."""
        failures = {}
        for slot in np.flatnonzero(members >= 0).tolist():
            single = replace(state.chunk, slot=slot)
            try:
                for _ in self.train(state.of(single), single.members, independent=True):
                    pass
            except SystemExit as error:
                failures[slot] = f"its training {exit_message(error)}"
            except Exception as error:
                device.raise_device_error(self.device, error)
                context = f"the training of client {members[slot]} in round {state.work.t}"
                failures[slot] = traceback_text(error, context)
        return failures

    def _train_in_parts(self, state: ChunkRound, members: np.ndarray) -> Iterator[Block]:
        """As `train`. Where the device's memory does not hold the chunk, half as many of its
        clients train at once, from the first block on that has not been yielded.
        """
        next_slot = 0
        while True:
            count = max(1, min(self._parts, len(members) // 2))
            edges = np.linspace(0, len(members), count + 1).astype(int).tolist()
            try:
                for start, end in pairwise(edges):
                    if (members[max(start, next_slot) : end] < 0).all():
                        continue
                    part = state if count == 1 else state.part(slice(start, end))
                    for block in self.train(part, members[start:end]):
                        new_mask = block.slots + start >= next_slot
                        if new_mask.any():
                            yield block.part(slice(int(np.argmax(new_mask)), None), start)
                            next_slot = start + int(block.slots[-1]) + 1
                return
            except RuntimeError as error:
                # one client alone may have other bits than several
                indivisible = len(members) < 4 * count
                if indivisible or self.device.type == "cpu" or not device.is_out_of_memory(error):
                    raise
                clear_frames(error.__traceback__)  # which hold the tensors of the chunk
            # not in the clause above, where the chunk would stay in memory
            device.empty_cache(self.device)
            self._parts = 2 * count

    def repeat(self, state: ChunkRound, times: int) -> tuple[torch.Tensor, np.ndarray]:
        """Trains the chunk so many times more, each time with other batches and noise. Returns the
        sum of what every client would send unbounded, float64 [C, d], and of its squared norms,
        float64 [C]; NaN if a client fails.
        """
        chunk = state.chunk
        count = len(chunk.clients)
        sums = torch.zeros(count, state.actor.d, dtype=torch.float64, device=self.device)
        squares = np.zeros(count)
        for k in range(1, times + 1):
            draws = chunk.draws + (k << 20)  # that no cohort has
            repeat_state = state.of(replace(chunk, draws=draws))
            try:
                for block in self.train(repeat_state, chunk.members, independent=True):
                    view = state.view("bounding", block.slots)
                    contributions = self.experiment.bounding.send(block.updates.double(), view)
                    sums[state.index(block.slots)] += contributions
                    squares[block.slots] += (contributions * contributions).sum(1).cpu().numpy()
            except USER_EXCEPTIONS as error:  # of a client, named where the chunk is trained
                device.raise_device_error(self.device, error)
                squares[:] = np.nan
                break
        return sums, squares


class UserCodeWatch:
    """After 1, 2, 4, 8, ... rounds of an actor, looks for Python state that has changed, and trains
    the first client of the round a second time, which must give the same bits.
    """

    def __init__(self, training: ChunkTraining):
        experiment = training.experiment
        self._training = training
        names = ("model", "local", "bounding")
        self._members = {name: getattr(experiment, name) for name in names}
        module = training.trainer.backend.module
        modules = [] if module is None else [module]
        self._take_snapshot = partial(python_state, *modules, experiment.local, experiment.bounding)
        self._rounds = 0
        self._state = self._take_snapshot()

    def check(self, actor: ActorRound) -> None:
        """Raises `RunError` if user-defined code keeps something from one client to the next."""
        self._rounds += 1
        if self._rounds & (self._rounds - 1):
            return
        before = self._state
        self._state = self._take_snapshot()
        difference = ", ".join(changed_names(before, self._state)[:5])
        if not difference and actor.sample:
            difference = self._difference(*actor.sample)
        if difference:
            names = " or ".join(
                f"{name}.kind {member.kind}"
                for name, member in self._members.items()
                if member.is_user_defined
            )
            raise RunError(
                f"{names} keeps something from one client to the next ({difference}), so that "
                "the bits would depend on who trains whom; a model may use its parameters, its "
                "buffers and its input alone, another member its arguments"
            )

    def _difference(self, state: ChunkRound, slot: int, update: torch.Tensor) -> str:
        """What differs when the client at this slot is trained a second time; empty: nothing."""
        single = replace(state.chunk, slot=slot)
        for block in self._training.train(state.of(single), single.members, independent=True):
            repeated_update = block.updates[0].cpu().numpy()
            if not np.array_equal(repeated_update, update.cpu().numpy(), equal_nan=True):
                client = state.chunk.clients[slot]
                return f"client {client}, trained again, gives another update"
        return ""
