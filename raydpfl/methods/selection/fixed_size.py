"""Cohorts of distinct clients, all equally likely."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from raydpfl.errors import ConfigError
from raydpfl.methods.selection.base import Selection


def distinct(generator: np.random.Generator, count: int, size: int) -> np.ndarray:
    """`size` of the numbers 0, ..., count - 1, uniformly without replacement: int64 [size],
    ascending, in O(size).
    """
    return np.sort(generator.choice(count, size, replace=False, shuffle=False))


class Sized(Selection):
    """Base of the members with a `cohort`, which is at most the population."""

    cohort: int = Field(
        ge=1,
        description="r, clients of a round; their expected number if they are drawn independently",
    )

    def fits(self, count: int) -> None:
        if self.cohort > count:
            expected = f"at most the population of {count} clients"
            raise ConfigError("selection.cohort", self.cohort, expected)
