"""The harmonic mean of precision and recall."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from raydpfl.models.metrics.base import Metric, Percent, Total, of_labels
from raydpfl.models.tasks import Form


class F1(Percent):
    """F1 = 2 TP / (2 TP + FP + FN) of a class, or of a label: `macro` its mean over them, those
    that neither are nor are predicted left out; `micro` that of the counts of all together.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"average": "micro"})

    kind: str = "f1"
    average: Literal["macro", "micro"] = Field(
        default="macro",
        description="macro: the mean over classes; micro: of the counts of all classes together",
    )

    @property
    def name(self) -> str:
        return "f1" if self.average == "macro" else "f1_micro"

    @classmethod
    def called(cls, name: str) -> Metric | None:
        members = {"f1": cls(), "f1_micro": cls(average="micro")}
        return members.get(name)

    def sums(self, form: Form, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen, right, counts = of_labels(self, form, outputs, y)
        both = (chosen & right & counts).sum(0)
        return torch.cat([both, (chosen & counts).sum(0), (right & counts).sum(0)])

    def value(self, total: Total) -> float | None:
        both, predicted, actual = total.reshape(3, -1)
        if self.average == "micro":
            both, predicted, actual = (
                counts.sum(keepdims=True) for counts in (both, predicted, actual)
            )
        there = predicted + actual > 0
        scores = 2 * both[there] / (predicted[there] + actual[there])
        return float(scores.mean()) if there.any() else None
