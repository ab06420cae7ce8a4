"""AMSGrad at the server (Reddi, Kale, Kumar 2018, Alg. 2), with the bias of its means undone."""

from typing import ClassVar

import numpy as np
from pydantic import Field

from raydpfl.methods.server import Server


class AmsGrad(Server):
    """m, v as in Adam; the step divides by the largest v so far."""

    examples: ClassVar = ({"lr": 0.01}, {"lr": 0.05, "b1": 0.0, "schedule": "inverse_sqrt"})
    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.99, ge=0, lt=1)
    floor: float = Field(default=1e-3, gt=0)

    def start(self, d):
        return {name: np.zeros(d) for name in ("m", "v", "most")} | {"times": np.zeros(1)}

    def direction(self, update, state):
        state["times"] += 1
        times = state["times"][0]
        state["m"] = self.b1 * state["m"] + (1 - self.b1) * update
        state["v"] = self.b2 * state["v"] + (1 - self.b2) * update**2
        state["most"] = np.maximum(state["most"], state["v"] / (1 - self.b2**times))
        return state["m"] / (1 - self.b1**times) / (np.sqrt(state["most"]) + self.floor)
