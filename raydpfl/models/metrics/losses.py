"""Losses, errors of predicted numbers, and what part of their variance is explained."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raydpfl.models.metrics.base import Mean, Metric, Total, pair, require_classes, require_numbers
from raydpfl.models.tasks import Form


class MeanLoss(Mean):
    """Base of means of which less is better."""

    def sign(self) -> int:
        return -1


class Loss(MeanLoss):
    """The mean over samples of the task's loss (`Task.loss`)."""

    kind: str = "loss"

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        return pair(form.task.loss(outputs, y).double().sum(), len(y))


class Perplexity(MeanLoss):
    """The exponential of the mean cross-entropy, in nats, over all samples, or all positions that
    count, each the same: not that of the loss of sequences, which is a mean over samples of means.
    """

    kind: str = "perplexity"

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        scores, y, counts = require_classes(self, form, outputs, y)
        losses = F.cross_entropy(scores, y, reduction="none").double()
        # of a position that does not count it may be infinite
        return pair(torch.where(counts, losses, 0.0).sum(), counts.sum())

    def value(self, total: Total) -> float | None:
        mean = super().value(total)
        if mean is None:
            return None
        return math.exp(mean) if mean < 700 else math.inf


class MeanSquaredError(MeanLoss):
    """The mean of (predicted - actual)^2 over samples and their numbers."""

    kind: str = "mse"

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        predictions, actual = require_numbers(self, form, outputs, y)
        return pair(((predictions - actual) ** 2).sum(), actual.numel())


class MeanAbsoluteError(MeanLoss):
    """The mean of |predicted - actual| over samples and their numbers."""

    kind: str = "mae"

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        predictions, actual = require_numbers(self, form, outputs, y)
        return pair((predictions - actual).abs().sum(), actual.numel())


class R2(Metric):
    """The share of the variance that is explained, 1 - sum (predicted - actual)^2 / sum (actual -
    its mean)^2: of each of a sample's numbers, and the mean over these. Numbers that are the same
    in all samples are left out.
    """

    kind: str = "r2"

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        predictions, actual = require_numbers(self, form, outputs, y)
        errors = ((predictions - actual) ** 2).sum(0)
        center = actual.mean(0)
        count = torch.full_like(center, len(actual))
        return torch.cat([count, center, ((actual - center) ** 2).sum(0), errors])

    def joined(self, parts: Sequence[Total]) -> Total:
        """Means and squares about them put together without cancellation (Chan et al., 1979)."""
        count, center, squares, errors = parts[0].reshape(4, -1)
        for part in parts[1:]:
            part_count, mean, part_squares, residuals = part.reshape(4, -1)
            total_count = count + part_count
            shift = mean - center
            squares = squares + part_squares + shift**2 * count * part_count / total_count
            center = center + shift * part_count / total_count
            count, errors = total_count, errors + residuals
        return np.concatenate([count, center, squares, errors])

    def value(self, total: Total) -> float | None:
        _, _, squares, errors = total.reshape(4, -1)
        mask = squares > 0
        return float((1 - errors[mask] / squares[mask]).mean()) if mask.any() else None

    def sign(self) -> int:
        return 1
