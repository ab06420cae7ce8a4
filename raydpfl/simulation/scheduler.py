"""A cohort cut into lanes, and the lanes dealt to whoever trains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from raydpfl.core.messages import Lane
from raydpfl.experiment import Experiment
from raydpfl.methods.selection import Cohort
from raydpfl.training.backends import WAYS


def lanes(
    cohort: Cohort,
    weights: np.ndarray,
    sizes: np.ndarray,
    width: int,
    stds: np.ndarray | None = None,
    costs: np.ndarray | None = None,
) -> list[Lane]:
    """The cohort cut into lanes of at most `width` clients of about one size.

    `weights` float64 [r], `sizes` int64 [r] (rows used) and `stds` float64 [r] (noise of local
    steps) are those of the cohort's clients; a lane's rows are those of its largest. The cut is by
    size, and by place in the cohort among equals; within a lane clients are in the order of their
    steps (with `costs`), the most first, and among equals in that of the cohort. So it is a
    function of the cohort and the sizes, and clients of one size are cut as they stand.

    Lanes are of `width`, the last one filled up with empty slots. Where clients differ in what they
    cost (`costs`, see `raydpfl.training.backends.base.Way.costs`) lanes are such that all of them
    cost least.
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
        found.append(Lane(clients, drawn, _at(weights, places), rows, stds=noised))
    return found


def _ends(steps: np.ndarray, lane: np.ndarray, step: np.ndarray, width: int) -> np.ndarray:
    """Where lanes of at most `width` end that together cost least, int64 [lanes], if one whose last
    client is i and whose clients make s steps together costs lane[i] + s step[i].
    """
    count = len(lane)
    made = np.append(0, np.cumsum(steps))
    least = np.zeros(count + 1)
    begins = np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        first = max(0, end - width)
        together = made[end] - made[first:end]
        taken = least[first:end] + lane[end - 1] + together * step[end - 1]
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
    """What lanes cost, in seconds, as the rounds so far have shown: so much for each client, and so
    much for each of its rows.

    Nothing but who runs which lane depends on it.
    """

    FADE = 0.9  # of what a share has shown, when another has

    def __init__(self) -> None:
        self._products = np.zeros((2, 2))
        self._seconds = np.zeros(2)

    def took(self, lanes: Sequence[Lane], seconds: float) -> None:
        """A share of these lanes has taken so long."""
        facts = sum(map(_facts, lanes), np.zeros(2))
        self._products = self.FADE * self._products + np.outer(facts, facts)
        self._seconds = self.FADE * self._seconds + facts * seconds

    def of(self, lanes: Sequence[Lane]) -> np.ndarray:
        """Of each lane, float64 [lanes], in seconds; before the first is known, in rows."""
        facts = np.array([_facts(lane) for lane in lanes]).reshape(-1, 2)
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


def _facts(lane: Lane) -> np.ndarray:
    """What the cost of a lane is made of: clients, and their rows."""
    count = float((lane.clients >= 0).sum())
    return np.array([count, count * lane.rows])


def shares(lanes: Sequence[Lane], count: int, costs: np.ndarray) -> list[list[Lane]]:
    """The lanes dealt to at most `count` shares of about one cost, the costliest first.

    `costs`: of each lane. The costliest lane that is left goes to the share that has least.
    """
    dealt: list[list[int]] = [[] for _ in range(count)]
    loads = np.zeros(count)
    for index in np.argsort(-costs, kind="stable").tolist():
        least = int(np.argmin(loads))
        dealt[least].append(index)
        loads[least] += costs[index]
    order = np.argsort(-loads, kind="stable").tolist()
    return [[lanes[index] for index in sorted(dealt[share])] for share in order if dealt[share]]


def cut(lanes: Sequence[Lane], count: int, costs: np.ndarray) -> list[list[Lane]]:
    """The clients of lanes that have the same bits in any, dealt to at most `count` shares of one
    cost, to within a client's.

    `costs`: of each lane.
    """
    present = [int((lane.clients >= 0).sum()) for lane in lanes]
    each = np.repeat(costs / np.maximum(present, 1), present)
    middle = np.cumsum(each) - each / 2
    ends = np.searchsorted(middle, np.linspace(0, each.sum(), count + 1)[1:-1])
    begins = np.cumsum([0, *present])[:-1].tolist()
    found = []
    for start, end in pairwise([0, *ends.tolist(), len(each)]):
        parts = [
            lane.part(slice(max(0, start - begin), min(many, end - begin)))
            for lane, begin, many in zip(lanes, begins, present, strict=True)
            if max(start, begin) < min(end, begin + many)
        ]
        if parts:
            found.append(parts)
    return found


def dealer(experiment: Experiment) -> Callable[[Sequence[Lane], int, np.ndarray], list[list[Lane]]]:
    """`cut` where all that a client trains has the same bits in any lane, a model of its own
    (`personal`) included; else `shares`.
    """
    apart = WAYS[experiment.client.way].alone and experiment.personal is None
    return cut if apart else shares


def singles(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """A share for every client of the cohort, in the order of the lanes."""
    return [
        [lane.alone(slot)] for lane in lanes for slot in np.flatnonzero(lane.clients >= 0).tolist()
    ]


def rows(lanes: Sequence[Lane]) -> int:
    """How many rows the clients of these lanes train on together, padding included."""
    return sum(
        lane.rows * (1 if lane.slot is not None else int((lane.clients >= 0).sum()))
        for lane in lanes
    )
