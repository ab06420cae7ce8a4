"""Several answers of yes or no."""

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from raydpfl.errors import ConfigError
from raydpfl.models.tasks.base import Classes, Count, Shape, Target, Targets, Task


class MultiLabel(Task):
    """Any of several labels for each sample: the mean over labels of the cross-entropy of a score
    for each, above 0 for yes.

    Columns of 0 and 1, a list of 0 and 1 to a row, or a list of names to a row.
    """

    takes: ClassVar[Literal["class", "numbers", "bits", "positions"]] = "bits"
    kind: str = "multi_label"

    def outputs(self, target: Target) -> tuple[int, ...]:
        return target.shape

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        # the log-softmax of (0, z) by hand: torch's own form uses log1p, whose value depends on the
        # position in the tensor, and so would the bits
        log_p = torch.log_softmax(torch.stack([torch.zeros_like(outputs), outputs], -1), -1)
        return -torch.where(y > 0.5, log_p[..., 1], log_p[..., 0]).mean(-1)

    def scores(self) -> tuple[str, ...]:
        return ("accuracy", "loss")

    def right(self, outputs: Tensor, y: Tensor) -> tuple[Count, Count]:
        return ((outputs > 0) == (y > 0.5)).sum(), y.numel()

    def bits(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        return outputs, y > 0.5

    def targets(self, name: str, y: np.ndarray, test_y: np.ndarray, classes: Classes) -> Targets:
        names = classes if isinstance(classes, tuple) else ()
        if y.dtype == object:
            label_lists = [_names(name, column) for column in (y, test_y)]
            names = names or tuple(
                sorted({label for rows in label_lists for row in rows for label in row})
            )
            arrays = [_bits(rows, names) for rows in label_lists]
        else:
            arrays = [_zeros_and_ones(name, column) for column in (y, test_y)]
        width = arrays[0].shape[1]
        label_count = classes if isinstance(classes, int) else len(names) or width
        if label_count != width:
            raise ConfigError("data.classes", classes, f"{width}, the labels of {name}, or none")
        return arrays[0], arrays[1], Target((width,), 0, names)

    def example_target(self) -> Target:
        return Target((3,))

    def random_targets(self, generator: np.random.Generator, rows: int, outputs: Shape) -> Tensor:
        return torch.from_numpy(generator.integers(2, size=(rows, *outputs))).float()


def _names(name: str, column: np.ndarray) -> list[list[str]]:
    """The labels of each row."""
    rows: list[Any] = column.tolist()
    lists = [[row] if isinstance(row, str) else [str(label) for label in row] for row in rows]
    if any(not isinstance(label, str) for row in rows if not isinstance(row, str) for label in row):
        expected = "lists of names, or lists of 0 and 1 of one length"
        raise ConfigError("data.y", name, f"{expected}, for multi_label")
    return lists


def _bits(rows: list[list[str]], names: tuple[str, ...]) -> np.ndarray:
    """Float32 [rows, names], 1 for each label that a row has. Raises `ConfigError`."""
    places = {name: place for place, name in enumerate(names)}
    bits = np.zeros((len(rows), len(names)), np.float32)
    for row, labels in enumerate(rows):
        for label in labels:
            if label not in places:
                expected = f"names of all labels; {label!r} is another"
                raise ConfigError("data.classes", list(names), expected)
            bits[row, places[label]] = 1
    return bits


def _zeros_and_ones(name: str, column: np.ndarray) -> np.ndarray:
    """Float32 [rows, labels]. Raises `ConfigError`."""
    bits = column.reshape(len(column), -1)
    if bits.dtype.kind not in "biuf" or not np.isin(bits, (0, 1)).all():
        raise ConfigError("data.y", name, "columns or lists of 0 and 1, or names, for multi_label")
    return bits.astype(np.float32)
