"""No noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raydpfl.errors import ConfigError
from raydpfl.methods.noise.base import Facts, Noise
from raydpfl.privacy import Mechanism, Release, Sampling

if TYPE_CHECKING:
    from raydpfl.experiment import Experiment


class NoNoise(Noise):
    """No noise: the run is not private, and says so."""

    kind: str = "none"

    def private(self) -> bool:
        return False

    def unseen(self) -> bool:
        return False

    def outline(self, experiment: Experiment, cohorts: Callable[[], Sampling]) -> Mechanism | None:
        return None

    def size(self, outline: Mechanism, facts: Facts) -> float:
        return 0.0

    def noised(self, outline: Mechanism | None, facts: Facts) -> Release | None:
        return None

    def check(self, experiment: Experiment) -> None:
        budget = experiment.privacy.budget
        if budget is not None:
            expected = "none without noise and an accountant: this run spends without bound"
            raise ConfigError("privacy.budget", budget, expected)
