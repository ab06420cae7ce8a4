"""One class of several."""

from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raydpfl.errors import ConfigError
from raydpfl.models.tasks.base import Classes, Count, LossForm, Shape, Target, Targets, Task

# at most: a larger class number is an id or a mistake, and a model would have an output for each
# number below it
CLASSES = 1 << 20
# from so many classes on at least such a share of them has a sample, or they are ids
MIN_CLASSES = 100
MIN_SHARE = 0.25


class Classification(Task):
    """A class for each sample: cross-entropy of a score for each class."""

    takes: ClassVar[Literal["class", "numbers", "bits", "positions"]] = "class"
    kind: str = "classification"

    def outputs(self, target: Target) -> tuple[int, ...]:
        return (target.classes,)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y, reduction="none")

    def scores(self) -> tuple[str, ...]:
        return ("accuracy", "loss")

    def right(self, outputs: Tensor, y: Tensor) -> tuple[Count, Count]:
        return (outputs.argmax(1) == y).sum(), len(y)

    def classes(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        return outputs, y, torch.ones_like(y, dtype=torch.bool)

    def targets(self, name: str, y: np.ndarray, test_y: np.ndarray, classes: Classes) -> Targets:
        if y.ndim != 1 or (y.dtype == object and not isinstance(y[0], str)):
            expected = "one column with a number or name to a row (several: task multi_label, "
            raise ConfigError("data.y", name, f"{expected}regression or sequence)")
        labels, names = number_classes(name, np.concatenate([y, test_y]), classes)
        count = classes if isinstance(classes, int) else len(names) or 1 + int(labels.max())
        return labels[: len(y)], labels[len(y) :], Target((), count, names)

    def example_target(self) -> Target:
        return Target((), 3)

    def random_targets(self, generator: np.random.Generator, rows: int, outputs: Shape) -> Tensor:
        return torch.from_numpy(generator.integers(outputs[-1], size=rows))

    def loss_form(self) -> LossForm | None:
        return "softmax" if type(self).loss is Classification.loss else None


def number_classes(
    name: str, labels: np.ndarray, classes: int | tuple[str, ...] | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Int64 class numbers, and the classes' names if they have any: whole numbers from 0 as they
    are, all else by its place among `classes`, or in sorted order where these name none.

    Raises:
        ConfigError: for numbers that are none of classes, or labels that are none of `classes`.
    """
    if isinstance(classes, tuple):
        return _class_positions(name, labels, classes), classes
    if labels.dtype.kind in "biuf":
        whole = labels.min() >= 0 and labels.max() < CLASSES and (labels == np.floor(labels)).all()
        if not whole:
            expected = f"whole numbers from 0, or names; at most {CLASSES:,} classes"
            raise ConfigError("data.y", name, f"{expected} (numbers to predict: task regression)")
        numbers = labels.astype(np.int64)
        _check_count(name, numbers, classes)
        return numbers, ()
    texts, numbers = np.unique(labels.astype(str), return_inverse=True)
    if isinstance(classes, int) and len(texts) > classes:
        raise ConfigError("data.classes", classes, f"at least {len(texts)}, the labels of {name}")
    return numbers.astype(np.int64), tuple(texts.tolist())


def _class_positions(name: str, labels: np.ndarray, classes: tuple[str, ...]) -> np.ndarray:
    """The place of each label among the names of the classes, int64."""
    if labels.dtype.kind == "f" and (labels == np.floor(labels)).all():
        labels = labels.astype(np.int64)
    places = {label: place for place, label in enumerate(classes)}
    texts, index = np.unique(labels.astype(str), return_inverse=True)
    unknown_labels = [text for text in texts.tolist() if text not in places]
    if unknown_labels:
        expected = f"names of all labels of {name}; {unknown_labels[0]!r} is another"
        raise ConfigError("data.classes", list(classes), expected)
    return np.array([places[text] for text in texts.tolist()], np.int64)[index]


def _check_count(name: str, labels: np.ndarray, classes: int | None) -> None:
    """Raises `ConfigError` for numbers beyond the classes that are given, and for ids."""
    largest = int(labels.max())
    if classes is not None and largest >= classes:
        expected = f"more than {largest}, the largest label of {name}"
        raise ConfigError("data.classes", classes, expected)
    present = len(np.unique(labels))
    if classes is None and largest + 1 >= MIN_CLASSES and present < MIN_SHARE * (largest + 1):
        remedy = "give data.classes: their number, or the list of the labels that there are"
        expected = f"class numbers from 0 without such gaps: {present} up to {largest}"
        raise ConfigError("data.y", name, f"{expected} ({remedy})")
