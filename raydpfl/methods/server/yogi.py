"""FedYogi."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from raydpfl.methods.server.adaptive import Adaptive


class Yogi(Adaptive):
    """FedYogi: nu = nu - (1 - beta2) u^2 sign(nu - u^2) (Reddi et al. 2021, Alg. 2)."""

    examples = ({"lr": 0.01}, {"lr": 0.01, "beta1": 0.0, "beta2": 0.9, "tau": 0.1})
    kind: str = "yogi"
    beta2: float = Field(default=0.99, ge=0, lt=1)

    def second_moment(self, nu: np.ndarray, square: np.ndarray) -> np.ndarray:
        return nu - (1 - self.beta2) * square * np.sign(nu - square)
