"""Sizes within an interval."""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from raydpfl.data.sizes.base import Sizes
from raydpfl.errors import ConfigError


class UniformInterval(Sizes):
    """n v_k / sum v with v_k ~ U(low, high) (003 sec. VI)."""

    kind: str = "spread"
    low: float = Field(default=0.5, gt=0)
    high: float = Field(default=1.5, gt=0)

    @model_validator(mode="after")
    def _interval(self) -> UniformInterval:
        if self.high < self.low:
            raise ConfigError("data.sizes.high", self.high, f"at least data.sizes.low, {self.low}")
        return self

    def weights(self, clients: int, generator: np.random.Generator) -> np.ndarray:
        return generator.uniform(self.low, self.high, clients)
