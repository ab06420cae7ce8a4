"""How good a model is on rows that it was not trained on: the columns of the rounds table and the
keys of the summary that say so.

A score is named SET_METRIC: of the test set, or of the rows that clients hold out of training
(`evaluate.validation`). It is a mean over rows, so that a client counts by how many of them it has:
the accuracy over validation is the clients' accuracies weighted by their sizes, and so is that over
a test set to which every client gave the same share of its own.

>>> row = {"round": 4, "test_loss": None, "test_accuracy": None, "validation_loss": 0.5,
...        "validation_accuracy": 0.75}
>>> evaluated(row), words(row), SIGNS["validation_loss"]
(True, 'validation accuracy 75.00%', -1)
>>> found = enumerate((0.5, 0.75))
>>> rows = [{**row, "validation_accuracy": accuracy, "round": t} for t, accuracy in found]
>>> best(rows, ("validation_loss", "validation_accuracy"))
{'best_validation_accuracy': 0.75, 'best_validation_round': 1}
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

TEST = "test"
VALIDATION = "validation"
SETS = (TEST, VALIDATION)
BETTER = {"accuracy": 1, "loss": -1}  # the sign that makes more of it better
SIGNS = {f"{rows}_{metric}": sign for rows in SETS for metric, sign in BETTER.items()}
Row = Mapping[str, Any]


def columns(validation: bool) -> tuple[str, ...]:
    """Those of the rounds table; `validation`: rows are held out."""
    sets = SETS if validation else (TEST,)
    return tuple(f"{rows}_{metric}" for rows in sets for metric in ("loss", "accuracy"))


def of(row: Row) -> dict[str, float | None]:
    """The scores in a row."""
    return {name: row[name] for name in row if name in SIGNS}


def evaluated(row: Row) -> bool:
    """Whether the model after the round of this row was evaluated."""
    return any(value is not None for value in of(row).values())


def set_of(metric: str) -> str:
    """The set that a metric is of."""
    return metric.partition("_")[0]


def named(metric: str) -> str:
    """A metric in print."""
    return metric.replace("_", " ")


def number(metric: str, value: float) -> str:
    """The value of a metric in print."""
    return f"{value:.2%}" if metric.endswith("accuracy") else f"{value:.4g}"


def words(row: Row) -> str:
    """The score of a row by which a run is followed, in print: of the test set, if it was looked
    at; the accuracy, if there is one. Empty where there is none.
    """
    for rows in SETS:
        for metric in BETTER:
            value = row.get(f"{rows}_{metric}")
            if value is not None:
                name = metric if rows == TEST else f"{rows} {metric}"
                return f"{name} {number(name, value)}"
    return ""


def told(row: Row) -> str:
    """The scores of every set in a row, in print; empty where there are none.

    >>> told({"test_loss": 0.5, "test_accuracy": 0.75, "validation_loss": None})
    'Test accuracy 75.00%, loss 0.5'
    """
    said = []
    for rows in SETS:
        values = ((metric, row.get(f"{rows}_{metric}")) for metric in BETTER)
        parts = [
            f"{metric} {number(metric, value)}" for metric, value in values if value is not None
        ]
        said += [f"{rows} {', '.join(parts)}"] if parts else []
    return "; ".join(said).capitalize()


def diverged(scores: Row) -> str | None:
    """The first loss that is no number, in words; None: all are."""
    for name, value in scores.items():
        if value is not None and not math.isfinite(value):
            return f"the {named(name)} is {value}"
    return None


def last(rows: Sequence[Row], names: Iterable[str]) -> dict[str, float | None]:
    """Each of these scores at the last evaluation; None where there was none."""
    found: dict[str, float | None] = dict.fromkeys(names)
    for row in rows:
        if evaluated(row):
            found |= {name: row[name] for name in found}
    return found


def best(rows: Sequence[Row], names: Collection[str]) -> dict[str, float | int | None]:
    """For the summary: of each set that these scores are of, the best over the rounds, and the
    `round` of its row (the first, if several have it). By accuracy; for regression by loss.
    """
    found: dict[str, float | int | None] = {}
    for kind in SETS:
        if f"{kind}_loss" not in names:
            continue
        classes = any(row[f"{kind}_accuracy"] is not None for row in rows)
        regression = not classes and any(row[f"{kind}_loss"] is not None for row in rows)
        metric = f"{kind}_loss" if regression else f"{kind}_accuracy"
        known = [row for row in rows if row[metric] is not None]
        top = max(known, key=lambda row: SIGNS[metric] * row[metric], default={})
        found[f"best_{metric}"] = top.get(metric)
        found["best_round" if kind == TEST else f"best_{kind}_round"] = top.get("round")
    return found
