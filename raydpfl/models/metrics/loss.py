"""The loss that the task takes."""

from __future__ import annotations

import torch

from raydpfl.models.metrics.base import Mean, pair
from raydpfl.models.tasks import Form


class Loss(Mean):
    """The mean over samples of the task's loss (`Task.loss`)."""

    kind: str = "loss"

    def sums(self, form: Form, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return pair(form.task.loss(outputs, y).double().sum(), len(y))

    def sign(self) -> int:
        return -1
