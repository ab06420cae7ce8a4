"""The contract of a measurement: see `raydpfl.methods.probes`."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq

from raydpfl.check.contract import hold
from raydpfl.check.example import Example
from raydpfl.check.runs import run_plan
from raydpfl.simulation.recorder import CLIENT_COLUMNS


def no_bit_changed(case: Example) -> str:
    """Measuring changes no bit of the model."""
    plan = case.plan
    bare_plan = replace(plan, experiment=plan.experiment.model_copy(update={"measure": ()}))
    bare_parameters = run_plan(bare_plan, case.folder / "without").parameters()
    hold(np.array_equal(case.inline_run.parameters(), bare_parameters), "the model is another")
    return "the model is that without it"


def columns(case: Example) -> str:
    """Of each client it gives the columns that it declares, a number each."""
    plan = case.plan
    noisy = plan.client_std(0, plan.experiment.bounding.initial_bound) > 0
    declared_columns = set(case.member.columns(noisy))
    run_columns = set(CLIENT_COLUMNS)
    for table in case.inline_run.columns:
        measured_columns = table.keys() - run_columns
        message = f"it declares {sorted(declared_columns)} and gives {sorted(measured_columns)}"
        hold(measured_columns == declared_columns, message)
        for name in measured_columns:
            hold(table[name].shape == table["client"].shape, f"{name} is not one number a client")
    return ", ".join(sorted(declared_columns)) or "none"


def values(case: Example) -> str:
    """Of each round it gives the values that it declares."""
    rows = pq.read_table(case.inline_run.out / "rounds.parquet")
    declared_values = case.member.values()
    missing = [name for name in declared_values if name not in rows.column_names]
    hold(not missing, f"the rounds table has no {missing}")
    tables = case.member.tables(["client"])
    for name in tables:
        hold((case.inline_run.out / f"{name}.parquet").exists(), f"it writes no {name}.parquet")
    return ", ".join([*declared_values, *(f"{name}.parquet" for name in tables)]) or "none"
