"""Distributions of the clients' sizes."""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from raydpfl.data.sizes.base import Sizes
from raydpfl.errors import ConfigError


class Balanced(Sizes):
    """The same for all; when it does not come out even, the first clients hold one sample more."""

    kind: str = "balanced"

    def even(self) -> bool:
        return True

    def weights(self, clients: int, generator: np.random.Generator) -> np.ndarray:
        return np.ones(clients)


class PowerLaw(Sizes):
    """Proportional to rank^-exponent, the ranks assigned at random (002, unbalanced)."""

    kind: str = "power-law"
    exponent: float = Field(default=1.0, gt=0, description="of the power law")

    def weights(self, clients: int, generator: np.random.Generator) -> np.ndarray:
        return (1.0 + generator.permutation(clients)) ** -self.exponent


class UniformInterval(Sizes):
    """n v_k / sum v with v_k ~ U(low, high) (003 sec. VI)."""

    kind: str = "spread"
    low: float = Field(default=0.5, gt=0, description="the least v_k, up to a common factor")
    high: float = Field(default=1.5, gt=0, description="the largest v_k")

    @model_validator(mode="after")
    def _interval(self) -> UniformInterval:
        if self.high < self.low:
            raise ConfigError("data.sizes.high", self.high, f"at least data.sizes.low, {self.low}")
        return self

    def weights(self, clients: int, generator: np.random.Generator) -> np.ndarray:
        return generator.uniform(self.low, self.high, clients)


class LogNormal(Sizes):
    """n v_k / sum v with log v_k ~ N(0, sigma^2) (Li et al. 2020, sec. 5.1)."""

    kind: str = "lognormal"
    sigma: float = Field(default=1.0, gt=0, le=10, description="std of the logarithm of the sizes")

    def weights(self, clients: int, generator: np.random.Generator) -> np.ndarray:
        return generator.lognormal(0.0, self.sigma, clients)
