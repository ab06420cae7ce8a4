"""The path of the model, seen in a plane that is common to all runs (001 Fig. 3)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from raydpfl.methods.probes.trajectory import project_paths
from raydpfl.report.figures.base import Missing, Need, Piece, PlotItem, seed_note
from raydpfl.report.labels import Quantity
from raydpfl.report.plot_style import INK, Axes, LegendKey, Look, look, scale, thin
from raydpfl.report.run_reader import LabelledRun, Panel, Run

MAX_MODELS = 80  # models of a run that are drawn, at most
MIN_MODELS = 8  # and at least
MAX_NUMBERS = 200_000_000  # of all models together that are read

ASPECT_RATIO = 1.5  # a panel's width over its height


class ModelPath(PlotItem):
    """Every model of a run on the two principal directions of the models of all runs together, so
    that paths in one figure can be compared, whatever panel they are in; of several seeds the first
    run, as other seeds begin elsewhere.
    """

    need: ClassVar[Need] = Need("trajectory", (), "measure: [trajectory]")
    heading: ClassVar[str] = "Path of the model on common axes"

    kind: str = "trajectory"

    def make(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        sizes = {case.run.path.shape[1] for case in cases if case.run.path is not None}
        if len(sizes) < 2:
            return super().make(cases)
        counts = ", ".join(f"{size:,}" for size in sorted(sizes))
        reason = f"models of {counts} parameters have no axes in common"
        return [Missing(self.title or self.headline(), reason)]

    def prepare(self, panels: Sequence[Panel]) -> Any:
        runs = [*dict.fromkeys(group.runs[0] for panel in panels for group in panel.groups)]
        paths = [models_of(run, len(runs)) for run in runs]
        if sum(len(path) for path in paths) < 2:
            return None
        optima = [run.optimum for run in runs if run.optimum is not None]
        plane_paths, marks = project_paths(paths, optima[0] if optima else None)
        return dict(zip(runs, plane_paths, strict=True)), marks

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        paths, marks = common
        for group in panel.groups:
            line_look = look(group.place)
            path = paths[group.runs[0]]
            marker: Any = {"marker": line_look.marker, "markersize": 3}
            marker["markevery"] = max(1, len(path) // 20)
            axes.plot(*path.T, alpha=0.85, **marker, **line_look.line)
            axes.plot(*path[0], marker="o", markersize=7, color=INK, zorder=5)
            axes.plot(*path[-1], marker="X", markersize=8, color=line_look.colour, zorder=5)
        for mark in marks:
            axes.plot(*mark, marker="*", markersize=13, color=INK, zorder=6)
        all_points = np.concatenate([*paths.values(), marks])
        for axis_name, words, values in zip("xy", ("first", "second"), all_points.T, strict=True):
            scale(axes, axis_name, Quantity("direction", f"{words} direction"), values)
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        width = max(right - left, ASPECT_RATIO * (top - bottom))  # of an inch as much across as up
        middle, centre = (left + right) / 2, (bottom + top) / 2
        axes.set_xlim(middle - width / 2, middle + width / 2)
        axes.set_ylim(centre - width / ASPECT_RATIO / 2, centre + width / ASPECT_RATIO / 2)
        axes.set_aspect("equal", adjustable="box")

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        signs = {"start": "o", "end": "X"} | ({"optimum": "*"} if len(common[1]) else {})
        marks = [LegendKey(name, Look(INK, "none", sign), "point") for name, sign in signs.items()]
        return [*super().keys(panels, common), *marks]

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        runs, marks = map(len, common)
        models_text = "the models of all runs together" if runs > 1 else "the models of the run"
        text = f"Models of the rounds, on the two principal directions of {models_text}."
        text += " Distances are those of the parameters, seen in this plane."
        files = "trajectory.bin and optimum.bin" if marks else "trajectory.bin"
        return f"{text}{seed_note(panels)} From {files}."


def models_of(run: Run, runs: int) -> np.ndarray:
    """The models that are drawn of one of so many runs, float32 [n, d]: evenly chosen, fewer of
    large ones, and none with a number that is not finite.
    """
    path = run.path
    assert path is not None  # see `Run.has`
    max_points = max(MIN_MODELS, min(MAX_MODELS, MAX_NUMBERS // (runs * path.shape[1])))
    points = path[thin(len(path), max_points)]
    return points[[bool(np.isfinite(model).all()) for model in points]]
