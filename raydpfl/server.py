"""The server's side of a round: weights, sums without order, and the step.

**Sums without order.** The contributions of a lane of clients are added in float64 in client order,
and the lane's sum is rounded once to a multiple of a power of two, the grid. Multiples of the grid
below 2^53 grid add exactly in float64, in any order and any grouping, so the total is the same bits
whoever ran which lane.

>>> lanes = [snap(np.array([0.1 * k]), 2.0**-40) for k in range(5)]
>>> sum(lanes) == sum(lanes[::-1])
array([ True])

With a bound c and a client's noise of std s the grid is below 1e-9 (c + 40 s) for cohorts of up to
four million, so rounding to it changes no printed digit of a sensitivity.

**Weights.** The server divides the sum by the cohort's nominal size r; a member of `WEIGHTS` gives
the factor w_i of each client's contribution, with mean 1 over the population, and the largest of
them multiplies the sensitivity.

**Steps.** A member of `FAMILY` turns the model and the mean update u (both float64 [d]) into the
next model. Server state is a dictionary of float64 arrays, all of it checkpointed.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import Field

from raydpfl.errors import RunError
from raydpfl.member import Member

# no coordinate of a round's sum may exceed this when nothing bounds the updates
UNBOUNDED = 2.0**20
TAIL = 40.0  # no Gaussian of float64 precision lies this many standard deviations out


def grid(cohort: int, bound: float | None, std: float = 0.0) -> float:
    """The power of two to whose multiples lane sums of a round are rounded.

    `bound` is the norm of one client's contribution, weight included (None: unbounded), `std` of
    the noise each client adds to its own. 2^52 grids cover the largest sum that `cohort` such
    contributions can reach.
    """
    reach = UNBOUNDED if bound is None else max(1, cohort) * (bound + TAIL * std)
    return 2.0 ** (math.ceil(math.log2(reach)) - 52)


def snap(total: np.ndarray, grid: float) -> np.ndarray:
    """`total` (float64 [d], changed in place) rounded to multiples of `grid`; raises `RunError`
    when it is out of range.
    """
    if not np.abs(total).max(initial=0.0) <= grid * 2.0**52:
        raise RunError(
            f"the updates diverged: a coordinate of their sum exceeds {grid * 2.0**52:g} in size; lower local.lr, or bound the updates"
        )
    total /= grid
    np.rint(total, out=total)
    total *= grid
    return total


class Weights(Member):
    """Base of the weights' family.

    A member is asked once, for all clients together: what it normalises by is the whole population,
    never a round's cohort, so that the largest weight that the accountants are told is the largest
    of any round.
    """

    def of(self, sizes: np.ndarray, samples: int, population: int) -> np.ndarray:
        """Weights float64 [N] of all `population` clients, with `sizes` samples (int64 [N]),
        `samples` in all.
        """
        raise NotImplementedError


class UniformWeights(Weights):
    """w_i = 1: the mean over the cohort, 1/r each (000, 001)."""

    kind: str = "uniform"

    def of(self, sizes: np.ndarray, samples: int, population: int) -> np.ndarray:
        return np.ones(len(sizes))


class DataWeights(Weights):
    """w_i = N p_i, p_i = n_i / sum n_j: unbiased for sum p_i Delta_i under uniform sampling (002
    Lemma 5).
    """

    kind: str = "data"

    def of(self, sizes: np.ndarray, samples: int, population: int) -> np.ndarray:
        return sizes * (population / samples)


WEIGHTS: dict[str, type[Weights]] = {"uniform": UniformWeights, "data": DataWeights}

State = dict[str, np.ndarray]


class Server(Member):
    """Base of the family. `lr` is the server's learning rate eta_g, divided by sqrt(t + 1) under
    `schedule: inverse_sqrt`.
    """

    lr: float = Field(default=1.0, gt=0)
    schedule: Literal["constant", "inverse_sqrt"] = "constant"

    def learning_rate(self, t: int) -> float:
        return self.lr / math.sqrt(t + 1) if self.schedule == "inverse_sqrt" else self.lr

    def start(self, d: int) -> State:
        """The state before the first round."""
        return {}

    def direction(self, update: np.ndarray, state: State) -> np.ndarray:
        """The direction (float64 [d]) that lr is multiplied with, from the mean update; `state` is
        changed in place.
        """
        raise NotImplementedError

    def step(self, model: np.ndarray, update: np.ndarray, state: State, t: int) -> np.ndarray:
        """The next model, float32 [d]. Raises `RunError` when it is not finite."""
        with np.errstate(over="ignore"):  # an overflow is reported below
            following = (model + self.learning_rate(t) * self.direction(update, state)).astype(
                np.float32
            )
        if not np.isfinite(following).all():
            raise RunError(
                f"the model is no longer finite after round {t}; lower server.lr or local.lr"
            )
        return following


class Sgd(Server):
    """x + lr u (000 Alg. 1-3, 001 Alg. 1-3, 002 Alg. 1)."""

    kind: str = "sgd"

    def direction(self, update: np.ndarray, state: State) -> np.ndarray:
        return update


class Momentum(Server):
    """v = momentum v + u; x + lr v (001 App. G, with 0.8)."""

    kind: str = "momentum"
    momentum: float = Field(default=0.8, ge=0, lt=1)

    def start(self, d: int) -> State:
        return {"v": np.zeros(d)}

    def direction(self, update: np.ndarray, state: State) -> np.ndarray:
        state["v"] *= self.momentum
        state["v"] += update
        return state["v"]


class _Adaptive(Server):
    beta1: float = Field(default=0.9, ge=0, lt=1)
    tau: float = Field(default=1e-3, gt=0)  # the adaptivity, pi in 002

    def start(self, d: int) -> State:
        return {"mu": np.zeros(d), "nu": np.full(d, self.tau**2)}

    def second_moment(self, nu: np.ndarray, square: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def direction(self, update: np.ndarray, state: State) -> np.ndarray:
        state["mu"] = self.beta1 * state["mu"] + (1 - self.beta1) * update
        state["nu"] = self.second_moment(state["nu"], update * update)
        return state["mu"] / (np.sqrt(state["nu"]) + self.tau)


class Adam(_Adaptive):
    """FedAdam: nu = beta2 nu + (1 - beta2) u^2, from tau^2, without bias correction (002 Alg. 2;
    Reddi et al. 2021).
    """

    kind: str = "adam"
    beta2: float = Field(default=0.99, ge=0, lt=1)

    def second_moment(self, nu: np.ndarray, square: np.ndarray) -> np.ndarray:
        return self.beta2 * nu + (1 - self.beta2) * square


class Yogi(_Adaptive):
    """FedYogi: nu = nu - (1 - beta2) u^2 sign(nu - u^2) (Reddi et al. 2021, Alg. 2)."""

    kind: str = "yogi"
    beta2: float = Field(default=0.99, ge=0, lt=1)

    def second_moment(self, nu: np.ndarray, square: np.ndarray) -> np.ndarray:
        return nu - (1 - self.beta2) * square * np.sign(nu - square)


class Adagrad(_Adaptive):
    """FedAdagrad: nu = nu + u^2 (Reddi et al. 2021, Alg. 2)."""

    kind: str = "adagrad"
    beta1: float = Field(default=0.0, ge=0, lt=1)

    def second_moment(self, nu: np.ndarray, square: np.ndarray) -> np.ndarray:
        return nu + square


FAMILY: dict[str, type[Server]] = {
    "sgd": Sgd,
    "momentum": Momentum,
    "adam": Adam,
    "yogi": Yogi,
    "adagrad": Adagrad,
}
