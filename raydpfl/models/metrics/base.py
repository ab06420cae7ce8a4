"""The base of the family."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raydpfl.config.registry import Member
from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.models.tasks import Form

Total = np.ndarray  # float64 [k]: what batches come to, together


class Metric(Member):
    """Base of the family. A metric takes batches of outputs float32 [B, *form.outputs] and
    targets y, int64 or float32 [B, *form.target.shape], and has a value for all of them.
    """

    def sums(self, form: Form, outputs: Tensor, y: Tensor) -> Tensor:
        """What a batch comes to, float64 or int64 [k], on the device of `outputs`; whole numbers
        below 2^53. It must not depend on other batches.

        Raises:
            ConfigError: the metric has no meaning for the task.
        """
        raise NotImplementedError

    def joined(self, parts: Sequence[Total]) -> Total:
        """What batches, float64 [k] each, come to together: their sum, in their order."""
        total = np.zeros_like(parts[0])
        for part in parts:
            total = total + part
        return total

    def value(self, total: Total) -> float | None:
        """The metric of all rows; None: it has none of these."""
        raise NotImplementedError

    def cells(self, total: Total) -> dict[str, np.ndarray]:
        """What it has next to a value, for a table of its own: columns by name, int64 [rows]."""
        return {}

    def columns(self) -> tuple[str, ...]:
        """The columns of `cells`; none: there is no such table."""
        return ()

    def sign(self) -> int:
        """1: more of it is better; -1: less of it is; 0: that is unknown."""
        return 0

    def share(self) -> bool:
        """Whether it is a share, shown in percent."""
        return False

    @property
    def name(self) -> str:
        """Of its columns, after that of the set (`test_NAME`): the kind, or the name of one's own
        class.
        """
        last = re.split(r"[.:]", self.kind)[-1]
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower()

    @classmethod
    def parse_name(cls, name: str) -> Metric | None:
        """The setting of this class whose columns have this name; None: none has."""
        return cls() if name == cls.model_fields["kind"].default else None

    def fits(self, form: Form) -> None:
        """Raises `ConfigError` where it has no meaning for what is learnt of samples of this form:
        it is tried on made-up ones.
        """
        outputs = torch.zeros(2, *form.outputs)
        y = form.task.random_targets(stream(0, Purpose.DATA), 2, form.outputs)
        sums = self.sums(form, outputs, y.reshape(2, *form.target.shape))
        if not (isinstance(sums, Tensor) and sums.ndim == 1):
            expected = f"a class whose sums gives a tensor [k], not {type(sums).__name__}"
            raise ConfigError("evaluate.metrics", self.kind, expected)

    def refused(self, expected: str) -> ConfigError:
        """The error for a task that it has no meaning for."""
        return ConfigError("evaluate.metrics", self.name, f"a metric of the task; {expected}")


class Percent(Metric):
    """Base of those that are shares of which more is better."""

    def sign(self) -> int:
        return 1

    def share(self) -> bool:
        return True


class Mean(Metric):
    """Base of means: `sums` gives a sum and its count (`pair`)."""

    def value(self, total: Total) -> float | None:
        return float(total[0] / total[1]) if total[1] else None


def require_classes(
    metric: Metric, form: Form, outputs: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Task.classes`. Raises `ConfigError` for a task that has none."""
    classes = form.task.classes(outputs, y)
    if classes is None:
        raise metric.refused(f"{form.task.kind} has no classes, of which one is right")
    return classes


def require_labels(
    metric: Metric, form: Form, outputs: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """For each class, or label, whether it is chosen, whether it is right, and whether the row
    counts: bool [n, C], [n, C] and [n, 1]. Raises `ConfigError` for a task that has none.
    """
    bits = form.task.bits(outputs, y)
    if bits is not None:
        scores, label_mask = bits
        return scores > 0, label_mask, torch.ones_like(label_mask[:, :1])
    scores, y, counts = require_classes(metric, form, outputs, y)
    class_ids = torch.arange(scores.shape[1], device=scores.device)
    return scores.argmax(1)[:, None] == class_ids, y[:, None] == class_ids, counts[:, None]


def require_numbers(
    metric: Metric, form: Form, outputs: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """See `Task.numbers`, in float64. Raises `ConfigError` for a task that has none."""
    numbers = form.task.numbers(outputs, y)
    if numbers is None:
        raise metric.refused(f"{form.task.kind} has no numbers to predict")
    predictions, actual = numbers
    return predictions.double(), actual.double()


def pair(total: Tensor, count: Tensor | int) -> Tensor:
    """A sum, [], and of how many, as float64 [2], without waiting for a device."""
    if not isinstance(count, Tensor):
        count = torch.full_like(total, count, dtype=torch.float64)
    return torch.stack([total.double(), count.double()])
