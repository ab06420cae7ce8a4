"""The base of Gaussian noise that is correlated over the rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from raydpfl.config.setting import Setting
from raydpfl.errors import ConfigError
from raydpfl.methods.noise.base import NoiseSource
from raydpfl.methods.noise.gaussian import Gaussian
from raydpfl.privacy import Mechanism, Sampling
from raydpfl.privacy.factorization import separation_refusal, toeplitz_squares


class CorrelatedGaussian(Gaussian):
    """Base of correlated noise y = C^-1 z on the sum, drawn by the server, for a matrix C and
    independent z of N(0, std^2 I) (`raydpfl.privacy.factorization`). `epsilon`, `multiplier` and
    `std` are those of z.

    A member gives `squares`, `fit_matrix`, `source` and `whitening`. Its fields are what C follows
    from; `fit_matrix` fills in those that are None, so that a resumed run cannot come to others.
    """

    # whether what some rounds cost depends on how many follow
    horizon_dependent: ClassVar[bool] = True
    kind: str = ""
    placement: Literal["server"] = Field(default="server", description="who draws it")

    @property
    def accounted_with(self) -> tuple[str, ...]:
        return ("server",)  # C is fitted to it

    @model_validator(mode="after")
    def _check_calibration(self) -> CorrelatedGaussian:
        expected = "rigorous: the papers have no formula for noise that is correlated over rounds"
        self._refuse("calibration", expected)
        self._refuse("schedule", "none with noise that is correlated over the rounds")
        if self.horizon_dependent:
            self._refuse("rounds", "none with noise that is correlated over all rounds of the run")
        return self

    def extension(self, rounds: int) -> str | None:
        override = super().extension(rounds)
        return None if override and self.horizon_dependent else override

    def span(self) -> int | None:
        """How many rounds the noise of one is correlated with, itself among them; None: all."""
        return None

    def fit_matrix(self, setting: Setting) -> CorrelatedGaussian:
        """The same noise with all fields that C follows from. Raises `ConfigError` where there is
        no such C.
        """
        return self

    def squares(self, rounds: int, separation: int, participations: int) -> np.ndarray:
        """The squared sensitivity, once C is fitted, of 1, 2, ... participations of a client, for
        updates of norm at most 1 at least `separation` rounds apart: float64 [at most
        participations]. Raises `ConfigError` where no theorem covers it.
        """
        raise NotImplementedError

    def resolve(self, setting: Setting, cohorts: Sampling) -> CorrelatedGaussian:
        """What `fit_matrix` gives for the run. Raises `ConfigError` where it is not covered."""
        reason = separation_refusal(cohorts, setting.min_separation, self.span())
        if reason:
            raise ConfigError("noise.kind", self.kind, f"another: {reason}")
        return self.fit_matrix(setting)

    def outline(self, setting: Setting, cohorts: Callable[[], Sampling]) -> Mechanism | None:
        outline = super().outline(setting, cohorts)
        noise = self.resolve(setting, cohorts())
        if outline is None or outline.sampling.hidden:  # a turn costs what independent noise costs
            return outline
        limits = setting.min_separation, setting.most_participations
        return replace(outline, squares=tuple(noise.squares(setting.rounds, *limits).tolist()))


class ToeplitzGaussian(CorrelatedGaussian):
    """Base of correlated noise by a Toeplitz matrix: a member gives `column` for `squares` and
    `whitening`.
    """

    def column(self, rounds: int) -> np.ndarray:
        """The first column of C, once it is fitted, in so many rounds, as far as it is not 0."""
        raise NotImplementedError

    def whitening(self, t: int) -> np.ndarray:
        return self.column(1 << t.bit_length())[: t + 1]

    def squares(self, rounds: int, separation: int, participations: int) -> np.ndarray:
        return toeplitz_squares(self.column(rounds), rounds, separation, participations)


class ReplayedSource(NoiseSource):
    """A source whose noise of a round follows from that of the rounds before: a function of (seed,
    round) alone. Asked for any round but the next (after a resume, or for a round that was cut off)
    it draws again from round 0, so that nothing need be in a checkpoint. A class gives `restart`
    and `next_noise`.
    """

    def __init__(self, seed: int, d: int):
        super().__init__(seed, d)
        self._next = 0
        self.restart()

    def restart(self) -> None:
        """Forgets all rounds."""
        raise NotImplementedError

    def next_noise(self, t: int) -> np.ndarray:
        """The noise y of round t for z of std 1, float64 [d], called for t = 0, 1, ... in turn."""
        raise NotImplementedError

    def on_sum(self, t: int, std: float) -> np.ndarray:
        """See `NoiseSource.on_sum`; `std` is that of z."""
        if t != self._next:
            self._next = 0
            self.restart()
        while self._next <= t:
            y = self.next_noise(self._next)
            self._next += 1
        return y * std
