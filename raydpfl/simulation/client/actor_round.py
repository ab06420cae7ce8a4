"""What is recorded of a round while it runs: of one actor, the sum of what its clients send; of a
chunk, what is known of its clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from raydpfl.core import device, exact_sum
from raydpfl.core.hardware import peak_rss_mb
from raydpfl.core.messages import LOCAL_PART, Chunk, ChunkResult, View, Work
from raydpfl.errors import ClientError, RunError
from raydpfl.methods.bounding import Bounding


@dataclass
class ActorRound:
    """Accumulates what the clients of one actor send in a round."""

    work: Work
    lr: float  # of all local steps of the round
    model: torch.Tensor  # float32 [d]
    broadcast: Mapping[str, Mapping[str, torch.Tensor]]  # broadcast state, by member
    # float64 [threads, d or more], see `raydpfl.training.backends.base.Sum.totals`: compiled code
    # adds up in a row per thread, all else in the first
    totals: torch.Tensor
    on_error: str  # `client.on_error`
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)
    client_states: dict[str, list[np.ndarray]] = field(default_factory=dict)
    dropped_clients: list[tuple[int, str]] = field(default_factory=list)  # (client, why)
    failed: set[tuple[int, int]] = field(default_factory=set)  # (client, draw)
    # on a GPU: the largest coordinate of every block, checked once at the end
    largest: list[torch.Tensor] = field(default_factory=list)
    # statistics of user-defined noise, see `raydpfl.simulation.noise_monitor`
    noise: dict[str, list[np.ndarray]] = field(default_factory=dict)
    # (chunk, slot, update) of the first client that has trained, for `UserCodeWatch`
    sample: tuple[ChunkRound, int, torch.Tensor] | None = None

    @property
    def d(self) -> int:
        """Parameters of the model."""
        return self.model.numel()

    @property
    def total(self) -> torch.Tensor:
        """Float64 [d], to be added to in place."""
        return self.totals[0, : self.d]

    def add_columns(self, columns: Mapping[str, np.ndarray]) -> None:
        """Appends the values of some clients to every column."""
        for name, values in columns.items():
            self.columns.setdefault(name, []).append(values)

    def add_client_states(
        self, member: str, vectors: torch.Tensor | None, shape: tuple[int, int]
    ) -> None:
        """Appends the states [k, d] that a member keeps of some clients (local parameters: [k,
        own]); None: it keeps none. Raises `RunError` for vectors of another shape.
        """
        if vectors is not None:
            check_shape(f"the state of {member} is", vectors, shape)
            self.client_states.setdefault(member, []).append(vectors.float().cpu().numpy())

    def result(self) -> ChunkResult:
        """The sum and the columns, by client; `RunError` beyond the grid's range."""
        for thread_total in self.totals[1:]:
            self.totals[0] += thread_total
        if self.largest:
            exact_sum.check_range(float(torch.stack(self.largest).max()), self.work.grid)
        columns = {name: np.concatenate(parts) for name, parts in self.columns.items()}
        states = {name: np.concatenate(parts) for name, parts in self.client_states.items()}
        order = np.lexsort((columns["draw"], columns["client"]))
        if (np.diff(order) != 1).any():
            columns = {name: values[order] for name, values in columns.items()}
            states = {name: vectors[order] for name, vectors in states.items()}
        drops = sorted(self.dropped_clients, key=lambda pair: pair[0])
        noise = {
            name: np.sum(parts, axis=0) if name == "sum" else np.concatenate(parts)
            for name, parts in self.noise.items()
        }
        total = self.total.cpu().numpy()
        return ChunkResult(total, columns, states, drops, noise, peak_rss_mb=peak_rss_mb())


class ChunkRound:
    """A chunk in a round: what is known of its clients until all of them have sent.
    `local_parameters`: those before the round, float32 [C, own].
    """

    def __init__(self, actor: ActorRound, chunk: Chunk, local_parameters: torch.Tensor):
        self.actor = actor
        self.chunk = chunk
        self.work = actor.work
        self.slots = np.flatnonzero(chunk.members >= 0)  # of the clients that train
        # of every slot's client, float64 [C]; norm NaN: failed
        self.norms, self.factors, self.losses = np.full((3, len(chunk.clients)), math.nan)
        # lengths of what its client would send, weight included, where `Chunk.limits` says how much
        self.lengths = np.full(len(chunk.clients), math.nan)
        # the share of per-sample gradients that were clipped, see `Trainer.chunk`
        self.clipped = np.full(len(chunk.clients), math.nan)
        self._previous_parameters = local_parameters
        self.local_parameters = local_parameters.clone()  # after training
        # the noise of all its clients, where a thread draws it
        self.drawn: Future[np.ndarray | None] | None = None
        # of so many repeated trainings, see `ChunkTraining.repeat`
        self.repeat_sums: dict[int, tuple[torch.Tensor, np.ndarray]] = {}

    def of(self, chunk: Chunk) -> ChunkRound:
        """Another chunk in the same round, whose records are its own."""
        return ChunkRound(self.actor, chunk, self._previous_parameters)

    def part(self, slots: slice) -> ChunkRound:
        """Some of the slots as a chunk. What it says of `clipped` is said here too."""
        part = ChunkRound(self.actor, self.chunk.part(slots), self._previous_parameters[slots])
        part.clipped = self.clipped[slots]
        return part

    def index(self, slots: np.ndarray) -> torch.Tensor:
        return device.index(slots, self.actor.model.device)

    def view(self, member: str, slots: np.ndarray) -> View:
        """What the clients at these slots know of the round, for the hooks of a member."""
        actor = self.actor

        def client_state() -> torch.Tensor:
            vectors = torch.zeros(len(slots), actor.d)
            slot_states = self.chunk.memory.get(member, {})
            for place, slot in enumerate(slots.tolist()):
                if slot in slot_states:
                    vectors[place] = torch.tensor(slot_states[slot])
            return device.move_tensor(vectors, actor.model.device)

        state = actor.broadcast.get(member, {})
        return View(self.work.t, actor.lr, self.work.bound, actor.model, state, client_state)

    def drop(self, slot: int, detail: str) -> None:
        """Leaves out a failed client; raises `ClientError` unless `on_error` is `drop`."""
        client = int(self.chunk.clients[slot])
        if self.actor.on_error == "fail":
            raise ClientError(client, detail)
        self.actor.dropped_clients.append((client, detail))
        self.actor.failed.add((client, int(self.chunk.draws[slot])))

    def drop_nonfinite_client(self, slot: int, norm: float) -> None:
        """Drops a client whose update has this norm, unless its training has already failed."""
        if (int(self.chunk.clients[slot]), int(self.chunk.draws[slot])) not in self.actor.failed:
            advice = "lower local.lr, or look at its data"
            self.drop(slot, f"its update has norm {norm} in round {self.work.t}; {advice}")

    def record(
        self, slots: np.ndarray, norms: np.ndarray, factors: np.ndarray, losses: np.ndarray
    ) -> None:
        """Of the clients at these slots, all float64 [k]."""
        self.norms[slots] = norms
        self.factors[slots] = factors
        self.losses[slots] = losses

    def finish(self, bounding: Bounding) -> None:
        """Passes what is recorded of the clients on to the actor's round."""
        local_count = self.local_parameters.shape[1]
        if local_count:
            failed_slots = self.index(np.flatnonzero(np.isnan(self.norms)))
            self.local_parameters[failed_slots] = self._previous_parameters[failed_slots]
            local = self.local_parameters[self.index(self.slots)]
            self.actor.add_client_states(LOCAL_PART, local, (len(self.slots), local_count))
        # user-defined code gets one client at a time
        for slots in self.slots[:, None] if bounding.is_user_defined else [self.slots]:
            failure_mask = ~np.isfinite(self.norms[slots])
            clipped_shares = bounding.clipped(self.factors[slots], self.clipped[slots])
            columns = {
                "client": self.chunk.clients[slots],
                "draw": self.chunk.draws[slots],
                "norm": self.norms[slots],
                "factor": self.factors[slots],
                "clipped": np.where(failure_mask, np.nan, clipped_shares),
                "train_loss": self.losses[slots],
            }
            if self.chunk.limits is not None:
                columns["contribution"] = self.lengths[slots]
            self.actor.add_columns(columns)


def check_shape(subject: str, values: torch.Tensor | np.ndarray, shape: tuple[int, ...]) -> None:
    """Raises `RunError` for what a member gives of some clients in another shape."""
    if tuple(values.shape) != tuple(shape):
        raise RunError(f"{subject} {list(values.shape)}, not {list(shape)}")
