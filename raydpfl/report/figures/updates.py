"""Clients' updates: norms before and after bounding, and norms over angles to the last global
update (000 Figs 1, 2, 5-11).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Need, Piece, PlotItem, seed_note
from raydpfl.report.labels import quantity
from raydpfl.report.plot_style import INK, REFERENCE, STAR, Axes, LegendKey, dots, look, scale, thin
from raydpfl.report.run_reader import LabelledRun, Panel, Run

LOOKS = {
    "before bounding": replace(look(0), marker=""),
    "after bounding": replace(look(1), marker=""),
    "bound in force": REFERENCE,
}
QUANTILES = (0.1, 0.5, 0.9)
MAX_THIRD_POINTS = 450  # points of each third of a run
MAX_FIGURE_POINTS = 6000  # points of a figure
THIRDS = ("first", "middle", "last")


class Norms(PlotItem):
    """Quantiles over the clients of each round: of the norms of what they would have sent, and of
    what bounding left (`norm` times `factor` of clients.parquet), with the bound of the round.
    """

    need: ClassVar[Need] = Need("rounds", ("norm_p10", "norm_p50", "norm_p90"))
    per_group: ClassVar[bool] = True
    heading: ClassVar[str] = "Norms before and after bounding"

    kind: str = "norms"

    def make(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        keep_title = self.title or any(_has_factors(case.run) for case in cases)
        item = self if keep_title else self.model_copy(update={"title": "Norms before bounding"})
        return super(Norms, item).make(cases)

    def prepare(self, panels: Sequence[Panel]) -> Any:
        return {panel.run: lines_of(panel.run) for panel in panels}

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        for name, (x, *values) in common[panel.run].items():
            line_look = LOOKS[name]
            if len(values) == 3:
                low, _, high = values
                axes.fill_between(x, low, high, color=line_look.colour, alpha=0.2, linewidth=0)
            width: Any = {"linewidth": 1.2} if line_look is REFERENCE else {}
            axes.plot(x, values[len(values) // 2], **width, **line_look.line)
        scale(axes, "x", quantity("round"), common[panel.run]["before bounding"][0])
        norms = [line for lines in common.values() for _, *band in lines.values() for line in band]
        scale(axes, "y", quantity("norm"), np.concatenate(norms))

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        names = {name for lines in common.values() for name in lines}
        return [LegendKey(name, key_look) for name, key_look in LOOKS.items() if name in names]

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
        return f"{text}{seed_note(panels)} From {files}."


def _has_factors(run: Run) -> bool:
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
    if _has_factors(run):
        places, pairs = run.points("clients", "norm", "factor")
        order = np.argsort(places, kind="stable")
        places, round_starts = np.unique(places[order], return_index=True)
        by_round = np.split(pairs[order].prod(1), round_starts[1:])
        quantiles = [np.quantile(values, QUANTILES) for values in by_round]
        lines["after bounding"] = [places + 1, *np.array(quantiles).T]
    if _has_bound(run):
        lines["bound in force"] = [rounds, bound]
    return lines


def _has_bound(run: Run) -> bool:
    return not run.per_sample and run.has("rounds", ("bound",))


@dataclass(frozen=True)
class Third:
    """The first, middle or last rounds of a run. `name`: which these are, in words; `points`: those
    that are drawn, float64 [n, 2], of `total`; `mean`: the point of the mean update, float64 [n, 2]
    with n = 0 where it is not known.
    """

    name: str
    points: np.ndarray
    total: int
    mean: np.ndarray


class Cloud(PlotItem):
    """A point for each client and round, `of` (an angle) across and `y` (a norm) up, of the first,
    middle and last rounds; and the mean update in each of these thirds.

    Points are left out evenly where there are many. The mean update is at the median of
    `update_angle` and `update_norm` over the rounds of a third; it is not drawn where clients send
    something else than updates, whose norms are not of its kind.
    """

    per_group: ClassVar[bool] = True
    heading: ClassVar[str] = "Norms and angles of clients' updates"

    kind: str = "cloud"
    of: str = "angle"
    y: str = "norm"

    def needs(self) -> Need:
        return Need("clients", (self.of, self.y), "measure: [clients, bounding]")

    def prepare(self, panels: Sequence[Panel]) -> Any:
        max_points = min(MAX_THIRD_POINTS, MAX_FIGURE_POINTS // (len(THIRDS) * len(panels)))
        return {panel.run: thirds_of(panel.run, self.of, self.y, max_points) for panel in panels}

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        run = panel.run
        for place, third in enumerate(common[run]):
            dots(axes, third.points, look(place), alpha=0.45, size=3)
        for place, third in enumerate(common[run]):
            star: Any = {"marker": "*", "markeredgewidth": 0}
            axes.plot(*third.mean.T, markersize=15, color=INK, zorder=4, **star)
            axes.plot(*third.mean.T, markersize=9, color=look(place).colour, zorder=5, **star)
        if _has_bound(run):
            bound = run.table("rounds")["bound"]
            axes.axhline(bound[np.isfinite(bound)][-1], color=INK, linestyle=REFERENCE.dash)
        thirds = [third for thirds in common.values() for third in thirds]
        reach = np.concatenate([part for third in thirds for part in (third.points, third.mean)])
        scale(axes, "x", quantity(self.of), reach[:, 0])
        scale(axes, "y", quantity(self.y), reach[:, 1])

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        names = [[third.name for third in thirds] for thirds in common.values()]
        same_names = all(name == names[0] for name in names)
        third_names = names[0] if same_names else [f"{third} rounds" for third in THIRDS]
        keys = [LegendKey(name, look(place), "point") for place, name in enumerate(third_names)]
        mean = [LegendKey("mean update", STAR, "point")] if _has_mean(common) else []
        bound = [LegendKey("last bound", REFERENCE)] if any(map(_has_bound, common)) else []
        return [*keys, *mean, *bound]

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        thirds = [third for thirds in common.values() for third in thirds]
        text = "A point is what one client would send in one round without a bound."
        drawn_count = sum(len(third.points) for third in thirds)
        total = sum(third.total for third in thirds)
        if drawn_count < total:
            text += f" {drawn_count:,} of {total:,} points, evenly chosen."
        if _has_mean(common):
            text += " The mean update has its noise in it."
        elif all(run.sends_updates for run in common):
            text += " The mean update is not drawn: rounds.parquet has no column update_angle."
        if not all(run.sends_updates for run in common):
            text += " Where clients send no updates but models, gradients or differences to their"
            text += " state, norms are of these, and the mean update is not drawn."
        return f"{text}{seed_note(panels)} From clients.parquet and rounds.parquet."


def _has_mean(common: dict[Run, list[Third]]) -> bool:
    return any(len(third.mean) for thirds in common.values() for third in thirds)


def thirds_of(run: Run, x: str, y: str, max_points: int) -> list[Third]:
    """The thirds of a run, with so many points each at most, of these columns of its clients."""
    rounds, points = run.points("clients", x, y)
    update_rounds, updates = run.points("rounds", f"update_{x}", f"update_{y}")
    if not run.sends_updates:
        update_rounds, updates = update_rounds[:0], updates[:0]
    thirds = []
    for third in filter(len, np.array_split(np.unique(rounds), len(THIRDS))):
        cloud = points[(rounds >= third[0]) & (rounds <= third[-1])]
        third_updates = updates[(update_rounds >= third[0]) & (update_rounds <= third[-1])]
        name = f"round {third[0] + 1:.0f}"
        if len(third) > 1:
            name = f"rounds {third[0] + 1:.0f} to {third[-1] + 1:.0f}"
        mean = np.median(third_updates, 0)[None] if len(third_updates) else third_updates
        thirds.append(Third(name, cloud[thin(len(cloud), max_points)], len(cloud), mean))
    return thirds
