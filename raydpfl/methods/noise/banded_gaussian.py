"""Gaussian noise that is correlated over a few rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from pydantic import Field, model_validator

from raydpfl.config.setting import Setting
from raydpfl.errors import ConfigError
from raydpfl.methods.noise.base import NoiseSource
from raydpfl.methods.noise.correlated import ReplayedSource, ToeplitzGaussian
from raydpfl.methods.noise.keyed_noise import server_noise
from raydpfl.privacy.factorization import banded_toeplitz


class BandedGaussian(ToeplitzGaussian):
    """Correlated noise y = C^-1 z on the sum, drawn by the server: C banded lower-triangular
    Toeplitz, z of N(0, std^2 I) (DP-FTRL with banded matrix factorisation, Choquette-Choo et al.
    2023).

    `epsilon`, `multiplier` and `std` are those of z; the columns of C have norm at most 1.
    Without `coefficients` participations have to be at least `bands` rounds apart; with some that
    do not increase they may be nearer. The server keeps bands - 1 models.
    """

    examples = (
        {"bands": 1, "multiplier": 1.0},
        {"bands": 3, "multiplier": 1.0, "coefficients": [1.0, 0.5, 0.25]},
    )
    horizon_dependent = False
    kind: str = "banded_gaussian"
    bands: int = Field(
        ge=1, description="rounds that the noise of one is correlated with, itself among them"
    )
    coefficients: tuple[float, ...] | None = Field(
        default=None, description="diagonals of C, of any scale; None: those of least error"
    )

    @model_validator(mode="after")
    def _check_coefficients(self) -> BandedGaussian:
        c = self.coefficients
        if c is not None and not (len(c) == self.bands and c[0] > 0):
            expected = f"{self.bands} numbers, one a band, the first above 0"
            raise ConfigError("noise.coefficients", c, expected)
        return self

    def source(self, seed: int, d: int) -> NoiseSource:
        assert self.coefficients is not None
        return BandedSource(seed, self.coefficients, d)

    def column(self, rounds: int) -> np.ndarray:
        assert self.coefficients is not None
        return np.array(self.coefficients)

    def span(self) -> int:
        return self.bands

    def fit_matrix(self, setting: Setting) -> BandedGaussian:
        """The same noise with `coefficients` of norm 1: those given, or the best for so many rounds
        and the momentum of the server. Raises `ConfigError` for more bands than rounds, or, of
        those of least error, than rounds between two participations of a client.
        """
        best = banded_toeplitz(self.bands, setting.rounds, setting.momentum)
        if self.coefficients is None and self.bands > setting.min_separation:
            expected = f"at most {setting.min_separation}, the rounds after which a client may "
            expected += "take part again; or a selection by turns with more groups, or "
            raise ConfigError("bands", self.bands, f"{expected}coefficients that do not increase")
        c = best if self.coefficients is None else np.array(self.coefficients)
        norm = float(np.linalg.norm(c))
        # resolved again, it is the same to the last bit
        c = c if abs(norm - 1) < 1e-12 else c / norm
        return self.model_copy(update={"coefficients": tuple(c.tolist())})


class BandedSource(ReplayedSource):
    """The noise of a resolved `BandedGaussian` on models of `d` parameters:

        y_t = (z_t - sum_{j=1}^{bands-1} c_j y_{t-j}) / c_0,

    where z_t are the standard normals that `server_noise` scales. It holds the last bands - 1 of
    the y, float64 [d] each.
    """

    def __init__(self, seed: int, coefficients: Sequence[float], d: int):
        self._leading_coefficient = coefficients[0]
        self._other_coefficients = coefficients[1:]
        super().__init__(seed, d)

    def restart(self) -> None:
        # the latest first
        self._past: deque[np.ndarray] = deque(maxlen=len(self._other_coefficients))

    def next_noise(self, t: int) -> np.ndarray:
        y = server_noise(self.seed, t, 1.0, self.d)
        for coefficient, past in zip(self._other_coefficients, self._past, strict=False):
            y -= coefficient * past
        y /= self._leading_coefficient
        self._past.appendleft(y)
        return y
