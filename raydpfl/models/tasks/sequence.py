"""A class at each position."""

from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from raydpfl.errors import ConfigError
from raydpfl.models.tasks.base import Classes, Count, Shape, Target, Targets, Task
from raydpfl.models.tasks.classification import number_classes


class Sequence(Task):
    """A class for each position of a sample: the mean over its positions of the cross-entropy of a
    score for each class. A sample none of whose positions counts has a loss of 0.

    Targets are lists of class numbers to a row; shorter lists are filled up with `ignore`.
    """

    takes: ClassVar[Literal["class", "numbers", "bits", "positions"]] = "positions"
    kind: str = "sequence"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"ignore": 1})
    ignore: int = Field(default=-100, description="the target of a position that does not count")

    def ignore_index(self) -> int:
        return self.ignore

    def outputs(self, target: Target) -> tuple[int, ...]:
        return (*target.shape, target.classes)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        flat = F.cross_entropy(
            outputs.flatten(0, -2), y.flatten(), ignore_index=self.ignore, reduction="none"
        )
        return flat.view(len(y), -1).sum(1) / (y != self.ignore).flatten(1).sum(1).clamp(min=1)

    def scores(self) -> tuple[str, ...]:
        return ("accuracy", "perplexity", "loss")

    def right(self, outputs: Tensor, y: Tensor) -> tuple[Count, Count]:
        counted_mask = y != self.ignore
        return ((outputs.argmax(-1) == y) & counted_mask).sum(), counted_mask.sum()

    def classes(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        flat = y.flatten()
        counted_mask = flat != self.ignore
        return outputs.flatten(0, -2), flat.where(counted_mask, 0), counted_mask

    def targets(self, name: str, y: np.ndarray, test_y: np.ndarray, classes: Classes) -> Targets:
        width = max((len(row) for column in (y, test_y) for row in _rows(name, column)), default=0)
        arrays = [self._pad_rows(name, column, width) for column in (y, test_y)]
        labels = np.concatenate([column[column != self.ignore] for column in arrays])
        if not len(labels):
            raise ConfigError("data.y", name, f"targets; all of these are {self.ignore}, ignored")
        number = len(classes) if isinstance(classes, tuple) else classes
        number_classes(name, labels, number)
        names = classes if isinstance(classes, tuple) else ()
        return arrays[0], arrays[1], Target((width,), number or 1 + int(labels.max()), names)

    def _pad_rows(self, name: str, column: np.ndarray, width: int) -> np.ndarray:
        """Int64 [rows, width]."""
        padded_rows = np.full((len(column), width), self.ignore, np.int64)
        for row, values in enumerate(_rows(name, column)):
            padded_rows[row, : len(values)] = values
        return padded_rows

    def example_target(self) -> Target:
        return Target((5,), 4)

    def random_targets(self, generator: np.random.Generator, rows: int, outputs: Shape) -> Tensor:
        y = generator.integers(outputs[-1], size=(rows, *outputs[:-1]))
        y[:, 1::3] = self.ignore
        return torch.from_numpy(y)


def _rows(name: str, column: np.ndarray) -> list[np.ndarray]:
    """The class numbers of each row. Raises `ConfigError`."""
    rows = [np.asarray(row) for row in column]
    for row in rows:
        if row.ndim != 1 or (row.size and row.dtype.kind not in "biu"):
            raise ConfigError("data.y", name, "a list of whole numbers to a row, for sequence")
    return rows
