"""Cuts a cohort into chunks, and assigns the chunks to actors."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from torch import nn

from raydpfl import models
from raydpfl.core import device
from raydpfl.core.messages import Chunk
from raydpfl.data import Shards
from raydpfl.methods.local import Local
from raydpfl.methods.selection import Cohort
from raydpfl.models.tasks import Form

CHUNK = 32  # clients at most, for the backends that train a whole chunk at once


def chunk_width(cohort: int, max_width: int | None = None) -> int:
    """How many clients of a cohort train at once: an even number of chunks, evenly filled, of
    `max_width` at most (None: `CHUNK`); one chunk where that is more than `CHUNK`, as on a GPU, and
    holds the whole cohort.

    >>> chunk_width(150), chunk_width(80), chunk_width(10)
    (25, 20, 5)
    >>> chunk_width(150, max_width=1000), chunk_width(150, max_width=100)
    (150, 75)
    """
    max_width = max_width or CHUNK
    if max_width > CHUNK and cohort <= max_width:
        return cohort
    return math.ceil(cohort / (2 * math.ceil(cohort / (2 * max_width))))


def max_gpu_width(local: Local, shards: Shards, form: Form, module: nn.Module, gpus: float) -> int:
    """How many clients train in half of an actor's share of GPU memory, two at least."""
    rows = int(local.max_rows(np.array([shards.sizes.max()]))[0])
    # weights, gradients and updates, these and the noise in float64, and what is in the making
    numbers = 16 * models.parameter_count(module)
    numbers += 2 * rows * math.prod(shards.shape)
    numbers += 4 * local.batch_size(rows) * models.activations(module, form)
    return max(2, device.memory(gpus) // (2 * 4 * numbers))


def chunks(
    cohort: Cohort,
    weights: np.ndarray,
    sizes: np.ndarray,
    width: int,
    stds: np.ndarray | None = None,
    costs: np.ndarray | None = None,
    limits: np.ndarray | None = None,
) -> list[Chunk]:
    """The cohort cut into chunks of at most `width` clients of about one size.

    `weights` float64 [r], `sizes` int64 [r] (rows used), `stds` float64 [r] (noise of local steps)
    and `limits` float64 [r] are those of the cohort's clients; a chunk's rows are those of its
    largest. The cut is by size, and by place in the cohort among equals; within a chunk clients are
    in the order of their steps (with `costs`), the most first, and among equals in that of the
    cohort.

    Chunks are of `width`, the last one filled up with empty slots. Where clients differ in what
    they cost (`costs`, see `raydpfl.training.backends.base.Backend.costs`) chunks are such that all
    of them cost least.
    """
    if not len(cohort):
        return []
    order = np.argsort(sizes, kind="stable")
    steps = np.zeros(len(order)) if costs is None else costs[0]
    if costs is None or not costs[2].any() or (costs[1:] == costs[1:, :1]).all():
        order = np.append(order, np.full(-len(order) % width, len(order)))
        ends = np.arange(width, len(order) + 1, width)
    else:
        ends = _ends(costs[0, order], costs[1, order], costs[2, order], width)
    parts = []
    for indices in np.split(order, ends[:-1]):
        indices = indices[np.lexsort((indices, -_take(steps, indices, -1)))]
        rows = max(1, int(_take(sizes, indices).max()))
        chunk_stds = None if stds is None else _take(stds, indices)
        chunk_limits = None if limits is None else _take(limits, indices)
        clients, draws = _take(cohort.clients, indices, -1), _take(cohort.draws, indices)
        factors = _take(weights, indices)
        parts.append(Chunk(clients, draws, factors, rows, None, chunk_stds, chunk_limits))
    return parts


def _ends(steps: np.ndarray, chunk: np.ndarray, step: np.ndarray, width: int) -> np.ndarray:
    """The ends of the chunks of at most `width` clients that together cost least, int64 [chunks]:
    one whose last client is i and whose clients make s steps together costs chunk[i] + s step[i].
    """
    count = len(chunk)
    total_steps = np.append(0, np.cumsum(steps))
    min_costs = np.zeros(count + 1)
    chunk_starts = np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        start = max(0, end - width)
        chunk_steps = total_steps[end] - total_steps[start:end]
        costs = min_costs[start:end] + chunk[end - 1] + chunk_steps * step[end - 1]
        best_index = int(np.argmin(costs))
        min_costs[end] = costs[best_index]
        chunk_starts[end] = start + best_index
    ends = [count]
    while chunk_starts[ends[-1]]:
        ends.append(int(chunk_starts[ends[-1]]))
    return np.array(ends[::-1])


def _take(values: np.ndarray, indices: np.ndarray, fill: int = 0) -> np.ndarray:
    """The values, [r], at these indices, int64 [k]; `fill` at index r."""
    return np.concatenate([values, np.array([fill], values.dtype)])[indices]


class Costs:
    """Seconds that chunks take, by past rounds; only the assignment depends on it."""

    FADE = 0.9  # weight of earlier assignments when another is added

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0

    def record(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """An assignment of these chunks took so many seconds."""
        self._rows = self.FADE * self._rows + rows(chunks)
        self._seconds = self.FADE * self._seconds + seconds

    def of(self, chunks: Sequence[Chunk]) -> np.ndarray:
        """By chunk, float64 [chunks], in seconds; before the first assignment, in rows."""
        rate = self._seconds / self._rows if self.is_fitted else 1.0
        return rate * np.array([float(rows([chunk])) for chunk in chunks])

    @property
    def is_fitted(self) -> bool:
        return self._seconds > 0


def assign_chunks(chunks: Sequence[Chunk], count: int, costs: np.ndarray) -> list[list[Chunk]]:
    """The chunks in at most `count` assignments of about one cost (`costs`: by chunk), the
    costliest first. The costliest chunk that is left goes to the cheapest assignment.
    """
    assignments: list[list[int]] = [[] for _ in range(count)]
    loads = np.zeros(count)
    for index in np.argsort(-costs, kind="stable").tolist():
        cheapest_index = int(np.argmin(loads))
        assignments[cheapest_index].append(index)
        loads[cheapest_index] += costs[index]
    order = np.argsort(-loads, kind="stable").tolist()
    return [[chunks[index] for index in sorted(assignments[i])] for i in order if assignments[i]]


def assign_clients(chunks: Sequence[Chunk], count: int, costs: np.ndarray) -> list[list[Chunk]]:
    """The chunks, cut between clients, in at most `count` assignments that differ in cost (`costs`:
    by chunk) by one client at most. For clients that have the same bits in any chunk.
    """
    client_counts = [int((chunk.clients >= 0).sum()) for chunk in chunks]
    per_client = np.repeat(costs / np.maximum(client_counts, 1), client_counts)
    middle = np.cumsum(per_client) - per_client / 2
    ends = np.searchsorted(middle, np.linspace(0, per_client.sum(), count + 1)[1:-1])
    starts = np.cumsum([0, *client_counts])[:-1].tolist()
    assignments = []
    for first_client, client_end in pairwise([0, *ends.tolist(), len(per_client)]):
        parts = [
            chunk.part(slice(max(0, first_client - start), min(clients, client_end - start)))
            for chunk, start, clients in zip(chunks, starts, client_counts, strict=True)
            if max(first_client, start) < min(client_end, start + clients)
        ]
        if parts:
            assignments.append(parts)
    return assignments


def assign_singly(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """An assignment for every client of the cohort, in the order of the chunks."""
    return [
        [chunk.alone(slot)]
        for chunk in chunks
        for slot in np.flatnonzero(chunk.clients >= 0).tolist()
    ]


def rows(chunks: Sequence[Chunk]) -> int:
    """How many rows the clients of these chunks train on together, padding included."""
    return sum(
        chunk.rows * (1 if chunk.slot is not None else int((chunk.clients >= 0).sum()))
        for chunk in chunks
    )
