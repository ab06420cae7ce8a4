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


def chunk_width(cohort: int, most: int | None = None) -> int:
    """How many clients of a cohort train at once: an even number of chunks, evenly filled, of at
    most `most` (None: `CHUNK`); one chunk where that holds more than `CHUNK`, as on a GPU, and the
    whole cohort.

    >>> chunk_width(150), chunk_width(80), chunk_width(10)
    (25, 20, 5)
    >>> chunk_width(150, most=1000), chunk_width(150, most=100)
    (150, 75)
    """
    most = most or CHUNK
    if most > CHUNK and cohort <= most:
        return cohort
    return math.ceil(cohort / (2 * math.ceil(cohort / (2 * most))))


def held_at_once(local: Local, shards: Shards, form: Form, module: nn.Module, gpus: float) -> int:
    """How many clients train in half of an actor's share of GPU memory, two at least."""
    rows = int(local.rows_used(np.array([shards.sizes.max()]))[0])
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
    cut = []
    for indices in np.split(order, ends[:-1]):
        indices = indices[np.lexsort((indices, -_at(steps, indices, -1)))]
        rows = max(1, int(_at(sizes, indices).max()))
        chunk_stds = None if stds is None else _at(stds, indices)
        most = None if limits is None else _at(limits, indices)
        clients, draws = _at(cohort.clients, indices, -1), _at(cohort.draws, indices)
        cut.append(Chunk(clients, draws, _at(weights, indices), rows, None, chunk_stds, most))
    return cut


def _ends(steps: np.ndarray, chunk: np.ndarray, step: np.ndarray, width: int) -> np.ndarray:
    """The ends of the chunks of at most `width` clients that together cost least, int64 [chunks]:
    one whose last client is i and whose clients make s steps together costs chunk[i] + s step[i].
    """
    count = len(chunk)
    total_steps = np.append(0, np.cumsum(steps))
    least = np.zeros(count + 1)
    begins = np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        first = max(0, end - width)
        chunk_steps = total_steps[end] - total_steps[first:end]
        costs = least[first:end] + chunk[end - 1] + chunk_steps * step[end - 1]
        best = int(np.argmin(costs))
        least[end] = costs[best]
        begins[end] = first + best
    ends = [count]
    while begins[ends[-1]]:
        ends.append(int(begins[ends[-1]]))
    return np.array(ends[::-1])


def _at(values: np.ndarray, indices: np.ndarray, fill: int = 0) -> np.ndarray:
    """The values, [r], at these indices, int64 [k]; `fill` at index r."""
    return np.concatenate([values, np.array([fill], values.dtype)])[indices]


class Costs:
    """Seconds that chunks take, by past rounds; only the assignment depends on it."""

    FADE = 0.9  # weight of earlier assignments when another is added

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0

    def took(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """An assignment of these chunks took so many seconds."""
        self._rows = self.FADE * self._rows + rows(chunks)
        self._seconds = self.FADE * self._seconds + seconds

    def of(self, chunks: Sequence[Chunk]) -> np.ndarray:
        """By chunk, float64 [chunks], in seconds; before the first assignment, in rows."""
        rate = self._seconds / self._rows if self.fitted else 1.0
        return rate * np.array([float(rows([chunk])) for chunk in chunks])

    @property
    def fitted(self) -> bool:
        return self._seconds > 0


def assign_chunks(chunks: Sequence[Chunk], count: int, costs: np.ndarray) -> list[list[Chunk]]:
    """The chunks in at most `count` assignments of about one cost (`costs`: by chunk), the
    costliest first. The costliest chunk that is left goes to the cheapest assignment.
    """
    assigned: list[list[int]] = [[] for _ in range(count)]
    loads = np.zeros(count)
    for index in np.argsort(-costs, kind="stable").tolist():
        least = int(np.argmin(loads))
        assigned[least].append(index)
        loads[least] += costs[index]
    order = np.argsort(-loads, kind="stable").tolist()
    return [[chunks[index] for index in sorted(assigned[i])] for i in order if assigned[i]]


def assign_clients(chunks: Sequence[Chunk], count: int, costs: np.ndarray) -> list[list[Chunk]]:
    """The chunks, cut between clients, in at most `count` assignments that differ in cost (`costs`:
    by chunk) by one client at most. For clients that have the same bits in any chunk.
    """
    present = [int((chunk.clients >= 0).sum()) for chunk in chunks]
    per_client = np.repeat(costs / np.maximum(present, 1), present)
    middle = np.cumsum(per_client) - per_client / 2
    ends = np.searchsorted(middle, np.linspace(0, per_client.sum(), count + 1)[1:-1])
    starts = np.cumsum([0, *present])[:-1].tolist()
    assignments = []
    for first, last in pairwise([0, *ends.tolist(), len(per_client)]):
        parts = [
            chunk.part(slice(max(0, first - start), min(clients, last - start)))
            for chunk, start, clients in zip(chunks, starts, present, strict=True)
            if max(first, start) < min(last, start + clients)
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
