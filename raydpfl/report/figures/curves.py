"""A number of every round, over rounds, seconds or epsilon."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Collection, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydpfl.models.metric_columns import is_score
from raydpfl.privacy import Guarantee
from raydpfl.privacy.papers import cited
from raydpfl.report.figures.base import (
    Missing,
    Names,
    Need,
    Piece,
    Placed,
    PlotItem,
    group_keys,
    name_of,
    runs_of,
    seeds_of,
)
from raydpfl.report.labels import Quantity, listed, quantity
from raydpfl.report.plot_style import FACTOR, LegendKey, Look, look, scale
from raydpfl.report.run_reader import Group, LabelledRun, Panel, Run, some

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BOUNDING = "measure: [bounding]"
HINTS = {
    "snr": f"{BOUNDING}, with noise on updates or sums",
    "angle_p50": BOUNDING,
    "bias_across": BOUNDING,
    "epsilon": "noise that an accountant covers",
    "epsilon_*": "noise that an accountant covers",
}
SECONDS = 5.0  # that a run takes, from which curves by second say more than those by round
MARKS = 12  # markers on a line at most
# The titles of columns that begin so.
TITLES = {
    "epsilon": "Epsilon",
    "angle": "Angles of clients' updates to the last global update",
    "bias": "Bias of clipping",
}
# What a column is, in a sentence.
ABOUT = {
    "test_accuracy": "On the test set, at the rounds that were evaluated.",
    "test_loss": "The test loss is of the rounds that were evaluated.",
    "train_loss": "The training loss is the mean over the cohort's local steps.",
    "snr": "The norm of what is sent over the norm of its noise, where the noise is drawn: of a "
    "client the means over the cohort, of the server the sums (001 Fig. 2).",
    "angle_p50": "Quantiles over the cohort.",
    "bias_within": "Within clients: the mean of |alpha - alpha~|, from the randomness of their "
    "steps (000 Theorem 3.1).",
    "bias_across": "Across clients: the mean of |alpha~ - its mean|, from their differences (000 "
    "Theorem 3.1).",
}
# What `bias_across` is where the expected update was not estimated.
ALONE = (
    "Across clients: the mean of |alpha - its mean|. Without repeats alpha stands for alpha~, so "
    "that the randomness of local steps is in it too, unless they take full gradients (000 Theorem "
    "3.1)."
)
CLIPPED = "The share of the cohort whose updates bounding shortened."
CLIPPED_SAMPLES = "The share of gradients longer than the bound, averaged over the cohort."
X_WORDS = {"round": "round", "seconds": "second", "epsilon": "epsilon"}
LOSSES = {"of": ["test_loss", "train_loss"], "main": "test_loss"}
EPSILONS = {"of": "epsilon_*", "main": "epsilon"}
ANGLES = ["angle_p10", "angle_p50", "angle_p90"]
BIASES = ["bias_within", "bias_across"]


class Curves(PlotItem):
    """Columns of rounds.parquet (`of`: one, or several; `epsilon_*`: all that begin so) over `x`:
    `round`, `seconds`, `epsilon` (the one that holds) or another column. Several runs of a group
    are a mean line with a band. `main` is the one column that is drawn where there are several
    groups.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"of": "test_accuracy"},
        {"of": ["test_loss", "train_loss"], "x": "seconds"},
    )
    placed: ClassVar[tuple[Placed, ...]] = (
        *(Placed("Accuracy and loss", {"of": "test_accuracy", "x": x}) for x in X_WORDS),
        *(Placed("Accuracy and loss", {**LOSSES, "x": x}) for x in ("round", "seconds")),
        *(Placed("Privacy", {**EPSILONS, "x": x}) for x in ("round", "seconds")),
        Placed("Bounding and noise", {"of": "clipped"}, 1),
        Placed("Bounding and noise", {"of": "snr"}, 2),
        Placed("Bounding and noise", {"of": ANGLES, "main": "angle_p50"}, 3),
        Placed("Bounding and noise", {"of": BIASES, "main": "bias_across"}, 5),
    )

    kind: str = "curves"
    of: Names = ("test_accuracy",)
    x: str = "round"
    main: str = ""
    log: bool | None = None

    def unasked(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        if self.x == "seconds":
            longest = max((_last_second(case.run) for case in cases), default=0.0)
            if longest < SECONDS:
                why = f"needs a run of {SECONDS:g} s: the longest here took {longest:.2g} s"
                return [Missing(self.title or self.headline(), why)]
        return self.make(cases)

    @classmethod
    def placed_for(cls, columns: Collection[str]) -> tuple[Placed, ...]:
        """A curve of each other score too."""
        drawn = {name for place in cls.placed for name in cls.model_validate(place.fields).of}
        others = [name for name in columns if is_score(name) and name not in drawn]
        return (*cls.placed, *(Placed("Accuracy and loss", {"of": name}) for name in others))

    def numbers(self) -> Sequence[str]:
        return self.of

    def needs(self) -> Need:
        first = self.main or self.of[-1]
        column = "epsilon" if first.startswith("epsilon") else first
        return Need("rounds", (column, self.x), HINTS.get(first, HINTS.get(self.x, "")))

    def slug(self) -> str:
        return name_of(self.of[0].strip("*_"), "by", self.x)

    def headline(self) -> str:
        by = X_WORDS.get(self.x, quantity(self.x).words)
        how = f"over {by}" if self.x.startswith("epsilon") else f"by {by}"
        return f"{_title(self.of)} {how}"

    def columns(self, panels: Sequence[Panel]) -> list[str]:
        """The columns that are drawn."""
        runs = runs_of(panels)
        several = any(len(panel.groups) > 1 for panel in panels)
        columns: dict[str, None] = {}
        for name in (self.main,) if several and self.main else self.of:
            if "*" in name:
                epsilons = [epsilon for run in runs for epsilon in run.epsilons]
                columns |= dict.fromkeys(
                    column for column in epsilons if fnmatch.fnmatch(column, name)
                )
            else:
                columns[name] = None
        return [name for name in columns if any(run.has("rounds", (name,)) for run in runs)]

    def prepare(self, panels: Sequence[Panel]) -> Any:
        columns = self.columns(panels)
        groups = [group for panel in panels for group in panel.groups]
        lines = {}
        for group, name in itertools.product(groups, columns):
            values = line(group, name, self.x)
            if values is not None:
                lines[id(group), name] = values
        if not lines:
            return None
        x = np.concatenate([line[0] for line in lines.values()])
        y = np.concatenate([line[place] for line in lines.values() for place in (2, 3)])
        return {"columns": columns, "lines": lines, "x": x, "y": y}

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        columns = common["columns"]
        for group in panel.groups:
            for place, name in enumerate(columns):
                if (id(group), name) not in common["lines"]:
                    continue
                x, mean, low, high = common["lines"][id(group), name]
                drawn = self._look(group, place, len(panel.groups), columns)
                if len(group.runs) > 1:
                    axes.fill_between(x, low, high, color=drawn.colour, alpha=0.18, linewidth=0)
                if len(x) == 1:  # no band is seen there
                    axes.vlines(x, low, high, color=drawn.colour, linewidth=1)
                every = max(1, len(x) // MARKS)
                axes.plot(x, mean, marker=drawn.marker, markevery=every, **drawn.line)
        x = common["x"]
        far = self.x.startswith("epsilon") and x.max() >= FACTOR * x.min()
        scale(axes, "x", quantity(self.x), x, far or None)
        scale(axes, "y", self._measured(columns), common["y"], self.log)

    def _measured(self, columns: Sequence[str]) -> Quantity:
        first = quantity(columns[0])
        begin = columns[0].split("_")[0]
        if len(columns) == 1 and begin not in ("angle", "bias"):
            return first
        word = begin if begin in ("epsilon", "angle", "bias") else columns[0].split("_")[-1]
        return Quantity(first.name, word, first.unit, first.percent, first.wide)

    def _look(self, group: Group, place: int, groups: int, columns: Sequence[str]) -> Look:
        if groups == 1 and len(columns) > 1:
            return look(place)
        return look(group.place, None if len(columns) == 1 else place)

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        columns = common["columns"]
        groups = group_keys(panels)
        if len(columns) == 1:
            return groups
        if not groups:
            run = panels[0].run
            return [
                LegendKey(_of_column(name, run), look(place)) for place, name in enumerate(columns)
            ]
        keys = {group.label: group for panel in panels for group in panel.groups}
        return [
            LegendKey(f"{key.label}: {quantity(name).words}", look(keys[key.label].place, place))
            for key in groups
            for place, name in enumerate(columns)
        ]

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        columns = common["columns"]
        about = [_about(name, panels) for name in columns]
        text = " ".join(words for words in about if words)
        if any(name.startswith("epsilon_") for name in columns):
            text += f" {_whose(panels)} Rigorous ones hold; a formula is what its paper prints."
        elif "epsilon" in (*columns, self.x):
            text += f" {_whose(panels)}"
        if self.x == "seconds":
            text += " Seconds count rounds and evaluations, not the start of the run."
        return f"{text}{seeds_of(panels)} From rounds.parquet.".strip()


def line(group: Group, name: str, x: str) -> tuple[np.ndarray, ...] | None:
    """What is drawn of a group: x, mean, least and greatest, float64 [n] each, at the rounds that
    all of its runs know; None for none.
    """
    runs = [run for run in group.runs if run.has("rounds", (name, x))]
    if not runs:
        return None
    shared = reduce(np.intersect1d, [_known(run, name, x) for run in runs])
    if not len(shared):
        return None
    places = [(run, np.isin(run.table("rounds")["round"], shared)) for run in runs]
    across = np.array([_values(run, x)[place] for run, place in places])
    values = np.array([_values(run, name)[place] for run, place in places])
    return across.mean(0), values.mean(0), values.min(0), values.max(0)


def _values(run: Run, name: str) -> np.ndarray:
    values = run.series(name)
    assert values is not None  # see `Run.has`
    return values


def _last_second(run: Run) -> float:
    seconds = run.series("seconds")
    return float(np.nanmax(seconds)) if seconds is not None and some(seconds) else 0.0


def _known(run: Run, name: str, x: str) -> np.ndarray:
    """The rounds of which a run knows both."""
    finite = np.isfinite(_values(run, name)) & np.isfinite(_values(run, x))
    return run.table("rounds")["round"][finite]


def _about(name: str, panels: Sequence[Panel]) -> str:
    runs = runs_of(panels)
    if name == "clipped":
        samples = any(run.per_sample for run in runs)
        updates = not all(run.per_sample for run in runs)
        parts = [CLIPPED if updates else "", CLIPPED_SAMPLES if samples else ""]
        return " With per-sample clipping: ".join(part for part in parts if part)
    if name == "bias_across" and not any(run.has("rounds", ("bias_within",)) for run in runs):
        return cited(ALONE)
    return cited(ABOUT.get(name, ""))


def _title(columns: Sequence[str]) -> str:
    first = columns[0]
    kind = first.split("_")[0]
    if kind in TITLES:
        return TITLES[kind]
    if len(columns) > 1:
        return "Loss" if first.endswith("loss") else listed([*columns])
    return quantity(first).words.capitalize()


def _of_column(name: str, run: Run) -> str:
    """A column in the legend of one run: of an epsilon, its kind too."""
    words = quantity(name).words
    if not name.startswith("epsilon_"):
        return words
    return f"{words.removeprefix('epsilon, ')} ({run.kind_of(name)})"


def _whose(panels: Sequence[Panel]) -> str:
    """Whose epsilon it is, against whom; of several groups each its own, where they differ."""
    labels: dict[str, dict[str, None]] = {}
    for group in (group for panel in panels for group in panel.groups):
        run = group.runs[0]
        for one in [*run.holds, *run.guarantees][:1]:
            labels.setdefault(_of_one(one), {})[group.label] = None
    if not labels:
        return "Epsilon is that of the ledger, by accountant."
    if len(labels) == 1:
        return f"Epsilon is that of {next(iter(labels))}."
    parts = (f"of {listed([*names])} that of {words}" for words, names in labels.items())
    return f"Epsilon is {'; '.join(parts)}."


def _of_one(one: Guarantee) -> str:
    sampling = str(one.sampling).split(";")[0]
    observer = f"an observer of {one.observer} ({sampling})"
    return f"one {one.unit} against {observer}, at delta {one.delta:g}"
