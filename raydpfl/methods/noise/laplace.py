"""Laplace noise on sums of what clients send, bounded in L1."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from raydpfl.config.registry import Examples
from raydpfl.config.setting import Setting
from raydpfl.core.prng import Purpose, named_stream
from raydpfl.errors import ConfigError
from raydpfl.methods.noise.base import NoiseSource
from raydpfl.methods.noise.gaussian import Gaussian


class Laplace(Gaussian):
    """Lap(b) on every coordinate of the sum, drawn by the server (Dwork et al. 2006; pfl-research
    has it), for a bounding in L1 such as `clip_l1`. One round with everyone is (bound / b)-DP,
    twice that under replace_one, at delta 0 (`raydpfl.privacy.laplace`).

    `std` is that of the noise, sqrt(2) b; `multiplier` is it over the bound.
    """

    laplace: ClassVar[bool] = True
    examples: ClassVar[Examples] = (
        {"multiplier": 30.0},
        {"epsilon": 8.0, "schedule": {"decay": 0.9}},
    )
    kind: str = "laplace"
    placement: Literal["server"] = Field(default="server", description="who draws it")

    @model_validator(mode="after")
    def _check_calibration(self) -> Self:
        self._refuse("calibration", "rigorous: the papers' formulas are for Gaussian noise")
        return self

    def check(self, setting: Setting) -> None:
        if setting.bound_order != 1:
            expected = "clip_l1, or another that bounds in L1, with Laplace noise"
            raise ConfigError("bounding.kind", setting.kinds["bounding"], expected)
        for field, requested_feature in (
            ("selection.loss_std", setting.loss_query), ("evaluate.histogram", setting.survey),
            ("privacy.individual", setting.individual), ("bounding.kind", setting.queries),
        ):  # fmt: skip
            if requested_feature:
                expected = "none next to Laplace noise, which is on the sum of updates alone"
                raise ConfigError(field, str(requested_feature), expected)

    def source(self, seed: int, d: int) -> NoiseSource:
        return LaplaceSource(seed, d)

    def scores(self, noise: np.ndarray, std: float) -> np.ndarray:
        from scipy.special import ndtri  # which those who train do without

        z = np.asarray(noise) * (math.sqrt(2) / std)
        return np.sign(z) * -ndtri(np.exp(-np.abs(z)) / 2)


class LaplaceSource(NoiseSource):
    """Independent Laplace noise of every round."""

    def on_sum(self, t: int, std: float) -> np.ndarray:
        generator = named_stream(self.seed, Purpose.SERVER_NOISE, "laplace", t=t)
        return generator.laplace(scale=std / math.sqrt(2), size=self.d)
