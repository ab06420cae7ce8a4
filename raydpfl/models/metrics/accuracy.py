"""The share of targets that are met."""

from __future__ import annotations

import torch

from raydpfl.models.metrics.base import Mean, Percent, pair
from raydpfl.models.tasks import Form


class Accuracy(Mean, Percent):
    """The share of targets that are met, as the task says (`Task.right`): of samples whose class
    has the largest score, of positions that count, or of labels. A regression has none.
    """

    kind: str = "accuracy"

    def sums(self, form: Form, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        right, counted = form.task.right(outputs, y)
        if not isinstance(right, torch.Tensor):
            right = torch.full((), right, device=outputs.device)
        return pair(right, counted)
