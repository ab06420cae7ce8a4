"""No noise."""

from __future__ import annotations

from raydpfl.config.setting import Setting
from raydpfl.errors import ConfigError
from raydpfl.methods.noise.base import Noise, RunFacts
from raydpfl.privacy import Mechanism


class NoNoise(Noise):
    """No noise: the run is not private, and says so."""

    kind: str = "none"

    def private(self) -> bool:
        return False

    def size(self, outline: Mechanism, facts: RunFacts) -> float:
        return 0.0

    def check(self, setting: Setting) -> None:
        if setting.budget is not None:
            expected = "none without noise and an accountant: this run spends without bound"
            raise ConfigError("privacy.budget", setting.budget, expected)
