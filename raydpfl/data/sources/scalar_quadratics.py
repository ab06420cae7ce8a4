"""Clients with quadratics of one number."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, SerializeAsAny, model_validator

from raydpfl.data.sources.base import Data, Split
from raydpfl.data.sources.quadratics import regression_split
from raydpfl.errors import ConfigError
from raydpfl.models.tasks import Task
from raydpfl.models.tasks.regression import Regression


class ScalarQuadratics(Data):
    """000 sec. 2.1: f_i(x) = 1/2 (a_i x - b_i)^2, one client for each pair, in the coordinates of
    the paper.

    Claim 2.1 is a = (1, 1, 1), b = (-c/2, -c/2, kc); eq. 8 is a = (1, 2, 6), b = (4, 1, -1). A
    client has the one row a_i with target b_i; the test set is all of them, so the test loss is the
    mean of all f_i, 1/N of the paper's f.
    """

    kind: str = "scalar_quadratics"
    location: ClassVar[str] = "generated"
    task: SerializeAsAny[Task] = Regression()
    a: tuple[float, ...] = Field(min_length=1)
    b: tuple[float, ...] = Field(min_length=1)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"a": (1, 2, 6), "b": (4, 1, -1)},)

    @model_validator(mode="after")
    def _pairs(self) -> ScalarQuadratics:
        if len(self.b) != len(self.a):
            raise ConfigError("data.b", self.b, f"{len(self.a)} numbers, one for each of data.a")
        if self.clients not in (None, len(self.a)):
            raise ConfigError(
                "data.clients", self.clients, f"{len(self.a)}, one for each of data.a, or none"
            )
        return self

    def split(self, seed: int, root: Path | None) -> Split:
        a = np.array(self.a)
        b = np.array(self.b)
        best = a @ b / (a @ a) if a.any() else 0.0
        return regression_split(a[:, None, None].astype(np.float32), b[:, None], np.array([best]))
