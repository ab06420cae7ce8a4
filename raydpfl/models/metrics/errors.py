"""Errors of predicted numbers."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raydpfl.models.metrics.base import MeanLoss, Metric, Total, of_numbers, pair
from raydpfl.models.tasks import Form


class MeanSquaredError(MeanLoss):
    """The mean of (predicted - actual)^2 over samples and their numbers."""

    kind: str = "mse"

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        predicted, actual = of_numbers(self, form, outputs, y)
        return pair(((predicted - actual) ** 2).sum(), actual.numel())


class MeanAbsoluteError(MeanLoss):
    """The mean of |predicted - actual| over samples and their numbers."""

    kind: str = "mae"

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        predicted, actual = of_numbers(self, form, outputs, y)
        return pair((predicted - actual).abs().sum(), actual.numel())


class R2(Metric):
    """The share of the variance that is explained, 1 - sum (predicted - actual)^2 / sum (actual -
    its mean)^2: of each of a sample's numbers, and the mean over these. Numbers that are the same
    in all samples are left out.
    """

    kind: str = "r2"

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        predicted, actual = of_numbers(self, form, outputs, y)
        errors = ((predicted - actual) ** 2).sum(0)
        center = actual.mean(0)
        count = torch.full_like(center, len(actual))
        return torch.cat([count, center, ((actual - center) ** 2).sum(0), errors])

    def joined(self, parts: Sequence[Total]) -> Total:
        """Means and squares about them put together without cancellation (Chan et al., 1979)."""
        count, center, squares, errors = parts[0].reshape(4, -1)
        for part in parts[1:]:
            more, mean, within, residuals = part.reshape(4, -1)
            both = count + more
            shift = mean - center
            squares = squares + within + shift**2 * count * more / both
            center = center + shift * more / both
            count, errors = both, errors + residuals
        return np.concatenate([count, center, squares, errors])

    def value(self, total: Total) -> float | None:
        _, _, squares, errors = total.reshape(4, -1)
        there = squares > 0
        return float((1 - errors[there] / squares[there]).mean()) if there.any() else None

    def sign(self) -> int:
        return 1
