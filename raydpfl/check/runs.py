"""Small runs of one plan by every executor of runs, without Ray."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from raydpfl.core.messages import Broadcast, Chunk, ChunkResult, Columns, Work
from raydpfl.experiment import Experiment
from raydpfl.methods.selection import Cohort
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.evaluation import BatchScores
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.pool import InlinePool
from raydpfl.simulation.recorder import join_columns
from raydpfl.simulation.scheduler import Costs, assign_chunks, assign_clients, assign_singly


class SeveralActors(InlinePool):
    """Several client actors in this process, or one per client (`actors` 0). Everything between
    them and the coordinator is pickled, and the last result comes first.
    """

    def __init__(self, experiment: Experiment, shards: str, actors: int):
        super().__init__(experiment, shards)
        self.per_client = actors == 0
        self.count = actors or self.client.shards.clients
        self._assign = assign_clients if experiment.is_chunk_invariant else assign_chunks
        self._make = cache(lambda index: ClientActor(experiment, shards))

    def assign(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        if self.per_client:
            return assign_singly(chunks)
        return self._assign(chunks, self.count, Costs().of(chunks))

    def run(
        self, broadcast: Broadcast, work: Work, shares: Sequence[Sequence[Chunk]]
    ) -> Iterator[tuple[int, ChunkResult]]:
        for index in reversed(range(len(shares))):
            payload = pickle.loads(pickle.dumps((broadcast, work, shares[index])))
            result = self._actor(index, shares[index][0]).train(*payload)
            yield index, pickle.loads(pickle.dumps(result))

    def _actor(self, index: int, chunk: Chunk) -> ClientActor:
        if chunk.slot is not None and self.per_client:
            index = int(chunk.clients[chunk.slot])
        return self._make(index % self.count)

    def losses(self, model: np.ndarray, t: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        parts = np.array_split(clients, min(self.count, len(clients)) or 1)
        losses = [
            self._make(index).losses(model, t, part.tolist(), noise_seed)
            for index, part in enumerate(parts)
        ]
        return np.concatenate(losses)

    def evaluate(
        self, model: np.ndarray, t: int, client_parameters: Mapping[int, np.ndarray]
    ) -> list[BatchScores]:
        batches = len(self.client.evaluator.batches)
        scores: dict[int, list[BatchScores]] = {}
        for index in reversed(range(batches)):
            actor = self._make(index % self.count)
            evaluation = actor.evaluate(model, t, [index], client_parameters)
            scores[index] = pickle.loads(pickle.dumps(evaluation))
        return [evaluation for index in range(batches) for evaluation in scores[index]]


class RecordingCoordinator(Coordinator):
    """A coordinator that keeps what its clients have sent."""

    def __init__(self, plan: Plan, out: str, **options: Any):
        super().__init__(plan, out, **options)
        self.totals: list[np.ndarray] = []  # of each round, float64 [d]
        self.columns: list[Columns] = []
        self.bounds: list[float | None] = []
        self.server_noise: list[np.ndarray | None] = []

    def collect(self, t: int, cohort: Cohort) -> tuple[np.ndarray, list[ChunkResult]]:
        total, results = super().collect(t, cohort)
        self.totals.append(total)
        self.columns.append(join_columns(results))
        self.bounds.append(self.state.bound)
        return total, results

    def release(self, t: int, total: np.ndarray) -> np.ndarray:
        released_sum = super().release(t, total)
        self.server_noise.append(self._server_noise)
        return released_sum


def run_plan(
    plan: Plan,
    out: Path,
    actors: int | None = None,
    stop_round: int | None = None,
    resume: bool = False,
) -> RecordingCoordinator:
    """A run of a plan in the directory `out`, saved after its last round or before `stop_round`, on
    `actors` client actors (0: one per client, None: inline).
    """
    out.mkdir(parents=True, exist_ok=True)
    coordinator = RecordingCoordinator(plan, str(out), resume=resume)
    coordinator.start()
    if actors is not None:
        coordinator.pool = SeveralActors(plan.experiment, str(plan.shards), actors)
    rounds = plan.experiment.rounds if stop_round is None else stop_round
    while coordinator.position() < rounds:
        coordinator.round()
    coordinator.save()
    return coordinator
