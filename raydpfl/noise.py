"""How much Gaussian noise, and where it is drawn.

A member says in exactly one of three ways how large the noise is:

- `epsilon` (with `delta`): calibrated so that the run as a whole spends at most that, by the run's first accountant;
- `multiplier`: standard deviation of the sum over the bound of one client;
- `std`: standard deviation of one client's noise (placement client) or of the sum (placement server).

and `placement` says who draws it: every client on its own update (the sum of r clients then carries sqrt(r) times
the std of one), or the server once on the sum.

>>> Gaussian(multiplier=2.0, delta=1e-5).placement
'client'

Noise is a function of its key alone (`raydpfl.keys`): a round done again after a crash draws the same noise, so it is
one release and not two. Drawn as one flat float64 vector by numpy's ziggurat, whose tail is not cut off.
It is simulation-grade: floating-point Gaussians from a non-cryptographic generator.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, stream
from raydpfl.member import Member


class Noise(Member):
    """Base of the family."""

    placement: Literal["client", "server"] = "client"
    delta: float = Field(default=1e-5, gt=0, lt=1)


class NoNoise(Noise):
    """No noise: the run is not private, and says so."""

    kind: Literal["none"] = "none"


class Gaussian(Noise):
    """N(0, std^2 I) (000 Alg. 3, 001 Alg. 1-2).

    `calibration: paper` takes the std from the papers' printed formula (000 Theorem 3.2, 001 Theorem 1) with its constant
    `v`, which they leave open; the guarantees then show what that noise truly gives.
    """

    kind: Literal["gaussian"] = "gaussian"
    epsilon: float | None = Field(default=None, gt=0)
    multiplier: float | None = Field(default=None, ge=1e-9, le=1e15)
    std: float | None = Field(default=None, ge=1e-9, le=1e15)
    calibration: Literal["rigorous", "paper"] = "rigorous"
    v: float = Field(default=4.0, gt=0)

    @model_validator(mode="after")
    def _one_size(self) -> Gaussian:
        given = [name for name in ("epsilon", "multiplier", "std") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError("noise", given or None, "exactly one of epsilon, multiplier and std")
        return self


def client_noise(seed: int, round: int, client: int, draw: int, std: float, d: int) -> np.ndarray:
    """Noise on one client's update: float64 [d] of standard deviation `std`."""
    noise = stream(seed, Purpose.CLIENT_NOISE, round=round, client=client, draw=draw).standard_normal(d)
    noise *= std
    return noise


def server_noise(seed: int, round: int, std: float, d: int) -> np.ndarray:
    """Noise on the sum, drawn once by the server: float64 [d] of standard deviation `std`."""
    noise = stream(seed, Purpose.SERVER_NOISE, round=round).standard_normal(d)
    noise *= std
    return noise


def query_noise(seed: int, round: int, std: float, client: int = 0, draw: int = 0) -> float:
    """Noise on the count of a round's side query: that of one client on its own indicator, or of the server on the sum (client 0)."""
    return float(stream(seed, Purpose.QUERY_NOISE, round=round, client=client, draw=draw).standard_normal() * std)


FAMILY: dict[str, type[Noise]] = {"none": NoNoise, "gaussian": Gaussian}
