"""A number of every round, over rounds, seconds or epsilon."""

import fnmatch
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, ClassVar

import numpy as np

from raydpfl.privacy.papers import cite_papers
from raydpfl.report.figures.base import (
    Names,
    Need,
    PlotItem,
    group_keys,
    group_places,
    name_of,
    runs_of,
)
from raydpfl.report.labels import Quantity, accountant_words, join_names, quantity
from raydpfl.report.plot_style import LOG_SPAN, Axes, LegendKey, Look, look, scale
from raydpfl.report.run_reader import Group, Panel

BOUNDING_HINT = "measure: [bounding]"
HINTS = {
    "snr": f"{BOUNDING_HINT}, with noise on updates or sums",
    "angle_p50": BOUNDING_HINT,
    "bias_across": BOUNDING_HINT,
    "epsilon": "noise that an accountant covers",
    "epsilon_*": "noise that an accountant covers",
}
MAX_MARKERS = 12  # markers on a line at most
# The titles of columns that begin so.
TITLES = {
    "epsilon": "Epsilon",
    "angle": "Angles of clients' updates to the last global update",
    "bias": "Bias of clipping",
}
# What a column is, in a sentence.
DESCRIPTIONS = {
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
BIAS_ACROSS_DESCRIPTION = (
    "Across clients: the mean of |alpha - its mean|. Without repeats alpha stands for alpha~, so "
    "that the randomness of local steps is in it too, unless they take full gradients (000 Theorem "
    "3.1)."
)
CLIPPED = "The share of the cohort whose updates bounding shortened."
CLIPPED_SAMPLES = "The share of gradients longer than the bound, averaged over the cohort."
X_WORDS = {"round": "round", "seconds": "second", "epsilon": "epsilon"}


class Curves(PlotItem):
    """Columns of rounds.parquet (`of`: one, or several; `epsilon_*`: all that begin so) over `x`:
    `round`, `seconds`, `epsilon` (the one that holds) or another column. Several runs of a group
    are a mean line with a band. `main` is the one column that is drawn where there are several
    groups.
    """

    number_fields: ClassVar[tuple[str, ...]] = ("of",)

    kind: str = "curves"
    of: Names = ("test_accuracy",)
    x: str = "round"
    main: str = ""
    log: bool | None = None

    def needs(self) -> Need:
        main_column = self.main or self.of[-1]
        column = "epsilon" if main_column.startswith("epsilon") else main_column
        return Need("rounds", (column, self.x), HINTS.get(main_column, HINTS.get(self.x, "")))

    def slug(self) -> str:
        return name_of(self.of[0].strip("*_"), "by", self.x)

    def headline(self) -> str:
        x_words = X_WORDS.get(self.x, quantity(self.x).words)
        x_suffix = f"over {x_words}" if self.x.startswith("epsilon") else f"by {x_words}"
        first_column = self.of[0]
        title = quantity(first_column).words.capitalize()
        if len(self.of) > 1:
            title = "Loss" if first_column.endswith("loss") else join_names(self.of)
        return f"{TITLES.get(first_column.split('_')[0], title)} {x_suffix}"

    def prepare(self, panels: Sequence[Panel]) -> Any:
        """The columns that are drawn, and by group and column what is: see `line`."""
        runs = runs_of(panels)
        several = any(len(panel.groups) > 1 for panel in panels)
        columns: dict[str, None] = {}
        for name in (self.main,) if several and self.main else self.of:
            epsilons = [epsilon for run in runs for epsilon in run.epsilons]
            columns |= dict.fromkeys(fnmatch.filter(epsilons, name) if "*" in name else [name])
        names = [name for name in columns if any(run.has("rounds", (name,)) for run in runs)]
        groups = [group for panel in panels for group in panel.groups]
        lines = {
            (group, name): values
            for group, name in itertools.product(groups, names)
            if (values := line(group, name, self.x)) is not None
        }
        return (names, lines) if lines else None

    def draw(self, axes: Axes, panel: Panel, common: Any) -> None:
        columns, lines = common
        alone = len(panel.groups) == 1 and len(columns) > 1
        for group, (place, name) in itertools.product(panel.groups, enumerate(columns)):
            if (group, name) in lines:
                # of several columns each has a dash
                dash = place if len(columns) > 1 else None
                line_look = look(place) if alone else look(group.place, dash)
                _draw_line(axes, lines[group, name], line_look, len(group.runs) > 1)
        x = np.concatenate([x for x, *_ in lines.values()])
        wide_range = self.x.startswith("epsilon") and x.max() >= LOG_SPAN * x.min()
        scale(axes, "x", quantity(self.x), x, wide_range or None)
        y = np.concatenate([side for _, _, *band in lines.values() for side in band])
        scale(axes, "y", self._y_quantity(columns), y, self.log)

    def _y_quantity(self, columns: Sequence[str]) -> Quantity:
        first_quantity = quantity(columns[0])
        kind = columns[0].split("_")[0]
        if len(columns) == 1 and kind not in ("angle", "bias"):
            return first_quantity
        word = kind if kind in ("epsilon", "angle", "bias") else columns[0].split("_")[-1]
        return replace(first_quantity, words=word)

    def keys(self, panels: Sequence[Panel], common: Any) -> Sequence[LegendKey]:
        columns, _ = common
        groups = group_keys(panels)
        if len(columns) == 1:
            return groups
        if not groups:
            words = [accountant_words(name) or quantity(name).words for name in columns]
            return [LegendKey(text, look(place)) for place, text in enumerate(words)]
        return [
            LegendKey(f"{label}: {quantity(name).words}", look(group_place, place))
            for group_place, label in group_places(panels)
            for place, name in enumerate(columns)
        ]

    def caption(self, panels: Sequence[Panel], common: Any) -> str:
        columns, _ = common
        text = " ".join(filter(None, [_column_description(name, panels) for name in columns]))
        if any(name.startswith("epsilon_") for name in columns):
            text += f" {_terms(panels)} Rigorous ones hold; a formula is what its paper prints."
        elif "epsilon" in (*columns, self.x):
            text += f" {_terms(panels)}"
        if self.x == "seconds":
            text += " Seconds count rounds and evaluations, not the start of the run."
        counts = sorted({len(group.runs) for panel in panels for group in panel.groups})
        if counts[-1] > 1:
            span = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
            text += f" Lines are means over {span} seeds; bands reach from the least to the"
            text += " greatest."
        return f"{text} From rounds.parquet.".strip()


def _draw_line(axes: Axes, line: Sequence[np.ndarray], line_look: Look, band: bool) -> None:
    x, mean, low, high = line
    if band:
        axes.fill_between(x, low, high, color=line_look.colour, alpha=0.18, linewidth=0)
    if len(x) == 1:  # no band is seen there
        axes.vlines(x, low, high, color=line_look.colour, linewidth=1)
    mark_interval = max(1, len(x) // MAX_MARKERS)
    axes.plot(x, mean, marker=line_look.marker, markevery=mark_interval, **line_look.line)


def line(group: Group, name: str, x: str) -> tuple[np.ndarray, ...] | None:
    """What is drawn of a group: x, mean, least and greatest, float64 [n] each, at the rounds of
    which all of its runs have both; None for none.
    """
    tables = []
    for run in group.runs:
        if run.has("rounds", (name, x)):
            columns = np.array([run.table("rounds")["round"], run.series(x), run.series(name)])
            tables.append(columns[:, np.isfinite(columns).all(0)])
    shared_rounds = reduce(np.intersect1d, [rounds for rounds, _, _ in tables]) if tables else ()
    if not len(shared_rounds):
        return None
    shared_rows = np.array([rows[1:, np.isin(rows[0], shared_rounds)] for rows in tables])
    x_values, values = shared_rows.swapaxes(0, 1)
    return x_values.mean(0), values.mean(0), values.min(0), values.max(0)


def _column_description(name: str, panels: Sequence[Panel]) -> str:
    runs = runs_of(panels)
    if name == "clipped":
        samples = any(run.per_sample for run in runs)
        updates = not all(run.per_sample for run in runs)
        parts = [CLIPPED if updates else "", CLIPPED_SAMPLES if samples else ""]
        return " With per-sample clipping: ".join(part for part in parts if part)
    if name == "bias_across" and not any(run.has("rounds", ("bias_within",)) for run in runs):
        return cite_papers(BIAS_ACROSS_DESCRIPTION)
    return cite_papers(DESCRIPTIONS.get(name, ""))


def _terms(panels: Sequence[Panel]) -> str:
    """Whose epsilon it is, against whom; of several groups each its own, where they differ."""
    labels: dict[str, dict[str, None]] = {}
    for group in (group for panel in panels for group in panel.groups):
        run = group.runs[0]
        for guarantee in [*run.holds, *run.guarantees][:1]:
            sampling = str(guarantee.sampling).split(";")[0]
            text = f"one {guarantee.unit} against an observer of {guarantee.observer} ({sampling})"
            labels.setdefault(f"{text}, at delta {guarantee.delta:g}", {})[group.label] = None
    if not labels:
        return "Epsilon is that of the ledger, by accountant."
    if len(labels) == 1:
        return f"Epsilon is that of {next(iter(labels))}."
    parts = (f"of {join_names([*names])} that of {words}" for words, names in labels.items())
    return f"Epsilon is {'; '.join(parts)}."
