"""Personalization: local parameters of a model, personal models (Ditto) and fine-tuning.

>>> net = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
>>> models.shared_and_local.set_local(net, {"1.bias"})
>>> local = LocalParameters(net)
>>> states = {LOCAL_PART: {1: np.ones(1)}}
>>> chunk = Chunk(np.array([4, 7]), np.zeros(2, int), np.ones(2), 1, memory=states)
>>> _, starts = local.starts(torch.zeros(4), chunk)
>>> starts.initial[1]
tensor([0., 0., 0., 0., 1.])
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from raydpfl import models
from raydpfl.core import device
from raydpfl.core.messages import LOCAL_PART, Chunk
from raydpfl.data import Shards
from raydpfl.experiment import Experiment
from raydpfl.methods.local import Local
from raydpfl.models.shared_and_local import ParameterSplit
from raydpfl.simulation.client.actor_round import ChunkRound
from raydpfl.simulation.client.data_cache import Rows
from raydpfl.simulation.user_code import trains_user_code
from raydpfl.training.backends import REFERENCE, missing_requirement
from raydpfl.training.backends.base import Block, Starts
from raydpfl.training.trainer import Trainer

# draws that no cohort has: of personal models, and of fine-tuning before an evaluation
PERSONAL_DRAW = 1 << 30
FINE_TUNING_DRAW = 1 << 31
STACKS = ("compiled", "fused")  # the backends of modules that vmap trains too


class LocalParameters:
    """The local parameters of the clients (`raydpfl.models.shared_and_local`).
    `module` has their initial values, which a client has before its first round.
    """

    def __init__(self, module: nn.Module):
        self.split = ParameterSplit.of(module)
        self.initial = self.split.local_part(models.trained(module)[None])[0]

    @property
    def count(self) -> int:
        """Local parameters per client; 0: none."""
        return len(self.initial)

    def before(self, chunk: Chunk, slots: np.ndarray) -> torch.Tensor:
        """The local parameters at these slots before the round, float32 [k, count]."""
        values = self.initial.expand(len(slots), -1).clone()
        states = chunk.memory.get(LOCAL_PART, {})
        places = [place for place, slot in enumerate(slots.tolist()) if slot in states]
        if places:
            rows = torch.from_numpy(np.stack([states[slot] for slot in slots[places].tolist()]))
            index = device.index(np.array(places), values.device)
            values[index] = device.move_tensor(rows, values.device).to(values)
        return values

    def starts(self, model: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, Starts | None]:
        """All trained parameters, float32 [D], from the shared ones, float32 [d], and where each
        client of a chunk starts, if it has local parameters.
        """
        if not self.split.own:
            return model, None
        full_model = self.split.whole(model, self.initial[None])[0]
        local = self.before(chunk, np.arange(len(chunk.clients)))
        return full_model[: self.split.parameters], Starts.at(self.split.whole(model, local))

    def corrections(self, vectors: torch.Tensor | None) -> torch.Tensor | None:
        """Corrections of all gradients from `vectors`, those of the shared parameters, [k, d]."""
        return self.split.spread(vectors) if self.split.own and vectors is not None else vectors

    def split_block(self, block: Block, starts: Starts | None) -> Block:
        """A trained block with its local parameters separate from the update. A client whose local
        parameters are not finite has an update that is not.
        """
        if starts is None:
            return block
        updates = self.split.shared_part(block.updates)
        final = starts.final[device.index(block.slots, starts.final.device)]
        local = self.split.local_part(final)
        updates.masked_fill_(~local.isfinite().all(1, keepdim=True), math.nan)
        return Block(block.slots, updates, block.losses, local)

    def train(self, state: ChunkRound) -> None:
        """Trains the personal models, if any, of the chunk's clients that have not failed."""

    def whole_model(self, model: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """The numbers of a client's model, float32 [D + b] (`raydpfl.models.trained`), from the
        shared ones, [d], and those that it keeps, [count].
        """
        return self.split.whole(model, local[None])[0]


class Ditto(LocalParameters):
    """A personal model per client, trained in the rounds that it takes part in, by a rule that
    draws it to the received model (Li, Hu, Beirami and Smith 2021, Alg. 1). What the client sends
    does not depend on it.
    """

    def __init__(self, experiment: Experiment, rule: Local, shards: Shards, module: nn.Module):
        super().__init__(module)
        self.initial = models.trained(module)
        full_split = ParameterSplit(torch.zeros(len(self.initial), dtype=torch.bool), 0)
        self.training = PersonalTraining(experiment, rule, shards, module, full_split)

    def train(self, state: ChunkRound) -> None:
        """As in the base. A model that is not finite is a failure, and the one before stays."""
        work = state.work
        members = np.where(np.isnan(state.norms), -1, state.chunk.members)
        previous_models = state.local_parameters
        starts = Starts.at(previous_models, to_model=True)
        chunk = replace(state.chunk, draws=state.chunk.draws + PERSONAL_DRAW)
        model = state.actor.model
        numbers = self.training.train(model, chunk, members, starts, work.t, work.seed)
        finite = numbers[state.index(state.slots)].isfinite().all(1).cpu().numpy()
        for slot in state.slots[~finite].tolist():
            detail = f"its personal model is not finite in round {work.t}; lower personal.lr"
            state.drop(slot, detail)
            numbers[slot] = previous_models[slot]
        state.local_parameters = numbers

    def whole_model(self, model: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        return local


class PersonalTraining:
    """Trains clients by a rule other than the run's. Nothing of it is sent."""

    def __init__(
        self,
        experiment: Experiment,
        rule: Local,
        shards: Shards,
        module: nn.Module,
        split: ParameterSplit,
    ):
        client = experiment.client
        torch_device = next(module.parameters()).device
        self.rows = Rows(shards, shards.form(experiment.data.task), torch_device)
        backends = [client.backend, *(["vmap"] if client.backend in STACKS else [])]
        needs = (rule, None, client.precision, split)
        backends = [backend for backend in backends if not missing_requirement(backend, *needs)]
        self.trainer = Trainer(
            module,
            rule,
            backend=backends[0] if backends else REFERENCE,
            seed=experiment.seed,
            device=torch_device,
            user_defined=trains_user_code(experiment),
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
        """What the clients of a chunk, with draws that no cohort has, train to: float32 [C, D + b].

        Args:
            model: all that is trained, float32 [D].
            members: the clients that train, int64 [C], -1 for all others.
            starts: where each starts; None: at the model.
            t, seed: by which randomness is keyed.
        """
        self.trainer.seed = seed
        parts = []
        for start in range(0, len(chunk.clients), chunk.width):
            span = slice(start, start + chunk.width)
            max_rows = self.trainer.local.max_rows(self.rows.sizes(chunk.clients[span])).max()
            part = replace(chunk.part(span), rows=max(1, int(max_rows)))
            points = starts and Starts.at(starts.initial[span], starts.to_model)
            blocks = self.rows.train(self.trainer, model, part, members[span], t, starts=points)
            updates = {slot: update for block in blocks for slot, update, _ in block.clients()}
            zero = torch.zeros_like(model)
            vectors = [model + updates.get(slot, zero) for slot in range(len(part.clients))]
            parts.append(torch.stack(vectors) if points is None else points.final)
        return torch.cat(parts)


class FineTuning:
    """Trains single clients further on their rows (`evaluate.fine_tune`), without a state."""

    def __init__(self, experiment: Experiment, rule: Local, shards: Shards, module: nn.Module):
        self.local = LocalParameters(module)
        self.training = PersonalTraining(experiment, rule, shards, module, self.local.split)
        width = experiment.client.chunk
        assert isinstance(width, int)  # resolved in the plan
        self.width = width
        self.seed = experiment.seed

    def models(
        self, clients: Sequence[int], model: torch.Tensor, states: Mapping[int, np.ndarray], t: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Each client and the numbers of its model, float32 [D + b] (`raydpfl.models.trained`),
        from `model`, float32 [d], after t rounds. `states`: local parameters by client, float32
        [count]; absent: the initial values.
        """
        for offset in range(0, len(clients), self.width):
            group = np.array(clients[offset : offset + self.width], np.int64)
            members = enumerate(group.tolist())
            memory = {slot: states[client] for slot, client in members if client in states}
            draws = np.full(len(group), FINE_TUNING_DRAW)
            chunk = Chunk(group, draws, np.ones(len(group)), 1, memory={LOCAL_PART: memory})
            with torch.inference_mode(False):
                full_model, starts = self.local.starts(model, chunk)
                numbers = self.training.train(full_model, chunk, group, starts, t, self.seed)
            yield from zip(group.tolist(), numbers, strict=True)
