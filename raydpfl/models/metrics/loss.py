"""Losses that are averaged over samples."""

import math

import torch.nn.functional as F
from torch import Tensor

from raydpfl.models.metrics.base import MeanLoss, Total, of_classes, pair
from raydpfl.models.tasks import Form


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
        scores, y, counts = of_classes(self, form, outputs, y)
        losses = F.cross_entropy(scores, y, reduction="none").double()
        return pair((losses * counts).sum(), counts.sum())

    def value(self, total: Total) -> float | None:
        mean = super().value(total)
        if mean is None:
            return None
        return math.exp(mean) if mean < 700 else math.inf
