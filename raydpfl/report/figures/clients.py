"""A point for each client: what its noise guarantees it next to the budget that it asked for, and
with which probability it is selected (003).
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from raydpfl.privacy import RIGOROUS, column
from raydpfl.report.figures.base import Need, PlotItem, group_keys, name_of, runs_of, seed_note
from raydpfl.report.labels import Quantity, accountant, accountant_words, join_names, quantity
from raydpfl.report.plot_style import REFERENCE, Axes, LegendKey, dots, look, scale, thin
from raydpfl.report.run_reader import Panel, Run

MAX_EPSILON_POINTS = 400  # clients of an accountant that are drawn
MAX_SELECTION_POINTS = 500  # clients of a run whose probabilities are
CLAIMED_EPSILON = "epsilon_claimed"
COLUMNS = {"size": "samples", "budget": "budget"}


class PersonalEpsilon(PlotItem):
    """Epsilon of every client that took part, by accountant, over its budget."""

    need: ClassVar[Need] = Need("guarantees", (CLAIMED_EPSILON,), "noise at local steps by budgets")
    per_group: ClassVar[bool] = True
    heading: ClassVar[str] = "Every client's epsilon against its budget"

    kind: str = "personal"

    def prepare(self, panels: Sequence[Panel]) -> Any:
        """By column of epsilon its look, and the numbers of all runs."""
        names = dict.fromkeys(name for panel in panels for name in epsilons_of(panel.run))
        tables = [panel.run.table("guarantees") for panel in panels]
        budgets = np.concatenate([table[CLAIMED_EPSILON] for table in tables])
        if not names or not np.isfinite(budgets).any():
            return None
        values = {name: np.concatenate([t[name] for t in tables if name in t]) for name in names}
        return {name: look(place) for place, name in enumerate(names)}, values, budgets

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        looks, values, budgets = common
        table = panel.run.table("guarantees")
        clients = thin(len(table[CLAIMED_EPSILON]), MAX_EPSILON_POINTS)
        ends = [np.nanmin(budgets), np.nanmax(budgets)]
        axes.plot(ends, ends, linewidth=1, **REFERENCE.line)
        for name in epsilons_of(panel.run):
            points = np.stack([table[CLAIMED_EPSILON][clients], table[name][clients]], 1)
            dots(axes, points, looks[name])
        scale(axes, "x", Quantity("budget", "budget, epsilon", wide=True), budgets)
        y_quantity = Quantity("epsilon", "epsilon spent", wide=True)
        scale(axes, "y", y_quantity, np.concatenate([budgets, *values.values()]))

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        looks = common[0].items()
        keys = [LegendKey(accountant_words(name), key_look, "point") for name, key_look in looks]
        return [*keys, LegendKey("spent = budget", REFERENCE)]

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "A point is a client that took part."
        values = common[1].items()
        infinite = [accountant(name) for name, column in values if np.isinf(column).any()]
        if infinite:
            text += f" Clients for whom {join_names(infinite)} shows no privacy (epsilon infinite)"
            text += " have no point."
        return f"{text} From guarantees.parquet."


def epsilons_of(run: Run) -> list[str]:
    """The columns of epsilon that the run itself states, rigorous first."""
    table = run.table("guarantees")
    stated_columns = {column(guarantee.accountant) for guarantee in run.guarantees}
    names = [name for name in table if name.startswith("epsilon_") and name != CLAIMED_EPSILON]
    names = [name for name in names if np.isfinite(table[name]).any()]
    names = [name for name in names if not stated_columns or name in stated_columns]
    return sorted(names, key=lambda name: name not in RIGOROUS)


class SelectionProbability(PlotItem):
    """A point for each client: `of` of selection.parquet over its size or its budget."""

    kind: str = "selection"
    of: str = "probability"
    x: Literal["size", "budget"] = "size"

    def needs(self) -> Need:
        hint = "measure: [selection], and a selection that draws clients one by one"
        return Need("selection", (COLUMNS[self.x], self.of), hint)

    def slug(self) -> str:
        return name_of("selection", "by", self.x)

    def headline(self) -> str:
        return f"Probability of selection over the clients' {self.x}s"

    def prepare(self, panels: Sequence[Panel]) -> Any:
        runs = runs_of(panels)
        by_size = [self.points(runs[0], "share")] if self.x == "size" else []
        return np.concatenate([*(self.points(run, self.of) for run in runs), *by_size])

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        for group in panel.groups:
            clients = self.points(group.runs[0], self.of)
            points = clients[thin(len(clients), MAX_SELECTION_POINTS)]
            dots(axes, points, look(group.place), alpha=0.6)
        if self.x == "size":
            axes.plot(*self.points(panel.run, "share").T, linewidth=1, **REFERENCE.line)
        scale(axes, "x", quantity(COLUMNS[self.x]), common[:, 0])
        scale(axes, "y", quantity(self.of), common[:, 1])
        axes.set_ylim(bottom=0)

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        by_size = [LegendKey("by size alone", REFERENCE)] if self.x == "size" else []
        return [*group_keys(panels, "point"), *by_size]

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "A point is a client: the probability of a draw, as the selection has it."
        if self.x == "budget":
            text += " Clients without a budget have no point."
        return f"{text}{seed_note(panels)} From selection.parquet."

    def points(self, run: Run, y: str) -> np.ndarray:
        """Both columns of the clients that have both, float64 [n, 2], by what is across."""
        points = run.points("selection", COLUMNS[self.x], y)[1]
        return points[np.argsort(points[:, 0], kind="stable")]


class SelectionMap(PlotItem):
    """A point for each client, its size across, its budget up and its area the probability of a
    draw (003 Fig. 3).
    """

    need: ClassVar[Need] = Need(
        "selection",
        ("samples", "budget", "probability"),
        "measure: [selection], of clients with budgets that are drawn one by one",
    )
    per_group: ClassVar[bool] = True
    heading: ClassVar[str] = "Probability of selection by size and budget"

    kind: str = "selection_map"

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        _, clients = panel.run.points(self.need.table, *self.need.columns)
        sizes, budgets, chances = clients[thin(len(clients), MAX_SELECTION_POINTS)].T
        style: Any = {"s": 300 * chances / chances.max(), "color": look(0).colour, "alpha": 0.6}
        axes.scatter(sizes, budgets, **style)
        scale(axes, "x", quantity("samples"), sizes)
        scale(axes, "y", quantity("budget"), budgets)

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "A point is a client; its area is the probability of a draw, relative to the largest"
        return f"{text} of the panel.{seed_note(panels)} From selection.parquet."
