"""Mixtures of classes: which are in a client's, and whole counts that come to them.

>>> counts = fit(np.array([[0.5, 0.5], [0.5, 0.5]]), np.array([3, 5]), np.array([4, 4]))
>>> counts.sum(0), counts.sum(1)
(array([4, 4]), array([3, 5]))
"""

from __future__ import annotations

import numpy as np

from raydpfl.data.rounding import apportion


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
    """Whole counts [clients, classes] with these row and column sums, near `mixture` and 0 where it
    is; None if there are none.

    Where proportional fitting converges, no count is further than 1 from the fitted real number.
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
    """Float64 [clients, classes]: `mixture` fitted in proportion to these row and column sums, none
    of which it exceeds.
    """
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


def assign_rows(
    table: np.ndarray, labels: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Rows in client order, int64 [n], of each class as many to each client as `table` [clients,
    classes] says.
    """
    rows = generator.permutation(len(labels))
    rows = rows[np.argsort(labels[rows], kind="stable")]
    owner = np.concatenate([np.repeat(np.arange(len(table)), column) for column in table.T])
    return rows[np.argsort(owner, kind="stable")]
