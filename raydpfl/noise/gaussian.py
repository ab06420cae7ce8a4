"""Gaussian noise, independent over the rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from raydpfl.errors import ConfigError
from raydpfl.noise.base import Noise, Source
from raydpfl.noise.places import PLACES, AtSteps
from raydpfl.privacy import budgets

# fields that say how large the noise is
SIZES = {
    "epsilon",
    "multiplier",
    "std",
    "delta",
    "calibration",
    "v",
    "virtual_cohort",
    "virtual_population",
    "common",
}


class Gaussian(Noise):
    """N(0, std^2 I) (000 Alg. 3, 001 Alg. 1-2; at local steps 002 Alg. 1-2, 003 Alg. 1).

    `calibration: paper` takes the std from the papers' printed formula: 000 Theorem 3.2, 001
    Theorem 1 with its constant `v`, which they leave open; at local steps 003's sigma_k. `tcdp` is
    002's, in its usable form. The guarantees then show what that noise truly gives. At local steps
    `epsilon` may be a law of budgets (`raydpfl.privacy.budgets`), each client having its own.
    """

    kind: str = "gaussian"
    # auto: step with per_sample_clip, server with Poisson cohorts, else client
    placement: Literal["auto", "client", "server", "step"] = "auto"
    delta: float = Field(default=1e-5, gt=0, lt=1)
    epsilon: Annotated[float, Field(gt=0)] | SerializeAsAny[budgets.Law] | None = None
    multiplier: float | None = Field(default=None, ge=1e-9, le=1e15)
    std: float | None = Field(default=None, ge=1e-9, le=1e15)
    calibration: Literal["rigorous", "paper", "tcdp"] = "rigorous"
    v: float = Field(default=4.0, gt=0)
    virtual_cohort: int | None = Field(default=None, ge=1)
    virtual_population: int | None = Field(default=None, ge=1)
    common: bool = False  # one noise for all runs with one seed, to compare them in pairs

    @property
    def of_seed(self) -> bool:
        return self.common

    def release(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude=SIZES)

    @property
    def _place(self) -> AtSteps:
        return PLACES[self.placement]

    def on_clients(
        self, seed: int, t: int, clients: np.ndarray, draws: np.ndarray, std: float, d: int
    ) -> np.ndarray | None:
        return self._place.on_clients(seed, t, clients, draws, std, d)

    def client_std(self, std: float, survivors: int) -> float:
        return self._place.client_std(std, survivors)

    def least(self, survivors: int) -> int:
        return self._place.least(survivors)

    def source(self, seed: int, d: int) -> Source:
        return self._place.source(seed, d)

    def on_query(
        self,
        seed: int,
        t: int,
        std: float,
        clients: np.ndarray,
        draws: np.ndarray,
        survivors: int,
        query: str = "count",
    ) -> float:
        return self._place.on_query(seed, t, std, clients, draws, survivors, query)

    @field_validator("epsilon", mode="before")
    @classmethod
    def _law(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ConfigError("noise.epsilon", value, "a positive number, or a law of budgets")
        return budgets.parse(value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _one_size(self) -> Gaussian:
        given = [
            name for name in ("epsilon", "multiplier", "std") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ConfigError("noise", given or None, "exactly one of epsilon, multiplier and std")
        if self.calibration != "rigorous" and self.epsilon is None:
            raise ConfigError(
                "noise.calibration",
                self.calibration,
                "rigorous, unless noise.epsilon is what is given",
            )
        if self.virtual_population is not None and self.virtual_cohort is None:
            raise ConfigError(
                "noise.virtual_population",
                self.virtual_population,
                "none without noise.virtual_cohort",
            )
        if self.virtual_cohort is not None and self.std is not None:
            raise ConfigError(
                "noise.std",
                self.std,
                "none with noise.virtual_cohort, which scales the noise; "
                "give noise.multiplier or noise.epsilon",
            )
        return self
