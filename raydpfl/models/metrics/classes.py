"""Metrics of which class, or which labels, a model chooses."""

import math
import re
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from raydpfl.errors import ConfigError
from raydpfl.models.metrics.base import (
    Mean,
    Metric,
    Percent,
    Total,
    pair,
    require_classes,
    require_labels,
)
from raydpfl.models.tasks import Form


class Accuracy(Mean, Percent):
    """The share of targets that are met, as the task says (`Task.right`): of samples whose class
    has the largest score, of positions that count, or of labels. A regression has none.
    """

    kind: str = "accuracy"

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        correct_count, total_count = form.task.right(outputs, y)
        if not isinstance(correct_count, Tensor):
            correct_count = torch.full((), correct_count, device=outputs.device)
        return pair(correct_count, total_count)


class TopK(Mean, Percent):
    """The share of samples (of positions that count) whose class is among the `k` with the largest
    scores; of equal scores those of lower classes come first. With k = 1 it is the accuracy.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"k": 1})

    kind: str = "top_k"
    k: int = Field(default=2, ge=1, description="classes that are looked at")

    @property
    def name(self) -> str:
        return f"top_{self.k}"

    @classmethod
    def parse_name(cls, name: str) -> Metric | None:
        match = re.fullmatch(r"top_([1-9]\d{0,8})", name)
        return cls(k=int(match[1])) if match else None

    def fits(self, form: Form) -> None:
        super().fits(form)
        if self.k >= form.outputs[-1]:
            expected = f"a k below the {form.outputs[-1]} classes"
            raise ConfigError("evaluate.metrics.k", self.k, expected)

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        scores, y, counts = require_classes(self, form, outputs, y)
        target_scores = scores.gather(1, y[:, None])
        lower_classes = torch.arange(scores.shape[1], device=scores.device) < y[:, None]
        # a score that is NaN is behind none
        ranks = (~((scores < target_scores) | ((scores == target_scores) & ~lower_classes))).sum(1)
        return pair(((ranks < self.k) & counts).sum(), counts.sum())


class BalancedAccuracy(Percent):
    """The mean over classes of the share of a class's samples (of positions that count) that are
    met: its recall. Classes without any are left out. Of several labels, over labels, of the recall
    of a label.
    """

    kind: str = "balanced_accuracy"

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        chosen_mask, label_mask, counts = require_labels(self, form, outputs, y)
        actual = label_mask & counts
        return torch.cat([(chosen_mask & actual).sum(0), actual.sum(0)])

    def value(self, total: Total) -> float | None:
        hits, actual = total.reshape(2, -1)
        mask = actual > 0
        return float((hits[mask] / actual[mask]).mean()) if mask.any() else None


class F1(Percent):
    """F1 = 2 TP / (2 TP + FP + FN) of a class, or of a label: `macro` its mean over them, those
    that neither are nor are predicted left out; `micro` that of the counts of all together.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"average": "micro"})

    kind: str = "f1"
    average: Literal["macro", "micro"] = Field(
        default="macro",
        description="macro: the mean over classes; micro: of the counts of all classes together",
    )

    @property
    def name(self) -> str:
        return "f1" if self.average == "macro" else "f1_micro"

    @classmethod
    def parse_name(cls, name: str) -> Metric | None:
        return {"f1": cls(), "f1_micro": cls(average="micro")}.get(name)

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        chosen_mask, label_mask, counts = require_labels(self, form, outputs, y)
        hits = (chosen_mask & label_mask & counts).sum(0)
        return torch.cat([hits, (chosen_mask & counts).sum(0), (label_mask & counts).sum(0)])

    def value(self, total: Total) -> float | None:
        hits, predictions, actual = total.reshape(3, -1)
        if self.average == "micro":
            hits, predictions, actual = (
                counts.sum(keepdims=True) for counts in (hits, predictions, actual)
            )
        mask = predictions + actual > 0
        scores = 2 * hits[mask] / (predictions[mask] + actual[mask])
        return float(scores.mean()) if mask.any() else None


class ConfusionMatrix(Metric):
    """How many samples (positions that count) of each class were taken for each: a table of its
    own, SET_confusion_matrix.parquet, with a row for each pair of classes that there is in an
    evaluation. It has no value.
    """

    kind: str = "confusion_matrix"

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        scores, y, counts = require_classes(self, form, outputs, y)
        classes = scores.shape[1]
        cells = y * classes + scores.argmax(1)
        cell_counts = torch.zeros(classes * classes, dtype=torch.int64, device=scores.device)
        return cell_counts.scatter_add_(0, cells, counts.long())

    def value(self, total: Total) -> float | None:
        return None

    def columns(self) -> tuple[str, ...]:
        return ("actual", "predicted", "samples")

    def cells(self, total: Total) -> dict[str, np.ndarray]:
        classes = math.isqrt(len(total))
        places = np.flatnonzero(total)
        columns = (places // classes, places % classes, total[places].astype(np.int64))
        return dict(zip(self.columns(), columns, strict=True))
