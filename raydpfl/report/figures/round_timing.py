"""Where the seconds of a run go."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from raydpfl.report.figures.base import Need, PlotItem, seed_note
from raydpfl.report.labels import Quantity, number
from raydpfl.report.plot_style import Axes, look, scale
from raydpfl.report.run_reader import Panel, Run

# The phases of a round, in their order, in words.
PHASES = {
    "select": "select the cohort",
    "collect": "clients train",
    "account": "account",
    "server": "server's step",
    "record": "record",
    "evaluate": "evaluate",
}


class Phases(PlotItem):
    """The seconds of all rounds by phase, a bar each; of several seeds the mean."""

    need: ClassVar[Need] = Need("rounds", ("seconds_collect",))
    per_group: ClassVar[bool] = True
    heading: ClassVar[str] = "Seconds by phase"

    kind: str = "phases"

    def prepare(self, panels: Sequence[Panel]) -> Any:
        return max(max(seconds_of(panel.groups[0].runs).values()) for panel in panels)

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        seconds = seconds_of(panel.groups[0].runs)
        total = sum(seconds.values()) or 1.0
        places = np.arange(len(seconds))[::-1]
        axes.barh(places, [*seconds.values()], color=look(panel.groups[0].place).colour, height=0.6)
        for place, value in zip(places, seconds.values(), strict=True):
            text = f"{number(round(value, 4))} s, {value / total:.0%}"
            size = axes.xaxis.get_ticklabels()[0].get_fontsize()
            style: Any = {"textcoords": "offset points", "va": "center", "fontsize": size}
            axes.annotate(text, (value, place), (4, 0), **style)
        axes.set_yticks(places, [*seconds])
        axes.grid(axis="y", visible=False)
        scale(axes, "x", Quantity("total", "all rounds together", "s"), [0.0, common])
        axes.set_xlim(0, 1.4 * common or 1.0)

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        text = "Seconds of the coordinator in each phase, over all rounds; clients train is the"
        text += " time until the last of them has answered."
        return f"{text}{seed_note(panels, ' Means over the seeds.')} From rounds.parquet."


def seconds_of(runs: Sequence[Run]) -> dict[str, float]:
    """Seconds by phase, in words, those that a run has; the mean over the runs."""
    seconds = {}
    for name, words in PHASES.items():
        columns = [run.series(f"seconds_{name}") for run in runs]
        sums = [float(np.nansum(column)) for column in columns if column is not None]
        if sums:
            seconds[words] = float(np.mean(sums))
    return seconds
