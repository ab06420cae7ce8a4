"""How good a model is on rows that it was not trained on: the columns of the rounds table and the
keys of the summary that say so.

A score is named SET_METRIC: of the test set, or of the rows that clients hold out of training
(`evaluate.validation`). It is of all rows together, so that a client counts by how many of them it
has: the accuracy over validation is the clients' accuracies weighted by their sizes, and so is that
over a test set to which every client gave the same share of its own. Scores stand in the order of
`evaluate.metrics`; the first one is that by which a run is followed.

>>> row = {"round": 4, "test_accuracy": None, "test_loss": None, "validation_accuracy": 0.75,
...        "validation_loss": 0.5}
>>> is_evaluated(row), words(row), sign("validation_loss"), is_score("train_loss")
(True, 'validation accuracy 75.00%', -1, False)
>>> found = enumerate((0.5, 0.75))
>>> rows = [{**row, "validation_accuracy": accuracy, "round": t} for t, accuracy in found]
>>> best_scores(rows, ("validation_accuracy", "validation_loss"))
{'best_validation_accuracy': 0.75, 'best_validation_round': 1}
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from raydpfl.models.client_histogram import Histogram
from raydpfl.models.metrics import Metric, find_metric

TEST = "test"
VALIDATION = "validation"
CLIENT = "client"  # what a metric of each client comes to over the clients: `STATISTICS`
SETS = (TEST, VALIDATION, CLIENT)
STATISTICS = ("mean", "std", "p10", "p50", "p90", "worst_tenth")
Row = Mapping[str, Any]


def client_statistics(metric: Metric, values: np.ndarray | None = None) -> dict[str, float | None]:
    """What a metric of every client, float64 [clients], NaN where one has none, comes to: its mean
    over the clients, standard deviation, quantiles, and the mean of the tenth that are worst (those
    with the largest values where less is better). None for all of them without values.
    """
    names = [f"{CLIENT}_{metric.name}_{statistic}" for statistic in STATISTICS]
    scores = np.sort(values[np.isfinite(values)]) if values is not None else np.empty(0)
    if not len(scores):
        return dict.fromkeys(names)
    worst_first = scores[::-1] if metric.sign() < 0 else scores
    tenth = worst_first[: math.ceil(len(scores) / 10)]
    statistics = [scores.mean(), scores.std(), *np.quantile(scores, (0.1, 0.5, 0.9)), tenth.mean()]
    return dict(zip(names, map(float, statistics), strict=True))


def histogram_statistics(
    metric: Metric, histogram: Histogram, counts: np.ndarray
) -> dict[str, float | None]:
    """As `client_statistics`, of counts over bins, float64 [bins], that have noise."""
    statistics = histogram.statistics(counts, worse=-metric.sign()) or dict.fromkeys(STATISTICS)
    return {f"{CLIENT}_{metric.name}_{name}": statistics[name] for name in STATISTICS}


def columns(metrics: Iterable[Metric], validation: bool) -> tuple[str, ...]:
    """Those of the rounds table; `validation`: rows are held out."""
    sets = (TEST, VALIDATION) if validation else (TEST,)
    names = [metric.name for metric in metrics if not metric.columns()]
    return tuple(f"{rows}_{name}" for rows in sets for name in names)


def is_score(column: str) -> bool:
    """Whether a column of the rounds table is a score."""
    return score_set(column) in SETS


def score_values(row: Row) -> dict[str, float | None]:
    """The scores in a row."""
    return {name: value for name, value in row.items() if is_score(name)}


def is_evaluated(row: Row) -> bool:
    """Whether the model after the round of this row was evaluated."""
    return any(value is not None for value in score_values(row).values())


def score_set(score: str) -> str:
    """The set that a score is of."""
    return score.partition("_")[0]


def score_metric(score: str, metrics: Iterable[Metric] = ()) -> Metric | None:
    """The metric that a score is of: of `metrics`, or of those that come with the project."""
    name = score.partition("_")[2]
    if score_set(score) == CLIENT:
        ends = [f"_{statistic}" for statistic in STATISTICS if name.endswith(f"_{statistic}")]
        name = name.removesuffix(ends[0]) if ends else ""
    return next((metric for metric in metrics if metric.name == name), None) or find_metric(name)


def sign(score: str, metrics: Iterable[Metric] = ()) -> int:
    """The sign that makes more of a score better; 0 where that is unknown."""
    metric = score_metric(score, metrics)
    if metric and score_set(score) == CLIENT and score.endswith("_std"):
        return -1
    return metric.sign() if is_score(score) and metric else 0


def score_label(score: str) -> str:
    """A score in print."""
    return score.replace("_", " ")


def number(score: str, value: float) -> str:
    """The value of a score in print."""
    metric = score_metric(score)
    return f"{value:.2%}" if metric and metric.share() else f"{value:.4g}"


def words(row: Row) -> str:
    """The score of a row by which a run is followed, in print: the first one that there is. Empty
    where there is none.
    """
    for score, value in score_values(row).items():
        if value is not None:
            name = score.removeprefix(f"{TEST}_")
            return f"{score_label(name)} {number(score, value)}"
    return ""


def summary_text(summary: Row) -> str:
    """The scores of every set in a summary, in print; empty where there are none.

    >>> summary_text({"test_accuracy": 0.75, "test_loss": 0.5, "validation_loss": None})
    'Test accuracy 75.00%, loss 0.5'
    """
    texts: dict[str, list[str]] = {}
    for score, value in score_values(summary).items():
        if value is not None:
            name = score_label(score.partition("_")[2])
            texts.setdefault(score_set(score), []).append(f"{name} {number(score, value)}")
    return "; ".join(f"{rows} {', '.join(parts)}" for rows, parts in texts.items()).capitalize()


def divergence(scores: Row) -> str | None:
    """The first loss that is no number, in words; None: all are."""
    for name, value in scores.items():
        if name.endswith("_loss") and value is not None and not math.isfinite(value):
            return f"the {score_label(name)} is {value}"
    return None


def since_best(values: Sequence[float | None], better: int) -> list[float | None]:
    """A score of evaluations from that one on at which it was best, the first of equals.

    >>> since_best([0.5, 0.4, 0.4, 0.45], -1), since_best([0.5, None, 0.4, 0.45], -1)
    ([0.4, 0.4, 0.45], [0.4, 0.45])

    Args:
        values: of the evaluations, in order; None: that one had none.
        better: the sign that makes more of the score better.
    """
    scores = [-math.inf if value is None else better * value for value in values]
    return [*values[scores.index(max(scores)) :]] if scores else []


def last_scores(rows: Sequence[Row], names: Iterable[str]) -> dict[str, float | None]:
    """Each of these scores at the last evaluation; None where there was none."""
    scores: dict[str, float | None] = dict.fromkeys(names)
    for row in rows:
        if is_evaluated(row):
            scores |= {name: row[name] for name in scores}
    return scores


def best_scores(
    rows: Sequence[Row], names: Iterable[str], metrics: Iterable[Metric] = ()
) -> dict[str, float | int | None]:
    """For the summary: of each set that these scores are of, the best over the rounds of the first
    score that there is and of which more or less is better, and the `round` of its row (the first,
    if several have it).
    """
    names_by_set: dict[str, list[str]] = {}
    for name in names:
        if sign(name, metrics):
            names_by_set.setdefault(score_set(name), []).append(name)
    scores: dict[str, float | int | None] = {}
    for set_name, set_scores in names_by_set.items():
        present_scores = (name for name in set_scores if any(row[name] is not None for row in rows))
        score = next(present_scores, set_scores[0])
        evaluated_rows = [row for row in rows if row[score] is not None]
        better = sign(score, metrics)
        top = max(evaluated_rows, key=lambda row: better * row[score], default={})
        scores[f"best_{score}"] = top.get(score)
        scores["best_round" if set_name == TEST else f"best_{set_name}_round"] = top.get("round")
    return scores
