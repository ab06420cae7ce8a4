from __future__ import annotations

import numpy as np
import pyarrow as pa

from raydpfl.methods.probes.base import Finished, Probe
from raydpfl.storage.tables import schema, write_table


class SelectionProbe(Probe):
    """A row per client in selection.parquet: `samples` n_k, `share` p^u_k = n_k / sum n,
    `probability` of each draw, `budget` epsilon_k, `variance` V_k (003 eq. 6), `noise_std`, that of
    its noise on the mean gradient of a local step, and `participations` in the run, draws counted.

    Null: a probability where cohorts are not made of independent draws, a budget where clients have
    none, and noise where they draw none at local steps.
    """

    kind: str = "selection"

    def afterwards(self, run: Finished) -> dict[str, int]:
        population = run.problem.population
        count = len(population)
        release = {} if run.mechanism is None else run.mechanism.of_clients()
        participations = np.zeros(count, np.int64)
        participations[list(run.participations)] = list(run.participations.values())
        columns = {
            "client": np.arange(count),
            "samples": population.sizes,
            "share": population.shares,
            "probability": run.problem.selection.probabilities(population),
            **{name: release.get(name) for name in ("budget", "variance", "noise_std")},
            "participations": participations,
        }
        absent = pa.nulls(count, pa.float64())
        rows = {name: absent if column is None else column for name, column in columns.items()}
        write_table(run.out / "selection.parquet", pa.table(rows, schema([*columns])))
        return {"clients": count, "participants": int((participations > 0).sum())}
