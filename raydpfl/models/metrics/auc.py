"""The area under the curve of true over false positives."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raydpfl.models.metrics.base import Percent, Total, require_classes
from raydpfl.models.tasks import Form


class Auc(Percent):
    """The chance that a sample of a class (a position that counts) has a larger score for it than
    one of another, ties counting half: the area under the receiver operating characteristic. The
    score of a class is its probability; of two classes one curve, of more the mean over classes,
    one against the rest; of several labels the mean over labels. Classes that all samples or none
    are of are left out.

    It is exact, by ranks, and so keeps the scores of all rows.
    """

    kind: str = "auc"

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        bits = form.task.bits(outputs, y)
        if bits is not None:
            scores, positives = bits
            return _pack_rows(scores.double(), positives, torch.ones_like(positives[:, 0]))
        scores, y, counts = require_classes(self, form, outputs, y)
        scores = scores.double()
        if scores.shape[1] == 2:
            return _pack_rows(scores[:, 1:] - scores[:, :1], y[:, None] == 1, counts)
        ids = torch.arange(scores.shape[1], device=scores.device)
        # rounded, as scores that are the same but for rounding are ties
        return _pack_rows(torch.log_softmax(scores, 1).float().double(), y[:, None] == ids, counts)

    def joined(self, parts: Sequence[Total]) -> Total:
        """The rows of all batches, one after another."""
        return np.concatenate([parts[0][:1], *(part[1:] for part in parts)])

    def value(self, total: Total) -> float | None:
        classes = int(total[0])
        rows = total[1:].reshape(-1, 2 * classes + 1)
        rows = rows[rows[:, -1] > 0]
        areas = []
        for scores, positives in zip(rows.T[:classes], rows.T[classes:-1] > 0, strict=True):
            ones = int(positives.sum())
            zeros = len(positives) - ones
            if ones and zeros:
                ranks = _ranks(scores)[positives].sum()
                areas.append(float((ranks - ones * (ones + 1) / 2) / (ones * zeros)))
        return float(np.mean(areas)) if areas else None


def _ranks(scores: np.ndarray) -> np.ndarray:
    """From 1; scores that are tied have the mean of theirs."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def _pack_rows(scores: Tensor, positives: Tensor, counts: Tensor) -> Tensor:
    """How many classes, then of each row its scores, whether each is right, and whether it counts;
    float64 [1 + n (2 C + 1)].
    """
    rows = torch.cat([scores, positives.double(), counts[:, None].double()], 1)
    width = torch.full((1,), scores.shape[1], dtype=torch.float64, device=scores.device)
    return torch.cat([width, rows.flatten()])
