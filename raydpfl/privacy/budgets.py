"""Distributions of personal budgets: how much epsilon clients are willing to spend (003).

A distribution gives every client a budget. 003's experiments have U(0, 1) and mixtures of normals:

>>> UniformBudgets(low=0, high=1).draw(seed=0, clients=4).round(3)
array([0.252, 0.069, 0.331, 0.909])
>>> mixture = parse({"kind": "normal_mixture", "components": [
...     {"weight": 0.3, "mean": 0.5, "std": 0.2}, {"weight": 0.7, "mean": 10, "std": 1}]})
>>> mixture.draw(seed=0, clients=4).round(3)
array([0.437, 0.887, 8.344, 8.164])

003 writes N(mean, variance): its 0.3 N(0.5, 0.04) + 0.7 N(10, 1) (Figs 4 and 5, Fig. 6 case 1) is
the mixture above, with std 0.2 and 1; likewise 0.3 N(2, 0.04) + 0.7 N(8, 1) (Fig. 6 case 2).

Public: the distribution, and every budget drawn from it. Randomness: client k reads block k (four
words) of the stream (seed, BUDGET), whatever the number of clients.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from raydpfl.config.registry import Member, choose
from raydpfl.core.prng import Purpose, stream
from raydpfl.data.columns import clients_table, numbers
from raydpfl.errors import ConfigError

FLOOR = 0.01
log = logging.getLogger("raydpfl")
FIELD = "noise.epsilon"


class BudgetDistribution(Member):
    """Base of the family; a member gives `budgets` (PRIVACY.md sec. 5)."""

    floor: float = Field(default=FLOOR, gt=0, description="least epsilon; others are raised")
    public: float = Field(
        default=0.0, ge=0, le=1, description="probability of a public client, with no limit"
    )

    def draw(
        self,
        seed: int,
        clients: int,
        root: Path | None = None,
        ids: Sequence[str] | None = None,
    ) -> np.ndarray:
        """Epsilons float64 [clients]; infinite for public clients. `ids`: of the clients; None:
        their numbers. Raises `ConfigError` if the distribution gives no numbers, or a file under
        `root`, the folder of data sets, lacks them.
        """
        words = stream(seed, Purpose.BUDGET).bit_generator.random_raw(4 * clients)
        words = words.reshape(clients, 4)[:, :3]
        uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # never 0, never 1
        budgets = np.maximum(self.budgets(uniform[:, 1:], root, ids), self.floor)
        if np.isnan(budgets).any():
            expected = "a distribution that gives numbers; this one has no mass above 0"
            raise ConfigError(FIELD, self.model_dump(), expected)
        budgets[uniform[:, 0] < self.public] = math.inf
        return budgets

    def budgets(
        self, uniform: np.ndarray, root: Path | None, ids: Sequence[str] | None
    ) -> np.ndarray:
        """Epsilons float64 [clients], made of `uniform` float64 [clients, 2], numbers in (0, 1)."""
        raise NotImplementedError


class ConstantBudget(BudgetDistribution):
    """One for everyone."""

    kind: str = "constant"
    epsilon: float = Field(gt=0, description="of every client; not below the floor")

    @model_validator(mode="after")
    def _check_floor(self) -> ConstantBudget:
        if self.epsilon < self.floor:
            expected = f"at least the floor of {self.floor:g}; or a lower {FIELD}.floor"
            raise ConfigError(f"{FIELD}.epsilon", self.epsilon, expected)
        return self

    def budgets(
        self, uniform: np.ndarray, root: Path | None, ids: Sequence[str] | None
    ) -> np.ndarray:
        return np.full(len(uniform), self.epsilon)


class UniformBudgets(BudgetDistribution):
    """U(low, high) (003 Tables III, IV: U(0, 1))."""

    kind: str = "uniform"
    low: float = Field(default=0.0, ge=0, description="least epsilon")
    high: float = Field(default=1.0, description="largest epsilon; above low and floor")

    @model_validator(mode="after")
    def _check_interval(self) -> UniformBudgets:
        if self.high <= max(self.low, self.floor):
            expected = f"above low = {self.low:g} and floor = {self.floor:g}"
            raise ConfigError(f"{FIELD}.high", self.high, expected)
        return self

    def budgets(
        self, uniform: np.ndarray, root: Path | None, ids: Sequence[str] | None
    ) -> np.ndarray:
        return self.low + (self.high - self.low) * uniform[:, 0]


class NormalComponent(BaseModel):
    """A normal distribution and its weight."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    weight: float = Field(gt=0, description="relative to the other components")
    mean: float = Field(description="of epsilon, before negative values are drawn again")
    std: float = Field(gt=0, description="of epsilon; a standard deviation, not a variance")


class MixtureOfBudgets(BudgetDistribution):
    """A mixture of normals (003 sec. VI-C and VI-D2)."""

    kind: str = "normal_mixture"
    components: tuple[NormalComponent, ...] = Field(
        min_length=1, description="weight, mean and std of each; negative values are drawn again"
    )

    def budgets(
        self, uniform: np.ndarray, root: Path | None, ids: Sequence[str] | None
    ) -> np.ndarray:
        # Rejection leaves component i with a probability proportional to w_i P[X_i > 0], and X_i
        # with its distribution above 0.
        from scipy.special import log_ndtr, ndtri_exp

        weight, mean, std = np.array(
            [(component.weight, component.mean, component.std) for component in self.components]
        ).T
        log_positive = log_ndtr(mean / std)
        log_chance = np.log(weight) + log_positive
        chance = np.exp(log_chance - log_chance.max())
        part = np.searchsorted(chance.cumsum()[:-1] / chance.sum(), uniform[:, 0], side="right")
        budgets = mean[part] - std[part] * ndtri_exp(np.log(uniform[:, 1]) + log_positive[part])
        return np.where(np.isfinite(budgets), budgets, math.nan)


class ColumnOfBudgets(BudgetDistribution):
    """Budgets from a column of a file."""

    file_fields: ClassVar[frozenset[str]] = frozenset({"path"})

    kind: str = "column"
    path: str = Field(
        description="CSV, Parquet, Arrow or NPZ; absolute, or in the data root or working folder"
    )
    column: str = Field(default="epsilon", description="of epsilons, inf for a public client")
    client: str | None = Field(
        default=None,
        description="column of ids, as data.client has them with partition natural, else of client "
        "numbers, in rows that agree; none: row k is client k's",
    )

    def budgets(
        self, uniform: np.ndarray, root: Path | None, ids: Sequence[str] | None
    ) -> np.ndarray:
        columns = clients_table(FIELD, self.path, root, column=self.column, client=self.client)
        epsilons = numbers(f"{FIELD}.column", self.column, columns["column"])
        rows = np.flatnonzero(~(epsilons > 0))
        if len(rows):
            expected = f"positive numbers, inf for a public client; row {rows[0]} has "
            raise ConfigError(f"{FIELD}.column", self.column, f"{expected}{epsilons[rows[0]]:g}")
        rows = np.flatnonzero(epsilons < self.floor)
        if len(rows):
            text = f"{len(rows)} of {self.path}, the first in row {rows[0]}, "
            text += f"which asks for {epsilons[rows[0]]:g}"
            log.warning("budgets below %s.floor are raised to %g: %s", FIELD, self.floor, text)
        if self.client is not None:
            row_ids = list(map(str, columns["client"].tolist()))
            budget_by_id = dict(zip(row_ids, epsilons.tolist(), strict=True))
            rows = np.flatnonzero(epsilons != [budget_by_id[name] for name in row_ids])
            if len(rows):
                expected = f"one budget for each client; client {row_ids[rows[0]]} has several"
                raise ConfigError(f"{FIELD}.column", self.column, expected)
            names = list(map(str, range(len(uniform)) if ids is None else ids))
            absent = [name for name in names if name not in budget_by_id]
            if absent:
                expected = f"ids of all clients; {len(absent)} lack a row, the first {absent[0]!r}"
                raise ConfigError(f"{FIELD}.client", self.client, expected)
            return np.array([budget_by_id[name] for name in names])
        if len(epsilons) != len(uniform):
            expected = f"a budget for each of the {len(uniform)} clients; it has {len(epsilons)}"
            raise ConfigError(f"{FIELD}.path", self.path, expected)
        return epsilons


FAMILY: dict[str, type[BudgetDistribution]] = {
    "constant": ConstantBudget,
    "uniform": UniformBudgets,
    "normal_mixture": MixtureOfBudgets,
    "column": ColumnOfBudgets,
}


def distribution(value: float | BudgetDistribution) -> BudgetDistribution:
    """A distribution itself, or a number for everyone; the floor is no higher than that."""
    if isinstance(value, BudgetDistribution):
        return value
    return ConstantBudget(epsilon=value, floor=min(value, FLOOR))


def parse(values: Any) -> BudgetDistribution:
    """The distribution that `noise.epsilon` names, a mapping with a kind. Raises `ConfigError`."""
    return choose(FIELD, values, FAMILY, BudgetDistribution)
