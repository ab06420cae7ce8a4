"""The loss and accuracy of a model on rows that it was not trained on, in an actor of its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from raydpfl import models, scores
from raydpfl.config import Experiment
from raydpfl.data import Shards
from raydpfl.errors import contained
from raydpfl.local import single_thread
from raydpfl.local.way import sample_loss
from raydpfl.process import Process, own_code

Rows = Iterator[tuple[np.ndarray, np.ndarray]]


class Evaluator(Process):
    """Loss and accuracy of a model on the test set, and on the rows that clients hold out, in an
    actor of its own so that it hides behind the next round.
    """

    def make(self, experiment: Experiment, shards: str) -> None:
        single_thread()
        self.evaluate_on = experiment.evaluate
        self.seed = experiment.seed
        self.own = own_code(experiment)
        self.shards = Shards.open(shards)
        self.module = models.build(
            experiment.model, self.shards.shape, self.shards.classes, experiment.seed
        ).eval()

    @contained()
    def evaluate(self, model: np.ndarray) -> dict[str, float | None]:
        """Each score (`raydpfl.scores`) over all rows of its set: the mean loss, and the share of
        samples classified right (None for a regression). `model`: float32 [d].

        Where `evaluate.test` is false no test row is read, and the test set has no score.
        """
        models.load(self.module, torch.tensor(model))
        found: dict[str, float | None] = {}
        batch = self.evaluate_on.batch
        if self.evaluate_on.test:
            found |= self._scores(scores.TEST, self.shards.test(batch))
        if self.evaluate_on.validation:
            found |= self._scores(scores.VALIDATION, self.shards.validation(batch))
        return found

    def _scores(self, name: str, rows: Rows) -> dict[str, float | None]:
        loss = 0.0
        right = 0
        count = 0
        with torch.inference_mode():
            for x, y in rows:
                with self.keyed(self.seed, step=4):
                    outputs = self.module(torch.from_numpy(x))
                targets = torch.from_numpy(y)
                loss += float(sample_loss(outputs, targets, "sum"))
                right += int((outputs.argmax(1) == targets).sum())
                count += len(y)
        accuracy = right / count if self.shards.classes else None
        return {f"{name}_loss": loss / count, f"{name}_accuracy": accuracy}
