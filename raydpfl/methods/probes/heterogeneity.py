"""How different the clients' objectives are."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from raydpfl.methods.probes.base import Afterwards, Finished, Probe
from raydpfl.methods.probes.client_optima import Heterogeneity
from raydpfl.storage.tables import schema, write_table


class HeterogeneityProbe(Probe):
    """Gamma_s and Gamma_n (002 Definitions 3 and 4) and f_i(w*) - f_i* (001) at the final model;
    each client's part is in heterogeneity.parquet. Without an L2 term clients may have no minimum:
    `left_out` in the summary counts them. It may take longer than the run.
    """

    of_all = True
    kind: str = "heterogeneity"

    def afterwards(self, run: Finished) -> Afterwards | None:
        return _Written(run)


class _Written(Heterogeneity):
    """Writes the rows of clients to a table."""

    def __init__(self, run: Finished):
        problem = run.problem
        super().__init__(problem.module, problem.task, problem.shards, run.model, problem.l2)
        self._out = run.out

    def result(self) -> dict[str, Any]:
        values = super().result()
        rows = values.pop("clients")
        table = pa.Table.from_pylist(rows, schema(rows[0] if rows else ()))
        write_table(self._out / "heterogeneity.parquet", table)
        return values
