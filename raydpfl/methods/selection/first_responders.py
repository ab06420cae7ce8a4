"""The first to respond are the cohort, and the work of the rest is dropped (002 sec. IV).

A client's response time is its scale, drawn once, times a draw from the response distribution in
every round. If all clients have the same scale this is uniform sampling in distribution (002 Lemma
5 rests on that).
"""

from typing import Any

import numpy as np
from pydantic import Field, SerializeAsAny, field_validator

from raydpfl.config.registry import Member, choose, family
from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.selection.base import Ask, Cohort, Population
from raydpfl.methods.selection.uniform import Sized, distinct
from raydpfl.privacy import Sampling


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
    sigma: float = Field(default=1.0, gt=0, description="std of the logarithm")

    def times(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return np.exp(self.sigma * generator.standard_normal(count))


class Pareto(Response):
    """P[time > x] = x^-alpha for x >= 1: a heavy tail, of infinite mean for alpha <= 1."""

    examples = ({}, {"alpha": 0.8})
    kind: str = "pareto"
    alpha: float = Field(default=1.5, gt=0, description="exponent of the tail")

    def times(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return 1 + generator.pareto(self.alpha, count)


DEFAULT_CONTACTS = 10_000  # clients asked by default, so that a round does not wait for a million
RESPONSES: dict[str, type[Response]] = family(
    "raydpfl.methods.selection", Response, ("exponential",)
)


class FirstResponders(Sized):
    """The first `cohort` to respond of `contacted` clients, which are asked uniformly without
    replacement.

    With spread 0 the sampling and the accounting are those of `uniform`. Otherwise fast clients are
    drawn more often, in no closed form: only a client's participations count, and no weights undo
    the bias.
    """

    examples = (
        {"cohort": 6},
        {"cohort": 6, "spread": 0.3, "response": {"kind": "lognormal", "sigma": 2.0}},
    )
    kind: str = "first_responders"
    contacted: int | None = Field(
        default=None,
        ge=1,
        description="clients asked; None: the larger of 10,000 and 10 cohorts, all if fewer",
    )
    response: SerializeAsAny[Response] = Field(
        default=Exponential(), description="distribution of the response times"
    )
    spread: float = Field(default=0.0, ge=0, description="of scales exp(spread Z_k), Z_k ~ N(0, 1)")

    @field_validator("response", mode="before")
    @classmethod
    def _response(cls, value: Any) -> Response:
        return choose("selection.response", value, RESPONSES, Response)

    def asked(self, count: int) -> int:
        """How many of `count` clients are asked."""
        return self.contacted or min(count, max(DEFAULT_CONTACTS, 10 * self.cohort))

    def fits(self, count: int) -> None:
        super().fits(count)
        if not self.cohort <= self.asked(count) <= count:
            expected = f"a number from the cohort of {self.cohort} to the population of {count}"
            raise ConfigError("selection.contacted", self.contacted, f"{expected} clients")

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        count = len(population)
        contacted_count = self.asked(count)
        clients = np.arange(contacted_count)
        if contacted_count < count:
            clients = distinct(stream(seed, Purpose.COHORT, t=t), count, contacted_count)
        generator = stream(seed, Purpose.RESPONSE, t=t)
        times = self.response.times(generator, contacted_count)
        ties = generator.random(contacted_count)  # which of equal times comes first
        if self.spread:
            scale_stream = stream(seed, Purpose.RESPONSE, step=1)
            scales = population.cached(
                ("scales", seed), lambda: scale_stream.standard_normal(count)
            )
            times = times * np.exp(self.spread * scales[clients])
        return Cohort.of(clients[np.lexsort((ties, times))[: self.cohort]])

    def sampling(self, population: Population) -> Sampling:
        if not self.spread:
            return Sampling("fixed", len(population), self.cohort)
        rule = "the first to respond, some always faster than others"
        return Sampling("public", len(population), self.cohort, rule=rule)
