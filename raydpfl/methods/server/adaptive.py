"""The adaptive servers (Reddi et al. 2021, Alg. 2)."""

import numpy as np
from pydantic import Field

from raydpfl.methods.server.base import Server, State


class Adaptive(Server):
    """Base of the adaptive servers; a member gives `second_moment`, the recurrence of nu.

        mu = beta1 mu + (1 - beta1) u,  x + lr mu / (sqrt(nu) + tau)

    mu begins at 0, nu at tau^2.
    """

    beta1: float = Field(default=0.9, ge=0, lt=1, description="share of mu that is kept")
    tau: float = Field(default=1e-3, gt=0, description="the adaptivity, pi in 002")

    def start(self, d: int) -> State:
        return {"mu": np.zeros(d), "nu": np.full(d, self.tau**2)}

    def second_moment(self, nu: np.ndarray, square: np.ndarray) -> np.ndarray:
        """The next nu from the last one and u^2, all float64 [d]."""
        raise NotImplementedError

    def direction(self, update: np.ndarray, state: State) -> np.ndarray:
        state["mu"] = self.beta1 * state["mu"] + (1 - self.beta1) * update
        state["nu"] = self.second_moment(state["nu"], update * update)
        return state["mu"] / (np.sqrt(state["nu"]) + self.tau)


class FedAdam(Adaptive):
    """FedAdam: nu = beta2 nu + (1 - beta2) u^2, without bias correction (002 Alg. 2; Reddi et al.
    2021, Alg. 2).
    """

    examples = ({"lr": 0.01}, {"lr": 0.01, "beta1": 0.0, "beta2": 0.9, "tau": 0.1})
    kind: str = "adam"
    beta2: float = Field(default=0.99, ge=0, lt=1, description="share of nu that is kept")

    def second_moment(self, nu: np.ndarray, square: np.ndarray) -> np.ndarray:
        return self.beta2 * nu + (1 - self.beta2) * square


class Yogi(Adaptive):
    """FedYogi: nu = nu - (1 - beta2) u^2 sign(nu - u^2) (Reddi et al. 2021, Alg. 2)."""

    examples = FedAdam.examples
    kind: str = "yogi"
    beta2: float = Field(default=0.99, ge=0, lt=1, description="share of nu that is kept")

    def second_moment(self, nu: np.ndarray, square: np.ndarray) -> np.ndarray:
        return nu - (1 - self.beta2) * square * np.sign(nu - square)


class Adagrad(Adaptive):
    """FedAdagrad: nu = nu + u^2 (Reddi et al. 2021, Alg. 2)."""

    examples = ({"lr": 0.01}, {"lr": 0.01, "beta1": 0.9, "tau": 0.1})
    kind: str = "adagrad"
    beta1: float = Field(default=0.0, ge=0, lt=1, description="share of mu that is kept")

    def second_moment(self, nu: np.ndarray, square: np.ndarray) -> np.ndarray:
        return nu + square
