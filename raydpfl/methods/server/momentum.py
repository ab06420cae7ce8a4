import numpy as np
from pydantic import Field

from raydpfl.methods.server.base import Server, State


class Momentum(Server):
    """v = momentum v + u; x + lr v (001 App. G, with 0.8)."""

    examples = ({"momentum": 0.8}, {"momentum": 0.5, "schedule": "inverse_sqrt"})
    kind: str = "momentum"
    momentum: float = Field(default=0.8, ge=0, lt=1, description="beta")

    def start(self, d: int) -> State:
        return {"v": np.zeros(d)}

    def direction(self, update: np.ndarray, state: State) -> np.ndarray:
        state["v"] *= self.momentum
        state["v"] += update
        return state["v"]

    def persistence(self) -> float:
        return self.momentum
