"""The loss and accuracy of a model on the test set, in an actor of its own."""

from __future__ import annotations

import numpy as np
import torch

from raydpfl import models
from raydpfl.config import Experiment
from raydpfl.data import Shards
from raydpfl.errors import contained
from raydpfl.local import single_thread
from raydpfl.local.way import sample_loss
from raydpfl.process import Process, own_code


class Evaluator(Process):
    """Loss and accuracy of a model on the test set, in an actor of its own so that it hides behind
    the next round.
    """

    def make(self, experiment: Experiment, shards: str) -> None:
        single_thread()
        self.batch = experiment.evaluate.batch
        self.seed = experiment.seed
        self.own = own_code(experiment)
        self.shards = Shards.open(shards)
        self.module = models.build(
            experiment.model, self.shards.shape, self.shards.classes, experiment.seed
        ).eval()

    @contained()
    def evaluate(self, model: np.ndarray) -> tuple[float, float | None]:
        """(mean loss, share of samples classified right; None for a regression) over the whole test
        set.
        """
        models.load(self.module, torch.tensor(model))
        loss = 0.0
        right = 0
        with torch.inference_mode():
            for x, y in self.shards.test(self.batch):
                with self.keyed(self.seed, step=4):
                    outputs = self.module(torch.from_numpy(x))
                targets = torch.from_numpy(y)
                loss += float(sample_loss(outputs, targets, "sum"))
                right += int((outputs.argmax(1) == targets).sum())
        return (
            loss / self.shards.test_size,
            right / self.shards.test_size if self.shards.classes else None,
        )
