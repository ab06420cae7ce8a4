"""Where a scalar problem ends, and the exact point where the algorithm stands still (000 Claims
2.1 and 2.2, eq. 8 and Table 1).

Client i's mean loss is a parabola, 1/2 k_i (x - o_i)^2 and a constant: k_i is the mean of its
squared inputs, o_i its optimum. Q full gradient steps with learning rate lr move it from x to

    x + s_i (o_i - x),    s_i = 1 - (1 - lr k_i)^Q,

and what it sends of that, and what the server makes of the sum, its bounding says. Where all
clients take part without noise the mean update is a function of x alone. Its zeros are computed by
bisection in float64.
"""

import math
from collections.abc import Callable

import numpy as np
import torch

from raydpfl.config.setting import Setting
from raydpfl.core.messages import Facts, View
from raydpfl.errors import ConfigError
from raydpfl.methods.probes.base import Finished, Probe, Problem
from raydpfl.methods.probes.client_optima import linear

ROUNDING = 1e-13  # of what all clients move the model by, less than which is no movement
DOUBLINGS = 1000


class StationaryProbe(Probe):
    """In the summary: `final_x`, the model after the last round; `exact_low` and `exact_high`, the
    least and the greatest point where the algorithm stands still, mostly one and the same;
    `exact_x`, the one of those nearest to `final_x`; `optimum_x`, the minimum of the mean loss.
    """

    needs_common_model = True
    kind: str = "stationary"

    def check(self, setting: Setting) -> None:
        changes = (
            setting.adaptive_bound or setting.per_sample_bound or "bounding" in setting.stateful
        )
        for section, wrong, expected in (
            ("noise", setting.drawn_by is not None, "none, as a noisy model is never stationary"),
            ("local", not setting.plain_steps, "sgd without momentum, decay or proximal term"),
            ("bounding", changes, "one that does the same in every round"),
        ):
            if wrong:
                raise _refusal(f"{section}.kind", setting.kinds[section], expected)

    def fits(self, problem: Problem) -> None:
        losses = linear(problem.module, problem.task, problem.shards, 0.0)
        if problem.shards.classes or losses is None or losses.width != 1:
            expected = "none of it, but for regression by a linear model of one parameter"
            raise ConfigError("measure", self.kind, expected)
        local = problem.local
        lr = local.learning_rate(0)
        if lr != local.learning_rate(problem.rounds - 1):
            raise _refusal("local.lr", lr, "one that is the same in all rounds")
        selection = problem.selection
        if not selection.sampling(problem.population).everyone or selection.dropout:
            raise _refusal("selection.kind", selection.kind, "full, without dropouts")
        sizes = problem.population.sizes
        if any(local.batch_size(rows) != rows for rows in sizes.tolist()):
            raise _refusal("local.batch", local.batch_size(int(sizes.max())), "full")
        clients = _Parabolas(problem)
        steepest = float(clients.curvature.max())
        if not 0 < steepest * lr < 2:
            raise _refusal("local.lr", lr, f"a number below 2/{steepest:g}, or clients diverge")
        clients.fixed_points()

    def afterwards(self, run: Finished) -> dict[str, float]:
        clients = _Parabolas(run.problem)
        low, high = clients.fixed_points()
        final = float(run.model[0])
        values = {"final_x": final, "exact_x": min(max(final, low), high)}
        return values | {"exact_low": low, "exact_high": high, "optimum_x": clients.optimum()}


def _refusal(field: str, value: object, expected: str) -> ConfigError:
    return ConfigError(field, value, f"{expected}, with measure stationary")


class _Parabolas:
    """The clients of a scalar problem, and what one round does to the model."""

    def __init__(self, problem: Problem):
        self._problem = problem
        losses = linear(problem.module, problem.task, problem.shards, 0.0)
        assert losses is not None
        sizes = problem.population.sizes
        self.shares = sizes / sizes.sum()
        self.curvature = np.zeros(len(sizes))
        self.slope = np.zeros(len(sizes))
        for client in np.flatnonzero(sizes).tolist():
            for x, y, weights in losses.parts(np.array([client]), {client: 1.0}):
                self.curvature[client] = weights @ x[:, 0] ** 2
                self.slope[client] = weights @ (x[:, 0] * y)
        self.optima = self.slope / np.where(self.curvature > 0, self.curvature, 1.0)

    def optimum(self) -> float:
        """The minimum of the mean loss over all rows."""
        return float(self.shares @ self.slope / (self.shares @ self.curvature))

    def fixed_points(self) -> tuple[float, float]:
        """The least and the greatest model that a round leaves as it is. Raises `ConfigError`."""
        pull = self._round()
        low = _outer_point(pull, float(self.optima.min()), -1.0)
        high = _outer_point(pull, float(self.optima.max()), 1.0)
        low_point = _last_point(lambda x: pull(x) > 0, low, high)[1]
        return low_point, max(low_point, _last_point(lambda x: pull(x) >= 0, low, high)[0])

    def _round(self) -> Callable[[float], float]:
        """Of a model the mean update that all clients make of it; 0 where only rounding is left."""
        problem = self._problem
        bounding = problem.bounding
        clients = problem.population
        count = len(clients)
        divisor = problem.selection.divisor(clients)
        weights = np.asarray(problem.weights.of(clients.sizes, clients.samples, count))
        lr = problem.local.learning_rate(0)
        bound = bounding.initial_bound
        state = bounding.start(1)
        broadcast = {
            name: torch.tensor(array) for name, array in bounding.broadcast_state(state).items()
        }
        progress = _step_share(lr * self.curvature, problem.local.step_counts(clients.sizes))

        def pull(x: float) -> float:
            model = np.array([x])
            nothing = torch.zeros(count, 1, dtype=torch.float64)
            view = View(0, lr, bound, torch.from_numpy(model), broadcast, lambda: nothing)
            vectors = bounding.send(torch.from_numpy((progress * (self.optima - x))[:, None]), view)
            factors = bounding.factors(vectors.abs()[:, 0], math.inf if bound is None else bound)
            parts = weights * (factors * vectors[:, 0]).numpy()
            facts = Facts(0, lr, model, divisor, count, count)
            mean = float(bounding.receive(np.array([parts.sum()]), state, facts)[0])
            rounding = ROUNDING * max(float(np.abs(parts).sum()) / divisor, abs(x))
            return 0.0 if abs(mean) <= rounding else mean

        return pull


def _step_share(rate: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """s = 1 - (1 - rate)^steps, float64 [N], without loss of digits for small rates; `steps` int64
    [N].
    """
    small = -np.expm1(steps * np.log1p(-np.minimum(rate, 0.5)))
    return np.where(rate < 0.5, small, 1 - (1 - rate) ** steps)


def _outer_point(pull: Callable[[float], float], start: float, side: float) -> float:
    """A model so far to one `side` (-1: below) that it is pulled back."""
    for exponent in range(DOUBLINGS):
        x = start + side * (1.0 + abs(start)) * 2.0**exponent
        if pull(x) * side < 0:
            return x
    expected = "none of it for a bounding that never pulls the model back"
    raise ConfigError("measure", "stationary", expected)


def _last_point(holds: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Where something that holds at `low` ceases to hold, as it does at `high`: two numbers next to
    each other, of which it holds for the first.
    """
    while low < (middle := low + (high - low) / 2) < high:
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high
