"""The mean absolute error of numbers."""

from __future__ import annotations

import torch

from raydpfl.models.metrics.base import Metric, Total, mean, of_numbers, pair
from raydpfl.models.tasks import Form


class MeanAbsoluteError(Metric):
    """The mean of |predicted - actual| over samples and their numbers."""

    kind: str = "mae"

    def sums(self, form: Form, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        predicted, actual = of_numbers(self, form, outputs, y)
        return pair((predicted - actual).abs().sum(), actual.numel())

    def value(self, total: Total) -> float | None:
        return mean(total)

    def sign(self) -> int:
        return -1
