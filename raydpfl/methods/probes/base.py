"""The base of what a run measures on the side."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from raydpfl import models
from raydpfl.config.registry import overrides
from raydpfl.config.setting import Setting
from raydpfl.core.messages import Columns, State
from raydpfl.data import Shards
from raydpfl.errors import ConfigError
from raydpfl.methods.bounding import Bounding
from raydpfl.methods.local import Local
from raydpfl.methods.selection import Population, Selection
from raydpfl.methods.server import Server
from raydpfl.methods.server_state import WithServerState
from raydpfl.methods.weights import Weights
from raydpfl.models.tasks import Task
from raydpfl.privacy import Release


@dataclass(frozen=True)
class Sent:
    """What k clients of a chunk send, as a probe is shown it."""

    updates: torch.Tensor  # float32 [k, d]
    vectors: torch.Tensor  # float64 [k, d]: bounded and weighted, without noise
    noise: np.ndarray | None  # float64 [k, d]: what each has drawn on it; None: nothing
    # what the probe's `broadcast_state` gave, float32 by name
    broadcast: Mapping[str, torch.Tensor]
    # of so many more trainings of each client, with batches and noise of their own: the sum of what
    # it would send unbounded, float64 [k, d], and that of its squared norms, float64 [k]
    again: Callable[[int], tuple[torch.Tensor, np.ndarray]]


@dataclass(frozen=True)
class Round:
    """What the server has of a round, as a probe is shown it."""

    t: int  # the round, from 0
    bound: float | None  # the bound that was in force, an L2 norm; None: nothing is bounded
    # all numbers of each client, [r] by name: `client`, `norm`, `factor`, `train_loss`, and
    # what `chunk` gave; NaN where a client failed
    columns: Columns
    total: np.ndarray  # float64 [d]: the sum of what was sent, without the server's noise
    noise: np.ndarray | None  # float64 [d]: what the server has drawn on it; None: nothing
    update: np.ndarray  # float64 [d]: the mean update, noise included


@dataclass(frozen=True)
class Problem:
    """The problem that a run solves, as a probe is shown it before the first round."""

    seed: int  # of the run
    rounds: int  # of the run
    # the members of its config.
    model: models.Model
    task: Task
    selection: Selection
    local: Local
    bounding: Bounding
    weights: Weights
    server: Server
    shards: Shards  # the prepared data of all clients
    population: Population  # the public facts about the clients
    mechanism: Release | None  # what is released; None: the run is not private

    @cached_property
    def module(self) -> torch.nn.Module:
        """The model, as it is before the first round."""
        return models.build(self.model, self.shards.form(self.task), self.seed)


@dataclass(frozen=True)
class Finished:
    """A run that has done all its rounds."""

    out: Path  # its directory
    problem: Problem  # what it was to solve
    model: np.ndarray  # float32 [d], after the last round
    # how often each client was drawn, by client; clients never drawn are absent
    participations: Mapping[int, int]


# yields (steps done, steps in all) while it computes, and returns values for the summary
Measurement = Generator[tuple[int, int], None, dict[str, Any]]
# the round, counted from 0, and the model after it, float32 [d] -> columns of the rounds table
Assess = Callable[[int, np.ndarray], Mapping[str, float | None]]


class Probe(WithServerState):
    """Base of the family. Nothing that a probe does changes the model, and none of its values is
    noisy: they are for those who may see all data.
    """

    # whether it takes clients' losses under one model of all
    needs_common_model: ClassVar[bool] = False

    def check(self, setting: Setting) -> None:
        """Raises `ConfigError` where there is no one model of all clients to look at."""
        if self.needs_common_model and setting.local_parameters:
            expected = "no measure of one model of all clients, as with model.local there is none"
            raise ConfigError("measure", self.kind, expected)

    # --- of a chunk, where the clients are ---

    def columns(self, client_noise: bool) -> tuple[str, ...]:
        """The names of what `chunk` gives. `client_noise`: clients draw noise on what they send."""
        return ()

    def chunk(self, sent: Sent) -> Columns:
        """A number for each client, float64 [k] by name."""
        return {}

    looks = overrides(chunk)  # whether it looks at what clients send

    # --- of a round, where the server is ---

    def values(self) -> tuple[str, ...]:
        """The names of what `round` and `assess` give."""
        return ()

    def round(self, seen: Round, state: State) -> Mapping[str, float | None]:
        """Columns of the rounds table; may change the probe's `state` in place."""
        return {}

    def assess(self, problem: Problem, out: Path) -> Assess | None:
        """What gives more columns of the rounds table, or None; called once, when a run starts or
        continues.
        """
        return None

    # --- of a run ---

    def fits(self, problem: Problem) -> None:
        """Raises `ConfigError` where this cannot be measured of such a problem."""

    def tables(self, columns: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """The tables that the probe writes, with their columns; `columns` are those of clients."""
        return {}

    def rows(self, seen: Round) -> Mapping[str, Columns]:
        """What a round adds to these tables."""
        return {}

    def follow(self, out: Path, d: int, t: int) -> Callable[[int, np.ndarray], None] | None:
        """A function of (t, model float32 [d]) after t rounds, and after each that follows."""
        return None

    def afterwards(self, run: Finished) -> dict[str, Any] | Measurement:
        """The values under the probe's name in the summary, computed when all rounds are done; a
        generator of what takes long.
        """
        return {}

    has_summary = overrides(afterwards)  # whether there is something to compute then
