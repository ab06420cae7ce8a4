"""Partitions by mixtures of classes: which are in a client's, and whole counts that come to them.

>>> counts = fit(np.array([[0.5, 0.5], [0.5, 0.5]]), np.array([3, 5]), np.array([4, 4]))
>>> counts.sum(0), counts.sum(1)
(array([4, 4]), array([3, 5]))
"""

from typing import Any, ClassVar

import numpy as np
from numpy.random import Generator
from pydantic import Field

from raydpfl.data.partitions.base import Assignment, Partition
from raydpfl.data.sizes import Sizes, apportion
from raydpfl.errors import ConfigError


class LabelMixture(Partition):
    """Base of partitions that give each client a mixture of classes."""

    def assign(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: Generator
    ) -> Assignment:
        supply = np.unique(labels, return_counts=True)[1]
        counts = sizes.counts(len(labels), clients, generator)
        table = self.table(counts, supply, sizes.kind, generator)
        rows = generator.permutation(len(labels))
        rows = rows[np.argsort(labels[rows], kind="stable")]
        owner = np.concatenate([np.repeat(np.arange(clients), column) for column in table.T])
        return rows[np.argsort(owner, kind="stable")], counts

    def table(
        self, counts: np.ndarray, supply: np.ndarray, sizes: str, generator: Generator
    ) -> np.ndarray:
        """Samples of each class and client, int64 [clients, classes], for the clients' `counts` and
        the classes' `supply`, int64; `sizes`: the kind, for messages. Raises `ConfigError`.
        """
        raise NotImplementedError


class Dirichlet(LabelMixture):
    """Each client's mixture of classes is a draw from the symmetric Dirichlet(psi) (Hsu, Qi, Brown
    2019; 002: psi = 100, 5, 0.1).
    """

    kind: str = "dirichlet"
    psi: float = Field(
        gt=0,
        description="the concentration, alpha elsewhere: the smaller, the less alike clients are",
    )
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"psi": 0.1}, {"psi": 100.0})

    def table(
        self, counts: np.ndarray, supply: np.ndarray, sizes: str, generator: Generator
    ) -> np.ndarray:
        mixture = generator.dirichlet(np.full(len(supply), self.psi), len(counts))
        table = fit(np.maximum(mixture, 1e-9), counts, supply)
        assert table is not None  # a mixture that is positive everywhere has a solution
        return table


class DominantLabels(LabelMixture):
    """A share of each client's samples from dominant classes, evenly, the rest evenly from all
    others (000 sec. 2.2: 2 with 230 of 500 samples each, 8 with about 5, a share of 0.92). Each
    class is dominant for clients in proportion to its samples.
    """

    kind: str = "dominant-labels"
    classes: int = Field(default=2, ge=1, description="dominant classes of a client")
    share: float = Field(default=0.92, gt=0, le=1, description="of its samples that are theirs")

    def table(
        self, counts: np.ndarray, supply: np.ndarray, sizes: str, generator: Generator
    ) -> np.ndarray:
        other_classes = len(supply) - self.classes
        if other_classes < 1:
            expected = f"fewer than the {len(supply)} classes of the data"
            raise ConfigError("data.partition.classes", self.classes, expected)
        dominant = choose_classes(len(counts), self.classes, supply, generator, min_clients=0)
        mixture = np.where(dominant, self.share / self.classes, (1 - self.share) / other_classes)
        table = fit(mixture, counts, supply)
        if table is None:
            expected = "below 1: these dominant classes alone cannot hold every sample"
            raise ConfigError("data.partition.share", self.share, expected)
        return table


class ClassesPerClient(LabelMixture):
    """Samples of exactly k classes each (002 sec. VI: 7), by class in proportion to its samples."""

    kind: str = "classes-per-client"
    k: int = Field(default=7, ge=1, description="classes of a client")

    def table(
        self, counts: np.ndarray, supply: np.ndarray, sizes: str, generator: Generator
    ) -> np.ndarray:
        classes = len(supply)
        min_k = -(-classes // len(counts))
        for is_invalid, expected in (
            (self.k > classes, f"at most the {classes} classes of the data"),
            (self.k > counts.min(), f"at most {counts.min()}, the samples of the smallest client"),
            (self.k < min_k, f"at least {min_k}, so that clients can hold all {classes} classes"),
        ):
            if is_invalid:
                raise ConfigError("data.partition.k", self.k, expected)
        class_mask = choose_classes(len(counts), self.k, supply, generator, min_clients=1)
        table = None
        if (supply >= class_mask.sum(0)).all():
            table = fit(class_mask.astype(float), counts - self.k, supply - class_mask.sum(0))
        if table is None:
            expected = f"a k for which {sizes} sizes leave no sample over (a larger one is easier)"
            raise ConfigError("data.partition.k", self.k, expected)
        return table + class_mask


def choose_classes(
    clients: int, k: int, supply: np.ndarray, generator: Generator, min_clients: int
) -> np.ndarray:
    """Bool [clients, classes], `k` true in each row, each class true for clients in proportion to
    its supply, and for `min_clients` at least.
    """
    classes = len(supply)
    places = clients * k - classes * min_clients
    limits = np.full(classes, clients - min_clients)
    counts = min_clients + apportion(places, supply * 1.0, limits)
    mask = np.zeros((clients, classes), bool)
    for row in range(clients):
        # A class wanted by as many clients as are left must be taken; so no row ever runs short of
        # classes.
        forced_classes = np.flatnonzero(counts == clients - row)
        weights = np.where(counts == clients - row, 0, counts)
        mask[row, forced_classes] = True
        if len(forced_classes) < k:
            p = weights / weights.sum()
            mask[row, generator.choice(classes, k - len(forced_classes), replace=False, p=p)] = True
        counts -= mask[row]
    return mask[generator.permutation(clients)]


def fit(mixture: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
    """Whole counts [clients, classes] with these row and column sums, 0 where `mixture` is; None if
    there are none. Where proportional fitting converges, each is within 1 of the fitted number.
    """
    table = _fit_margins(mixture, rows, columns)
    floors = np.floor(table).astype(np.int64)
    deficits = rows - floors.sum(1)
    surplus = columns - floors.sum(0)
    # What rounding down left over goes to a row's largest fractions, as few of them beyond its
    # largest remainders as will do.
    rank = np.argsort(np.argsort(floors - table - (mixture > 0), axis=1, kind="stable"), axis=1)
    classes = len(columns)
    relaxations = [(1 << power, 1) for power in range(1 + classes.bit_length())]
    for extra_ranks, max_increment in (*relaxations, (classes, int(deficits.sum()))):
        allowed_mask = (mixture > 0) & (rank < (deficits + extra_ranks)[:, None])
        increments = _flow(allowed_mask, max_increment, deficits, surplus)
        if increments is not None:
            return floors + increments
    return None


def _fit_margins(mixture: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """`mixture` fitted to these row and column sums, none of which it exceeds, in float64."""
    table = mixture.astype(np.float64)
    for _ in range(1000):
        sums = table.sum(0)
        table *= np.divide(columns, sums, out=np.zeros(len(columns)), where=sums > 0)
        sums = table.sum(1)
        table *= np.divide(rows, sums, out=np.zeros(len(rows)), where=sums > 0)[:, None]
        if np.abs(table.sum(0) - columns).max() < 1e-6:
            break
    sums = table.sum(0)
    table *= min(1.0, np.divide(columns, sums, out=np.ones(len(columns)), where=sums > 0).min())
    return table


def _flow(
    allowed_mask: np.ndarray, max_count: int, deficits: np.ndarray, surplus: np.ndarray
) -> np.ndarray | None:
    """Whole counts [clients, classes] of at most `max_count`, and 0 where not `allowed_mask`, that
    sum to `deficits` by client and to `surplus` at most by class; None if there are none.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import maximum_flow

    clients, classes = allowed_mask.shape
    source = clients + classes
    row, column = np.nonzero(allowed_mask)
    tails = np.concatenate([row, np.full(clients, source), clients + np.arange(classes)])
    heads = np.concatenate([clients + column, np.arange(clients), np.full(classes, source + 1)])
    capacity = np.concatenate([np.full(len(row), max_count), deficits, surplus]).astype(np.int32)
    ends = (tails.astype(np.int32), heads.astype(np.int32))
    graph = coo_array((capacity, ends), shape=(source + 2, source + 2)).tocsr()
    flow = maximum_flow(graph, source, source + 1)
    if flow.flow_value != deficits.sum():
        return None
    return flow.flow[:clients, clients:source].toarray()
