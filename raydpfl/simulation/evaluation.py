"""Scores of a model on rows that it was not trained on, by the processes that train: batches in any
process, added up in their order, so that a score does not depend on who evaluated what.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from raydpfl import models
from raydpfl.core.device import memory, move_tensor
from raydpfl.core.prng import keyed_globals
from raydpfl.data import Shards
from raydpfl.experiment import Experiment
from raydpfl.models import metric_columns
from raydpfl.models.metrics import Metric, Total
from raydpfl.simulation.client.data_cache import check
from raydpfl.simulation.client.personalization import FineTuning, LocalParameters
from raydpfl.simulation.user_code import trains_user_code

SHARE = 8  # of the device's memory that is the actor's, batches may take one part in so many


@dataclass(frozen=True)
class BatchScores:
    """What a model does on one batch of a set."""

    rows: str  # the set
    sums: tuple[Total, ...]  # by metric, in their order; of clients, by client


@dataclass(frozen=True)
class Batch:
    """What is evaluated at once: rows of a set, or all that some clients are scored by."""

    rows: str  # the set
    arrays: tuple[np.ndarray, np.ndarray] | None = None  # x and y
    clients: range = range(0)  # one after another
    first: int = 0  # the place of their first row among those of all clients


def batches(experiment: Experiment, shards: Shards) -> list[Batch]:
    """What is evaluated. Where `evaluate.test` is false that is no test row. Where parts of the
    model are clients' own, the rows that are held out are evaluated by client.
    """
    evaluate = experiment.evaluate
    has_local = bool(experiment.model.local)
    sets = [metric_columns.TEST] if evaluate.test else []
    sets += [metric_columns.VALIDATION] if evaluate.validation and not has_local else []
    batches = [
        Batch(rows, arrays)
        for rows in sets
        for arrays in shards.stored_batches(rows, evaluate.batch)
    ]
    by_client = evaluate.per_client or (evaluate.validation and has_local)
    return batches + (_client_batches(shards, evaluate.batch) if by_client else [])


def _client_batches(shards: Shards, max_rows: int) -> list[Batch]:
    """All clients, some at a time: with `max_rows` rows together, or one with more."""
    rows = shards.client_rows
    ends = np.cumsum(rows)
    batches = []
    start = 0
    while start < len(rows):
        first_row = int(ends[start] - rows[start])
        stop = max(start + 1, int(np.searchsorted(ends, first_row + max_rows, side="right")))
        batches.append(Batch(metric_columns.CLIENT, None, range(start, stop), first_row))
        start = stop
    return batches


def client_values(scores: Iterable[BatchScores], metric: Metric) -> np.ndarray:
    """The metric of every client, float64 [clients]; NaN of one that has none."""
    batch_sums = (score.sums for score in scores if score.rows == metric_columns.CLIENT)
    sums = chain.from_iterable(batch_sums)
    # None becomes NaN
    values = [metric.value(metric.joined([total])) if len(total) else None for total in sums]
    return np.array(values, np.float64)


def totals(
    scores: Iterable[BatchScores], metrics: Sequence[Metric]
) -> dict[str, list[tuple[Metric, Total]]]:
    """What the batches of every set come to together by every metric, the batches in order."""
    scores_by_set: dict[str, list[BatchScores]] = {}
    for score in scores:
        if score.rows != metric_columns.CLIENT:
            scores_by_set.setdefault(score.rows, []).append(score)
    return {
        rows: [
            (metric, metric.joined([part.sums[place] for part in parts]))
            for place, metric in enumerate(metrics)
        ]
        for rows, parts in scores_by_set.items()
    }


def set_scores(totals_by_set: dict[str, list[tuple[Metric, Total]]]) -> dict[str, float | None]:
    """Each score of these sets; None where it is no number (but the loss)."""
    values: dict[str, float | None] = {}
    for rows, totals in totals_by_set.items():
        for metric, total in totals:
            if not metric.columns():
                value = metric.value(total)
                finite = value is None or math.isfinite(value) or metric.name == "loss"
                values[f"{rows}_{metric.name}"] = value if finite else None
    return values


def fetch_totals(batches: Sequence[Sequence[torch.Tensor]]) -> list[tuple[Total, ...]]:
    """Vectors [k] each, of every batch, in float64; a GPU that holds them is waited for once."""
    tensors = [total.double() for sums in batches for total in sums]
    flat = torch.cat(tensors).cpu().numpy() if tensors else np.empty(0)
    parts = iter(np.split(flat, np.cumsum([len(total) for total in tensors])[:-1]))
    return [tuple(next(parts) for _ in sums) for sums in batches]


class Evaluator:
    """Evaluates models on batches of rows that clients do not train on.

    `module`: the experiment's, where it is to run; its parameters are overwritten. `clients`: their
    local parameters. With these, or personal models, every client's rows are for its own model, and
    those of a client that has none yet are left out; with fine-tuning, for what it has trained of
    the model and its own.
    """

    def __init__(
        self,
        experiment: Experiment,
        shards: Shards,
        module: torch.nn.Module,
        clients: LocalParameters,
    ):
        self.seed = experiment.seed
        self.form = shards.form(experiment.data.task)
        self.metrics = experiment.metrics
        self.per_client = experiment.evaluate.per_client
        self.user_defined = trains_user_code(experiment)
        self.shards = shards
        self.module = module
        self.personal = clients
        self.device = next(module.parameters()).device
        self.batches = batches(experiment, shards)
        rule = experiment.evaluate.fine_tune
        self._tuning = FineTuning(experiment, rule, shards, module) if rule else None
        # the sets that a batch of clients is scored for, and by what
        local_validation = experiment.evaluate.validation and experiment.model.local
        self._by_client = [(metric_columns.VALIDATION, self.metrics)] if local_validation else []
        self._device_batches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # that a GPU keeps
        self._free_bytes = memory(experiment.client.num_gpus) // SHARE  # bytes that it has for more

    def evaluate(
        self, model: np.ndarray, t: int, indices: Sequence[int], states: Mapping[int, np.ndarray]
    ) -> list[BatchScores]:
        """The scores of the model, float32 [d], after t rounds, on the batches at `indices`.
        `states`: local parameters by client, float32 [own].
        """
        self._t = t
        self._client_parameters = states
        self._model = move_tensor(torch.tensor(model), self.device)
        models.load(self.module, self._model)
        with torch.inference_mode():
            scores = [sums for index in indices for sums in self._batch_sums(index)]
            sums = fetch_totals([sums for _, sums in scores])
        self._client_parameters = {}
        del self._model  # not kept in memory while clients train
        return [BatchScores(rows, total) for (rows, _), total in zip(scores, sums, strict=True)]

    def _batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y of a batch, on the device."""
        if index in self._device_batches:
            return self._device_batches[index]
        batch = self.batches[index]
        if batch.arrays is None:
            x, y = self.shards.client_batch(batch.clients, batch.first)
        else:
            x, y = self.shards.decode(*batch.arrays)
        check(self.device, self.form, x, y)
        host_x, host_y = torch.from_numpy(x), torch.from_numpy(y)
        tensors = move_tensor(host_x, self.device), move_tensor(host_y, self.device)
        if self.device.type != "cpu" and x.nbytes + y.nbytes <= self._free_bytes:
            self._free_bytes -= x.nbytes + y.nbytes
            self._device_batches[index] = tensors
        return tensors

    def _batch_sums(self, index: int) -> list[tuple[str, list[torch.Tensor]]]:
        """By set, the sums of the batch by metric, or of its clients, [k] each."""
        batch = self.batches[index]
        personal = batch.clients and self.personal.count and not self._tuning
        if personal and not any(client in self._client_parameters for client in batch.clients):
            empty_sum = self._model.new_empty(0)  # no score needs the rows
            sums = [empty_sum for _ in batch.clients]
            return [(metric_columns.CLIENT, sums)] if self.per_client else []
        x, y = self._batch(index)
        if not batch.clients:
            outputs = self._outputs(x)
            return [(batch.rows, [metric.sums(self.form, outputs, y) for metric in self.metrics])]
        rows = self.shards.client_rows[batch.clients.start : batch.clients.stop].tolist()
        if self.personal.count or self._tuning:
            outputs, y, rows = self._personal_outputs(batch.clients, rows, x, y)
        else:
            outputs = self._outputs(x)
        set_sums = [
            (name, [metric.sums(self.form, outputs, y) for metric in metrics])
            for name, metrics in self._by_client
            if len(y)
        ]
        if self.per_client is None:
            return set_sums
        empty_sum = outputs.new_empty(0)
        sums = [
            self.per_client.sums(self.form, *pair) if len(pair[1]) else empty_sum
            for pair in zip(outputs.split(rows), y.split(rows), strict=True)
        ]
        return [*set_sums, (metric_columns.CLIENT, sums)]

    def _personal_outputs(
        self, clients: range, rows: Sequence[int], x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Outputs of clients' own models (if any) on their rows, targets, and rows by client."""
        outputs = [x.new_empty(0, *self.form.outputs, dtype=torch.float32)]
        targets = {client: y[:0] for client in clients}
        samples = dict(zip(clients, zip(x.split(rows), y.split(rows), strict=True), strict=True))
        tested_clients = [client for client in clients if len(samples[client][1])]
        for client, numbers in self._models(tested_clients):
            client_x, targets[client] = samples[client]
            models.set_trained(self.module, numbers)
            outputs.append(self._outputs(client_x))
        models.load(self.module, self._model)
        parts = list(targets.values())
        return torch.cat(outputs), torch.cat(parts), [len(part) for part in parts]

    def _models(self, clients: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """The numbers of the model of each of these clients that has its own, float32 [D + b]."""
        if self._tuning:
            yield from self._tuning.models(clients, self._model, self._client_parameters, self._t)
            return
        for client in clients:
            if client in self._client_parameters:
                part = move_tensor(torch.tensor(self._client_parameters[client]), self.device)
                yield client, self.personal.whole_model(self._model, part)

    def _outputs(self, x: torch.Tensor) -> torch.Tensor:
        if not self.user_defined:
            return self.module(x)
        with keyed_globals(self.seed, step=4):  # it may draw from the generators of the process
            return self.module(x)
