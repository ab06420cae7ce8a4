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
from raydpfl.methods.noise import at_local_steps, on_sums
from raydpfl.methods.noise.base import Asked, Facts, Source
from raydpfl.methods.noise.keyed_noise import client_noise, server_noise
from raydpfl.privacy import Mechanism, Release, Sampling
from raydpfl.privacy.types import Placement, Relation, Unit

if TYPE_CHECKING:
    from raydpfl.experiment import Experiment
    from raydpfl.methods.noise.gaussian import Gaussian


class DrawnBy(ABC):
    """What follows from who draws. A method named like one of `Noise` answers for it."""

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

    def kept(self, override: str | None) -> str | None:
        """See `Noise.kept`, where `override` fixes the rounds that a size is for."""
        return override

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


class DuringSteps(DrawnBy):
    """Each client at each of its local steps, as part of its training: nothing is drawn on what it
    sends, and samples are protected.
    """

    name = "step"
    protects = "sample"

    def kept(self, override: str | None) -> str | None:
        """None where sizes are calibrated: each client's is for the rounds that it is in."""
        return None if override else override

    def relation(self, asked: Asked, natural: Relation) -> Relation:
        return "replace_one"

    def check(self, noise: Gaussian, experiment: Experiment) -> None:
        if experiment.bounding.sample_bound is None:
            expected = "client or server; noise at local steps needs bounding.kind per_sample_clip"
            raise ConfigError("noise.placement", self.name, expected)
        at_local_steps.check(noise, experiment)

    def outline(
        self, noise: Gaussian, experiment: Experiment, cohorts: Callable[[], Sampling]
    ) -> Mechanism | None:
        return None

    def noised(self, noise: Gaussian, outline: Mechanism | None, facts: Facts) -> Release:
        return at_local_steps.release(noise, facts)

    def variances(
        self, noise: Gaussian, experiment: Experiment, sizes: np.ndarray, root: Path | None
    ) -> np.ndarray | None:
        return at_local_steps.variances(noise, experiment, sizes, root)


class OnSums(DrawnBy):
    """On what leaves the clients, so that clients are protected."""

    def check(self, noise: Gaussian, experiment: Experiment) -> None:
        if experiment.bounding.sample_bound is not None:
            raise ConfigError("noise.placement", self.name, "step, with per_sample_clip")
        noise.check_sums(experiment)

    def outline(
        self, noise: Gaussian, experiment: Experiment, cohorts: Callable[[], Sampling]
    ) -> Mechanism | None:
        return on_sums.outline(noise, experiment, cohorts())

    def noised(self, noise: Gaussian, outline: Mechanism | None, facts: Facts) -> Release:
        assert outline is not None
        return on_sums.at_multiplier(outline, facts, noise.size(outline, facts))


class ByServer(OnSums):
    """The server, once on the sum."""

    name = "server"
    unseen = True

    def source(self, seed: int, d: int) -> Source:
        return Independent(seed, d)


class ByClients(OnSums):
    """Each client on what it sends: everyone draws as much as the round with the fewest clients
    needs.
    """

    name = "client"

    def on_clients(
        self, seed: int, t: int, clients: np.ndarray, draws: np.ndarray, std: float, d: int
    ) -> np.ndarray | None:
        return client_noise(seed, t, clients, draws, std, d)

    def client_std(self, std: float, survivors: int) -> float:
        return std / math.sqrt(survivors)

    def least(self, survivors: int) -> int:
        return survivors

    def total(self, std: float, facts: Facts) -> float:
        return std * math.sqrt(facts.survivors)

    def noised(self, noise: Gaussian, outline: Mechanism | None, facts: Facts) -> Release:
        if not facts.survivors:
            dropout = facts.experiment.selection.dropout
            expected = "one that leaves some client, and its noise, in every round of the run"
            raise ConfigError("selection.dropout", dropout, expected)
        return super().noised(noise, outline, facts)


class Independent(Source):
    """The server's noise, independent over the rounds."""

    def __init__(self, seed: int, d: int):
        self._seed = seed
        self._d = d

    def on_sum(self, t: int, std: float) -> np.ndarray | None:
        return server_noise(self._seed, t, std, self._d)


DRAWN_BY: dict[str, DrawnBy] = {
    each.name: each for each in (ByClients(), ByServer(), DuringSteps())
}


def who_draws(placement: str) -> DrawnBy:
    """Whoever draws the noise of a settled placement."""
    return DRAWN_BY[placement]


def settled(name: str, experiment: Experiment) -> str:
    """The placement that a config names. `auto` means at local steps if samples' gradients are
    bounded, by the server if the size of a cohort is a secret, and by the clients otherwise.
    """
    if name in DRAWN_BY:
        return name
    if experiment.bounding.sample_bound is not None:
        return DuringSteps.name
    return ByServer.name if experiment.selection.hides_size() else ByClients.name
