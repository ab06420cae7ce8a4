from __future__ import annotations

from pydantic import Field, model_validator

from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.selection.base import Ask, Cohort, Population
from raydpfl.methods.selection.poisson import Poisson
from raydpfl.methods.selection.uniform import distinct
from raydpfl.privacy import Sampling


class TruncatedPoisson(Poisson):
    """Each client independently with probability cohort / population; of more than `cap` a uniform
    subset of `cap` takes part (Chua et al. 2024). The divisor is always `cohort`.
    """

    examples = ({"cohort": 6, "cap": 9},)
    kind: str = "truncated_poisson"
    cap: int = Field(ge=1, description="the largest size of a cohort, at least `cohort`")

    @model_validator(mode="after")
    def _above_the_cohort(self) -> TruncatedPoisson:
        if self.cap < self.cohort:
            expected = f"at least selection.cohort, {self.cohort}"
            raise ConfigError("selection.cap", self.cap, expected)
        return self

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        generator = stream(seed, Purpose.COHORT, t=t)
        count = len(population)
        size = min(int(generator.binomial(count, self.cohort / count)), self.cap)
        return Cohort.of(distinct(generator, count, size))

    def sampling(self, population: Population) -> Sampling:
        return Sampling("truncated_poisson", len(population), self.cohort, cap=self.cap)
