"""Norms of updates before and after bounding, with the bound in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Need, Piece, Placed, PlotItem, first_seed
from raydpfl.report.labels import quantity
from raydpfl.report.plot_style import REFERENCE, LegendKey, look, scale
from raydpfl.report.run_reader import LabelledRun, Panel, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS = {
    "before bounding": replace(look(0), marker=""),
    "after bounding": replace(look(1), marker=""),
    "bound in force": REFERENCE,
}
QUANTILES = (0.1, 0.5, 0.9)


class Norms(PlotItem):
    """Quantiles over the clients of each round: of the norms of what they would have sent, and of
    what bounding left (`norm` times `factor` of clients.parquet), with the bound of the round.
    """

    need: ClassVar[Need] = Need("rounds", ("norm_p10", "norm_p50", "norm_p90"))
    placed: ClassVar[tuple[Placed, ...]] = (Placed("Bounding and noise", {}),)
    per_group: ClassVar[bool] = True
    heading: ClassVar[str] = "Norms before and after bounding"

    kind: str = "norms"

    def make(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        recorded = self.title or any(_recorded(case.run) for case in cases)
        item = self if recorded else self.model_copy(update={"title": "Norms before bounding"})
        return super(Norms, item).make(cases)

    def prepare(self, panels: Sequence[Panel]) -> Any:
        return {panel.run: lines_of(panel.run) for panel in panels}

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        for name, (x, *values) in common[panel.run].items():
            drawn = LOOKS[name]
            if len(values) == 3:
                low, _, high = values
                axes.fill_between(x, low, high, color=drawn.colour, alpha=0.2, linewidth=0)
            width: Any = {"linewidth": 1.2} if drawn is REFERENCE else {}
            axes.plot(x, values[len(values) // 2], **width, **drawn.line)
        scale(axes, "x", quantity("round"), common[panel.run]["before bounding"][0])
        every = [line for lines in common.values() for _, *band in lines.values() for line in band]
        scale(axes, "y", quantity("norm"), np.concatenate(every))

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        return [
            LegendKey(name, drawn)
            for name, drawn in LOOKS.items()
            if any(name in lines for lines in common.values())
        ]

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "Lines are medians over the clients of a round, bands their 10 and 90 % quantiles."
        files = "rounds.parquet"
        if any("after bounding" in lines for lines in common.values()):
            text += " After bounding: norm times factor, before any noise."
            files += " and clients.parquet"
        elif not all(run.per_sample for run in common):
            text += " What bounding left is drawn of runs with measure: [clients]."
        if any(run.per_sample for run in common):
            text += " Where samples are clipped, the bound is that of a sample's gradient at each"
            text += " step, and is not drawn next to the norms of updates."
        return f"{text}{first_seed(panels)} From {files}."


def _recorded(run: Run) -> bool:
    """Whether it is known what bounding left of each update."""
    return not run.per_sample and run.has("clients", ("round", "norm", "factor"))


def lines_of(run: Run) -> dict[str, list[np.ndarray]]:
    """What is drawn of a run, by its name in the legend: rounds, and three quantiles of norms or
    one bound, float64 [T] each.
    """
    rounds, *norms, bound = (
        run.series(name) for name in ("round", "norm_p10", "norm_p50", "norm_p90", "bound")
    )
    lines: dict[str, Any] = {"before bounding": [rounds, *norms]}
    if _recorded(run):
        clients = run.table("clients")
        bounded = clients["norm"] * clients["factor"]
        finite = np.isfinite(clients["norm"]) & np.isfinite(clients["factor"])
        order = np.argsort(clients["round"][finite], kind="stable")
        places, first = np.unique(clients["round"][finite][order], return_index=True)
        by_round = np.split(bounded[finite][order], first[1:])
        quantiles = [np.quantile(values, QUANTILES) for values in by_round]
        lines["after bounding"] = [places + 1, *np.array(quantiles).T]
    if not run.per_sample and bound is not None and np.isfinite(bound).any():
        lines["bound in force"] = [rounds, bound]
    return lines
