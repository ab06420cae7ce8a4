"""What each client's noise guarantees it, next to the budget that it asked for (003)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydpfl.privacy import column
from raydpfl.report.figures.base import Need, Placed, PlotItem
from raydpfl.report.labels import Quantity, accountant, listed
from raydpfl.report.plot_style import REFERENCE, LegendKey, dots, look, scale, thin
from raydpfl.report.run_reader import Panel, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 400  # clients of an accountant that are drawn


class PersonalEpsilon(PlotItem):
    """Epsilon of every client that took part, by accountant, over its budget."""

    placed: ClassVar[tuple[Placed, ...]] = (Placed("Privacy", {}),)
    per_group: ClassVar[bool] = True
    heading: ClassVar[str] = "Every client's epsilon against its budget"

    kind: str = "personal"

    def needs(self) -> Need:
        return Need("guarantees", ("epsilon_claimed",), "noise at local steps by budgets")

    def prepare(self, panels: Sequence[Panel]) -> Any:
        names = dict.fromkeys(name for panel in panels for name in spent(panel.run))
        tables = [panel.run.table("guarantees") for panel in panels]
        budgets = np.concatenate([table["epsilon_claimed"] for table in tables])
        if not names or not np.isfinite(budgets).any():
            return None
        values = np.concatenate(
            [table[name] for table in tables for name in names if name in table]
        )
        looks = {name: look(place) for place, name in enumerate(names)}
        return {"looks": looks, "budgets": budgets, "values": np.append(values, budgets)}

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        table = panel.run.table("guarantees")
        kept = thin(len(table["epsilon_claimed"]), MOST)
        budgets = common["budgets"][np.isfinite(common["budgets"])]
        ends = [budgets.min(), budgets.max()]
        axes.plot(ends, ends, linewidth=1, **REFERENCE.line)
        for name in spent(panel.run):
            points = np.stack([table["epsilon_claimed"][kept], table[name][kept]], 1)
            dots(axes, points, common["looks"][name])
        scale(axes, "x", Quantity("budget", "budget, epsilon", wide=True), common["budgets"])
        scale(axes, "y", Quantity("epsilon", "epsilon spent", wide=True), common["values"])

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        kind_of = panels[0].run.kind_of
        keys = [
            LegendKey(f"{accountant(name)} ({kind_of(name)})", each, "point")
            for name, each in common["looks"].items()
        ]
        return [*keys, LegendKey("spent = budget", REFERENCE)]

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "A point is a client that took part."
        tables = [panel.run.table("guarantees") for panel in panels]
        infinite = [
            accountant(name)
            for name in common["looks"]
            if any(np.isinf(table[name]).any() for table in tables if name in table)
        ]
        if infinite:
            text += f" Clients for whom {listed(infinite)} shows no privacy (epsilon infinite)"
            text += " have no point."
        return f"{text} From guarantees.parquet."


def spent(run: Run) -> list[str]:
    """The columns of epsilon that the run itself states, rigorous first."""
    table = run.table("guarantees")
    columns = [name for name in table if name.startswith("epsilon_") and name != "epsilon_claimed"]
    stated = {column(one.accountant) for one in run.guarantees}
    return sorted(
        (
            name
            for name in columns
            if np.isfinite(table[name]).any() and (not stated or name in stated)
        ),
        key=lambda name: run.kind_of(name) != "rigorous",
    )
