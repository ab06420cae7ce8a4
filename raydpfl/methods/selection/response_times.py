"""Distributions of response times."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from raydpfl.config.registry import Member


class Response(Member):
    """Base of the response distributions. A member gives `times`."""

    def times(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Independent response times of clients of scale 1, float64 [count]."""
        raise NotImplementedError


class Exponential(Response):
    """Memoryless, of mean 1."""

    kind: str = "exponential"

    def times(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return generator.standard_exponential(count)


class Lognormal(Response):
    """exp(sigma Z), Z standard normal: many small delays multiplied."""

    examples = ({}, {"sigma": 2.0})
    kind: str = "lognormal"
    sigma: float = Field(default=1.0, gt=0)

    def times(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return np.exp(self.sigma * generator.standard_normal(count))


class Pareto(Response):
    """P[time > x] = x^-alpha for x >= 1: a heavy tail, of infinite mean for alpha <= 1."""

    examples = ({}, {"alpha": 0.8})
    kind: str = "pareto"
    alpha: float = Field(default=1.5, gt=0)

    def times(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return 1 + generator.pareto(self.alpha, count)
