"""Which classes are taken for which."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from raydpfl.report.figures.base import Need, PlotItem, seed_note
from raydpfl.report.plot_style import PALETTE, Axes, thin
from raydpfl.report.run_reader import Panel, Run

MAX_NUMBERED_CLASSES = 12  # classes, up to which each cell has its number
TICKS = 12  # classes that are named at most
NAME_LIMIT = 10  # characters of a class's name


class Confusion(PlotItem):
    """The confusion matrix of the last evaluation as a heat map: of the samples of each class, in a
    row, the share that was taken for each class. Of several seeds the samples are added up.
    """

    per_group: ClassVar[bool] = True
    heading: ClassVar[str] = "Which classes are taken for which"

    kind: str = "confusion"
    of: Literal["test", "validation"] = "test"  # the set

    def needs(self) -> Need:
        hint = "evaluate.metrics: [confusion_matrix]"
        return Need(f"{self.of}_confusion_matrix", ("actual", "predicted", "samples"), hint)

    def prepare(self, panels: Sequence[Panel]) -> Any:
        return {panel: matrix_of(panel.groups[0].runs, self.needs().table) for panel in panels}

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        from matplotlib.colors import LinearSegmentedColormap, to_rgba

        counts, names, _ = common[panel]
        classes = len(counts)
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
        deep = to_rgba(PALETTE[0])
        colours = LinearSegmentedColormap.from_list("share", [(*deep[:3], 0.0), deep])
        edges = np.arange(classes + 1) - 0.5
        axes.pcolormesh(edges, edges, shares, cmap=colours, vmin=0.0, vmax=1.0)
        for actual, predicted in np.argwhere(shares > 0) if classes <= MAX_NUMBERED_CLASSES else ():
            share = shares[actual, predicted]
            style: Any = {"ha": "center", "va": "center", "fontsize": 7}
            style["color"] = "white" if share > 0.6 else None
            axes.text(predicted, actual, f"{100 * share:.0f}", **style)
        ticks = thin(classes, TICKS)
        labels = [names[place] for place in ticks]
        rotation = 90 if max(map(len, labels)) > 2 else 0
        axes.set_xticks(ticks, labels, rotation=rotation, fontsize=8)
        axes.set_yticks(ticks, labels, fontsize=8)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_xlabel("taken for")
        axes.set_ylabel("class")

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        rounds = sorted({last + 1 for *_, last in common.values()})  # as curves count them
        text = "Of the samples of each class, in a row, the share in percent that was taken for "
        text += f"each class, at the last evaluation (round {', '.join(map(str, rounds))})."
        text += seed_note(panels, " Samples of all seeds together.")
        return f"{text} From {self.needs().table}.parquet."


def matrix_of(runs: Sequence[Run], table: str) -> tuple[np.ndarray, list[str], int]:
    """The last evaluation of these runs, added up: the samples of each class (rows) that were taken
    for each, float64 [classes, classes]; the names of the classes; the round.
    """
    tables = []
    for columns in (run.table(table) for run in runs):
        rows = columns["round"] == columns["round"].max()
        tables.append({name: values[rows].astype(int) for name, values in columns.items()})
    names = [str(name) for name in runs[0].summary.get("class_names") or ()]
    sizes = [int(table[name].max()) + 1 for table in tables for name in ("actual", "predicted")]
    names = names or [str(place) for place in range(max(sizes))]
    counts = np.zeros([max(*sizes, len(names))] * 2)
    for columns in tables:
        np.add.at(counts, (columns["actual"], columns["predicted"]), columns["samples"])
    labels = [name if len(name) <= NAME_LIMIT else f"{name[: NAME_LIMIT - 2]}.." for name in names]
    return counts, labels, int(tables[0]["round"][0])
