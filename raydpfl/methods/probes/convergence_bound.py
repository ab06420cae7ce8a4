"""The bounds on convergence of 002 and 003 (Theorems 1 and 2 of each), and what they bound.

The loss is half the squared error of a linear model, whose constants are known: f = sum p_i f_i
with p_i = n_i / sum n, and Gamma_s of 002 (Definition 3). Gamma_n (Definition 4) is the larger of
its values at the start and at the optimum. Batches are full, so that phi_i of 002 is 0. G of 002,
and B_1 and C of 003, are the norm to which samples' gradients are clipped; where none is, q_k,t of
003 is 1. Clients of 003 make one step a round, so that B_2 is 0; p^s is the selection's, V_k by eq.
7, and Gamma, which is free, the one of the least bound. The start stands for w_1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal, cast

import numpy as np
from pydantic import Field

from raydpfl import models
from raydpfl.config.setting import Setting
from raydpfl.errors import ConfigError
from raydpfl.methods.probes.base import Assess, Probe, Problem
from raydpfl.methods.probes.client_optima import LinearLosses, linear
from raydpfl.methods.probes.suboptimality import quadratic_minimum
from raydpfl.privacy import LocalSteps

COLUMNS = ("theorem_error", "theorem_bound", "theorem_ratio")
SELECTIONS = {"chen": ("uniform",), "xu": ("multinomial", "privacy_aware")}
WEIGHTS = {"chen": "data", "xu": "uniform"}
CLOSE = 1e-6  # relative, of a step size to the theorem's
GAMMAS = np.logspace(-6, 6, 1201)  # the free Gamma of 003 Theorem 1


class ConvergenceBoundProbe(Probe):
    """After every round what a theorem bounds, `theorem_error`, its bound, `theorem_bound`, and the
    first over the second, `theorem_ratio`.

    Theorem 1 of either paper bounds f(w) - f* after T rounds, with the step sizes 4 / (lambda Q t +
    16 L Q), t from 0, and beta / (gamma + t), t from 1, beta above 1 / mu: `local.schedule`
    inverse. In the second noise is sized for a T, so that the last round alone has a bound. Theorem
    2 bounds the mean over the rounds of ||grad f(w)||^2, before each round (here: after each), with
    one step size, below 1 / (200 Q L) or 1 / sqrt(T). There is no bound where a sample's gradient
    is longer than its clip at the start or after the round. A theorem says nothing of a run in
    which `clipped` of some round is above 0.
    """

    examples = ({"smoothness": 4.0, "convexity": 1.0},)
    needs_common_model = True
    kind: str = "convergence_bound"
    theorem: Literal[
        "chen_2024_theorem1", "chen_2024_theorem2", "xu_2026_theorem1", "xu_2026_theorem2"
    ] = Field(default="chen_2024_theorem1", description="that gives the bound")
    smoothness: float = Field(default=1.0, gt=0, description="L; no client may have more")
    convexity: float = Field(
        default=0.1, gt=0, description="lambda or mu of Theorem 1; no client may have less"
    )

    def values(self) -> tuple[str, ...]:
        return COLUMNS

    def check(self, setting: Setting) -> None:
        super().check(setting)
        paper = self.theorem.partition("_")[0]
        for section, kinds in (
            ("bounding", ("per_sample_clip",)),
            ("local", ("sgd",)),
            ("noise", ("gaussian",)),
            ("selection", SELECTIONS[paper]),
            ("server", ("sgd",)),
            ("weights", (WEIGHTS[paper],)),
        ):
            if setting.kinds[section] not in kinds:
                raise self._refusal(f"{section}.kind", setting.kinds[section], " or ".join(kinds))
        if not setting.plain_steps or setting.epochs is not None:
            raise self._refusal("local.kind", "sgd", "plain steps, of every client as many")
        if setting.dropout:
            raise self._refusal("selection.dropout", setting.dropout, "0")

    def fits(self, problem: Problem) -> None:
        losses = linear(problem.module, problem.task, problem.shards, 0.0)
        if problem.shards.classes or losses is None:
            expected = "none of it, but for regression by a linear model"
            raise ConfigError("measure", self.kind, expected)
        self._fits_algorithm(problem)
        constants = BoundConstants(problem, losses)
        if constants.smoothness > self.smoothness:
            raise self._refusal("smoothness", self.smoothness, f"{constants.smoothness:g} or above")
        if self.theorem.endswith("1") and constants.convexity < self.convexity:
            raise self._refusal("convexity", self.convexity, f"{constants.convexity:g} or below")
        beta, gamma = constants.beta_gamma
        if self.theorem == "xu_2026_theorem1" and (gamma < 1 or beta * self.convexity <= 1):
            expected = "one times a local.lr_period of 2 or more that is above 1 / convexity"
            raise self._refusal("local.lr", problem.local.lr, expected)
        self._fits_rates(problem, constants)
        if math.isinf(self._bound(constants, 0, problem.rounds)):
            raise self._refusal("local.lr", problem.local.lr, "less: Upsilon is not above 0")

    def _fits_algorithm(self, problem: Problem) -> None:
        if any(problem.local.batch_sizes(problem.population.sizes) != problem.population.sizes):
            raise self._refusal("local.batch", problem.local.batch, "full")
        server = [problem.server.learning_rate(t) for t in range(problem.rounds)]
        if set(server) != {1.0}:
            raise self._refusal("server.lr", problem.server.lr, "1 in all rounds")
        if self.theorem.startswith("xu"):
            if problem.local.steps != 1:
                raise self._refusal("local.steps", problem.local.steps, "1")
            calibration = cast(LocalSteps, problem.mechanism).calibration
            if calibration is None or calibration.method != "paper":
                method = calibration and calibration.method
                raise self._refusal("noise.calibration", method, "paper, of clients' budgets")

    def _fits_rates(self, problem: Problem, constants: BoundConstants) -> None:
        for t in range(problem.rounds):
            rate = problem.local.learning_rate(t)
            low, high = self._rates(constants, t, problem.rounds)
            if not low * (1 - CLOSE) <= rate <= high * (1 + CLOSE):
                raise self._refusal("local.lr", rate, f"{low:g} to {high:g} in round {t}")

    def _refusal(self, field: str, value: object, expected: str) -> ConfigError:
        return ConfigError(field, value, f"{expected}, with measure {self.kind} of {self.theorem}")

    def _rates(self, constants: BoundConstants, t: int, rounds: int) -> tuple[float, float]:
        """The least and the largest step size that the theorem allows in round t, from 0."""
        if self.theorem == "chen_2024_theorem1":
            rate = 4 / (constants.steps * (self.convexity * t + 16 * self.smoothness))
        elif self.theorem == "chen_2024_theorem2":
            return constants.rate, (1 - 2 * CLOSE) / (200 * constants.steps * self.smoothness)
        elif self.theorem == "xu_2026_theorem1":
            beta, gamma = constants.beta_gamma
            rate = beta / (gamma + t + 1)
        else:
            rate = 1 / math.sqrt(rounds)
        return rate, rate

    def _bound(self, constants: BoundConstants, t: int, rounds: int) -> float:
        """In round t, from 0, of so many."""
        if self.theorem == "chen_2024_theorem1":
            return chen_theorem1(constants, self.smoothness, self.convexity, t + 1)
        if self.theorem == "chen_2024_theorem2":
            return chen_theorem2(constants, self.smoothness, rounds)
        if self.theorem == "xu_2026_theorem1":
            return xu_theorem1(constants, self.smoothness, rounds)
        return xu_theorem2(constants, self.smoothness, rounds)

    def assess(self, problem: Problem, out: Path) -> Assess | None:
        losses = linear(problem.module, problem.task, problem.shards, 0.0)
        assert losses is not None
        constants = BoundConstants(problem, losses)
        steepest = constants.steepest
        first_round = problem.rounds - 1 if self.theorem == "xu_2026_theorem1" else 0
        is_gradient = self.theorem.endswith("2")

        def assess(t: int, model: np.ndarray) -> Mapping[str, float | None]:
            theta = losses.matrix(model)
            if t < first_round or max(steepest(constants.start), steepest(theta)) > constants.clip:
                return dict.fromkeys(COLUMNS)
            error = constants.squared_gradient(theta) if is_gradient else constants.gap(theta)[0]
            bound = self._bound(constants, t, problem.rounds)
            return dict(zip(COLUMNS, (error, bound, error / bound), strict=True))

        return assess


class BoundConstants:
    """What the bounds are made of, but for the L and the lambda that are given."""

    def __init__(self, problem: Problem, losses: LinearLosses):
        population = problem.population
        clients = np.flatnonzero(population.sizes)
        shares = population.shares
        self._rows = partial(losses.parts, clients, shares)
        self._gradient = losses.mixture(clients, shares)
        self.start = losses.matrix(models.flatten(problem.module).numpy())
        best, self.gap = quadratic_minimum(losses, clients, shares)
        curvatures, squared_gaps, self.gamma_s = [], np.zeros(2), 0.0
        for i in clients.tolist():
            one, whole = np.array([i]), {i: 1.0}
            ((x, _, weights),) = losses.parts(one, whole)
            curvatures += [np.linalg.eigvalsh((x * weights[:, None]).T @ x)]
            self.gamma_s += shares[i] * quadratic_minimum(losses, one, whole)[1](best)[0]
            gradient = losses.mixture(one, whole)
            for point_index, theta in enumerate((self.start, best)):
                squared_gaps[point_index] += shares[i] * np.sum(
                    (gradient(theta)[1] - self._gradient(theta)[1]) ** 2
                )
        self.smoothness = float(np.max(curvatures))
        self.convexity = float(np.min(curvatures))
        self.gamma_n_squared = float(squared_gaps.max())
        self.start_gap, self.distance = self.gap(self.start)
        release = cast(LocalSteps, problem.mechanism)  # with per_sample_clip
        self.clip = release.bound
        self.steps = problem.local.steps or 1
        self.rate = problem.local.lr
        period = float(problem.local.lr_period or 0)
        # of the step size beta / (gamma + t), t from 1
        self.beta_gamma = self.rate * period, period - 1
        self.ratio = len(population) / problem.selection.sampling(population).cohort  # n / r
        d = self.start.size
        self.noise = d * float(np.max(release.stds)) ** 2  # d sigma^2
        probabilities = problem.selection.probabilities(population)
        variances = release.client_columns().get("variance")
        if probabilities is not None and variances is not None:
            self.selection = float(np.abs(probabilities - shares).sum())
            self.privacy = d * float(probabilities**2 @ variances)  # G^DP
            biased_optimum = quadratic_minimum(losses, clients, probabilities)[0]
            self.biased_distance = float(np.linalg.norm(self.start - biased_optimum))

    def squared_gradient(self, theta: np.ndarray) -> float:
        """||grad f||^2 at theta, float64 [1, width]."""
        return float(np.sum(self._gradient(theta)[1] ** 2))

    def steepest(self, theta: np.ndarray) -> float:
        """The largest norm of a sample's gradient at theta."""
        return max(
            float(np.max(np.abs(x @ theta[0] - y) * np.linalg.norm(x, axis=1)))
            for x, y, _ in self._rows()
        )


def chen_theorem1(constants: BoundConstants, L: float, convexity: float, rounds: int) -> float:
    """002 Theorem 1."""
    squares = constants.clip**2 + constants.noise
    h = 40 * (squares + 4 * constants.steps * constants.clip**2)
    h += (8 * L * constants.ratio + 16 * L) * constants.gamma_s
    h += 4 * constants.ratio * constants.noise + convexity / L * squares
    start = 8 * L**2 / convexity * constants.distance**2
    return (2 * L / convexity**2 * h + start) / (16 * L / convexity + rounds)


def chen_theorem2(constants: BoundConstants, L: float, rounds: int) -> float:
    """002 Theorem 2."""
    length = constants.rate * constants.steps  # alpha tau
    upsilon = length / 2 - 15 * length**3 * L**2 - 90 * constants.ratio * length**4 * L**3
    upsilon -= constants.ratio * length**2 * L
    if upsilon <= 0:
        return math.inf
    squares = constants.clip**2 + constants.noise
    q = (1 + constants.ratio * constants.steps + constants.ratio) * constants.rate * squares
    q += (2 * constants.ratio + 1) * length * constants.gamma_n_squared
    return (constants.start_gap / rounds + q) / upsilon


def xu_theorem1(constants: BoundConstants, L: float, rounds: int) -> float:
    """003 Theorem 1, squared: of F - F*."""
    beta, gamma = constants.beta_gamma
    denominator = gamma + rounds
    free = 1 + 9 * GAMMAS
    z = 4.5 * L * GAMMAS * gamma * constants.biased_distance**2 + gamma * constants.start_gap
    z += free / 2 * beta**2 * rounds * L / denominator * constants.clip**2
    root = np.sqrt((1 + 1 / GAMMAS) * constants.selection**2 + free * constants.privacy)
    scale = math.sqrt(2 * L) * beta * rounds * constants.clip / (2 * denominator)
    return float(np.min(np.sqrt(z / denominator) + scale * (constants.selection + root)) ** 2)


def xu_theorem2(constants: BoundConstants, L: float, rounds: int) -> float:
    """003 Theorem 2, squared: of the mean of ||grad F||^2."""
    root = math.sqrt(constants.selection**2 + 2 * math.sqrt(rounds) * L * constants.privacy)
    start = (constants.start_gap + L * constants.clip**2 / 2) / math.sqrt(rounds)
    return (constants.clip / 2 * (constants.selection + root) + math.sqrt(start)) ** 2
