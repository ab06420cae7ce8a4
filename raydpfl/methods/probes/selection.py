import numpy as np
import pyarrow as pa

from raydpfl.methods.probes.base import Finished, Probe
from raydpfl.storage.tables import schema, write_table


class SelectionProbe(Probe):
    """A row per client in selection.parquet: `samples` n_k, `share` p^u_k = n_k / sum n,
    `probability` of each draw, `budget` epsilon_k, `variance` V_k (003 eq. 7), `noise_std`, that of
    its noise on the mean gradient of a local step, and `participations` in the run, draws counted.

    The summary has the `clients`, the `participants`, and of the probabilities of each draw, where
    there are, their `support` (the number above 1e-9), `total_variation` from the shares, and the
    mean samples and mean finite budget of a client that is drawn: `mean_samples`, `mean_budget`.

    Null: a probability where cohorts are not made of independent draws, a budget where clients have
    none, and noise where they draw none at local steps.
    """

    kind: str = "selection"

    def afterwards(self, run: Finished) -> dict[str, float]:
        population = run.problem.population
        count = len(population)
        release = {} if run.problem.mechanism is None else run.problem.mechanism.client_columns()
        participations = np.zeros(count, np.int64)
        participations[list(run.participations)] = list(run.participations.values())
        probabilities = run.problem.selection.probabilities(population)
        columns = {
            "client": np.arange(count),
            "samples": population.sizes,
            "share": population.shares,
            "probability": probabilities,
            **{name: release.get(name) for name in ("budget", "variance", "noise_std")},
            "participations": participations,
        }
        absent = pa.nulls(count, pa.float64())
        rows = {name: absent if column is None else column for name, column in columns.items()}
        write_table(run.out / "selection.parquet", pa.table(rows, schema([*columns])))
        participants = int((participations > 0).sum())
        facts: dict[str, float] = {"clients": count, "participants": participants}
        if probabilities is None:
            return facts
        distance = float(np.abs(probabilities - population.shares).sum() / 2)
        facts |= {"support": int((probabilities > 1e-9).sum()), "total_variation": distance}
        facts["mean_samples"] = float(probabilities @ population.sizes)
        budgets = release.get("budget")
        if budgets is not None and probabilities[np.isfinite(budgets)].any():
            finite = np.isfinite(budgets)
            facts["mean_budget"] = float(np.average(budgets[finite], weights=probabilities[finite]))
        return facts
