"""Gaussian noise that is correlated over the rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from raydpfl.config.setting import Setting
from raydpfl.errors import ConfigError
from raydpfl.methods.noise.base import NoiseSource
from raydpfl.methods.noise.gaussian import Gaussian
from raydpfl.methods.noise.keyed_noise import server_noise
from raydpfl.privacy import Sampling
from raydpfl.privacy.factorization import banded_toeplitz, check


class BandedGaussian(Gaussian):
    """Correlated noise y = C^-1 z on the sum, drawn by the server: C banded lower-triangular
    Toeplitz, z of N(0, std^2 I) (DP-FTRL with banded matrix factorisation, Choquette-Choo et al.
    2023).

    `epsilon`, `multiplier` and `std` are those of z; the columns of C have norm at most 1.
    `coefficients` are the diagonals of C, float [bands], of any scale. By default they are those of
    least error; `resolved` fills them in, so that a resumed run cannot come to others.
    """

    accounted_with = ("server",)  # its coefficients are fitted to it
    examples = (
        {"bands": 1, "multiplier": 1.0},
        {"bands": 3, "multiplier": 1.0, "coefficients": [1.0, 0.5, 0.25]},
    )
    kind: str = "banded_gaussian"
    placement: Literal["server"] = "server"
    bands: int = Field(
        ge=1, description="rounds that the noise of one is correlated with, itself among them"
    )
    coefficients: tuple[float, ...] | None = None

    @model_validator(mode="after")
    def _banded(self) -> BandedGaussian:
        expected = "rigorous: the papers have no formula for noise that is correlated over rounds"
        self._refuse("calibration", expected, "rigorous")
        c = self.coefficients
        if c is not None and not (len(c) == self.bands and c[0] > 0):
            expected = f"{self.bands} numbers, one a band, the first above 0"
            raise ConfigError("noise.coefficients", c, expected)
        return self

    def source(self, seed: int, d: int) -> NoiseSource:
        assert self.coefficients is not None
        return Correlated(seed, self.coefficients, d)

    def whitening(self) -> tuple[float, ...]:
        assert self.coefficients is not None
        return self.coefficients

    def resolved(self, setting: Setting, cohorts: Sampling) -> BandedGaussian:
        """`fitted` to the run. Raises `ConfigError` for more bands than rounds, or than rounds
        between two participations of a client.
        """
        check(self.bands, cohorts, setting.min_separation)
        return self.fitted(setting.rounds, setting.momentum)

    def fitted(self, rounds: int, persistence: float = 0.0) -> BandedGaussian:
        """The same noise with `coefficients` of norm 1: those given, or the best for so many rounds
        and a server of this persistence. Raises `ConfigError` for more bands than rounds.
        """
        best = banded_toeplitz(self.bands, rounds, persistence)
        c = best if self.coefficients is None else np.array(self.coefficients)
        norm = float(np.linalg.norm(c))
        # resolved again, it is the same to the last bit
        c = c if abs(norm - 1) < 1e-12 else c / norm
        return self.model_copy(update={"coefficients": tuple(c.tolist())})


class Correlated(NoiseSource):
    """The noise of a resolved `BandedGaussian` on models of `d` parameters: a function of (seed,
    coefficients, round) alone.

        y_t = (z_t - sum_{j=1}^{bands-1} c_j y_{t-j}) / c_0,

    where z_t are the standard normals that `server_noise` scales. It holds the last bands - 1 of
    the y, float64 [d] each. Asked for any round but the next (after a resume, or for a round that
    was cut off) it draws again from round 0, so that nothing need be in a checkpoint.
    """

    def __init__(self, seed: int, coefficients: Sequence[float], d: int):
        super().__init__(seed, d)
        self._first = coefficients[0]
        self._later = coefficients[1:]
        self._restart()

    def _restart(self) -> None:
        self._next = 0
        self._past: deque[np.ndarray] = deque(maxlen=len(self._later))  # the latest first

    def on_sum(self, t: int, std: float) -> np.ndarray:
        """See `NoiseSource.on_sum`; `std` is that of z."""
        if t != self._next:
            self._restart()
        while self._next <= t:
            y = server_noise(self.seed, self._next, 1.0, self.d)
            for coefficient, past in zip(self._later, self._past, strict=False):
                y -= coefficient * past
            y /= self._first
            self._past.appendleft(y)
            self._next += 1
        return y * std
