"""With which probability clients are selected, over their sizes and budgets (003 Fig. 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from raydpfl.report.figures.base import (
    Need,
    Placed,
    PlotItem,
    first_seed,
    group_keys,
    name_of,
    runs_of,
)
from raydpfl.report.labels import quantity
from raydpfl.report.plot_style import REFERENCE, LegendKey, dots, look, scale, thin
from raydpfl.report.run_reader import Panel, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 500  # clients of a run that are drawn
COLUMNS = {"size": "samples", "budget": "budget"}
HINT = "measure: [selection], and a selection that draws clients one by one"


class SelectionProbability(PlotItem):
    """A point for each client: `of` of selection.parquet over its size or its budget."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"x": "budget"})
    placed: ClassVar[tuple[Placed, ...]] = tuple(Placed("Selection", {"x": x}) for x in COLUMNS)

    kind: str = "selection"
    of: str = "probability"
    x: Literal["size", "budget"] = "size"

    def needs(self) -> Need:
        return Need("selection", (COLUMNS[self.x], self.of), HINT)

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
            dots(axes, clients[thin(len(clients), MOST)], look(group.place), alpha=0.6)
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
        return f"{text}{first_seed(panels)} From selection.parquet."

    def points(self, run: Run, y: str) -> np.ndarray:
        """Both columns of the clients that have both, float64 [n, 2], by what is across."""
        table = run.table("selection")
        if y not in table:
            return np.empty((0, 2))
        pairs = np.stack([table[COLUMNS[self.x]], table[y]], 1)
        pairs = pairs[np.isfinite(pairs).all(1)]
        return pairs[np.argsort(pairs[:, 0], kind="stable")]
