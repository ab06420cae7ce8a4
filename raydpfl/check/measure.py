"""The contract of a measurement: see `raydpfl.methods.probes`."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq

from raydpfl.check.contract import hold
from raydpfl.check.example import Example
from raydpfl.check.runs import carried_out
from raydpfl.simulation.recorder import CLIENT_COLUMNS


def no_bit_changed(case: Example) -> str:
    """Measuring changes no bit of the model."""
    plan = case.plan
    bare = replace(plan, experiment=plan.experiment.model_copy(update={"measure": ()}))
    without = carried_out(bare, case.folder / "without").parameters()
    hold(np.array_equal(case.whole.parameters(), without), "the model is another")
    return "the model is that without it"


def columns(case: Example) -> str:
    """Of each client it gives the columns that it declares, a number each."""
    plan = case.plan
    noisy = plan.client_std(0, plan.experiment.bounding.initial_bound) > 0
    declared = set(case.member.columns(noisy))
    known = set(CLIENT_COLUMNS)
    for seen in case.whole.columns:
        undeclared = seen.keys() - known
        wrong = f"it declares {sorted(declared)} and gives {sorted(undeclared)}"
        hold(undeclared == declared, wrong)
        for name in undeclared:
            hold(seen[name].shape == seen["client"].shape, f"{name} is not one number a client")
    return ", ".join(sorted(declared)) or "none"


def values(case: Example) -> str:
    """Of each round it gives the values that it declares."""
    rows = pq.read_table(case.whole.out / "rounds.parquet")
    declared = case.member.values()
    missing = [name for name in declared if name not in rows.column_names]
    hold(not missing, f"the rounds table has no {missing}")
    tables = case.member.tables(["client"])
    for name in tables:
        hold((case.whole.out / f"{name}.parquet").exists(), f"it writes no {name}.parquet")
    return ", ".join([*declared, *(f"{name}.parquet" for name in tables)]) or "none"
