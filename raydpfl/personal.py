"""Personal models, where clients train: what of a model is a client's own, and fine-tuning.

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
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from raydpfl import models
from raydpfl.config import Experiment
from raydpfl.data import Shards
from raydpfl.local import Local, Trainer
from raydpfl.local.way import Block, Starts
from raydpfl.local.ways import REFERENCE, lacking
from raydpfl.process import own_code
from raydpfl.rounds import OWN, Lane

TUNED = 1 << 31  # the draw of fine-tuning, which no cohort has


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


class FineTuning:
    """Trains the model further for each client alone, on the rows that it trains on, as
    `evaluate.fine_tune` says. Nothing of it lasts.
    """

    def __init__(
        self, experiment: Experiment, rule: Local, shards: Shards, module: nn.Module, there: str
    ):
        client = experiment.client
        self.personal = Personal(module)
        self.shards = shards
        width = client.lane
        assert isinstance(width, int)  # the plan has settled "auto"
        self.width = width
        unable = lacking(client.way, rule, None, client.precision, self.personal.split)
        self.trainer = Trainer(
            module,
            rule,
            way=REFERENCE if unable else client.way,
            seed=experiment.seed,
            device=there,
            own=own_code(experiment),
            task=experiment.data.task,
            precision=client.precision,
        )

    def models(
        self, clients: Sequence[int], model: torch.Tensor, own: Mapping[int, np.ndarray], t: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Each client and the numbers of its model, float32 [D + b] (`raydpfl.models.trained`).

        Args:
            clients: some of them.
            model: after t rounds, float32 [d].
            own: by client, what it has of its own, float32 [own]; absent: its initial values.
            t: by which batches are keyed.
        """
        for first in range(0, len(clients), self.width):
            some = np.array(clients[first : first + self.width], np.int64)
            yield from zip(some.tolist(), self._lane(some, model, own, t), strict=True)

    def _lane(
        self, clients: np.ndarray, model: torch.Tensor, own: Mapping[int, np.ndarray], t: int
    ) -> torch.Tensor:
        """As `models`, of clients that are trained at once: float32 [k, D + b]."""
        held = {slot: own[client] for slot, client in enumerate(clients.tolist()) if client in own}
        draws = np.full(len(clients), TUNED)
        rows = max(1, int(self.shards.sizes[clients].max()))
        lane = Lane(clients, draws, np.ones(len(clients)), rows, memory={OWN: held})
        x, y, sizes = self.shards.lane(clients, rows)
        with torch.inference_mode(False):
            every, starts = self.personal.begun(model, lane)
            trained = self.trainer.lane(
                every, x, y, sizes, t=t, clients=clients, draws=draws, starts=starts
            )
            moved = torch.cat([block.updates for block in trained])
            return every + moved if starts is None else starts.ended
