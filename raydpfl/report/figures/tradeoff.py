"""The guarantee that holds, as curves: delta over epsilon, and the power of attacks."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from raydpfl.privacy import TradeOff
from raydpfl.privacy.tradeoff import LEAST_RATE
from raydpfl.report.figures.base import PlotItem, group_keys, name_of, seed_note
from raydpfl.report.labels import Quantity, number
from raydpfl.report.plot_style import REFERENCE, Axes, LegendKey, Look, dots, look, scale
from raydpfl.report.run_reader import LabelledRun, Panel, Run

MIN_RATE = 1e-6  # the least rate, and the least delta, that is drawn
TITLES = {"attacks": "Power of any attack", "profile": "Delta at every epsilon"}
AXES = {
    "attacks": (
        Quantity("false_positives", "false-positive rate", wide=True),
        Quantity("true_positives", "true-positive rate, at most", wide=True),
    ),
    "profile": (Quantity("epsilon", "epsilon"), Quantity("delta", "delta", wide=True)),
}


class Tradeoff(PlotItem):
    """The first guarantee that holds, beyond its one epsilon. `attacks`: the largest true-positive
    rate of any attack at every false-positive rate, 1 - f, beside that of the nearest Gaussian.
    `profile`: delta over epsilon, with a point where the guarantee is stated.
    """

    kind: str = "tradeoff"
    of: Literal["attacks", "profile"] = "attacks"

    def needs(self) -> str:
        return "a guarantee that holds in summary.json, by an accountant"

    def has(self, case: LabelledRun) -> bool:
        return bool(curve_of(case.run))

    def slug(self) -> str:
        return name_of("tradeoff", self.of)

    def headline(self) -> str:
        return TITLES[self.of]

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        ends = []
        for group in panel.groups:
            run = group.runs[0]
            x, y = points(run, self.of)
            axes.plot(x, y, **look(group.place).line)
            ends.append((x, y))
            if self.of == "profile":
                guarantee = run.holds[0]
                dots(axes, [(guarantee.epsilon, guarantee.delta)], look(group.place))
            elif (mu := float(curve_of(run)["mu"])) < np.inf:
                power = TradeOff.gaussian(mu).true_positives(x)
                axes.plot(x, power, linewidth=1, **_gaussian(group.place).line)
        if self.of == "attacks":
            axes.plot([MIN_RATE, 1], [MIN_RATE, 1], linewidth=1, **REFERENCE.line)
        axis_values = zip(*ends, strict=True)
        for axis_name, axis_quantity, values in zip("xy", AXES[self.of], axis_values, strict=True):
            log = self.of == "attacks" or axis_name == "y"
            scale(axes, axis_name, axis_quantity, np.concatenate(values), log=log)

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        keys = list(group_keys(panels))
        if self.of == "profile":
            return keys
        place = panels[0].groups[0].place
        keys = keys or [LegendKey("any attack", look(place))]
        gaussian = LegendKey("nearest Gaussian", _gaussian(place))
        return [*keys, gaussian, LegendKey("blind guessing", REFERENCE)]

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        run = panels[0].run
        guarantee, curve = run.holds[0], curve_of(run)
        text = f"Of one {guarantee.unit} against an observer of {guarantee.observer}"
        text += f" ({str(guarantee.sampling).split(';')[0]}), by {guarantee.accountant}."
        if self.of == "attacks":
            rate, power = curve["at_false_positive_rate"], curve["true_positive_rate"]
            text += f" At a false-positive rate of {rate:g} no attack has a true-positive rate"
            text += f" above {power:.4g}. None that makes both errors at least {LEAST_RATE:g} of"
            text += " the time does better than against the nearest Gaussian, of mu"
            text += f" {number(float(curve['mu']))} (regret {curve['regret']:.2g})."
        return f"{text}{seed_note(panels)} From summary.json."


def curve_of(run: Run) -> Mapping[str, Any]:
    """What the summary has of the curve of the first guarantee that holds; empty: nothing."""
    return next((g.get("curve") or {} for g in run.summary.get("holds", ())), {})


def points(run: Run, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """What is drawn across and up, float64 [n] each, of a run that has a curve."""
    curve = curve_of(run)
    if kind == "profile":
        x, y = np.array(curve["epsilon"]), np.array(curve["delta"])
        return x[y >= MIN_RATE], y[y >= MIN_RATE]
    return np.array(curve["false_positive_rate"]), 1 - np.array(curve["false_negative_rate"])


def _gaussian(place: int) -> Look:
    return Look(look(place).colour, ":", "")
