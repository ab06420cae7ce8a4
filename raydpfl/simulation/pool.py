"""Where clients run: in this process, or in actors of Ray (`raydpfl.runtime.actor_pool`).

Results are taken as they arrive: nothing depends on their order, nor on which actor trains whom.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from raydpfl.core import signals
from raydpfl.core.messages import Broadcast, Chunk, ChunkResult, Work
from raydpfl.errors import RunError
from raydpfl.experiment import Experiment
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.evaluation import BatchScores


class Pool(Protocol):
    """The clients of a run, wherever they are."""

    per_client: bool  # every client of the population is its own actor

    @property
    def healthy(self) -> int:
        """How many actors can work."""

    @property
    def replaced(self) -> int:
        """How many actors were replaced by others."""

    def assign(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """The chunks of a round in assignments, of which an actor trains one at a time."""

    def run(
        self, broadcast: Broadcast, work: Work, assignments: Sequence[Sequence[Chunk]]
    ) -> Iterator[tuple[int, ChunkResult]]:
        """Yields (index of the assignment, its result) as they arrive. Raises `ClientError` for a
        client that failed, `RunError` where actors keep dying or a client takes too long.
        """

    def losses(self, model: np.ndarray, t: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        """What `clients` (int64 [k]) answer of their local losses under `model` (float32 [d]),
        float64 [k].
        """

    def evaluate(
        self, model: np.ndarray, t: int, client_parameters: Mapping[int, np.ndarray]
    ) -> list[BatchScores]:
        """What a model, float32 [d], does after t rounds on every batch that it is evaluated on, in
        order. `client_parameters`: by client, what it has of its own of the model, float32 [own].
        """

    def close(self) -> None:
        """Ends the actors."""


class _Timeout(BaseException):
    """Passes through where a client's exceptions are caught."""


class InlinePool:
    """The clients as plain objects in this process, one after another (compiled: in threads)."""

    healthy = 1
    replaced = 0
    per_client = False

    def __init__(self, experiment: Experiment, shards: str):
        self.client = ClientActor(experiment, shards)
        timeout = experiment.client.timeout
        # no other process could take over
        self._seconds = None if timeout == "auto" else timeout
        self._kind = experiment.model.kind

    @contextmanager
    def _time_limit(self, task: str) -> Iterator[None]:
        """Raises `RunError` for what takes longer than `client.timeout`, if that is a number."""
        try:
            with signals.time_limit(self._seconds, _Timeout()):
                yield
        except _Timeout:
            client = self.client.training.client
            prefix = f"client {client}: " if client >= 0 else ""
            raise RunError(
                f"{prefix}{task} did not end within {self._seconds:g} s; model.kind {self._kind} "
                "hangs there, or client.timeout is to be higher"
            ) from None

    def assign(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        return [list(chunks)] if chunks else []

    def run(
        self, broadcast: Broadcast, work: Work, assignments: Sequence[Sequence[Chunk]]
    ) -> Iterator[tuple[int, ChunkResult]]:
        for index, chunks in enumerate(assignments):
            with self._time_limit("training"):
                result = self.client.train(broadcast, work, chunks)
            yield index, result

    def losses(self, model: np.ndarray, t: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        with self._time_limit("answering with its loss"):
            return np.array(self.client.losses(model, t, clients.tolist(), noise_seed))

    def evaluate(
        self, model: np.ndarray, t: int, client_parameters: Mapping[int, np.ndarray]
    ) -> list[BatchScores]:
        with self._time_limit("the evaluation of the model"):
            indices = range(len(self.client.evaluator.batches))
            return self.client.evaluate(model, t, indices, client_parameters)

    def close(self) -> None:
        pass
