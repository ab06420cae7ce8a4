"""One actor's part of a round: the sum of what its clients send, and what is recorded of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from raydpfl.core import device, exact_sum
from raydpfl.core.hardware import peak_rss_mb
from raydpfl.core.messages import Chunk, ChunkResult, View, Work
from raydpfl.errors import ClientError, RunError


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
    dropped: list[tuple[int, str]] = field(default_factory=list)  # (client, why)
    failed: set[tuple[int, int]] = field(default_factory=set)  # (client, draw)
    # on a GPU: the largest coordinate of every block, checked once at the end
    largest: list[torch.Tensor] = field(default_factory=list)
    # statistics of user-defined noise, see `raydpfl.simulation.noise_monitor`
    noise: dict[str, list[np.ndarray]] = field(default_factory=dict)
    # (chunk, slot, update) of the first client that has trained, for `UserCodeWatch`
    sample: tuple[Chunk, int, torch.Tensor] | None = None

    @property
    def d(self) -> int:
        """Parameters of the model."""
        return self.model.numel()

    @property
    def total(self) -> torch.Tensor:
        """Float64 [d], to be added to in place."""
        return self.totals[0, : self.d]

    def view(self, chunk: Chunk, member: str, slots: np.ndarray) -> View:
        """What the clients at these slots know of the round, for the hooks of a member."""

        def client_state() -> torch.Tensor:
            vectors = torch.zeros(len(slots), self.d)
            stored = chunk.memory.get(member, {})
            for place, slot in enumerate(slots.tolist()):
                if slot in stored:
                    vectors[place] = torch.tensor(stored[slot])
            return device.sent(vectors, self.model.device)

        state = self.broadcast.get(member, {})
        return View(self.work.t, self.lr, self.work.bound, self.model, state, client_state)

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

    def drop(self, client: int, detail: str) -> None:
        """Leaves a failed client out of the round; raises `ClientError` unless `on_error` is
        `drop`.
        """
        if self.on_error == "fail":
            raise ClientError(client, detail)
        self.dropped.append((client, detail))

    def drop_not_finite(self, chunk: Chunk, slot: int, norm: float) -> None:
        """Drops a client whose update has this norm, unless its training has already failed."""
        client = int(chunk.clients[slot])
        draw = int(chunk.draws[slot])
        if (client, draw) not in self.failed:
            advice = "lower local.lr, or look at its data"
            self.drop(client, f"its update has norm {norm} in round {self.work.t}; {advice}")
            self.failed.add((client, draw))

    def result(self) -> ChunkResult:
        """The sum and the columns, ordered by client. Raises `RunError` for a contribution out of
        the grid's range.
        """
        for other in self.totals[1:]:
            self.totals[0] += other
        total = self.total.cpu().numpy()
        if self.largest:
            exact_sum.check_range(float(torch.stack(self.largest).max()), self.work.grid)
        columns = {name: np.concatenate(parts) for name, parts in self.columns.items()}
        states = {name: np.concatenate(parts) for name, parts in self.client_states.items()}
        order = np.lexsort((columns["draw"], columns["client"]))
        if (np.diff(order) != 1).any():
            columns = {name: values[order] for name, values in columns.items()}
            states = {name: vectors[order] for name, vectors in states.items()}
        dropped = sorted(self.dropped, key=lambda pair: pair[0])
        noise = {
            name: np.sum(parts, axis=0) if name == "sum" else np.concatenate(parts)
            for name, parts in self.noise.items()
        }
        return ChunkResult(total, columns, states, dropped, noise, peak_rss_mb=peak_rss_mb())


class ChunkRound:
    """What is recorded of the clients of one chunk in a round, until all of them have sent."""

    def __init__(self, actor: ActorRound, chunk: Chunk, local_parameters: torch.Tensor):
        self.actor = actor
        self.chunk = chunk
        self.work = actor.work
        self.members = np.flatnonzero(chunk.members >= 0)  # slots of the clients that train
        # of every slot's client, float64 [C]; norm NaN: failed
        self.norms, self.factors, self.losses = np.full((3, len(chunk.clients)), math.nan)
        # the share of per-sample gradients that were clipped, see `Trainer.chunk`
        self.clipped = np.full(len(chunk.clients), math.nan)
        self.local_parameters = local_parameters  # float32 [C, own], after training
        # of repeated trainings, see `ChunkTraining.repeat`
        self.repeated: tuple[torch.Tensor, np.ndarray] | None = None

    def index(self, slots: np.ndarray) -> torch.Tensor:
        """See `device.index`."""
        return device.index(slots, self.actor.model.device)

    def view(self, member: str, slots: np.ndarray) -> View:
        """See `ActorRound.view`."""
        return self.actor.view(self.chunk, member, slots)

    def record(
        self, slots: np.ndarray, norms: np.ndarray, factors: np.ndarray, losses: np.ndarray
    ) -> None:
        """Of the clients at these slots, all float64 [k]."""
        self.norms[slots] = norms
        self.factors[slots] = factors
        self.losses[slots] = losses


def check_shape(what: str, values: torch.Tensor | np.ndarray, shape: tuple[int, ...]) -> None:
    """Raises `RunError` for what a member gives of some clients in another shape."""
    if tuple(values.shape) != tuple(shape):
        raise RunError(f"{what} {list(values.shape)}, not {list(shape)}")
