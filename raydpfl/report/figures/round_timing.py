"""Where the seconds of a run go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Apart, Need, Placed
from raydpfl.report.labels import Quantity, number
from raydpfl.report.plot_style import Key, look, scale
from raydpfl.report.run_reader import Panel, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The phases of a round, in their order, in words.
PHASES = {
    "select": "select the cohort",
    "collect": "clients train",
    "account": "account",
    "server": "server's step",
    "record": "record",
    "evaluate": "evaluate",
}


class Phases(Apart):
    """The seconds of all rounds by phase, a bar each; of several seeds the mean."""

    placed: ClassVar[tuple[Placed, ...]] = (Placed("Time", {}),)

    kind: str = "phases"

    def needs(self) -> Sequence[Need]:
        return (Need("rounds", ("seconds_collect",)),)

    def headline(self) -> str:
        return "Seconds by phase"

    def prepare(self, panels: Sequence[Panel]) -> Any:
        return max(max(spent(panel.groups[0].runs).values()) for panel in panels)

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        seconds = spent(panel.groups[0].runs)
        total = sum(seconds.values()) or 1.0
        places = np.arange(len(seconds))[::-1]
        axes.barh(places, [*seconds.values()], color=look(panel.groups[0].place).colour, height=0.6)
        for place, value in zip(places, seconds.values(), strict=True):
            said = f"{number(round(value, 4))} s, {value / total:.0%}"
            size = axes.xaxis.get_ticklabels()[0].get_fontsize()
            given: Any = {"textcoords": "offset points", "va": "center", "fontsize": size}
            axes.annotate(said, (value, place), (4, 0), **given)
        axes.set_yticks(places, [*seconds])
        axes.grid(axis="y", visible=False)
        scale(axes, "x", Quantity("total", "all rounds together", "s"), [0.0, common])
        axes.set_xlim(0, 1.4 * common or 1.0)

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[Key]:
        return []

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "Seconds of the coordinator in each phase, over all rounds; clients train is the"
        text += " time until the last of them has answered."
        if any(len(panel.groups[0].runs) > 1 for panel in panels):
            text += " Means over the seeds."
        return f"{text} From rounds.parquet."


def spent(runs: Sequence[Run]) -> dict[str, float]:
    """Seconds by phase, in words, those that a run has; the mean over the runs."""
    found = {}
    for name, words in PHASES.items():
        values = [run.series(f"seconds_{name}") for run in runs]
        sums = [float(np.nansum(each)) for each in values if each is not None]
        if sums:
            found[words] = float(np.mean(sums))
    return found
