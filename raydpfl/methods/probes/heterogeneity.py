"""How different the clients' objectives are."""

from __future__ import annotations

from typing import Any, ClassVar

import pyarrow as pa

from raydpfl.methods.probes.base import Afterwards, Finished, Probe
from raydpfl.methods.probes.client_optima import Heterogeneity
from raydpfl.storage.tables import schema, write_table


class HeterogeneityProbe(Probe):
    """Gamma_s and Gamma_n (002 Definitions 3 and 4) and f_i(w*) - f_i* (001) at the final model;
    each client's part is in heterogeneity.parquet. Without an L2 term clients may have no minimum:
    `left_out` in the summary counts them. It may take longer than the run.
    """

    of_all: ClassVar[bool] = True
    kind: str = "heterogeneity"

    def afterwards(self, run: Finished) -> Afterwards | None:
        return _Computed(run)


class _Computed:
    def __init__(self, run: Finished):
        of = run.problem
        self._work = Heterogeneity(of.module, of.task, of.shards, run.model, of.l2)
        self._out = run.out

    def advance(self, seconds: float) -> tuple[int, int]:
        return self._work.advance(seconds)

    def result(self) -> dict[str, Any]:
        found = self._work.result()
        rows = found.pop("clients")
        table = pa.Table.from_pylist(rows, schema(rows[0] if rows else ()))
        write_table(self._out / "heterogeneity.parquet", table)
        return found
