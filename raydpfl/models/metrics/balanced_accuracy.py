"""The accuracy on each class, averaged over the classes."""

from __future__ import annotations

import torch

from raydpfl.models.metrics.base import Percent, Total, of_labels
from raydpfl.models.tasks import Form


class BalancedAccuracy(Percent):
    """The mean over classes of the share of a class's samples (of positions that count) that are
    met: its recall. Classes without any are left out. Of several labels, over labels, of the recall
    of a label.
    """

    kind: str = "balanced_accuracy"

    def sums(self, form: Form, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen, right, counts = of_labels(self, form, outputs, y)
        actual = right & counts
        return torch.cat([(chosen & actual).sum(0), actual.sum(0)])

    def value(self, total: Total) -> float | None:
        met, actual = total.reshape(2, -1)
        there = actual > 0
        return float((met[there] / actual[there]).mean()) if there.any() else None
