"""What is sent in a round: `Chunk`s (clients that train together), `Work` (of all clients of the
round) and `Broadcast` to actors; a `ChunkResult` (a sum, and a column for every number of a client)
back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from raydpfl.core.modular_sum import ModularSum
from raydpfl.errors import ConfigError

State = dict[str, np.ndarray]  # of a member, from round to round, by name
Columns = dict[str, np.ndarray]  # by name, one value per client each, in client order
Rows = Mapping[int, np.ndarray]  # slot -> its client's state, float32 [d]; absent: zeros
# the name, among the members with client states, of a client's local part of the model, float32;
# absent: its initial values (`raydpfl.models.shared_and_local`)
LOCAL_PART = "own"
# The least and the largest L2 norm that may bound what a client sends or a sample's gradient: the
# squares of numbers near it lie far inside of float32, and its noise does, too.
BOUNDS = (1e-12, 1e15)


@dataclass(frozen=True)
class Chunk:
    """Clients that train together; its shape is a function of its full membership alone."""

    # int64 [C], those of most steps first where steps cost, else ascending; -1 for an empty slot
    clients: np.ndarray
    # int64 [C]: index of this draw among the client's draws of the round, from 0
    draws: np.ndarray
    weights: np.ndarray  # float64 [C]
    rows: int  # per client, after padding to the one that can train on most
    slot: int | None = None  # the one slot to train, when every client is an actor
    # float64 [C]: std of the noise on the mean gradient of each client's local steps
    stds: np.ndarray | None = None
    # float64 [C]: the longest contribution, weight included, that each client's own budget lets it
    # send; one whose is longer sends nothing
    limits: np.ndarray | None = None
    memory: Mapping[str, Rows] = field(default_factory=dict)  # client states, by member
    parts: int = 1  # chunks, one after another, that are trained together: see `concatenate`

    @classmethod
    def concatenate(cls, chunks: Sequence[Chunk]) -> Chunk:
        """Chunks as one, in order; those of several widths are one chunk from then on."""
        if len(chunks) == 1:
            return chunks[0]
        memory: dict[str, dict[int, np.ndarray]] = {}
        offset = 0
        for chunk in chunks:
            for member, states in chunk.memory.items():
                shifted_states = {offset + slot: vector for slot, vector in states.items()}
                memory[member] = memory.get(member, {}) | shifted_states
            offset += len(chunk.clients)
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(chunk, name) for chunk in chunks])
            for name in chunks[0]._arrays()
        }
        parts = len(chunks) if len({len(chunk.clients) for chunk in chunks}) == 1 else 1
        rows = max(chunk.rows for chunk in chunks)
        return cls(**arrays, rows=rows, memory=memory, parts=parts)

    def _arrays(self) -> dict[str, Any]:
        """What has a value per client, by name."""
        names = ("clients", "draws", "weights", "stds", "limits")
        arrays = {name: getattr(self, name) for name in names}
        return {name: values for name, values in arrays.items() if values is not None}

    def alone(self, slot: int) -> Chunk:
        """The chunk for one of its clients, which is an actor by itself."""
        memory = {
            name: {slot: rows[slot]} if slot in rows else {} for name, rows in self.memory.items()
        }
        return replace(self, slot=slot, memory=memory)

    def part(self, slots: slice) -> Chunk:
        """Some of its slots as a chunk."""
        start, end, _ = slots.indices(len(self.clients))
        memory = {
            name: {slot - start: row for slot, row in rows.items() if start <= slot < end}
            for name, rows in self.memory.items()
        }
        arrays = {name: values[slots] for name, values in self._arrays().items()}
        return replace(self, **arrays, memory=memory, slot=None)

    @property
    def width(self) -> int:
        """Clients of one chunk."""
        return len(self.clients) // self.parts

    @property
    def members(self) -> np.ndarray:
        """The clients that are to be trained, int64 [C], -1 for all other slots."""
        if self.slot is None:
            return self.clients.copy()
        members = np.full_like(self.clients, -1)
        members[self.slot] = self.clients[self.slot]
        return members


def check_bound(field: str, bound: float) -> None:
    """Raises `ConfigError` for a bound on an L2 norm outside of `BOUNDS`."""
    minimum, maximum = BOUNDS
    if not minimum <= bound <= maximum:
        expected = f"a number from {minimum:g} to {maximum:g}, as squares must be exact in float32"
        raise ConfigError(field, bound, expected)


@dataclass(frozen=True)
class Grid:
    """The multiples of a power of two that contributions are rounded to: see `exact_sum`."""

    step: float
    most: float  # no coordinate of a contribution may exceed it in size; at most 2^51 steps

    # of a coordinate of a contribution that nothing bounds, and the most standard deviations out
    # that a Gaussian of float64 precision lies
    UNBOUNDED: ClassVar[float] = 2.0**16
    TAIL: ClassVar[float] = 40.0

    @classmethod
    def integer_grid(cls, cohort: int) -> Grid:
        """The integers, of any sum below 2^51 of `cohort` contributions."""
        return cls(1.0, 2.0**51 / max(1, cohort))

    @classmethod
    def of(cls, cohort: int, bound: float | None, std: float = 0.0) -> Grid:
        """The grid of a round, which holds the largest sum of `cohort` contributions of an L2 norm
        up to `bound`, weight included (None: unbounded), with noise of this std each.
        """
        max_coordinate = cls.UNBOUNDED if bound is None else bound
        max_coordinate += cls.TAIL * std
        count = max(1, cohort)
        step = 2.0 ** (math.ceil(math.log2(count * max_coordinate)) - 51)
        return cls(step, step * 2.0**51 / count)


@dataclass(frozen=True)
class Work:
    """What all clients of a round are sent with the model."""

    t: int
    seed: int  # of batches, and of randomness inside modules
    noise_seed: int
    bound: float | None  # of one client's vector, before its weight
    # std of the noise on one client's contribution, after its weight, or on its integers, in steps;
    # 0: none
    client_std: float
    grid: Grid
    modular: ModularSum | None = None  # how vectors are sent as integers; None: as they are


@dataclass(frozen=True)
class Broadcast:
    """What all clients are sent: the model, and what members broadcast of their states."""

    model: np.ndarray  # float32 [d]
    states: Mapping[str, State] = field(default_factory=dict)  # by member


@dataclass
class ChunkResult:
    """What one actor returns of a round."""

    total: np.ndarray  # float64 [d]: the exact sum of what its clients send
    columns: Columns
    memory: Mapping[str, np.ndarray]  # the clients' next states, float32 [r, d]
    dropped_updates: list[tuple[int, str]] = field(default_factory=list)  # (client, what it did)
    # of noise by a class from outside, see `raydpfl.simulation.noise_monitor.numbers`
    drawn: Mapping[str, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0
    peak_rss_mb: float = 0.0

    def copy_arrays(self) -> ChunkResult:
        """The same with copies of its arrays, but for the total."""
        fields: dict[str, Any] = {
            name: {key: values.copy() for key, values in getattr(self, name).items()}
            for name in ("columns", "memory", "drawn")
        }
        return replace(self, **fields)


@dataclass(frozen=True)
class View:
    """What k clients have of the round, for the hooks of a bounding or a local rule. Tensors are on
    the device that trains, and are not to be written to.
    """

    t: int  # the round, from 0
    lr: float  # the local learning rate of all their steps in this round
    bound: float | None  # the bound in force, an L2 norm; None: nothing is bounded
    model: torch.Tensor  # float32 [d], the round's model, as broadcast
    # what the member's `broadcast_state` gave, float32 by name
    broadcast: Mapping[str, torch.Tensor]
    load_state: Callable[[], torch.Tensor]  # gives `state`

    @cached_property
    def state(self) -> torch.Tensor:
        """The state of each of them, float32 [k, d]; zeros before its first round."""
        return self.load_state()


@dataclass(frozen=True)
class Facts:
    """What the server has of a round, for the hooks of a bounding or a local rule."""

    t: int  # the round, from 0
    lr: float  # the learning rate of the clients' local steps
    model: np.ndarray  # float32 [d], as it was broadcast
    divisor: float  # of the released sum: the mean is the sum over it
    cohort: float  # clients of the round; their expected number where it is a secret
    population: int  # N, all clients
