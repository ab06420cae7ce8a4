"""How long a client's step takes by a backend, timed on made-up rows of the size of a run's."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import nn

from raydpfl import models
from raydpfl.core.hardware import Precision
from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import USER_EXCEPTIONS
from raydpfl.methods.local.base import Local
from raydpfl.models.tasks import Form
from raydpfl.training.backends import BACKENDS
from raydpfl.training.backends.base import Starts
from raydpfl.training.process_settings import single_thread
from raydpfl.training.trainer import Trainer

STEPS = 2  # of every client that is timed
MIN_SECONDS = 0.3  # seconds of a run after which there is no other; one of many clients takes fewer


@dataclass(frozen=True)
class Workload:
    """What a run trains."""

    clients: int  # that a chunk holds, where a backend trains several at once
    rows: int  # of a client
    steps: float  # of all clients in all rounds

    @classmethod
    def of(
        cls, local: Local, sizes: np.ndarray, clients: int, cohort: float, rounds: int
    ) -> Workload:
        """Of cohorts of clients with `sizes` rows, int64 [N]."""
        sampled_sizes = np.maximum(sizes[:: max(1, len(sizes) // 10_000)], 1)
        steps = 1.0 if local.trains else float(local.step_counts(sampled_sizes).mean())
        return cls(clients, int(np.median(sampled_sizes)), steps * cohort * rounds)


@dataclass(eq=False)
class StepTimes:
    """Seconds of the processor for a client's step by backend, in one thread; for the training of a
    client where it is a user-defined `train`. Infinite where it raises.
    """

    module: nn.Module
    local: Local
    form: Form
    clip: float | None
    precision: Precision
    work: Workload
    _known_seconds: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.steps = 1 if self.local.trains else STEPS
        if not self.local.trains:
            self.local = self.local.model_copy(update={"steps": STEPS, "epochs": None})

    @cached_property
    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x [1, n, *shape] and y [1, n, *target]."""
        generator = stream(0, Purpose.DATA)
        n = self.work.rows
        x = self.form.inputs(n, generator)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            outputs = copy.deepcopy(self.module)(x[:1])
        y = self.form.task.random_targets(generator, n, tuple(outputs.shape[1:]))
        return x[None], y[None]

    def of(self, backend: str, best_seconds: float = math.inf) -> float:
        """By a backend, infinite where it fails. Where its first steps take more than four times
        `best_seconds`, they count.
        """
        if backend not in self._known_seconds:
            threads = torch.get_num_threads()
            single_thread()
            try:
                self._known_seconds[backend] = self._measure(backend, best_seconds)
            except USER_EXCEPTIONS:  # which the run will meet, and say where
                self._known_seconds[backend] = math.inf
            finally:
                torch.set_num_threads(threads)
        return self._known_seconds[backend]

    def _measure(self, backend: str, best: float) -> float:
        trainer = Trainer(
            *(self.module, self.local),
            backend=backend,
            seed=0,
            clip=self.clip,
            user_defined=True,
            task=self.form.task,
            precision=self.precision,
        )
        clients = 1
        if not BACKENDS[backend].one_by_one:
            clients = min(self.work.clients, max(3, int(MIN_SECONDS / (STEPS * min(best, 0.1)))))
        first_seconds = self._run(trainer, min(clients, 3))
        if first_seconds > 4 * best:
            return first_seconds
        seconds = self._run(trainer, clients)
        if seconds * clients * self.steps < MIN_SECONDS:
            seconds = min(seconds, self._run(trainer, clients))
        return seconds

    def _run(self, trainer: Trainer, clients: int) -> float:
        x, y = (part.expand(clients, *part.shape[1:]) for part in self._rows)
        parameters = models.trained(self.module)
        own_count = models.ParameterSplit.of(self.module).own
        start_parameters = parameters.expand(clients, -1)
        start_time = time.thread_time()
        blocks = trainer.chunk(
            *(parameters, x, y, [self.work.rows] * clients),
            t=0,
            clients=range(clients),
            draws=[0] * clients,
            corrections=torch.zeros_like(start_parameters) if self.local.corrects else None,
            starts=Starts.at(start_parameters) if own_count else None,
        )
        for _ in blocks:
            pass
        return (time.thread_time() - start_time) / (clients * self.steps)
