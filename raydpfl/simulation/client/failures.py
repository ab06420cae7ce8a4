"""Finds the clients whose training raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from raydpfl.core import device
from raydpfl.core.messages import Chunk
from raydpfl.errors import exited, traceback_text
from raydpfl.simulation.client.actor_round import ActorRound
from raydpfl.training.backends.base import Block

Train = Callable[[ActorRound, Chunk, np.ndarray], Iterator[Block]]


def failures(train: Train, actor: ActorRound, chunk: Chunk) -> dict[int, str]:
    """Trains the clients of a chunk one by one; returns the tracebacks of failures, by slot."""
    details = {}
    for slot in np.flatnonzero(chunk.members >= 0).tolist():
        alone = replace(chunk, slot=slot)
        try:
            for _ in train(actor, alone, alone.members):
                pass
        except SystemExit as error:
            details[slot] = f"its training {exited(error)}"
        except Exception as error:
            device.blame(actor.model.device, error)
            where = f"the training of client {chunk.clients[slot]} in round {actor.work.t}"
            details[slot] = traceback_text(error, where)
    return details
