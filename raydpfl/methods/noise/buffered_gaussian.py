"""Gaussian noise that is correlated over all rounds, by a few buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from pydantic import Field, model_validator

from raydpfl.config.setting import Setting
from raydpfl.errors import ConfigError
from raydpfl.methods.noise.base import NoiseSource
from raydpfl.methods.noise.correlated import ReplayedSource, ToeplitzGaussian
from raydpfl.methods.noise.keyed_noise import server_noise
from raydpfl.privacy.factorization import buffered_column, buffered_toeplitz


class BufferedGaussian(ToeplitzGaussian):
    """Correlated noise by a buffered linear Toeplitz matrix (BLT; Dvijotham et al. 2024; McMahan,
    Xu and Zhang 2024): C has the first column (1, s_0, s_1, ...) / norm with s_j = sum over the
    buffers of scale x decay^j, of norm 1 over all rounds.

    `epsilon`, `multiplier` and `std` are those of z. The least error is that for the run's rounds,
    the momentum of its server, and the participations that its selection allows.
    """

    examples = ({"multiplier": 1.0, "buffers": 2},)
    kind: str = "buffered_gaussian"
    buffers: int = Field(default=3, ge=1, le=20, description="models that the server keeps")
    decays: tuple[float, ...] | None = Field(
        default=None, description="from 0 to 1, one a buffer; None: those of least error"
    )
    scales: tuple[float, ...] | None = Field(
        default=None, description="as decays; their sum is <= 1"
    )
    norm: float | None = Field(
        default=None, gt=0, description="of the column (1, s_0, ...) over the rounds; filled in"
    )

    @model_validator(mode="after")
    def _check_shapes(self) -> BufferedGaussian:
        expected = f"{self.buffers} numbers from 0, one a buffer, that add up to at most 1"
        values = self.scales
        if values is not None and not (
            len(values) == self.buffers and min(values) >= 0 and math.fsum(values) <= 1
        ):
            raise ConfigError("noise.scales", values, expected)
        values = self.decays
        if values is not None and not (
            len(values) == self.buffers and all(0 <= value <= 1 for value in values)
        ):
            expected = f"{self.buffers} numbers from 0 to 1, one a buffer"
            raise ConfigError("noise.decays", values, expected)
        if (self.scales is None) != (self.decays is None):
            expected = "both of noise.decays and noise.scales, or none"
            raise ConfigError("noise.decays", self.decays, expected)
        return self

    def source(self, seed: int, d: int) -> NoiseSource:
        assert self.decays is not None and self.scales is not None and self.norm is not None
        return BufferedSource(seed, self.decays, self.scales, self.norm, d)

    def column(self, rounds: int) -> np.ndarray:
        assert self.decays is not None and self.scales is not None and self.norm is not None
        return _column(self.decays, self.scales, rounds) / self.norm

    def fit_matrix(self, setting: Setting) -> BufferedGaussian:
        decays, scales = self.decays, self.scales
        if decays is None or scales is None:
            limits = setting.min_separation, setting.most_participations
            best = buffered_toeplitz(self.buffers, setting.rounds, setting.momentum, *limits)
            decays, scales = (tuple(values.tolist()) for values in best)
        norm = self.norm or float(np.linalg.norm(_column(decays, scales, setting.rounds)))
        return self.model_copy(update={"decays": decays, "scales": scales, "norm": norm})


_column = lru_cache(maxsize=8)(buffered_column)


class BufferedSource(ReplayedSource):
    """The noise of a resolved `BufferedGaussian` on models of `d` parameters:

        y_t = norm z_t - sum over the buffers of scale x b,    b <- decay b + y_t,

    where z_t are the standard normals that `server_noise` scales. It holds the buffers b, float64
    [buffers, d].
    """

    def __init__(
        self, seed: int, decays: Sequence[float], scales: Sequence[float], norm: float, d: int
    ):
        self._decays = decays
        self._scales = scales
        self._norm = norm
        super().__init__(seed, d)

    def restart(self) -> None:
        self._buffers = np.zeros((len(self._decays), self.d))

    def next_noise(self, t: int) -> np.ndarray:
        y = server_noise(self.seed, t, self._norm, self.d)
        for scale, buffer in zip(self._scales, self._buffers, strict=True):
            y -= scale * buffer
        for decay, buffer in zip(self._decays, self._buffers, strict=True):
            buffer *= decay
            buffer += y
        return y
