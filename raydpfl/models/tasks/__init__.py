"""What a model is to give for a sample, and what it loses where it does not: `data.task`, a file a
member.

A task says what the targets of a sample are, how a table's columns become such targets, which shape
a model's outputs have, the loss of each sample, and which scores there are by default. A loss of
one's own is a class with one of these bases, named by import path:

>>> task = parse("classification")
>>> outputs = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
>>> task.loss(outputs, torch.tensor([0, 1]))
tensor([0.6931, 0.6931])
>>> class Focal(Classification):
...     gamma: float = 2.0
...
...     def loss(self, outputs, y):
...         loss = super().loss(outputs, y)
...         return (1 - torch.exp(-loss)) ** self.gamma * loss
>>> Focal().loss(outputs, torch.tensor([0, 1]))
tensor([0.1733, 0.1733])
"""

from typing import Any

import torch  # noqa: F401  (the example above)

from raydpfl.config.registry import choose, family
from raydpfl.models.tasks.base import Form, Target, Task
from raydpfl.models.tasks.classification import Classification

__all__ = ["FAMILY", "Classification", "Form", "Target", "Task", "parse"]

FIRST = ("classification", "regression", "multi_label", "sequence")
FAMILY: dict[str, type[Task]] = family(__name__, Task, FIRST)


def parse(values: Any) -> Task:
    """The member that `data.task` names: a mapping with a kind, or a kind alone. Raises
    `ConfigError`.
    """
    fields = {"kind": values} if isinstance(values, str) else values
    return choose("data.task", fields, FAMILY, Task)
