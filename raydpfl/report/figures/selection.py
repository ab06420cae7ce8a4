"""With which probability clients are selected, over their sizes and budgets (003 Fig. 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from raydpfl.report.figures.base import Need, Placed, PlotItem, first_seed, name_of, runs_of
from raydpfl.report.labels import quantity
from raydpfl.report.plot_style import REFERENCE, LegendKey, dots, look, scale, thin
from raydpfl.report.run_reader import Panel, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 500  # clients of a run that are drawn
COLUMNS = {"size": "samples", "budget": "budget"}


class SelectionProbability(PlotItem):
    """A point for each client: `of` of selection.parquet over its size or its budget."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"x": "budget"})
    placed: ClassVar[tuple[Placed, ...]] = tuple(Placed("Selection", {"x": x}) for x in COLUMNS)

    kind: str = "selection"
    of: str = "probability"
    x: Literal["size", "budget"] = "size"

    @property
    def column(self) -> str:
        """The column of what is across."""
        return COLUMNS[self.x]

    def needs(self) -> Need:
        hint = "measure: [selection], and a selection that draws clients one by one"
        return Need("selection", (self.column, self.of), hint)

    def slug(self) -> str:
        return name_of("selection", "by", self.x)

    def headline(self) -> str:
        return f"Probability of selection over the clients' {self.x}s"

    def prepare(self, panels: Sequence[Panel]) -> Any:
        runs = runs_of(panels)
        by_size = [points(runs[0], self.column, "share")] if self.x == "size" else []
        return np.concatenate([*(points(run, self.column, self.of) for run in runs), *by_size])

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        for group in panel.groups:
            clients = points(group.runs[0], self.column, self.of)
            dots(axes, clients[thin(len(clients), MOST)], look(group.place), alpha=0.6)
        if self.x == "size":
            axes.plot(*points(panel.run, self.column, "share").T, linewidth=1, **REFERENCE.line)
        scale(axes, "x", quantity(self.column), common[:, 0])
        scale(axes, "y", quantity(self.of), common[:, 1])
        axes.set_ylim(bottom=0)

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        keys = [LegendKey(key.label, key.look, "point") for key in super().keys(panels, common)]
        return [*keys, LegendKey("by size alone", REFERENCE)] if self.x == "size" else keys

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "A point is a client: the probability of a draw, as the selection has it."
        if self.x == "budget":
            text += " Clients without a budget have no point."
        return f"{text}{first_seed(panels)} From selection.parquet."


def points(run: Run, x: str, y: str) -> np.ndarray:
    """Both columns of the clients that have both, float64 [n, 2], by the first."""
    table = run.table("selection")
    if y not in table:
        return np.empty((0, 2))
    finite = np.isfinite(table[x]) & np.isfinite(table[y])
    pairs = np.stack([table[x][finite], table[y][finite]], 1)
    return pairs[np.argsort(pairs[:, 0], kind="stable")]
