"""Who draws Gaussian noise: each client on its update, the server on the sum, or each client at its
local steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.noise import steps, sums
from raydpfl.noise.base import Asked, Facts, Source
from raydpfl.noise.drawn import client_noise, query_noise, server_noise
from raydpfl.privacy import Mechanism, Release, Sampling
from raydpfl.privacy.facts import Placement, Relation, Unit

if TYPE_CHECKING:
    from raydpfl.config import Experiment
    from raydpfl.noise.gaussian import Gaussian


class Place(ABC):
    """What follows from who draws. The methods named like those of `Noise` are these."""

    name: ClassVar[Placement]
    protects: ClassVar[Unit] = "client"
    unseen: ClassVar[bool] = False

    def on_clients(
        self, seed: int, t: int, clients: np.ndarray, draws: np.ndarray, std: float, d: int
    ) -> np.ndarray | None:
        """See `Noise.on_clients`."""
        return None

    def client_std(self, std: float, survivors: int) -> float:
        """See `Noise.client_std`."""
        return 0.0

    def least(self, survivors: int) -> int:
        """See `Noise.least`."""
        return 0

    def source(self, seed: int, d: int) -> Source:
        """See `Noise.source`."""
        return Source()

    def on_query(
        self,
        seed: int,
        t: int,
        std: float,
        clients: np.ndarray,
        draws: np.ndarray,
        survivors: int,
        query: str,
    ) -> float:
        """See `Noise.on_query`."""
        return 0.0

    def relation(self, asked: Asked, natural: Relation) -> Relation:
        """The neighbouring relation of the guarantees."""
        return natural if asked == "auto" else asked

    def total(self, std: float, facts: Facts) -> float:
        """Std of the noise on the sum, where the config gives that of one draw."""
        return std

    @abstractmethod
    def check(self, noise: Gaussian, experiment: Experiment) -> None:
        """See `Noise.check`."""

    @abstractmethod
    def outline(
        self, noise: Gaussian, experiment: Experiment, cohorts: Callable[[], Sampling]
    ) -> Mechanism | None:
        """See `Noise.outline`."""

    @abstractmethod
    def noised(self, noise: Gaussian, outline: Mechanism | None, facts: Facts) -> Release:
        """See `Noise.noised`."""

    def variances(
        self, noise: Gaussian, experiment: Experiment, sizes: np.ndarray, root: Path | None
    ) -> np.ndarray | None:
        """See `Noise.variances`."""
        return None


class AtSteps(Place):
    """Each client at each of its local steps, which is part of its training: nothing is drawn on
    what it sends, and samples are protected.
    """

    name = "step"
    protects = "sample"

    def relation(self, asked: Asked, natural: Relation) -> Relation:
        return "replace_one"

    def check(self, noise: Gaussian, experiment: Experiment) -> None:
        if experiment.bounding.sample_bound is None:
            accepted = "client or server; noise at local steps needs bounding.kind per_sample_clip"
            raise ConfigError("noise.placement", self.name, accepted)
        steps.check(noise, experiment)

    def outline(
        self, noise: Gaussian, experiment: Experiment, cohorts: Callable[[], Sampling]
    ) -> Mechanism | None:
        return None

    def noised(self, noise: Gaussian, outline: Mechanism | None, facts: Facts) -> Release:
        return steps.release(noise, facts)

    def variances(
        self, noise: Gaussian, experiment: Experiment, sizes: np.ndarray, root: Path | None
    ) -> np.ndarray | None:
        return steps.variances(noise, experiment, sizes, root)


class OnSums(Place):
    """On what leaves the clients, so that clients are protected."""

    def check(self, noise: Gaussian, experiment: Experiment) -> None:
        if experiment.bounding.sample_bound is not None:
            raise ConfigError("noise.placement", self.name, "step, with per_sample_clip")
        noise.check_sums(experiment)

    def outline(
        self, noise: Gaussian, experiment: Experiment, cohorts: Callable[[], Sampling]
    ) -> Mechanism | None:
        return sums.outline(noise, experiment, cohorts())

    def noised(self, noise: Gaussian, outline: Mechanism | None, facts: Facts) -> Release:
        assert outline is not None
        z = noise.size(outline, facts)
        return sums.at_multiplier(outline, facts.experiment, z, facts.rounds)


class AtServer(OnSums):
    """The server, once on the sum."""

    name = "server"
    unseen = True

    def source(self, seed: int, d: int) -> Source:
        return Independent(seed, d)

    def on_query(
        self,
        seed: int,
        t: int,
        std: float,
        clients: np.ndarray,
        draws: np.ndarray,
        survivors: int,
        query: str,
    ) -> float:
        return query_noise(seed, t, std, query=query)


class AtClients(OnSums):
    """Each client on what it sends. All draw as much as the round with fewest clients needs."""

    name = "client"

    def on_clients(
        self, seed: int, t: int, clients: np.ndarray, draws: np.ndarray, std: float, d: int
    ) -> np.ndarray | None:
        return client_noise(seed, t, clients, draws, std, d)

    def client_std(self, std: float, survivors: int) -> float:
        return std / math.sqrt(survivors)

    def least(self, survivors: int) -> int:
        return survivors

    def on_query(
        self,
        seed: int,
        t: int,
        std: float,
        clients: np.ndarray,
        draws: np.ndarray,
        survivors: int,
        query: str,
    ) -> float:
        own = std / math.sqrt(survivors)
        drawn = zip(clients.tolist(), draws.tolist(), strict=True)
        # in client order, whoever trained them
        return sum(query_noise(seed, t, own, client, draw, query) for client, draw in drawn)

    def total(self, std: float, facts: Facts) -> float:
        return std * math.sqrt(facts.survivors)

    def noised(self, noise: Gaussian, outline: Mechanism | None, facts: Facts) -> Release:
        if not facts.survivors:
            dropout = facts.experiment.selection.dropout
            accepted = "one that leaves some client, and its noise, in every round of the run"
            raise ConfigError("selection.dropout", dropout, accepted)
        return super().noised(noise, outline, facts)


class Independent(Source):
    """The server's noise, independent over the rounds."""

    def __init__(self, seed: int, d: int):
        self._seed = seed
        self._d = d

    def on_sum(self, t: int, std: float) -> np.ndarray | None:
        return server_noise(self._seed, t, std, self._d)


PLACES: dict[str, Place] = {place.name: place for place in (AtClients(), AtServer(), AtSteps())}


def place_of(name: str) -> Place:
    """The place of that name."""
    return PLACES[name]


def settled(name: str, experiment: Experiment) -> str:
    """The place that a config names. Where it leaves that open: at steps if samples' gradients are
    bounded, by the server if the size of a cohort is a secret, else by the clients.
    """
    if name in PLACES:
        return name
    if experiment.bounding.sample_bound is not None:
        return AtSteps.name
    return AtServer.name if experiment.selection.hides_size() else AtClients.name
