"""What each client's own noise guarantees it, beside the budget that it asked for (003)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydpfl.privacy import column
from raydpfl.report.figures.base import Apart, Need, Placed
from raydpfl.report.labels import Quantity, accountant, listed
from raydpfl.report.plot_style import REFERENCE, Key, Look, dots, look, scale, thin
from raydpfl.report.run_reader import Panel, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 400  # clients of an accountant that are drawn


class Personal(Apart):
    """Epsilon of every client that took part, by accountant, over its budget."""

    placed: ClassVar[tuple[Placed, ...]] = (Placed("Privacy", {}),)

    kind: str = "personal"

    def needs(self) -> Sequence[Need]:
        return (Need("guarantees", ("epsilon_claimed",), "noise at local steps by budgets"),)

    def headline(self) -> str:
        return "Every client's epsilon against its budget"

    def prepare(self, panels: Sequence[Panel]) -> Any:
        runs = [panel.groups[0].runs[0] for panel in panels]
        names = dict.fromkeys(name for run in runs for name in spent(run))
        found = [run.table("guarantees") for run in runs]
        budgets = np.concatenate([each["epsilon_claimed"] for each in found])
        if not names or not np.isfinite(budgets).any():
            return None
        values = np.concatenate([each[name] for each in found for name in names if name in each])
        return {"names": [*names], "budgets": budgets, "values": np.append(values, budgets)}

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        run = panel.groups[0].runs[0]
        table = run.table("guarantees")
        kept = thin(len(table["epsilon_claimed"]), MOST)
        budgets = common["budgets"][np.isfinite(common["budgets"])]
        ends = [budgets.min(), budgets.max()]
        axes.plot(ends, ends, color=REFERENCE.colour, linestyle=REFERENCE.dash, linewidth=1)
        for name in spent(run):
            points = np.stack([table["epsilon_claimed"][kept], table[name][kept]], 1)
            dots(axes, points, _look(common["names"], name))
        scale(axes, "x", Quantity("budget", "budget, epsilon", wide=True), common["budgets"])
        scale(axes, "y", Quantity("epsilon", "epsilon spent", wide=True), common["values"])

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[Key]:
        run = panels[0].groups[0].runs[0]
        keys = [
            Key(f"{accountant(name)} ({_kind(run, name)})", _look(common["names"], name), "point")
            for name in common["names"]
        ]
        return [*keys, Key("spent = budget", REFERENCE)]

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "A point is a client that took part."
        infinite = [name for name in common["names"] if _infinite(panels, name)]
        if infinite:
            names = listed([accountant(name) for name in infinite])
            text += f" Clients for whom {names} shows no privacy (epsilon infinite) have no point."
        return f"{text} From guarantees.parquet."


def spent(run: Run) -> list[str]:
    """The columns of epsilon that the run itself states, rigorous first."""
    table = run.table("guarantees")
    there = [name for name in table if name.startswith("epsilon_") and name != "epsilon_claimed"]
    finite = [name for name in there if np.isfinite(table[name]).any()]
    stated = {column(one.accountant) for one in run.guarantees}
    return sorted(
        (name for name in finite if not stated or name in stated),
        key=lambda name: run.kind_of(name) != "rigorous",
    )


def _look(names: Sequence[str], name: str) -> Look:
    return look([*names].index(name))


def _kind(run: Run, name: str) -> str:
    return "rigorous" if run.kind_of(name) == "rigorous" else "formula"


def _infinite(panels: Sequence[Panel], name: str) -> bool:
    tables = [panel.groups[0].runs[0].table("guarantees") for panel in panels]
    return any(np.isinf(table[name]).any() for table in tables if name in table)
