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
ASKED = "epsilon_claimed"


class PersonalEpsilon(PlotItem):
    """Epsilon of every client that took part, by accountant, over its budget."""

    need: ClassVar[Need] = Need("guarantees", (ASKED,), "noise at local steps by budgets")
    placed: ClassVar[tuple[Placed, ...]] = (Placed("Privacy", {}),)
    per_group: ClassVar[bool] = True
    heading: ClassVar[str] = "Every client's epsilon against its budget"

    kind: str = "personal"

    def prepare(self, panels: Sequence[Panel]) -> Any:
        spent = {panel.run: epsilons_of(panel.run) for panel in panels}
        names = dict.fromkeys(name for epsilons in spent.values() for name in epsilons)
        tables = [run.table("guarantees") for run in spent]
        budgets = np.concatenate([table[ASKED] for table in tables])
        if not names or not np.isfinite(budgets).any():
            return None
        # numbers of each accountant over all runs
        values = {
            name: np.concatenate([table[name] for table in tables if name in table])
            for name in names
        }
        looks = {name: look(place) for place, name in enumerate(names)}
        return {"looks": looks, "budgets": budgets, "values": values, "spent": spent}

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        table = panel.run.table("guarantees")
        clients = thin(len(table[ASKED]), MOST)
        budgets = common["budgets"][np.isfinite(common["budgets"])]
        ends = [budgets.min(), budgets.max()]
        axes.plot(ends, ends, linewidth=1, **REFERENCE.line)
        for name in common["spent"][panel.run]:
            points = np.stack([table[ASKED][clients], table[name][clients]], 1)
            dots(axes, points, common["looks"][name])
        values = np.concatenate([common["budgets"], *common["values"].values()])
        scale(axes, "x", Quantity("budget", "budget, epsilon", wide=True), common["budgets"])
        scale(axes, "y", Quantity("epsilon", "epsilon spent", wide=True), values)

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        kind_of = panels[0].run.kind_of
        keys = [
            LegendKey(f"{accountant(name)} ({kind_of(name)})", drawn, "point")
            for name, drawn in common["looks"].items()
        ]
        return [*keys, LegendKey("spent = budget", REFERENCE)]

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "A point is a client that took part."
        values = common["values"].items()
        infinite = [accountant(name) for name, column in values if np.isinf(column).any()]
        if infinite:
            text += f" Clients for whom {listed(infinite)} shows no privacy (epsilon infinite)"
            text += " have no point."
        return f"{text} From guarantees.parquet."


def epsilons_of(run: Run) -> list[str]:
    """The columns of epsilon that the run itself states, rigorous first."""
    table = run.table("guarantees")
    stated = {column(one.accountant) for one in run.guarantees}
    names = [name for name in table if name.startswith("epsilon_") and name != ASKED]
    names = [name for name in names if np.isfinite(table[name]).any()]
    names = [name for name in names if not stated or name in stated]
    return sorted(names, key=lambda name: run.kind_of(name) != "rigorous")
