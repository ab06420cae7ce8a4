"""Which classes are taken for which."""

from __future__ import annotations

import math

import numpy as np
import torch

from raydpfl.models.metrics.base import Metric, Total, of_classes
from raydpfl.models.tasks import Form


class ConfusionMatrix(Metric):
    """How many samples (positions that count) of each class were taken for each: a table of its
    own, SET_confusion_matrix.parquet, with a row for each pair of classes that there is in an
    evaluation. It has no value.
    """

    kind: str = "confusion_matrix"

    def sums(self, form: Form, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores, y, counts = of_classes(self, form, outputs, y)
        classes = scores.shape[1]
        cells = y * classes + scores.argmax(1)
        found = torch.zeros(classes * classes, dtype=torch.int64, device=scores.device)
        return found.scatter_add_(0, cells, counts.long())

    def value(self, total: Total) -> float | None:
        return None

    def columns(self) -> tuple[str, ...]:
        return ("actual", "predicted", "samples")

    def cells(self, total: Total) -> dict[str, np.ndarray]:
        classes = math.isqrt(len(total))
        there = np.flatnonzero(total)
        columns = (there // classes, there % classes, total[there].astype(np.int64))
        return dict(zip(self.columns(), columns, strict=True))
