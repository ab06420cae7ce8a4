from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import Field, model_validator

from raydpfl.data.columns import clients_table, numbers
from raydpfl.errors import ConfigError
from raydpfl.methods.selection.base import Population
from raydpfl.methods.selection.with_replacement import WithReplacement


class Importance(WithReplacement):
    """Any p, with each update weighted by p^u_k / p_k, so that the sum is unbiased for
    sum p^u_k Delta_k (Luo et al. 2024).

    The file has a row per client in client order; its path is absolute or relative to the data root
    or the working folder. Clients with data must have p > 0. A client that is rarely drawn counts
    more when it is: its correction multiplies what it can add to the sum.
    """

    file_fields = frozenset({"path"})

    examples = ({"cohort": 6, "power": 0.5},)
    kind: str = "importance"
    power: float | None = Field(
        default=None, description="p ~ (p^u)^power: 1 multinomial, 0 uniform"
    )
    path: str | None = Field(default=None, description="a CSV, Parquet, Arrow or NPZ file")
    column: str | None = Field(default=None, description="of that file; p is proportional to it")

    @model_validator(mode="after")
    def _one_source(self) -> Importance:
        if (self.power is None) == (self.path is None):
            expected = "a number, or selection.path and selection.column; not both"
            raise ConfigError("selection.power", self.power, expected)
        if (self.path is None) != (self.column is None):
            expected = "the column of probabilities in selection.path, and none without a path"
            raise ConfigError("selection.column", self.column, expected)
        return self

    def draw_probabilities(self, population: Population) -> np.ndarray:
        shares = population.shares
        table = population.table if population.table is not None else self.table(len(population))
        with np.errstate(divide="ignore", over="ignore"):
            p = shares**self.power if table is None else table
        if not (np.isfinite(p) & (p >= 0)).all() or (p[shares > 0] == 0).any():
            field = "power" if self.path is None else "column"
            expected = "finite probabilities from 0, above 0 for every client that has data"
            raise ConfigError(f"selection.{field}", getattr(self, field), expected)
        return p / p.sum()

    def corrections(self, population: Population) -> np.ndarray:
        def ratio() -> np.ndarray:
            p = self.probabilities(population)
            return np.divide(population.shares, p, out=np.zeros_like(p), where=p > 0)

        return population.cached((self, "corrections"), ratio)

    def table(self, count: int, root: Path | None = None) -> np.ndarray | None:
        if self.path is None or self.column is None:
            return None
        column = clients_table("selection", self.path, root, column=self.column)["column"]
        values = numbers("selection.column", self.column, column)
        if len(values) != count:
            expected = f"a row for each of the {count} clients; this has {len(values)}"
            raise ConfigError("selection.path", self.path, expected)
        return values
