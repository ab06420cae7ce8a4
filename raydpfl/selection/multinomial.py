"""Cohorts drawn with replacement, client k with probability p_k at each of r draws: the virtual
clients of 003 sec. III-C2.

A client drawn twice trains twice, with batches and noise of its own each time, and counts twice in
the sum over r. What the members differ in is p:

>>> clients = Population(sizes=[10, 30, 60])
>>> Multinomial(cohort=4).draw(seed=0, t=1, population=clients)
Cohort(clients=array([1, 1, 1, 2]), draws=array([0, 1, 2, 0]), lost=0)
>>> even = Importance(cohort=4, power=0.0)
>>> even.probabilities(clients).round(3), even.corrections(clients).round(3)
(array([0.333, 0.333, 0.333]), array([0.3, 0.9, 1.8]))
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from raydpfl.data.table import clients_table, numbers
from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, stream
from raydpfl.privacy import Sampling
from raydpfl.selection.base import Cohort, Population, Selection
from raydpfl.selection.privacy_aware import solve, solve_cvxpy


class WithReplacement(Selection):
    """Base of these members: `cohort` draws, each from `probabilities`; the sum is divided by
    `cohort`.
    """

    cohort: int = Field(ge=1, le=10**9)

    def law(self, population: Population) -> np.ndarray:
        """p float64 [N], non-negative with sum 1, computed anew."""
        raise NotImplementedError

    def probabilities(self, population: Population) -> np.ndarray:
        """p float64 [N]: who each draw takes; computed once for a population."""
        return population.remember((self, "p"), lambda: self.law(population))

    def weighs_data(self) -> bool:
        return True

    def select(self, seed: int, t: int, population: Population) -> Cohort:
        sums = population.remember(
            (self, "sums"), lambda: np.cumsum(self.probabilities(population))
        )
        places = stream(seed, Purpose.COHORT, t=t).random(self.cohort) * sums[-1]
        return Cohort.of(np.searchsorted(sums, places, side="right"))

    def sampling(self, population: Population) -> Sampling:
        largest = population.remember(
            (self, "largest"), lambda: float(self.probabilities(population).max())
        )
        uniform = largest * len(population) <= 1 + 1e-9
        return Sampling(
            "with_replacement", len(population), self.cohort, None if uniform else min(largest, 1.0)
        )


class Multinomial(WithReplacement):
    """p = p^u, p^u_k = n_k / sum n: MD sampling (002 sec. IV), which is the unbiased selection of
    003 sec. III-C2.

    The sum over r of the cohort's updates is unbiased for sum p^u_k Delta_k, so the weights are
    uniform.
    """

    kind: str = "multinomial"

    def law(self, population: Population) -> np.ndarray:
        return population.shares


class Importance(WithReplacement):
    """Any p, with each update weighted by p^u_k / p_k, which keeps the sum unbiased for sum p^u_k
    Delta_k (Luo et al. 2024).

    p is in proportion to (p^u)^power, from 1 (the same as multinomial) to 0 (uniform) and beyond;
    or to `column` of the table `path`, a CSV, Parquet, Arrow or NPZ file with a row per client in
    client order, absolute or relative to the data root or the working folder. Whoever has data must
    have p > 0. A client that is rarely asked speaks the louder: its correction multiplies what it
    may contribute to the sum.
    """

    named: ClassVar[frozenset[str]] = frozenset({"path"})

    kind: str = "importance"
    power: float | None = None
    path: str | None = None
    column: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Importance:
        if (self.power is None) == (self.path is None):
            raise ConfigError(
                "selection.power",
                self.power,
                "a number, or selection.path and selection.column; not both",
            )
        if (self.path is None) != (self.column is None):
            raise ConfigError(
                "selection.column",
                self.column,
                "the column of selection.path that holds the probabilities; one needs the other",
            )
        return self

    def law(self, population: Population) -> np.ndarray:
        shares = population.shares
        field, given = (
            ("selection.power", self.power)
            if self.path is None
            else ("selection.column", self.column)
        )
        with np.errstate(divide="ignore", over="ignore"):
            table = (
                population.table if population.table is not None else self.table(len(population))
            )
            p = shares**self.power if table is None else table
        if not (np.isfinite(p) & (p >= 0)).all() or (p[shares > 0] == 0).any():
            raise ConfigError(
                field,
                given,
                "probabilities that are finite, not negative, and above 0 for every client that has data",
            )
        return p / p.sum()

    def corrections(self, population: Population) -> np.ndarray:
        def ratio() -> np.ndarray:
            p = self.probabilities(population)
            return np.divide(population.shares, p, out=np.zeros_like(p), where=p > 0)

        return population.remember((self, "corrections"), ratio)

    def table(self, count: int, root: Path | None = None) -> np.ndarray | None:
        if self.path is None:
            return None
        values = numbers(
            "selection.column",
            self.column,
            clients_table("selection", self.path, root, column=self.column)["column"],
        )
        if len(values) != count:
            raise ConfigError(
                "selection.path",
                self.path,
                f"a row for each of the {count} clients; this has {len(values)}",
            )
        return values


class PrivacyAware(WithReplacement):
    """p solves Problem 1 of 003, which trades the bias of leaving p^u against the noise of the
    clients that p asks (003 sec. V).

    `scale` is eta: costs are eta d V_k, with `Population.privacy_cost` = d V_k. `solver` is `exact`
    (see `solve`) or the reference it is tested against. The weights are uniform: the bias is what
    Problem 1 has paid for. A client without data is never drawn.
    """

    kind: str = "privacy_aware"
    needs_costs: ClassVar[bool] = True
    scale: float = Field(default=1.0, gt=0, le=1e15)
    solver: Literal["exact", "cvxpy"] = "exact"

    def law(self, population: Population) -> np.ndarray:
        if population.privacy_cost is None:
            raise ConfigError(
                "selection.kind",
                self.kind,
                "clients with privacy budgets: noise at local steps, with noise.epsilon",
            )
        p = np.zeros(len(population))
        has = population.sizes > 0
        shares = population.shares[has]
        cost = self.scale * population.privacy_cost[has]
        p[has] = (
            solve(shares, cost).probabilities
            if self.solver == "exact"
            else np.maximum(solve_cvxpy(shares, cost), 0)
        )
        return p if self.solver == "exact" else p / p.sum()
