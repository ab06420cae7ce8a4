"""Personal models, where clients train: what of a model is a client's own, a model that it trains
beside (Ditto), and fine-tuning.

>>> net = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
>>> models.shared_and_local.set_local(net, {"1.bias"})
>>> personal = Personal(net)
>>> chunk = Chunk(np.array([4, 7]), np.zeros(2, int), np.ones(2), 1, memory={OWN: {1: np.ones(1)}})
>>> _, starts = personal.begun(torch.zeros(4), chunk)
>>> starts.begun[1]
tensor([0., 0., 0., 0., 1.])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from raydpfl import models
from raydpfl.core import device
from raydpfl.core.messages import OWN, Chunk
from raydpfl.data import Shards
from raydpfl.experiment import Experiment
from raydpfl.methods.local import Local
from raydpfl.models.shared_and_local import ParameterSplit
from raydpfl.simulation.client.data_cache import check
from raydpfl.simulation.worker import own_code
from raydpfl.training.backends import REFERENCE, lacking
from raydpfl.training.backends.base import Block, Starts
from raydpfl.training.minibatches import batches, picked
from raydpfl.training.trainer import Trainer

# draws that no cohort has: of what is trained beside a round, and before an evaluation
BESIDE = 1 << 30
TUNED = 1 << 31
STACKS = ("compiled", "fused")  # the backends of modules that vmap trains too


class Personal:
    """The parts of a model that are clients' own (`raydpfl.models.shared_and_local`). `module` has
    their initial values, which a client has before its first round.
    """

    def __init__(self, module: nn.Module):
        self.split = ParameterSplit.of(module)
        self.initial = self.split.kept(models.trained(module)[None])[0]

    @property
    def own(self) -> int:
        """Numbers that each client keeps; 0: nothing."""
        return len(self.initial)

    def had(self, chunk: Chunk, slots: np.ndarray) -> torch.Tensor:
        """What the clients at these slots had of their own before the round, float32 [k, own]."""
        found = self.initial.expand(len(slots), -1).clone()
        stored = chunk.memory.get(OWN, {})
        places = [place for place, slot in enumerate(slots.tolist()) if slot in stored]
        if places:
            given = torch.from_numpy(np.stack([stored[slot] for slot in slots[places].tolist()]))
            at = device.index(np.array(places), found.device)
            found[at] = device.sent(given, found.device).to(found)
        return found

    def begun(self, model: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, Starts | None]:
        """What a chunk trains of a model, float32 [d]: all that is trained, float32 [D], and where
        each client begins, if parts are its own.
        """
        if not self.split.own:
            return model, None
        every = self.split.joined(model, self.initial[None])[0]
        own = self.had(chunk, np.arange(len(chunk.clients)))
        return every[: self.split.parameters], Starts.at(self.split.joined(model, own))

    def corrections(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """Corrections of gradients by what travels, [k, d], as those by all that is trained."""
        return self.split.spread(given) if self.split.own and given is not None else given

    def parted(self, block: Block, starts: Starts | None) -> Block:
        """A block of a chunk that began there, of which what travels and what stays is apart. A
        client whose own part is not finite has an update that is not.
        """
        if starts is None:
            return block
        updates = self.split.shared(block.updates)
        ended = starts.ended[device.index(block.slots, starts.ended.device)]
        own = self.split.kept(ended)
        updates[~own.isfinite().all(1)] = math.nan
        return Block(block.slots, updates, block.losses, own)

    def beside(
        self, model: torch.Tensor, chunk: Chunk, members: np.ndarray, t: int, seed: int
    ) -> torch.Tensor | None:
        """What the chunk's clients have of their own after the round, float32 [C, own], where they
        train it beside the model, float32 [d]; None: they do not. Only `members` of them train,
        int64 [C], -1 for all others.
        """
        return None

    def whole(self, model: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The numbers of a client's model, float32 [D + b] (`raydpfl.models.trained`), from the
        model, [d], and its own, [own].
        """
        return self.split.joined(model, own[None])[0]


class Ditto(Personal):
    """A model of each client's own, which it trains in the rounds that it is part of, by a rule
    that draws it to the model as it was received (Li, Hu, Beirami and Smith 2021, Alg. 1). What it
    sends is as without.
    """

    def __init__(self, experiment: Experiment, rule: Local, shards: Shards, module: nn.Module):
        super().__init__(module)
        self.initial = models.trained(module)
        every = ParameterSplit(torch.zeros(len(self.initial), dtype=torch.bool), 0)
        self.training = Training(experiment, rule, shards, module, every)

    def beside(
        self, model: torch.Tensor, chunk: Chunk, members: np.ndarray, t: int, seed: int
    ) -> torch.Tensor | None:
        """See `Personal.beside`."""
        own = self.had(chunk, np.arange(len(chunk.clients)))
        starts = Starts.at(own, drawn=True)
        apart = replace(chunk, draws=chunk.draws + BESIDE)
        return self.training.train(model, apart, members, starts, t, seed)

    def whole(self, model: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """See `Personal.whole`."""
        return own


def of(experiment: Experiment, shards: Shards, module: nn.Module) -> Personal:
    """What clients have of their own. `module`: as it is before the first round."""
    rule = experiment.personal
    return Ditto(experiment, rule, shards, module) if rule else Personal(module)


class Training:
    """Trains clients by a rule apart from the run: nothing of it is sent."""

    def __init__(
        self,
        experiment: Experiment,
        rule: Local,
        shards: Shards,
        module: nn.Module,
        split: ParameterSplit,
    ):
        client = experiment.client
        self.rule = rule
        self.shards = shards
        self.form = shards.form(experiment.data.task)
        backends = [client.backend, *(["vmap"] if client.backend in STACKS else [])]
        asked = (rule, None, client.precision, split)
        able = [backend for backend in backends if not lacking(backend, *asked)]
        self.trainer = Trainer(
            module,
            rule,
            backend=able[0] if able else REFERENCE,
            seed=experiment.seed,
            device=next(module.parameters()).device,
            own=own_code(experiment),
            task=experiment.data.task,
            precision=client.precision,
        )

    def train(
        self,
        model: torch.Tensor,
        chunk: Chunk,
        members: np.ndarray,
        starts: Starts | None,
        t: int,
        seed: int,
    ) -> torch.Tensor:
        """What the clients of a chunk have trained to, float32 [C, D + b].

        Args:
            model: all that is trained, float32 [D].
            chunk: of clients, whose draws are no cohort's.
            members: those that train, int64 [C], -1 for all others.
            starts: where each begins; None: at the model.
            t: by which, and by the seed, what is drawn is keyed.
        """
        self.trainer.seed = seed
        parts = []
        for first in range(0, len(chunk.clients), chunk.width):
            some = slice(first, first + chunk.width)
            begun = starts and Starts.at(starts.begun[some], starts.drawn)
            who = chunk.clients[some], members[some], chunk.draws[some]
            parts.append(self._chunk(model, *who, begun, t))
        return torch.cat(parts)

    def _chunk(
        self,
        model: torch.Tensor,
        clients: np.ndarray,
        members: np.ndarray,
        draws: np.ndarray,
        starts: Starts | None,
        t: int,
    ) -> torch.Tensor:
        """As `train`, of one chunk; only `members` of its clients train, int64 [C], -1 for others.
        Its shape is that of all clients.
        """
        sizes = np.where(clients < 0, 0, self.shards.sizes[clients])
        rows = max(1, int(self.rule.rows_used(sizes).max()))
        held = np.where(members < 0, 0, sizes)
        drawn = batches(self.trainer.seed, t, members, draws, held, self.rule, rows=rows)
        taken, index = picked(*drawn, held, self.rule)
        x, y, n = self.shards.chunk(members, rows, taken)
        for slot in np.flatnonzero(n).tolist():
            check(self.trainer.device, self.form, x[slot, : n[slot]], y[slot, : n[slot]])
        trained = self.trainer.chunk(
            model,
            *(x, y, n),
            t=t,
            clients=members,
            draws=draws,
            drawn=(index, drawn[1], self.rule.step_counts(held)),
            starts=starts,
            planned=self.rule.step_counts(sizes),
        )
        moved = {int(slot): update for block in trained for slot, update, _ in block.clients()}
        if starts is not None:
            return starts.ended
        still = torch.zeros_like(model)
        return torch.stack([model + moved.get(slot, still) for slot in range(len(clients))])


class FineTuning:
    """Trains the model further for each client alone, on the rows that it trains on, as
    `evaluate.fine_tune` says. Nothing of it lasts.
    """

    def __init__(self, experiment: Experiment, rule: Local, shards: Shards, module: nn.Module):
        self.personal = Personal(module)
        self.training = Training(experiment, rule, shards, module, self.personal.split)
        width = experiment.client.chunk
        assert isinstance(width, int)  # the plan has settled "auto"
        self.width = width
        self.seed = experiment.seed

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
            held = {slot: own[client] for slot, client in enumerate(some.tolist()) if client in own}
            draws = np.full(len(some), TUNED)
            chunk = Chunk(some, draws, np.ones(len(some)), 1, memory={OWN: held})
            with torch.inference_mode(False):
                every, starts = self.personal.begun(model, chunk)
                trained = self.training.train(every, chunk, some, starts, t, self.seed)
            yield from zip(some.tolist(), trained, strict=True)
