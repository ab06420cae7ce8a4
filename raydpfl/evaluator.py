"""The loss and accuracy of a model on rows that it was not trained on, by the processes that train.

A set (`raydpfl.scores`) is evaluated a batch at a time, the batches by whoever is free; what they
come to is added up in their order, so that a score does not depend on who evaluated what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raydpfl import models, scores
from raydpfl.config import Evaluate, Experiment
from raydpfl.data import Shards
from raydpfl.device import memory, sent
from raydpfl.keys import keyed_globals
from raydpfl.process import own_code
from raydpfl.resident import check

Number = torch.Tensor | int  # the tensor is [], on the device
SHARE = 8  # of the device's memory that is the actor's, batches may take one part in so many


@dataclass(frozen=True)
class Scored:
    """What a model does on one batch of a set."""

    rows: str  # the set
    loss: float  # summed over the samples
    right: int  # targets that are met
    counted: int  # of how many; 0: an accuracy has no meaning
    samples: int


def batches(evaluate: Evaluate, shards: Shards) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """What is evaluated: (set, x, y) of each batch, as it is stored. Where `evaluate.test` is false
    that is no test row.
    """
    sets = [scores.TEST] if evaluate.test else []
    sets += [scores.VALIDATION] if evaluate.validation else []
    return [(rows, *stored) for rows in sets for stored in shards.held_apart(rows, evaluate.batch)]


def scored(found: Iterable[Scored]) -> dict[str, float | None]:
    """Each score of the sets of these batches, in order: the mean loss, and the share of targets
    that are met (None where the task has no accuracy).
    """
    known: dict[str, float | None] = {}
    by_set: dict[str, list[Scored]] = {}
    for each in found:
        by_set.setdefault(each.rows, []).append(each)
    for rows, parts in by_set.items():
        samples = sum(part.samples for part in parts)
        right = sum(part.right for part in parts)
        counted = sum(part.counted for part in parts)
        loss = 0.0
        for part in parts:  # `sum` rounds otherwise from Python 3.12 on
            loss += part.loss
        known[f"{rows}_loss"] = loss / samples
        known[f"{rows}_accuracy"] = right / counted if counted else None
    return known


def known(values: list[Number]) -> list[float]:
    """Numbers, some of which a GPU may hold, which is waited for once."""
    held = [each for each in values if isinstance(each, torch.Tensor)]
    fetched = iter(torch.stack(held).tolist() if held else ())
    return [next(fetched) if isinstance(each, torch.Tensor) else each for each in values]


class Evaluator:
    """Evaluates models on batches of rows that clients do not train on.

    `module`: the experiment's, on `device`; its parameters are overwritten.
    """

    def __init__(
        self, experiment: Experiment, shards: Shards, module: torch.nn.Module, device: torch.device
    ):
        self.seed = experiment.seed
        self.form = shards.form(experiment.data.task)
        self.own = own_code(experiment)
        self.shards = shards
        self.module = module
        self.device = device
        self.batches = batches(experiment.evaluate, shards)
        self._there: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # that a GPU keeps
        self._left = memory(experiment.client.num_gpus) // SHARE  # bytes that it has for more

    def evaluate(self, model: np.ndarray, which: Sequence[int]) -> list[Scored]:
        """What the model, float32 [d], does on some of the batches, each by itself."""
        models.load(self.module, torch.tensor(model, device=self.device))
        with torch.inference_mode():
            found = [self._scored(*self._batch(index)) for index in which]
        columns = [known(list(values)) for values in zip(*found, strict=True)]
        sets = [self.batches[index][0] for index in which]
        samples = [len(self.batches[index][2]) for index in which]
        return [Scored(*each) for each in zip(sets, *columns, samples, strict=True)]

    def _batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y of a batch, on the device."""
        if index in self._there:
            return self._there[index]
        x, y = self.shards.ready(*self.batches[index][1:])
        check(self.device, self.form, x, y)
        given = sent(torch.from_numpy(x), self.device), sent(torch.from_numpy(y), self.device)
        if self.device.type != "cpu" and x.nbytes + y.nbytes <= self._left:
            self._left -= x.nbytes + y.nbytes
            self._there[index] = given
        return given

    def _scored(self, x: torch.Tensor, y: torch.Tensor) -> tuple[Number, Number, Number]:
        """The loss, summed over the samples, how many targets are met, and of how many."""
        if self.own:  # which may draw from the generators of the process
            with keyed_globals(self.seed, step=4):
                outputs = self.module(x)
        else:
            outputs = self.module(x)
        right, counted = self.form.task.right(outputs, y)
        return self.form.task.loss(outputs, y).sum(), right, counted
