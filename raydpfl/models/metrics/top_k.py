"""Whether the class is among the k with the largest scores."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from pydantic import Field

from raydpfl.errors import ConfigError
from raydpfl.models.metrics.base import Mean, Metric, Percent, of_classes, pair
from raydpfl.models.tasks import Form


class TopK(Mean, Percent):
    """The share of samples (of positions that count) whose class is among the `k` with the largest
    scores; of equal scores those of lower classes come first. With k = 1 it is the accuracy.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"k": 1})

    kind: str = "top_k"
    k: int = Field(default=2, ge=1, description="classes that are looked at")

    @property
    def name(self) -> str:
        return f"top_{self.k}"

    @classmethod
    def called(cls, name: str) -> Metric | None:
        match = re.fullmatch(r"top_([1-9]\d{0,8})", name)
        return cls(k=int(match[1])) if match else None

    def fits(self, form: Form) -> None:
        super().fits(form)
        if self.k >= form.outputs[-1]:
            expected = f"a k below the {form.outputs[-1]} classes"
            raise ConfigError("evaluate.metrics.k", self.k, expected)

    def sums(self, form: Form, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores, y, counts = of_classes(self, form, outputs, y)
        its = scores.gather(1, y[:, None])
        lower = torch.arange(scores.shape[1], device=scores.device) < y[:, None]
        before = ((scores > its) | ((scores == its) & lower)).sum(1)
        return pair(((before < self.k) & counts).sum(), counts.sum())
