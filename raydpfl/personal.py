"""Personal models, where clients train: what of a model is a client's own.

>>> from torch import nn
>>> net = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
>>> models.split.set_local(net, {"1.bias"})
>>> personal = Personal(net)
>>> lane = Lane(np.array([4, 7]), np.zeros(2, int), np.ones(2), 1, memory={OWN: {1: np.ones(1)}})
>>> _, starts = personal.begun(torch.zeros(4), lane)
>>> starts.begun[1]
tensor([0., 0., 0., 0., 1.])
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from raydpfl import models
from raydpfl.local.way import Block, Starts
from raydpfl.rounds import OWN, Lane


class Personal:
    """The parts of a model that are clients' own (`raydpfl.models.split`). `module` has their
    initial values, which a client has before its first round.
    """

    def __init__(self, module: nn.Module):
        self.split = models.Split.of(module)
        self.own = self.split.own  # numbers of each client; 0: all travels
        self.initial = self.split.kept(models.trained(module)[None])[0]

    def had(self, lane: Lane, slots: np.ndarray) -> torch.Tensor:
        """What the clients at these slots had of their own before the round, float32 [k, own]."""
        found = self.initial.expand(len(slots), -1).clone()
        stored = lane.memory.get(OWN, {})
        for place, slot in enumerate(slots.tolist()):
            if slot in stored:
                found[place] = torch.tensor(stored[slot], device=found.device)
        return found

    def begun(self, model: torch.Tensor, lane: Lane) -> tuple[torch.Tensor, Starts | None]:
        """What a lane trains of a model, float32 [d]: all that is trained, float32 [D], and where
        each client begins, if parts are its own.
        """
        if not self.own:
            return model, None
        every = self.split.joined(model, self.initial[None])[0]
        own = self.had(lane, np.arange(len(lane.clients)))
        return every[: self.split.parameters], Starts.at(self.split.joined(model, own))

    def corrections(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """Corrections of gradients by what travels, [k, d], as those by all that is trained."""
        return self.split.spread(given) if self.own and given is not None else given

    def parted(self, block: Block, starts: Starts | None) -> Block:
        """A block of a lane that began there, of which what travels and what stays is apart. A
        client whose own part is not finite has an update that is not.
        """
        if starts is None:
            return block
        updates = self.split.shared(block.updates)
        own = self.split.kept(starts.ended[block.slots])
        updates[~own.isfinite().all(1)] = math.nan
        return Block(block.slots, updates, block.losses, own)
