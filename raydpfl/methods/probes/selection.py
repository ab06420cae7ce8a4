"""Who is likely to be selected, and what it costs (003 Fig. 3)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from raydpfl.methods.probes.base import Afterwards, Done, Finished, Probe
from raydpfl.storage.tables import schema, write_table


class SelectionProbe(Probe):
    """A row per client in selection.parquet: `samples` n_k, `share` p^u_k = n_k / sum n,
    `probability` of each draw, `budget` epsilon_k, `variance` V_k (003 eq. 6), `noise_std`, that of
    its noise on the mean gradient of a local step, and `participations` in the run, draws counted.

    Null is what there is none of: a probability where cohorts are not made of independent draws, a
    budget where clients have no own one, and noise where they draw none at local steps.
    """

    kind: str = "selection"

    def afterwards(self, run: Finished) -> Afterwards | None:
        population = run.problem.population
        selection = run.problem.selection
        count = len(population)
        columns = {"client": np.arange(count), "samples": population.sizes}
        columns |= {"share": population.shares}
        known = {} if run.mechanism is None else run.mechanism.of_clients()
        found = {"probability": selection.probabilities(population)}
        found |= {name: known.get(name) for name in ("budget", "variance", "noise_std")}
        columns |= {name: each for name, each in found.items() if each is not None}
        seen = np.zeros(count, np.int64)
        seen[list(run.participations)] = list(run.participations.values())
        columns["participations"] = seen
        names = ["client", "samples", "share", *found, "participations"]
        rows = {name: columns.get(name, pa.nulls(count, pa.float64())) for name in names}
        write_table(run.out / "selection.parquet", pa.table(rows, schema(names)))
        return Done({"clients": count, "participants": int((seen > 0).sum())})
