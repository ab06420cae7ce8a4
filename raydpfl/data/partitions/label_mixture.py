"""Partitions by mixtures of classes: which are in a client's, and whole counts that come to them.

>>> counts = fit(np.array([[0.5, 0.5], [0.5, 0.5]]), np.array([3, 5]), np.array([4, 4]))
>>> counts.sum(0), counts.sum(1)
(array([4, 4]), array([3, 5]))
"""

from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from raydpfl.data.partitions.base import Partition
from raydpfl.data.rounding import apportion
from raydpfl.data.sizes import Sizes
from raydpfl.errors import ConfigError


class LabelMixture(Partition):
    """Base of partitions that give each client a mixture of classes."""

    def assign(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        supply = np.unique(labels, return_counts=True)[1]
        counts = sizes.counts(len(labels), clients, generator)
        table = self.table(counts, supply, sizes.kind, generator)
        rows = generator.permutation(len(labels))
        rows = rows[np.argsort(labels[rows], kind="stable")]
        owner = np.concatenate([np.repeat(np.arange(clients), column) for column in table.T])
        return rows[np.argsort(owner, kind="stable")], counts

    def table(
        self, counts: np.ndarray, supply: np.ndarray, sizes: str, generator: np.random.Generator
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
        self, counts: np.ndarray, supply: np.ndarray, sizes: str, generator: np.random.Generator
    ) -> np.ndarray:
        drawn = generator.dirichlet(np.full(len(supply), self.psi), len(counts))
        table = fit(np.maximum(drawn, 1e-9), counts, supply)
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
        self, counts: np.ndarray, supply: np.ndarray, sizes: str, generator: np.random.Generator
    ) -> np.ndarray:
        others = len(supply) - self.classes
        if others < 1:
            expected = f"fewer than the {len(supply)} classes of the data"
            raise ConfigError("data.partition.classes", self.classes, expected)
        dominant = choose_classes(len(counts), self.classes, supply, generator, least=0)
        mixture = np.where(dominant, self.share / self.classes, (1 - self.share) / others)
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
        self, counts: np.ndarray, supply: np.ndarray, sizes: str, generator: np.random.Generator
    ) -> np.ndarray:
        classes = len(supply)
        least = -(-classes // len(counts))
        for wrong, expected in (
            (self.k > classes, f"at most the {classes} classes of the data"),
            (self.k > counts.min(), f"at most {counts.min()}, the samples of the smallest client"),
            (self.k < least, f"at least {least}, so that clients can hold all {classes} classes"),
        ):
            if wrong:
                raise ConfigError("data.partition.k", self.k, expected)
        held = choose_classes(len(counts), self.k, supply, generator, least=1)
        table = None
        if (supply >= held.sum(0)).all():
            table = fit(held.astype(float), counts - self.k, supply - held.sum(0))
        if table is None:
            expected = f"a k for which {sizes} sizes leave no sample over (a larger one is easier)"
            raise ConfigError("data.partition.k", self.k, expected)
        return table + held


def choose_classes(
    clients: int, k: int, supply: np.ndarray, generator: np.random.Generator, least: int
) -> np.ndarray:
    """Bool [clients, classes], `k` true in each row, each class true for clients in proportion to
    its supply, and for `least` at least.
    """
    classes = len(supply)
    left = least + apportion(
        clients * k - classes * least, supply * 1.0, np.full(classes, clients - least)
    )
    chosen = np.zeros((clients, classes), bool)
    for row in range(clients):
        # A class wanted by as many clients as are left must be taken; so no row ever runs short of
        # classes.
        must = np.flatnonzero(left == clients - row)
        weights = np.where(left == clients - row, 0, left)
        chosen[row, must] = True
        if len(must) < k:
            p = weights / weights.sum()
            chosen[row, generator.choice(classes, k - len(must), replace=False, p=p)] = True
        left -= chosen[row]
    return chosen[generator.permutation(clients)]


def fit(mixture: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
    """Whole counts [clients, classes] with these row and column sums, 0 where `mixture` is; None if
    there are none. Where proportional fitting converges, each is within 1 of the fitted number.
    """
    real = _fitted(mixture, rows, columns)
    whole = np.floor(real).astype(np.int64)
    short = rows - whole.sum(1)
    spare = columns - whole.sum(0)
    # What rounding down left over goes to a row's largest fractions, as few of them beyond its
    # largest remainders as will do.
    rank = np.argsort(np.argsort(whole - real - (mixture > 0), axis=1, kind="stable"), axis=1)
    classes = len(columns)
    widening = [(1 << power, 1) for power in range(1 + classes.bit_length())]
    for extra, most in (*widening, (classes, int(short.sum()))):
        allowed = (mixture > 0) & (rank < (short + extra)[:, None])
        added = _flow(allowed, most, short, spare)
        if added is not None:
            return whole + added
    return None


def _fitted(mixture: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """`mixture` fitted to these row and column sums, none of which it exceeds, in float64."""
    real = mixture.astype(np.float64)
    for _ in range(1000):
        sums = real.sum(0)
        real *= np.divide(columns, sums, out=np.zeros(len(columns)), where=sums > 0)
        sums = real.sum(1)
        real *= np.divide(rows, sums, out=np.zeros(len(rows)), where=sums > 0)[:, None]
        if np.abs(real.sum(0) - columns).max() < 1e-6:
            break
    sums = real.sum(0)
    real *= min(1.0, np.divide(columns, sums, out=np.ones(len(columns)), where=sums > 0).min())
    return real


def _flow(
    allowed: np.ndarray, most: int, short: np.ndarray, spare: np.ndarray
) -> np.ndarray | None:
    """Whole counts [clients, classes] of at most `most`, where `allowed`, that sum to `short` by
    client and stay below `spare` by class; None if there are none.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import maximum_flow

    clients, classes = allowed.shape
    source = clients + classes
    row, column = np.nonzero(allowed)
    tails = np.concatenate([row, np.full(clients, source), clients + np.arange(classes)])
    heads = np.concatenate([clients + column, np.arange(clients), np.full(classes, source + 1)])
    capacity = np.concatenate([np.full(len(row), most), short, spare]).astype(np.int32)
    ends = (tails.astype(np.int32), heads.astype(np.int32))
    graph = coo_array((capacity, ends), shape=(source + 2, source + 2)).tocsr()
    flow = maximum_flow(graph, source, source + 1)
    if flow.flow_value != short.sum():
        return None
    return flow.flow[:clients, clients:source].toarray()
