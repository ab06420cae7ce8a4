"""Clients with quadratic objectives, of many numbers or one, as regression data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, SerializeAsAny, model_validator

from raydpfl.core.prng import Purpose, stream
from raydpfl.data.sources.base import Data, Split
from raydpfl.errors import ConfigError
from raydpfl.models.tasks import Task
from raydpfl.models.tasks.regression import Regression


class Quadratics(Data):
    """001 sec. 5.3: f_i(w) = 1/2 (w - w_i)^T A_i A_i^T (w - w_i), each client with its own A_i
    [dimension, rank] and optimum w_i.

    A_i has entries N(0, variance). The scalars of the paper are lost; all are parameters. A
    client's rows are sqrt(rank) times the columns of A_i, so that its mean loss is f_i, and the
    test set is all rows, so that the test loss is f(w), the mean of all f_i.

    Coordinates are shifted: the origin is w*, the optimum of f (of the least norm in the
    coordinates before, if there are several), and f_i is 0 at w_i - w*. Every method that looks at
    gradients and updates alone does the same in both; clipping of the model itself and weight
    decay, which pull towards the origin, do not. A start at a distance from the optimum is thus one
    from 0: `model.spread` 0.2 and 1 are the starts w* + z/5 and w* + z, z ~ U(0,1)^d, of 001.
    `describe` has f(w*) as `optimum`.
    """

    division: ClassVar[frozenset[str]] = Data.division | {
        "dimension",
        "rank",
        "variance",
        "optima",
        "heterogeneity",
    }
    kind: str = "quadratics"
    location: ClassVar[str] = "generated"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"clients": 6, "dimension": 7, "rank": 3},)
    task: SerializeAsAny[Task] = Field(default=Regression(), description="what is learnt")
    clients: int = Field(default=100, ge=1, le=10**9, description="N")
    dimension: int = Field(default=200, ge=1, description="d, the parameters")
    rank: int = Field(default=20, ge=1, description="rows of a client")
    variance: float | None = Field(default=None, gt=0, description="of A_i; None: 1/dimension")
    optima: Literal["normal", "uniform"] = Field(
        default="normal", description="w_i / heterogeneity: from N(0, I) or U(0, 1)^d"
    )
    heterogeneity: float = Field(default=1.0, ge=0, description="factor of the optima w_i")

    def split(self, seed: int, root: Path | None) -> Split:
        d = self.dimension
        rank = self.rank
        scale = (rank * (self.variance or 1 / d)) ** 0.5
        x = np.empty((self.clients, rank, d), np.float32)
        y = np.empty((self.clients, rank))
        hessian = np.zeros((d, d))
        slope = np.zeros(d)
        for client in range(self.clients):
            generator = stream(seed, Purpose.DATA, client=client)
            x[client] = scale * generator.standard_normal((rank, d))
            draw = generator.standard_normal(d) if self.optima == "normal" else generator.random(d)
            client_optimum = self.heterogeneity * draw
            rows = x[client].astype(np.float64)
            y[client] = rows @ client_optimum
            hessian += rows.T @ rows
            slope += rows.T @ y[client]
        minimizer = np.linalg.lstsq(hessian, slope, rcond=1e-12)[0]
        y -= np.stack([rows.astype(np.float64) @ minimizer for rows in x])
        return _make_split(x, y, np.zeros(d))


class ScalarQuadratics(Data):
    """000 sec. 2.1: f_i(x) = 1/2 (a_i x - b_i)^2, one client for each pair, in the coordinates of
    the paper.

    Claim 2.1 is a = (1, 1, 1), b = (-c/2, -c/2, kc); eq. 8 is a = (1, 2, 6), b = (4, 1, -1). A
    client has the one row a_i with target b_i; the test set is all of them, so the test loss is the
    mean of all f_i, 1/N of the paper's f.
    """

    division: ClassVar[frozenset[str]] = Data.division | {"a", "b"}
    kind: str = "scalar_quadratics"
    location: ClassVar[str] = "generated"
    task: SerializeAsAny[Task] = Field(default=Regression(), description="what is learnt")
    a: tuple[float, ...] = Field(min_length=1, description="a_i of every client")
    b: tuple[float, ...] = Field(min_length=1, description="b_i of every client")
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"a": (1, 2, 6), "b": (4, 1, -1)},)

    @model_validator(mode="after")
    def _check_pairs(self) -> ScalarQuadratics:
        if len(self.b) != len(self.a):
            raise ConfigError("data.b", self.b, f"{len(self.a)} numbers, one for each of data.a")
        if self.clients not in (None, len(self.a)):
            expected = f"{len(self.a)}, one for each of data.a, or none"
            raise ConfigError("data.clients", self.clients, expected)
        return self

    def split(self, seed: int, root: Path | None) -> Split:
        a = np.array(self.a)
        b = np.array(self.b)
        minimizer = a @ b / (a @ a) if a.any() else 0.0
        return _make_split(a[:, None, None].astype(np.float32), b[:, None], np.array([minimizer]))


def _make_split(x: np.ndarray, y: np.ndarray, minimizer: np.ndarray) -> Split:
    """Of x float32 [clients, rows, d] and y [clients, rows]; `minimizer` [d] has the least loss."""
    y = y.astype(np.float32)
    residuals = x.astype(np.float64) @ minimizer - y

    def rows(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        return x[first:last].reshape(-1, x.shape[2]), y[first:last].reshape(-1)

    optimum = float(np.mean(residuals**2) / 2)
    sizes = np.full(len(x), x.shape[1])
    return Split(sizes, (x.shape[2],), 0, rows, lambda: rows(0, len(x)), optimum=optimum)
