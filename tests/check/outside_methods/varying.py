"""Cohorts whose size varies from round to round, and their sampling scheme."""

from typing import ClassVar

import numpy as np
from pydantic import Field

from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.selection import Cohort, Selection
from raydpfl.privacy import Sampling, pld
from raydpfl.privacy.sampling import SamplingScheme


class Spread(SamplingScheme):
    """The size is uniform on r - spread, ..., r + spread, and all may know it; the cohort is then a
    uniform subset of that size. So delta is the mean of those of fixed sizes, under replace-one.
    """

    kind = "spread"

    def __init__(self, spread=2):
        self.spread = spread

    def size(self, sampling):
        return None

    def as_in_the_papers(self, sampling):
        return False

    def words(self, sampling):
        return f"size {sampling.cohort} +- {self.spread} of {sampling.population}"

    def refuses(self, relation):
        if relation == "replace_one":
            return None
        return "cohorts of varying size are covered under replace_one only; nearest: replace_one"

    def curves(self, sampling, mu, relation):
        sizes = range(sampling.cohort - self.spread, sampling.cohort + self.spread + 1)

        def curve(epsilon):
            deltas = [
                pld.fixed_size_curve(size / sampling.population, mu)(epsilon) for size in sizes
            ]
            return np.mean(deltas, axis=0)

        return ((curve, curve),)


class Varying(Selection):
    """`cohort` +- `spread` clients."""

    examples: ClassVar = ({"cohort": 8}, {"cohort": 6, "spread": 5})
    cohort: int = Field(ge=1)
    spread: int = Field(default=2, ge=0)

    def fits(self, count):
        if not self.spread < self.cohort <= count - self.spread:
            accepted = f"above the spread, and with it at most the {count} clients"
            raise ConfigError("selection.cohort", self.cohort, accepted)

    def select(self, seed, t, population, ask):
        drawn = stream(seed, Purpose.COHORT, t=t)
        size = int(drawn.integers(self.cohort - self.spread, self.cohort + self.spread + 1))
        return Cohort.of(drawn.choice(len(population), size, replace=False))

    def sampling(self, population):
        return Sampling(Spread(self.spread), len(population), self.cohort)

    def clients_left(self, seed, rounds, population):
        return self.cohort - self.spread
