"""Softmax regression."""

from __future__ import annotations

from math import prod
from typing import ClassVar

from torch import nn

from raydpfl.models.base import Model, Shape


class Softmax(Model):
    """Softmax regression: one linear layer with bias. For numeric targets see `linear`."""

    classifies: ClassVar[bool] = True
    kind: str = "softmax"

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), outputs))
