import numpy as np

from raydpfl.methods.server.base import Server, State


class ServerSgd(Server):
    """x + lr u (000 Alg. 1-3, 001 Alg. 1-3, 002 Alg. 1)."""

    examples = ({"lr": 1.0}, {"lr": 0.5, "schedule": "inverse_sqrt"})
    kind: str = "sgd"

    def direction(self, update: np.ndarray, state: State) -> np.ndarray:
        return update
