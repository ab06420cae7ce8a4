"""How good a model is on rows that it was not trained on, by the processes that train.

A set (`raydpfl.scores`) is evaluated a batch at a time, the batches by whoever is free; what they
come to by each metric is added up in their order, so that a score does not depend on who evaluated
what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raydpfl import models, scores
from raydpfl.config import Evaluate, Experiment
from raydpfl.data import Shards
from raydpfl.device import memory, sent
from raydpfl.keys import keyed_globals
from raydpfl.metrics import Metric, Total
from raydpfl.process import own_code
from raydpfl.resident import check

SHARE = 8  # of the device's memory that is the actor's, batches may take one part in so many


@dataclass(frozen=True)
class Scored:
    """What a model does on one batch of a set."""

    rows: str  # the set
    sums: tuple[Total, ...]  # by metric, in their order


def batches(evaluate: Evaluate, shards: Shards) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """What is evaluated: (set, x, y) of each batch, as it is stored. Where `evaluate.test` is false
    that is no test row.
    """
    sets = [scores.TEST] if evaluate.test else []
    sets += [scores.VALIDATION] if evaluate.validation else []
    return [(rows, *stored) for rows in sets for stored in shards.held_apart(rows, evaluate.batch)]


def totals(
    found: Iterable[Scored], metrics: Sequence[Metric]
) -> dict[str, list[tuple[Metric, Total]]]:
    """What the batches of each set come to together by each metric, the batches in order."""
    by_set: dict[str, list[Scored]] = {}
    for each in found:
        by_set.setdefault(each.rows, []).append(each)
    return {
        rows: [
            (metric, metric.joined([part.sums[place] for part in parts]))
            for place, metric in enumerate(metrics)
        ]
        for rows, parts in by_set.items()
    }


def scored(found: dict[str, list[tuple[Metric, Total]]]) -> dict[str, float | None]:
    """Each score of these sets; None where a metric has no value, or none that is a number (but
    the loss).
    """
    known: dict[str, float | None] = {}
    for rows, totals in found.items():
        for metric, total in totals:
            if not metric.columns():
                value = metric.value(total)
                kept = value is None or math.isfinite(value) or metric.name == "loss"
                known[f"{rows}_{metric.name}"] = value if kept else None
    return known


def fetched(batches: Sequence[Sequence[torch.Tensor]]) -> list[tuple[Total, ...]]:
    """Vectors [k] each, of each batch, in float64; a GPU that holds them is waited for once."""
    every = [each.double() for sums in batches for each in sums]
    flat = torch.cat(every).cpu().numpy() if every else np.empty(0)
    parts = iter(np.split(flat, np.cumsum([len(each) for each in every])[:-1]))
    return [tuple(next(parts) for _ in sums) for sums in batches]


class Evaluator:
    """Evaluates models on batches of rows that clients do not train on.

    `module`: the experiment's, on `device`; its parameters are overwritten.
    """

    def __init__(
        self, experiment: Experiment, shards: Shards, module: torch.nn.Module, device: torch.device
    ):
        self.seed = experiment.seed
        self.form = shards.form(experiment.data.task)
        self.metrics = experiment.metrics
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
            sums = fetched(found)
        sets = [self.batches[index][0] for index in which]
        return [Scored(*each) for each in zip(sets, sums, strict=True)]

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

    def _scored(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        """What the batch comes to by each metric, [k] each."""
        if self.own:  # which may draw from the generators of the process
            with keyed_globals(self.seed, step=4):
                outputs = self.module(x)
        else:
            outputs = self.module(x)
        return [metric.sums(self.form, outputs, y) for metric in self.metrics]
