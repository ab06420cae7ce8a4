"""Errors of predicted numbers."""

from __future__ import annotations

import torch

from raydpfl.models.metrics.base import Mean, of_numbers, pair
from raydpfl.models.tasks import Form


class MeanSquaredError(Mean):
    """The mean of (predicted - actual)^2 over samples and their numbers."""

    kind: str = "mse"

    def sums(self, form: Form, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        predicted, actual = of_numbers(self, form, outputs, y)
        return pair(((predicted - actual) ** 2).sum(), actual.numel())

    def sign(self) -> int:
        return -1


class MeanAbsoluteError(Mean):
    """The mean of |predicted - actual| over samples and their numbers."""

    kind: str = "mae"

    def sums(self, form: Form, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        predicted, actual = of_numbers(self, form, outputs, y)
        return pair((predicted - actual).abs().sum(), actual.numel())

    def sign(self) -> int:
        return -1
