"""Each client by a coin of its own."""

from __future__ import annotations

from typing import Any, ClassVar

from raydpfl.keys import Purpose, stream
from raydpfl.privacy import Sampling
from raydpfl.selection.base import Ask, Cohort, Population
from raydpfl.selection.sized import Sized, distinct


class Poisson(Sized):
    """Each client on its own with probability cohort / population; the divisor stays `cohort`, so
    it tells nothing.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"cohort": 6},)
    kind: str = "poisson"

    def hides_size(self) -> bool:
        return True

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        generator = stream(seed, Purpose.COHORT, t=t)
        count = len(population)
        # A binomial count, then a uniform subset of that size: the same law as a coin for every
        # client, in O(cohort).
        return Cohort.of(
            distinct(generator, count, int(generator.binomial(count, self.cohort / count)))
        )

    def sampling(self, population: Population) -> Sampling:
        return Sampling("poisson", len(population), self.cohort)
