"""Checks that user-defined code keeps nothing from one client to the next."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from raydpfl.errors import RunError
from raydpfl.models.hidden_state import changed, kept
from raydpfl.simulation.client.actor_round import ActorRound, ChunkRound
from raydpfl.simulation.client.chunk_training import ChunkTraining


class UserCodeWatch:
    """After 1, 2, 4, 8, ... rounds of an actor, looks for Python state that has changed, and trains
    the first client of the round a second time, which must give the same bits.
    """

    def __init__(self, training: ChunkTraining):
        experiment = training.experiment
        self._training = training
        names = ("model", "local", "bounding")
        self._members = {name: getattr(experiment, name) for name in names}
        module = training.trainer.module
        modules = [] if module is None else [module]
        self._kept = partial(kept, *modules, experiment.local, experiment.bounding)
        self._rounds = 0
        self._state = self._kept()

    def check(self, actor: ActorRound) -> None:
        """Raises `RunError` if user-defined code keeps something from one client to the next."""
        self._rounds += 1
        if self._rounds & (self._rounds - 1):
            return
        before = self._state
        self._state = self._kept()
        what = ", ".join(changed(before, self._state)[:5])
        if not what and actor.sample:
            what = self._difference(*actor.sample)
        if what:
            names = " or ".join(
                f"{name}.kind {member.kind}"
                for name, member in self._members.items()
                if member.is_user_defined
            )
            raise RunError(
                f"{names} keeps something from one client to the next ({what}), so that "
                "the bits would depend on who trains whom; a model may use its parameters, its "
                "buffers and its input alone, another member its arguments"
            )

    def _difference(self, state: ChunkRound, slot: int, update: torch.Tensor) -> str:
        """What differs when the client at this slot is trained a second time; empty: nothing."""
        alone = replace(state.chunk, slot=slot)
        for block in self._training.train(state.of(alone), alone.members, independent=True):
            repeated = block.updates[0].cpu().numpy()
            if not np.array_equal(repeated, update.cpu().numpy(), equal_nan=True):
                client = state.chunk.clients[slot]
                return f"client {client}, trained again, gives another update"
        return ""
