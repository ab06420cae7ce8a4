"""The base of the family, and what a sample and its targets are."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from raydpfl.config.registry import Member

TOKENS = 16  # of made-up inputs at most, so that they have repeats

Count = Tensor | int
Shape = tuple[int, ...]
Classes = int | tuple[str, ...] | None
LossForm = Literal["softmax", "squares"]


@dataclass(frozen=True)
class Target:
    """What the targets of one sample are.

    Args:
        shape: of a sample's targets, () for a single one.
        classes: int64 targets are below it; 0: they are float32 numbers.
        names: of the classes, or of the several targets, where they have any.
    """

    shape: tuple[int, ...] = ()
    classes: int = 0
    names: tuple[str, ...] = ()


Targets = tuple[np.ndarray, np.ndarray, Target]  # of training rows, of test rows, and what they are


class Task(Member):
    """Base of the family. A batch has outputs float32 [B, *outputs(target)] and targets y: int64 or
    float32 [B, *target.shape].
    """

    # What the targets are: what a source gives and a task takes is of the same sort.
    takes: ClassVar[Literal["class", "numbers", "bits", "positions"]]

    def outputs(self, target: Target) -> tuple[int, ...]:
        """The shape of a model's outputs for one sample."""
        raise NotImplementedError

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample, [B], differentiable by `outputs`. It must not mix samples."""
        raise NotImplementedError

    def scores(self) -> tuple[str, ...]:
        """The scores that are given by default, the one to follow a run by first."""
        return ("loss",)

    def right(self, outputs: Tensor, y: Tensor) -> tuple[Count, Count]:
        """How many targets of the batch are met, of how many that count, as whole numbers or as
        tensors [], for which a GPU need not be waited for; (0, 0): there is no such thing as an
        accuracy.
        """
        return 0, 0

    def classes(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where one of several classes is right: for each sample or position a score for each class
        float32 [n, C], the class int64 [n], below C, and whether it counts, bool [n].
        """
        return None

    def bits(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Where any of several labels are right: for each sample a score for each, above 0 for yes,
        float32 [B, L], and whether it is right, bool [B, L].
        """
        return None

    def numbers(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Where numbers are predicted: those, and those that they are to be, float32 [B, k]."""
        return None

    def ignore_index(self) -> int:
        """The target of a position that does not count."""
        return -100

    def targets(self, name: str, y: np.ndarray, test_y: np.ndarray, classes: Classes) -> Targets:
        """Targets of training and test rows from what the columns of a table hold.

        Args:
            name: of the column or columns, for messages.
            y, test_y: numbers or text [rows], or numbers [rows, n] of several columns or of lists;
                of lists of several lengths, or of text, an object array [rows].
            classes: how many there are, or their names in order; None: what the columns have.

        Returns:
            Both in the types of a batch, and what they are.

        Raises:
            ConfigError: on the field `data.y`, or `data.classes`.
        """
        raise NotImplementedError

    def example_target(self) -> Target:
        """Targets of a sample that the task could have, for the check of its contract."""
        raise NotImplementedError

    def random_targets(self, generator: np.random.Generator, rows: int, outputs: Shape) -> Tensor:
        """Random targets of some rows for a model with outputs of this shape for a sample."""
        raise NotImplementedError

    def loss_form(self) -> LossForm | None:
        """The form of the loss by which backends write its gradient out: `softmax`, the
        cross-entropy of a class in int64, or `squares`, half the mean squared error in float32.
        None: they have to differentiate `loss`.
        """
        return None


@dataclass(frozen=True)
class Form:
    """What one sample is, and what is learnt of it.

    Args:
        shape: of its inputs.
        target: what its targets are.
        task: what is learnt.
        tokens: inputs are int64, whole numbers below it; 0: they are float32.
    """

    shape: tuple[int, ...]
    target: Target
    task: Task
    tokens: int = 0

    @property
    def outputs(self) -> tuple[int, ...]:
        """The shape of a model's outputs for one sample."""
        return self.task.outputs(self.target)

    @property
    def dtype(self) -> str:
        """Of inputs."""
        return "int64" if self.tokens else "float32"

    def inputs(self, rows: int, generator: np.random.Generator | None = None) -> Tensor:
        """Made-up inputs [rows, *shape]: zeros, or drawn evenly from all there are (from [0, 1)
        where they are float32).
        """
        size = (rows, *self.shape)
        if generator is None:
            return torch.zeros(size, dtype=torch.int64 if self.tokens else torch.float32)
        if self.tokens:
            return torch.from_numpy(generator.integers(min(self.tokens, TOKENS), size=size))
        return torch.from_numpy(generator.random(size, dtype=np.float32))
