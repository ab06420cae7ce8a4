from collections.abc import Callable
from typing import Literal

import numpy as np
from pydantic import Field

from raydpfl.config.setting import Setting
from raydpfl.errors import ConfigError
from raydpfl.methods.selection.base import Population
from raydpfl.methods.selection.privacy_aware_solver import solve, solve_cvxpy
from raydpfl.methods.selection.with_replacement import WithReplacement


class PrivacyAware(WithReplacement):
    """p solves Problem 1 of 003, which trades the bias of leaving p^u against the noise of the
    clients drawn (003 sec. V).

    The weights are uniform, since Problem 1 accounts for the bias. A client without data is never
    drawn.
    """

    examples = ({"cohort": 6}, {"cohort": 6, "scale": 0.01})
    kind: str = "privacy_aware"
    scale: float = Field(default=1.0, gt=0, le=1e15, description="eta: costs are eta d V_k")
    solver: Literal["exact", "cvxpy"] = Field(default="exact", description="cvxpy: the reference")

    @property
    def accounted_with(self) -> tuple[str, ...]:
        return ("model",)  # a cost grows with its parameters

    def check(self, setting: Setting) -> None:
        if setting.epochs is not None:
            expected = f"none with selection.kind {self.kind}: its costs are of clients with as "
            raise ConfigError("local.epochs", setting.epochs, f"{expected}many steps each")

    def costs(self, d: int, variances: Callable[[], np.ndarray | None]) -> np.ndarray:
        by_client = variances()
        if by_client is None:
            expected = "noise at local steps, with noise.epsilon for the clients' budgets"
            raise ConfigError("selection.kind", self.kind, expected)
        return d * by_client

    def draw_probabilities(self, population: Population) -> np.ndarray:
        if population.privacy_cost is None:
            expected = "clients with privacy budgets: noise at local steps, with noise.epsilon"
            raise ConfigError("selection.kind", self.kind, expected)
        p = np.zeros(len(population))
        has_data = population.sizes > 0
        shares = population.shares[has_data]
        cost = self.scale * population.privacy_cost[has_data]
        if self.solver == "exact":
            p[has_data] = solve(shares, cost).probabilities
            return p
        import cvxpy

        try:
            p[has_data] = np.maximum(solve_cvxpy(shares, cost), 0)
        except cvxpy.SolverError:
            expected = "one at which cvxpy finds an optimum; or selection.solver exact"
            raise ConfigError("selection.scale", self.scale, expected) from None
        return p / p.sum()
