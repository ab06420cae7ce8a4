"""One number, or several."""

from math import prod
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raydpfl.errors import ConfigError
from raydpfl.models.tasks.base import Classes, LossForm, Shape, Target, Targets, Task


class Regression(Task):
    """A number for each sample, or several: half the mean squared error of an output for each."""

    takes: ClassVar[Literal["class", "numbers", "bits", "positions"]] = "numbers"
    kind: str = "regression"

    def outputs(self, target: Target) -> tuple[int, ...]:
        return (prod(target.shape),)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        squares = F.mse_loss(outputs.reshape(y.shape), y, reduction="none")
        return (squares.flatten(1).mean(1) if y.dim() > 1 else squares) / 2

    def numbers(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        return outputs.reshape(len(y), -1), y.reshape(len(y), -1)

    def targets(self, name: str, y: np.ndarray, test_y: np.ndarray, classes: Classes) -> Targets:
        if classes is not None:
            raise ConfigError("data.classes", classes, "none for task regression")
        for column in (y, test_y):
            if column.dtype.kind not in "biuf" or not np.isfinite(column).all():
                raise ConfigError("data.y", name, "finite numbers, for regression")
        with np.errstate(over="ignore"):
            arrays = [column.astype(np.float32) for column in (y, test_y)]
        if not all(np.isfinite(column).all() for column in arrays):
            raise ConfigError("data.y", name, "numbers below 3.4e38, for regression")
        return arrays[0], arrays[1], Target(y.shape[1:])

    def example_target(self) -> Target:
        return Target((2,))

    def random_targets(self, generator: np.random.Generator, rows: int, outputs: Shape) -> Tensor:
        shape = (rows,) if outputs == (1,) else (rows, *outputs)
        return torch.from_numpy(generator.random(shape)).float()

    def loss_form(self) -> LossForm | None:
        return "squares" if type(self).loss is Regression.loss else None
