"""Norms of updates before and after bounding, with the bound in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Need, Piece, Placed, PlotItem, first_seed
from raydpfl.report.labels import quantity
from raydpfl.report.plot_style import REFERENCE, LegendKey, look, scale
from raydpfl.report.run_reader import LabelledRun, Panel, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEFORE = replace(look(0), marker="")
AFTER = replace(look(1), marker="")
QUANTILES = (0.1, 0.5, 0.9)


class Norms(PlotItem):
    """Quantiles over the clients of each round: of the norms of what they would have sent, and of
    what bounding left (`norm` times `factor` of clients.parquet), with the bound of the round.
    """

    placed: ClassVar[tuple[Placed, ...]] = (Placed("Bounding and noise", {}),)
    per_group: ClassVar[bool] = True
    heading: ClassVar[str] = "Norms before and after bounding"

    kind: str = "norms"

    def needs(self) -> Need:
        return Need("rounds", ("norm_p10", "norm_p50", "norm_p90"))

    def make(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        recorded = self.title or any(_recorded(case.run) for case in cases)
        item = self if recorded else self.model_copy(update={"title": "Norms before bounding"})
        return super(Norms, item).make(cases)

    def prepare(self, panels: Sequence[Panel]) -> Any:
        return {panel.run: lines_of(panel.run) for panel in panels}

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        lines = common[panel.run]
        for band, drawn in ((lines.before, BEFORE), (lines.after, AFTER)):
            if band is not None:
                x, low, middle, high = band
                axes.fill_between(x, low, high, color=drawn.colour, alpha=0.2, linewidth=0)
                axes.plot(x, middle, **drawn.line)
        x = lines.before[0]
        if lines.bound is not None:
            axes.plot(x, lines.bound, linewidth=1.2, **REFERENCE.line)
        scale(axes, "x", quantity("round"), x)
        every = [values for norms in common.values() for values in norms.values()]
        scale(axes, "y", quantity("norm"), np.concatenate(every))

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        keys = [LegendKey("before bounding", BEFORE)]
        if any(lines.after is not None for lines in common.values()):
            keys.append(LegendKey("after bounding", AFTER))
        if any(lines.bound is not None for lines in common.values()):
            keys.append(LegendKey("bound in force", REFERENCE))
        return keys

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "Lines are medians over the clients of a round, bands their 10 and 90 % quantiles."
        files = "rounds.parquet"
        if any(lines.after is not None for lines in common.values()):
            text += " After bounding: norm times factor, before any noise."
            files += " and clients.parquet"
        elif not all(run.per_sample for run in common):
            text += " What bounding left is drawn of runs with measure: [clients]."
        if any(run.per_sample for run in common):
            text += " Where samples are clipped, the bound is that of a sample's gradient at each"
            text += " step, and is not drawn next to the norms of updates."
        return f"{text}{first_seed(panels)} From {files}."


@dataclass(frozen=True)
class Lines:
    """What is drawn of a run: rounds and three quantiles of the norms before and after bounding,
    float64 [T] each, and the bound of each round; None for what there is not.
    """

    before: tuple[np.ndarray, ...]
    after: tuple[np.ndarray, ...] | None
    bound: np.ndarray | None

    def values(self) -> list[np.ndarray]:
        """All that stands on the axis of norms."""
        bands = [*self.before[1:], *(self.after or ((),))[1:]]
        return bands if self.bound is None else [*bands, self.bound]


def lines_of(run: Run) -> Lines:
    """What is drawn of a run."""
    columns = [run.series(name) for name in ("round", "norm_p10", "norm_p50", "norm_p90")]
    before = tuple(column for column in columns if column is not None)  # all of them: see `needs`
    bound = run.series("bound")
    if run.per_sample or bound is None or not np.isfinite(bound).any():
        bound = None
    return Lines(before, _after(run), bound)


def _recorded(run: Run) -> bool:
    """Whether it is known what bounding left of each update."""
    return not run.per_sample and run.has("clients", ("round", "norm", "factor"))


def _after(run: Run) -> tuple[np.ndarray, ...] | None:
    """Rounds, and three quantiles of what bounding left; None where that is not known."""
    if not _recorded(run):
        return None
    clients = run.table("clients")
    finite = np.isfinite(clients["norm"]) & np.isfinite(clients["factor"])
    order = np.argsort(clients["round"][finite], kind="stable")
    bounded = (clients["norm"] * clients["factor"])[finite][order]
    rounds, first = np.unique(clients["round"][finite][order], return_index=True)
    quantiles = [np.quantile(values, QUANTILES) for values in np.split(bounded, first[1:])]
    return (rounds + 1, *np.array(quantiles).T)
