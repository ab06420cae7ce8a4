"""How much Gaussian noise, and where it is drawn.

A member says in exactly one of three ways how large the noise is:

- `epsilon` (with `delta`): calibrated so that the run as a whole spends at most that, by the run's
  first accountant;
- `multiplier`: standard deviation of the sum over the bound of one client;
- `std`: standard deviation of one client's noise (placement client), of the sum (server), or of a
  batch's mean gradient (step).

and `placement` says who draws it: every client on its own update (the sum of r clients then carries
sqrt(r) times the std of one), the server once on the sum, or every client at each of its local
steps (002, 003), where a sample is protected rather than a client.

>>> Gaussian(multiplier=2.0, delta=1e-5).placement
'auto'

**Virtual cohort.** A large cohort needs the noise of a small one, relative to its sum; with
`virtual_cohort` R the r clients that are simulated stand for R, of a `virtual_population` (default:
in proportion), and get r/R of the noise on the sum of those R, so that the mean carries what it
would there. The guarantee is the virtual cohort's, and says so.

Noise is a function of its key alone (`raydpfl.keys`): a round done again after a crash draws the
same noise, so it is one release and not two. The key takes in all that the release depends on
(`raydpfl.plan.Plan.noise_seed`), so that two runs that differ in anything never carry the same
noise, which their difference would be free of. With `common: true` the seed alone is the key: runs
with one seed then carry the same noise, for comparisons in pairs (001 Figs 1 to 3), and no two of
them may both be shown.

Standard normals are drawn as one flat float32 vector (`raydpfl.keys.normals`, whose tail reaches
7.5 standard deviations) and scaled in float64.

**Banded noise** (`BandedGaussian`): the server's noise of one round takes back a part of that of
the rounds before, so that the sum over the rounds carries less, at the same privacy for clients
that take part by turns; theory and accounting stand in `raydpfl.privacy.factorization`.

It is simulation-grade: floating-point Gaussians from a non-cryptographic generator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, normals, stream
from raydpfl.member import Member
from raydpfl.privacy import budgets
from raydpfl.privacy.factorization import banded_toeplitz

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


class Noise(Member):
    """Base of the family."""

    @property
    def of_seed(self) -> bool:
        """Whether all runs with one seed carry the same noise."""
        return False

    def release(self) -> dict[str, Any]:
        """What of this section a release depends on, besides how large the noise came out."""
        return self.model_dump(mode="json", exclude=SIZES)


class NoNoise(Noise):
    """No noise: the run is not private, and says so."""

    kind: str = "none"
    placement: ClassVar[str] = "client"


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
                "none with noise.virtual_cohort, which scales the noise; give noise.multiplier or noise.epsilon",
            )
        return self


class BandedGaussian(Gaussian):
    """Correlated noise y = C^-1 z on the sum, drawn by the server: C banded lower-triangular
    Toeplitz, z of N(0, std^2 I) (DP-FTRL with banded matrix factorisation, Choquette-Choo et al.
    2023).

    `epsilon`, `multiplier` and `std` speak of z, C having columns of norm at most 1. `coefficients`
    are C's diagonals, float [bands], of any scale: by default those of least error, which `resolve`
    fills in, so that a resumed run cannot come to others.
    """

    kind: str = "banded_gaussian"
    placement: Literal["server"] = "server"
    bands: int = Field(ge=1)
    coefficients: tuple[float, ...] | None = None

    @model_validator(mode="after")
    def _banded(self) -> BandedGaussian:
        if self.calibration != "rigorous":
            raise ConfigError(
                "noise.calibration",
                self.calibration,
                "rigorous: the papers have no formula for noise that is correlated over rounds",
            )
        if self.coefficients is not None and not (
            len(self.coefficients) == self.bands and self.coefficients[0] > 0
        ):
            raise ConfigError(
                "noise.coefficients",
                self.coefficients,
                f"{self.bands} numbers, one a band, the first above 0",
            )
        return self

    def resolve(self, rounds: int, momentum: float = 0.0) -> BandedGaussian:
        """Itself with `coefficients` of norm 1: those given, or the best for so many rounds under a
        server of this momentum.

        Raises `ConfigError` for more bands than rounds.
        """
        best = banded_toeplitz(self.bands, rounds, momentum)
        c = best if self.coefficients is None else np.array(self.coefficients)
        norm = float(np.linalg.norm(c))
        # resolved again, it is the same to the last bit
        c = c if abs(norm - 1) < 1e-12 else c / norm
        return self.model_copy(update={"coefficients": tuple(c.tolist())})


class Correlated:
    """The noise of a resolved `BandedGaussian` on models of `d` parameters: a function of (seed,
    coefficients, round) alone.

    y_t = (z_t - sum_{j=1}^{bands-1} c_j y_{t-j}) / c_0, z_t being the standard normals that
    `server_noise` scales. It holds the last bands - 1 y, as float64 [d] each; asked for any round
    but the next (after a resume, or for a round that broke off) it draws all from round 0 again, so
    that nothing need be checkpointed.
    """

    def __init__(self, seed: int, coefficients: Sequence[float], d: int):
        self._seed = seed
        self._first = coefficients[0]
        self._later = coefficients[1:]
        self._d = d
        self._start()

    def _start(self) -> None:
        self._next, self._past = 0, deque(maxlen=len(self._later))  # the latest first

    def draw(self, t: int, std: float) -> np.ndarray:
        """The noise of one round on the sum, float64 [d], where `std` is that of z: noise
        multiplier x the bound in force.
        """
        if t != self._next:
            self._start()
        while self._next <= t:
            y = server_noise(self._seed, self._next, 1.0, self._d)
            for coefficient, past in zip(self._later, self._past, strict=False):
                y -= coefficient * past
            y /= self._first
            self._past.appendleft(y)
            self._next += 1
        return y * std


def client_noise(seed: int, t: int, client: int, draw: int, std: float, d: int) -> np.ndarray:
    """Noise on one client's update: float64 [d] of standard deviation `std`."""
    return _scaled(normals(seed, Purpose.CLIENT_NOISE, d, t=t, client=client, draw=draw), std)


def server_noise(seed: int, t: int, std: float, d: int) -> np.ndarray:
    """Noise on the sum, drawn once by the server: float64 [d] of standard deviation `std`."""
    return _scaled(normals(seed, Purpose.SERVER_NOISE, d, t=t), std)


def _scaled(drawn: torch.Tensor, std: float) -> np.ndarray:
    return np.multiply(drawn.numpy(), std, dtype=np.float64)


def query_noise(
    seed: int,
    t: int,
    std: float,
    client: int = 0,
    draw: int = 0,
    query: Literal["count", "losses"] = "count",
) -> float:
    """Noise on the number that one client gives in a side query of a round, or the server's on the
    sum of all (client 0).
    """
    return float(
        stream(
            seed,
            Purpose.QUERY_NOISE,
            t=t,
            client=client,
            draw=draw,
            step=("count", "losses").index(query),
        ).standard_normal()
        * std
    )


FAMILY: dict[str, type[Noise]] = {
    "none": NoNoise,
    "gaussian": Gaussian,
    "banded_gaussian": BandedGaussian,
}
