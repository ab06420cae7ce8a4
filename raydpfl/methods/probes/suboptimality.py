"""How far the model is from the optimum, where that can be computed (001 sec. 5.3, Fig. 1).

f is the mean loss over all rows of all clients, with the L2 term that local training has: sum_i p_i
f_i with p_i = n_i / sum n. Half the squared error of a linear model is a quadratic, and both
numbers are exact. The cross-entropy of softmax regression is minimised by the solver of
`raydpfl.methods.probes.client_optima`, to about 1e-10 of f*; without an L2 term it may have no
minimiser.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from pydantic import Field

from raydpfl import models
from raydpfl.errors import ConfigError
from raydpfl.methods.probes.base import Assess, Finished, Probe, Problem
from raydpfl.methods.probes.client_optima import WIDTH, LinearLosses, Shares, is_minimum, linear
from raydpfl.storage.run_files import replace_file

COLUMNS = ("suboptimality", "distance")
FLAT = 1e-12  # of the largest curvature; a direction with less has none
OPTIMUM = "optimum.bin"

Gap = Callable[[np.ndarray], tuple[float, float]]  # of theta: (f - f*, distance)


class SuboptimalityProbe(Probe):
    """f(w) - f* as `suboptimality` and ||w - w*|| as `distance`, after every `every`-th round and
    the last; among several minimisers w* is the nearest. None of it is noisy.

    The summary has f* as `optimum`, and both numbers at the start and at the end. w* is in
    optimum.bin, float64 [d], the one of least norm.
    """

    examples = ({}, {"every": 3})
    needs_common_model = True
    kind: str = "suboptimality"
    every: int = Field(default=1, ge=1, description="rounds from one value to the next")

    def values(self) -> tuple[str, ...]:
        return COLUMNS

    def fits(self, problem: Problem) -> None:
        losses = linear(problem.module, problem.task, problem.shards, problem.local.l2)
        if losses is None:
            expected = "none of it for this model: only one linear layer has an optimum to find"
            raise ConfigError("measure", self.kind, expected)
        if problem.shards.classes and not problem.local.l2:
            expected = "a number above 0 with measure suboptimality: else there may be no optimum"
            raise ConfigError("local.weight_decay", problem.local.l2, expected)
        if not problem.shards.classes and losses.width > WIDTH:
            expected = f"none of it for a linear model of more than {WIDTH} inputs"
            raise ConfigError("measure", self.kind, expected)

    def assess(self, problem: Problem, out: Path) -> Assess | None:
        optimum = _Optimum(problem, out)
        rounds = problem.rounds

        def assess(t: int, model: np.ndarray) -> Mapping[str, float | None]:
            if (t + 1) % self.every and t + 1 < rounds:
                return dict.fromkeys(COLUMNS)
            return dict(zip(COLUMNS, optimum.gap(model), strict=True))

        return assess

    def afterwards(self, run: Finished) -> dict[str, float]:
        optimum = _Optimum(run.problem, run.out)
        start = models.flatten(run.problem.module).numpy()
        values = {"optimum": optimum.value}
        for name, model in (("start", start), ("final", run.model)):
            values[name], values[f"{name}_distance"] = optimum.gap(model)
        return values


class _Optimum:
    """f* as `value`, and how far a model is from it. Writes w* to the run directory."""

    def __init__(self, problem: Problem, out: Path):
        losses = linear(problem.module, problem.task, problem.shards, problem.local.l2)
        assert losses is not None
        self._linear = losses
        sizes = np.asarray(problem.shards.sizes)
        clients = np.flatnonzero(sizes), sizes / sizes.sum()
        self._value = losses.mixture(*clients)
        self._gap: Gap = self._convex
        if problem.shards.classes:
            start = models.flatten(problem.module).numpy()
            theta = _read_optimum(out, losses, self._value)
            self.theta = losses.joint_minimum(*clients, start)[1] if theta is None else theta
        else:
            self.theta, self._gap = quadratic_minimum(losses, *clients)
        self.value = self._value(self.theta)[0]
        flat = losses.flat(self.theta)
        replace_file(out / OPTIMUM, lambda part: part.write(flat.astype("<f8").tobytes()))

    def gap(self, model: np.ndarray) -> tuple[float, float]:
        """(f - f*, distance to the nearest minimiser) of a model, float32 [d]."""
        return self._gap(self._linear.matrix(model))

    def _convex(self, theta: np.ndarray) -> tuple[float, float]:
        return self._value(theta)[0] - self.value, float(np.linalg.norm(theta - self.theta))


def _read_optimum(
    out: Path, losses: LinearLosses, value: Callable[[np.ndarray], tuple[float, np.ndarray]]
) -> np.ndarray | None:
    """theta as an interrupted run has stored it; None without it, or if it is no minimum."""
    path = out / OPTIMUM
    if not path.is_file() or path.stat().st_size != 8 * losses.layer.outputs * losses.width:
        return None
    theta = losses.matrix(np.fromfile(path, "<f8"))
    return theta if is_minimum(value(theta)[1], losses.decay) else None


def quadratic_minimum(
    losses: LinearLosses, clients: np.ndarray, shares: Shares
) -> tuple[np.ndarray, Gap]:
    """The minimiser of least norm of half the squared error, and the distances to it: sums over the
    directions in which the error is curved, so that neither loses digits near the minimum.
    """
    curvature = losses.decay * np.eye(losses.width)
    slope = np.zeros(losses.width)
    for x, y, weights in losses.parts(clients, shares):
        curvature += (x * weights[:, None]).T @ x
        slope += (weights * y) @ x
    values, directions = np.linalg.eigh(curvature)
    curved_mask = values > FLAT * max(values[-1], 0.0)
    values = values[curved_mask]
    directions = directions[:, curved_mask]
    best = (directions.T @ slope) / values

    def gap(theta: np.ndarray) -> tuple[float, float]:
        offset = theta[0] @ directions - best
        return 0.5 * float(values @ offset**2), float(np.linalg.norm(offset))

    return (directions @ best)[None], gap
