"""A cohort cut into chunks, and the chunks dealt to whoever trains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from raydpfl.core.messages import Chunk
from raydpfl.experiment import Experiment
from raydpfl.methods.selection import Cohort
from raydpfl.training.backends import BACKENDS


def chunks(
    cohort: Cohort,
    weights: np.ndarray,
    sizes: np.ndarray,
    width: int,
    stds: np.ndarray | None = None,
    costs: np.ndarray | None = None,
) -> list[Chunk]:
    """The cohort cut into chunks of at most `width` clients of about one size.

    `weights` float64 [r], `sizes` int64 [r] (rows used) and `stds` float64 [r] (noise of local
    steps) are those of the cohort's clients; a chunk's rows are those of its largest. The cut is by
    size, and by place in the cohort among equals; within a chunk clients are in the order of their
    steps (with `costs`), the most first, and among equals in that of the cohort. So it is a
    function of the cohort and the sizes, and clients of one size are cut as they stand.

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
    found = []
    for some in np.split(order, ends[:-1]):
        places = some[np.lexsort((some, -_at(steps, some, -1)))]
        rows = max(1, int(_at(sizes, places).max()))
        drawn = _at(cohort.draws, places)
        noised = None if stds is None else _at(stds, places)
        clients = _at(cohort.clients, places, -1)
        found.append(Chunk(clients, drawn, _at(weights, places), rows, stds=noised))
    return found


def _ends(steps: np.ndarray, chunk: np.ndarray, step: np.ndarray, width: int) -> np.ndarray:
    """Where chunks of at most `width` end that together cost least, int64 [chunks], if one whose
    last client is i and whose clients make s steps together costs chunk[i] + s step[i].
    """
    count = len(chunk)
    made = np.append(0, np.cumsum(steps))
    least = np.zeros(count + 1)
    begins = np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        first = max(0, end - width)
        together = made[end] - made[first:end]
        taken = least[first:end] + chunk[end - 1] + together * step[end - 1]
        place = int(np.argmin(taken))
        least[end] = taken[place]
        begins[end] = first + place
    ends = [count]
    while begins[ends[-1]]:
        ends.append(int(begins[ends[-1]]))
    return np.array(ends[::-1])


def _at(values: np.ndarray, places: np.ndarray, fill: int = 0) -> np.ndarray:
    """The values, [r], at these places, int64 [k]; `fill` at place r."""
    return np.concatenate([values, np.array([fill], values.dtype)])[places]


class Costs:
    """What chunks cost, in seconds, as the rounds so far have shown: so much for each client, and
    so much for each of its rows.

    Nothing but who runs which chunk depends on it.
    """

    FADE = 0.9  # of what a share has shown, when another has

    def __init__(self) -> None:
        self._products = np.zeros((2, 2))
        self._seconds = np.zeros(2)

    def took(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """A share of these chunks has taken so long."""
        facts = sum(map(_facts, chunks), np.zeros(2))
        self._products = self.FADE * self._products + np.outer(facts, facts)
        self._seconds = self.FADE * self._seconds + facts * seconds

    def of(self, chunks: Sequence[Chunk]) -> np.ndarray:
        """Of each chunk, float64 [chunks], in seconds; before the first is known, in rows."""
        facts = np.array([_facts(chunk) for chunk in chunks]).reshape(-1, 2)
        return facts @ self._each()

    @property
    def known(self) -> bool:
        return bool(self._seconds.any())

    def _each(self) -> np.ndarray:
        """Seconds a client and a row, neither below 0."""
        if not self.known:
            return np.array([0.0, 1.0])
        (clients, both), (_, rows) = self._products
        if clients * rows - both**2 > 1e-6 * clients * rows:  # they can be told apart
            found = np.linalg.solve(self._products, self._seconds)
            if (found >= 0).all():
                return found
        alone = self._seconds / np.array([clients, rows])
        left = [self._seconds @ each for each in (np.array([alone[0], 0]), np.array([0, alone[1]]))]
        return np.array([0, alone[1]]) if left[1] >= left[0] else np.array([alone[0], 0])


def _facts(chunk: Chunk) -> np.ndarray:
    """What the cost of a chunk is made of: clients, and their rows."""
    count = float((chunk.clients >= 0).sum())
    return np.array([count, count * chunk.rows])


def shares(chunks: Sequence[Chunk], count: int, costs: np.ndarray) -> list[list[Chunk]]:
    """The chunks dealt to at most `count` shares of about one cost, the costliest first.

    `costs`: of each chunk. The costliest chunk that is left goes to the share that has least.
    """
    dealt: list[list[int]] = [[] for _ in range(count)]
    loads = np.zeros(count)
    for index in np.argsort(-costs, kind="stable").tolist():
        least = int(np.argmin(loads))
        dealt[least].append(index)
        loads[least] += costs[index]
    order = np.argsort(-loads, kind="stable").tolist()
    return [[chunks[index] for index in sorted(dealt[share])] for share in order if dealt[share]]


def cut(chunks: Sequence[Chunk], count: int, costs: np.ndarray) -> list[list[Chunk]]:
    """The clients of chunks that have the same bits in any, dealt to at most `count` shares of one
    cost, to within a client's.

    `costs`: of each chunk.
    """
    present = [int((chunk.clients >= 0).sum()) for chunk in chunks]
    each = np.repeat(costs / np.maximum(present, 1), present)
    middle = np.cumsum(each) - each / 2
    ends = np.searchsorted(middle, np.linspace(0, each.sum(), count + 1)[1:-1])
    begins = np.cumsum([0, *present])[:-1].tolist()
    found = []
    for start, end in pairwise([0, *ends.tolist(), len(each)]):
        parts = [
            chunk.part(slice(max(0, start - begin), min(many, end - begin)))
            for chunk, begin, many in zip(chunks, begins, present, strict=True)
            if max(start, begin) < min(end, begin + many)
        ]
        if parts:
            found.append(parts)
    return found


def dealer(
    experiment: Experiment,
) -> Callable[[Sequence[Chunk], int, np.ndarray], list[list[Chunk]]]:
    """`cut` where all that a client trains has the same bits in any chunk, a model of its own
    (`personal`) included; else `shares`.
    """
    apart = BACKENDS[experiment.client.backend].alone and experiment.personal is None
    return cut if apart else shares


def singles(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """A share for every client of the cohort, in the order of the chunks."""
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
