"""The names of quantities as axes and tables say them, and numbers with sensible digits.

>>> quantity("test_accuracy").label, quantity("seconds_clients").label
('test accuracy', 'seconds clients (s)')
>>> number(0.788512, percent=True), number(1225.92), number(0.000123456), number(None)
('78.85 %', '1,226', '0.0001235', '')
>>> number((1 << 63) - 1)
'9,223,372,036,854,775,807'
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raydpfl.models.metric_columns import score_metric, sign
from raydpfl.privacy import RIGOROUS
from raydpfl.privacy import column as column_of
from raydpfl.privacy.accountants import ACCOUNTANTS


@dataclass(frozen=True)
class Quantity:
    """A number of a run. `name`: of its column; `unit`: in print, empty for none; `percent`: a
    share that print shows in percent; `wide`: it may span decades, so that a logarithmic axis fits;
    `better`: the sign of a change for the better, 0 where there is none.
    """

    name: str
    words: str
    unit: str = ""
    percent: bool = False
    wide: bool = False
    better: int = 0

    @property
    def label(self) -> str:
        """The words with their unit, for an axis or the head of a table."""
        return f"{self.words} ({self.unit})" if self.unit else self.words


BARE_LABELS = ("none", "true", "false", "auto", "inf")  # labels that need their axis, as numbers do
# Those of which the name and the metric do not say all.
QUANTITIES = {
    quantity.name: quantity
    for quantity in (
        Quantity("seconds", "time of training", "s"),
        Quantity("test_accuracy_weighted", "test accuracy by size", percent=True, better=1),
        Quantity("train_loss", "training loss", wide=True, better=-1),
        Quantity("suboptimality", "suboptimality f(w) - f*", wide=True, better=-1),
        Quantity("clipped", "share clipped", percent=True),
        Quantity("snr", "signal to noise", wide=True),
        Quantity("norm", "norm of an update", wide=True),
        Quantity("angle", "angle to the last update", "degrees"),
        Quantity("angle_p10", "10 % quantile", "degrees"),
        Quantity("angle_p50", "median", "degrees"),
        Quantity("angle_p90", "90 % quantile", "degrees"),
        Quantity("alpha_mean", "mean of alpha"),
        Quantity("bias_within", "bias within clients"),
        Quantity("bias_across", "bias across clients"),
        Quantity("theorem_bound", "bound of the theorem", wide=True),
        Quantity("theorem_error", "error that it bounds", wide=True),
        Quantity("theorem_ratio", "error / bound", wide=True),
        Quantity("update_norm", "norm of the mean update", wide=True),
        Quantity("epsilon", "epsilon that holds", wide=True),
        Quantity("probability", "probability of selection", percent=True),
        Quantity("samples", "samples of a client"),
        Quantity("budget", "budget of a client", "epsilon"),
    )
}


def quantity(name: str) -> Quantity:
    """The quantity in a column, or of a number in a mapping (`suboptimality.final`)."""
    if name in QUANTITIES:
        return QUANTITIES[name]
    if name.startswith("best_"):
        inner = quantity(name.removeprefix("best_"))
        return replace(inner, name=name, words=f"best {inner.words}")
    whole, dot, part = name.partition(".")
    if whole == "rounds" and dot:
        inner = quantity(part)
        return replace(inner, name=name, words=f"{inner.words}, mean over the rounds")
    if dot:
        outer = quantity(whole)
        return replace(outer, name=name, words=f"{outer.words}: {part.replace('_', ' ')}")
    words = name.replace("_", " ")
    if name.startswith("epsilon_"):
        return Quantity(name, f"epsilon, {accountant(name)}", wide=True)
    if name.startswith("seconds_"):
        return Quantity(name, words, "s")
    metric = score_metric(name)
    if metric is None:
        return Quantity(name, words)
    better = sign(name) or metric.sign()
    return Quantity(name, words, percent=metric.share(), wide=better < 0, better=better)


def accountant(column: str) -> str:
    """The name of an accountant as the column of its epsilons has it.

    >>> accountant("epsilon_chen_2024_tcdp"), accountant("epsilon_paper"), accountant("epsilon_pld")
    ('Chen 2024 tCDP', 'Zhang, Das 2021', 'pld')
    """
    for member in ACCOUNTANTS.values():
        if column in (member.name, column_of(member.name)):
            return member.label or member.name
    return column.removeprefix("epsilon_").replace("_", " ")


def accountant_words(column: str) -> str:
    """The accountant of a column of epsilons and what they are; empty for any other column.

    >>> [accountant_words(name) for name in ("epsilon_pld", "epsilon_paper", "epsilon")]
    ['pld (rigorous)', 'Zhang, Das 2021 (formula)', '']
    """
    kind = "rigorous" if column in RIGOROUS else "formula"
    return f"{accountant(column)} ({kind})" if column.startswith("epsilon_") else ""


def axis(name: str) -> str:
    """An axis of a study in print: the last part of a dotted key, with the one before where it is
    short.

    >>> axis("noise.epsilon"), axis("data.partition.s"), axis("power_law")
    ('epsilon', 'partition s', 'power law')
    """
    parts = name.replace("_", " ").split(".")
    return " ".join(parts[-2:]) if len(parts[-1]) < 3 else parts[-1]


def join_labels(labels: Mapping[str, str]) -> str:
    """Labels by axis in a row, empty ones left out.

    >>> join_labels({"arm": "Clip", "noise.epsilon": "8", "accounting": "paper", "data": ""})
    'Clip, epsilon 8, paper accounting'
    """
    return ", ".join(qualified_label(axis, label) for axis, label in labels.items() if label)


def qualified_label(name: str, label: str) -> str:
    """A label that says by itself what it is of, or with its axis."""
    if name == "accounting":
        return f"{label} accounting"
    return f"{axis(name)} {label}" if label in BARE_LABELS or numeric([label]) else label


def number(value: Any, percent: bool = False) -> str:
    """A value in print: four digits, a comma every three of a large one; empty for none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if percent:
        return f"{100 * value:.2f} %"
    if isinstance(value, int):
        return f"{value:,}"
    whole = value == round(value) and abs(value) < 1e15
    return f"{value:,.0f}" if whole or abs(value) >= 1000 else f"{value:.4g}"


def float_or_none(value: Any) -> float | None:
    """A number as float; None for anything else, and for NaN."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and value == value else None


def format_mean(mean: float, std: float, percent: bool = False) -> str:
    """A mean with its standard deviation (NaN for none) in print.

    >>> format_mean(0.815, 0.0031, percent=True), format_mean(3.57512, 0.046031)
    ('81.50 ± 0.31 %', '3.575 ± 0.046')
    >>> format_mean(2.0, math.nan)
    '2'
    """
    if math.isnan(std):
        return number(mean, percent)
    if percent:
        return f"{100 * mean:.2f} \N{PLUS-MINUS SIGN} {100 * std:.2f} %"
    return f"{number(mean)} \N{PLUS-MINUS SIGN} {std:.2g}"


def numeric(labels: Sequence[str]) -> bool:
    """Whether all labels are finite numbers."""
    try:
        return all(math.isfinite(float(label)) for label in labels)
    except ValueError:
        return False


def join_names(names: Sequence[str]) -> str:
    """Names in a row.

    >>> join_names(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def count_text(count: int | None, noun: str) -> str:
    """So many of a thing; empty where it is not known how many.

    >>> count_text(1, "seed"), count_text(3, "seed"), count_text(None, "seed")
    ('1 seed', '3 seeds', '')
    """
    if count is None:
        return ""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_value(value: Any) -> str:
    """A searched value as a label.

    >>> [format_value(value) for value in (0.30000000000000004, None, "sgd", True)]
    ['0.3', 'none', 'sgd', 'true']
    """
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "none"
    return f"{value:.6g}" if isinstance(value, (int, float)) else str(value)


def edge(value: Any, grid_values: Sequence[Any]) -> str:
    """Which edge of the numbers that were tried a value is at: "smallest", "largest", or "" for
    none; of a single number, and of what is no number, it is none.

    >>> edge(0.1, (0.1, 0.3, 1)), edge(0.3, (0.1, 0.3, 1)), edge(1, (0.1, 0.3, 1, "auto"))
    ('smallest', '', 'largest')
    """
    numbers = {value for value in grid_values if type(value) in (int, float)}
    if len(numbers) < 2 or value not in (min(numbers), max(numbers)) or isinstance(value, bool):
        return ""
    return "smallest" if value == min(numbers) else "largest"


def edge_warning(values: Mapping[str, Any], edges: Mapping[str, str]) -> str:
    """Which of the best values are at an edge of their grids, in a sentence; empty for none.

    >>> edge_warning({"local.lr": 0.4, "bounding.bound": 1}, {"local.lr": "largest"})
    'At the edge of its grid: local.lr 0.4 (largest). A value beyond it may be better.'
    """
    if not edges:
        return ""
    text = ", ".join(f"{key} {format_value(values[key])} ({end})" for key, end in edges.items())
    return f"At the edge of its grid: {text}. A value beyond it may be better."
