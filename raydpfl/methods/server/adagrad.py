"""FedAdagrad."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from raydpfl.methods.server.adaptive import Adaptive


class Adagrad(Adaptive):
    """FedAdagrad: nu = nu + u^2 (Reddi et al. 2021, Alg. 2)."""

    examples = ({"lr": 0.01}, {"lr": 0.01, "beta1": 0.9, "tau": 0.1})
    kind: str = "adagrad"
    beta1: float = Field(default=0.0, ge=0, lt=1)

    def second_moment(self, nu: np.ndarray, square: np.ndarray) -> np.ndarray:
        return nu + square
