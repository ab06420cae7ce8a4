"""Norms of updates before and after bounding, with the bound in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Apart, Need, Placed
from raydpfl.report.reading import Panel, Run
from raydpfl.report.style import REFERENCE, Key, look, scale
from raydpfl.report.words import quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEFORE = look(0)
AFTER = look(1)
QUANTILES = (0.1, 0.5, 0.9)


class Norms(Apart):
    """Quantiles over the clients of each round: of the norms of what they would have sent, and of
    what bounding left (`norm` times `factor` of clients.parquet), with the bound of the round.
    """

    placed: ClassVar[tuple[Placed, ...]] = (Placed("Bounding and noise", {}),)

    kind: str = "norms"

    def needs(self) -> Sequence[Need]:
        return (Need("rounds", ("norm_p10", "norm_p50", "norm_p90")),)

    def headline(self) -> str:
        return "Norms before and after bounding"

    def prepare(self, panels: Sequence[Panel]) -> Any:
        runs = [panel.groups[0].runs[0] for panel in panels]
        drawn = []
        for run in runs:
            for band in (before(run), after(run)):
                drawn += [] if band is None else [*band[1:]]
            drawn += [bound for bound in [_bound(run)] if bound is not None]
        return np.concatenate(drawn)

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        run = panel.groups[0].runs[0]
        for band, drawn in ((before(run), BEFORE), (after(run), AFTER)):
            if band is None:
                continue
            x, low, middle, high = band
            axes.fill_between(x, low, high, color=drawn.colour, alpha=0.2, linewidth=0)
            axes.plot(x, middle, color=drawn.colour, linestyle=drawn.dash)
        bound = _bound(run)
        x = _series(run, "round")
        if bound is not None:
            axes.plot(x, bound, color=REFERENCE.colour, linestyle=REFERENCE.dash, linewidth=1.2)
        scale(axes, "x", quantity("round"), x)
        scale(axes, "y", quantity("norm"), common)

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[Key]:
        runs = [panel.groups[0].runs[0] for panel in panels]
        keys = [Key("before bounding", _bare(BEFORE))]
        if any(after(run) is not None for run in runs):
            keys.append(Key("after bounding", _bare(AFTER)))
        if any(_bound(run) is not None for run in runs):
            keys.append(Key("bound in force", REFERENCE))
        return keys

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        runs = [panel.groups[0].runs[0] for panel in panels]
        text = "Lines are medians over the clients of a round, bands their 10 and 90 % quantiles."
        if any(after(run) is not None for run in runs):
            text += " After bounding: norm times factor, before any noise."
        if any(run.per_sample for run in runs):
            text += " The bound of these runs is that of a sample's gradient at each step, and"
            text += " no bound is drawn beside the norms of updates."
        if any(len(panel.groups[0].runs) > 1 for panel in panels):
            text += " Of several seeds, the first."
        files = "rounds.parquet and clients.parquet" if "factor" in text else "rounds.parquet"
        return f"{text} From {files}."


def _bare(drawn: Any) -> Any:
    return type(drawn)(drawn.colour, drawn.dash, "")


def _series(run: Run, name: str) -> np.ndarray:
    found = run.series(name)
    return np.empty(0) if found is None else found


def before(run: Run) -> tuple[np.ndarray, ...]:
    """Rounds, and three quantiles of the norms, float64 [T] each."""
    return (_series(run, "round"), *(_series(run, f"norm_p{q}") for q in (10, 50, 90)))


def after(run: Run) -> tuple[np.ndarray, ...] | None:
    """Rounds, and three quantiles of what bounding left; None where clients were not recorded, or
    where no update is bounded.
    """
    clients = run.table("clients")
    if run.per_sample or not run.has("clients", ("round", "norm", "factor")):
        return None
    bounded = clients["norm"] * clients["factor"]
    rounds = np.unique(clients["round"])
    by_round = [bounded[clients["round"] == each] for each in rounds]
    known = [values[np.isfinite(values)] for values in by_round]
    kept = np.array([len(values) > 0 for values in known])
    found = np.array([np.quantile(values, QUANTILES) for values in known if len(values)])
    return (rounds[kept] + 1, *found.T)


def _bound(run: Run) -> np.ndarray | None:
    bound = run.series("bound")
    if run.per_sample or bound is None or not np.isfinite(bound).any():
        return None
    return bound
