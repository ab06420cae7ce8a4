"""Integer noise on sums of integers modulo a power of two, as secure aggregation takes them."""

import os
import warnings
from dataclasses import replace
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from raydpfl.config.registry import Examples
from raydpfl.config.setting import Setting
from raydpfl.core import integer_distributions as distributions
from raydpfl.core.prng import Purpose, bit_streams, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.noise.base import NoiseSource, RunFacts, Silent
from raydpfl.methods.noise.gaussian import Gaussian
from raydpfl.privacy import Mechanism, Release
from raydpfl.privacy.integer_noise import (
    LEAST_STD,
    DistributedDiscreteGaussian,
    IntegerNoise,
    SkellamNoise,
)

SYSTEM = (
    "noise.source system: the noise is the operating system's, so that this run cannot be repeated "
    "or resumed with the same bits"
)


with warnings.catch_warnings():
    # the key `source` has the name of a hook, whose place `on_server` takes
    warnings.filterwarnings("ignore", "Field name .source. in", UserWarning)

    class Sourced(Gaussian):
        """Base of noises that may be drawn by the operating system's generator."""

        kind: str = ""
        source: Literal["keyed", "system"] = Field(  # type: ignore[assignment]
            default="keyed",
            description="keyed: by seed, round and client; system: by the operating system's "
            "generator, so that no run can be repeated",
        )


# the field of subclasses, which would find the hook
Sourced.source = Sourced.model_fields["source"]  # type: ignore[assignment]


class SecureSum(Sourced):
    """Base of the integer noises. What a client sends is rotated, divided by a step, rounded to
    integers of a bounded norm and added up modulo 2^bits (`raydpfl.core.modular_sum`); the step
    and the sensitivity follow from noise, width and size of the model
    (`raydpfl.privacy.integer_noise`).

    `epsilon`, `multiplier` and `std` are as of `gaussian`; the std of `on_clients` and
    `on_server`, whose noise is integers, counts steps.
    """

    examples: ClassVar[Examples] = (
        {"multiplier": 1.0},
        {"epsilon": 8.0, "delta": 1e-5, "bits": 20, "rotation": False},
        {"multiplier": 1.0, "source": "system"},
    )
    kind: str = ""
    bits: int = Field(default=16, ge=8, le=32, description="width of the sum of a coordinate")
    rotation: bool = Field(
        default=True, description="of updates, at random, so that no coordinate needs a wider sum"
    )

    @property
    def accounted_with(self) -> tuple[str, ...]:
        return ("model",)  # the sensitivity depends on its parameters

    @model_validator(mode="after")
    def _check_integer_fields(self) -> Self:
        self._refuse("calibration", "rigorous: no paper's formula is for integers")
        self._refuse("schedule", "none with a sum of integers, whose step is for one std")
        self._refuse("virtual_cohort", "none with a sum of integers, whose width is for those")
        if not self.repeatable:
            self._refuse("common", "false, as noise.source system is never the same")
        return self

    def noise_distribution(self, std: float) -> distributions.Distribution:
        """Of noise of this std, in steps."""
        raise NotImplementedError

    def by_norms(self) -> bool:
        return False

    @property
    def repeatable(self) -> bool:
        return self.source == "keyed"

    def scores(self, noise: np.ndarray, std: float) -> np.ndarray:
        return self.noise_distribution(std).scores(noise)

    def check(self, setting: Setting) -> None:
        if setting.queries:
            expected = "one without side queries, whose noise is no integer: a fixed bound"
            raise ConfigError("bounding.kind", setting.kinds["bounding"], expected)
        if setting.loss_query is not None:
            expected = "one that asks for no losses, whose noise is no integer"
            raise ConfigError("selection.kind", setting.kinds["selection"], expected)
        if setting.survey is not None:
            expected = f"none with noise.kind {self.kind}: its noise is no integer"
            raise ConfigError("evaluate.histogram", setting.survey.name, expected)

    def warnings(self, setting: Setting) -> tuple[str, ...]:
        return super().warnings(setting) + (() if self.repeatable else (SYSTEM,))

    def client_std(self, std: float, clients_left: int) -> float:
        # so that rounding takes nothing off the variance of the sum
        return super().client_std(std, clients_left) * (1 + 2.0**-50)

    def on_clients(
        self, seed: int, t: int, clients: np.ndarray, draws: np.ndarray, std: float, d: int
    ) -> np.ndarray | None:
        if self.drawn_by() != "client":
            return None
        distribution = self.noise_distribution(std)
        rows = np.empty((len(clients), d))
        bit_generators = bit_streams(seed, Purpose.CLIENT_NOISE, t=t, clients=clients, draws=draws)
        for row, bits in zip(rows, bit_generators, strict=True):
            row[:] = distribution.sample(bits.random_raw if self.repeatable else system_words, d)
        return rows

    def on_server(self, seed: int, d: int) -> NoiseSource:
        return Silent(seed, d) if self.drawn_by() == "client" else IntegerSource(self, seed, d)

    def calibrated(self, outline: Mechanism | None, facts: RunFacts) -> Release | None:
        assert outline is not None
        sized_outline = replace(outline, integer=self.integers(outline.sampling.cohort, facts.d))
        release = super().calibrated(sized_outline, facts)
        assert isinstance(release, Mechanism) and release.integer is not None
        std = release.integer.lattice(release.noise_multiplier).std
        if not release.private:
            expected = f"more: the noise on a sum has std {std:.3g} steps, and a guarantee "
            expected += f"needs {LEAST_STD:g} or so, of each client where clients draw it, "
            expected += "and more where the noise multiplier is small"
            raise ConfigError("noise.bits", self.bits, expected)
        return release


class IntegerSource(NoiseSource):
    """The server's noise of a `SecureSum` in one run, in steps."""

    def __init__(self, noise: SecureSum, seed: int, d: int):
        super().__init__(seed, d)
        self._noise = noise

    def on_sum(self, t: int, std: float) -> np.ndarray:
        keyed_words = stream(self.seed, Purpose.SERVER_NOISE, t=t).bit_generator.random_raw
        distribution = self._noise.noise_distribution(std)
        return distribution.sample(keyed_words if self._noise.repeatable else system_words, self.d)


class DiscreteGaussian(SecureSum):
    """Discrete Gaussian noise (Canonne, Kamath and Steinke 2020) on the sum, drawn by the server;
    with `placement: client` the distributed one, each client's part on what it sends (Kairouz, Liu
    and Steinke 2021).
    """

    examples: ClassVar[Examples] = (*SecureSum.examples, {"multiplier": 1.0, "placement": "client"})
    kind: str = "discrete_gaussian"
    placement: Literal["server", "client"] = Field(default="server", description="who draws it")

    def noise_distribution(self, std: float) -> distributions.Distribution:
        return distributions.discrete_gaussian(std)

    def integers(self, cohort: int, d: int) -> IntegerNoise:
        noise_class = DistributedDiscreteGaussian if self.drawn_by() == "client" else IntegerNoise
        return noise_class(self.bits, cohort, d, self.rotation)


class Skellam(SecureSum):
    """Skellam noise of clients on what they send (Agarwal, Kairouz and Liu 2021). Their sum is
    Skellam noise, however little each of them draws.
    """

    kind: str = "skellam"
    placement: Literal["client"] = Field(default="client", description="who draws it")

    def noise_distribution(self, std: float) -> distributions.Distribution:
        return distributions.skellam(std)

    def integers(self, cohort: int, d: int) -> IntegerNoise:
        return SkellamNoise(self.bits, cohort, d, self.rotation)


def system_words(n: int) -> np.ndarray:
    """n words of the operating system's generator, uint64 [n]."""
    return np.frombuffer(os.urandom(8 * n), np.uint64)
