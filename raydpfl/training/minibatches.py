"""The rows of each local step: a function of the client's own key and size alone.

>>> local = Sgd(steps=2, batch=3)
>>> index, batch_sizes = batches(0, 0, clients=[4, 9], draws=[0, 0], sizes=[5, 2], local=local)
>>> index.tolist(), batch_sizes.tolist()
([[[1, 0, 2], [0, 4, 2]], [[0, 1, 0], [0, 1, 0]]], [3, 2])
"""

import math
from collections.abc import Sequence

import numpy as np

from raydpfl.core import native
from raydpfl.core.prng import Purpose, bit_streams, stream
from raydpfl.methods.local.base import Local
from raydpfl.methods.local.sgd import Sgd  # noqa: F401  (the example above)

# a batch of 1/RANKED_RATIO of the rows or more is drawn by ranking all, a smaller one row by row
RANKED_RATIO = 8
# bits of a shuffled word that hold the row's number; more where a client's rows take more
BITS = 24
Integers = Sequence[int] | np.ndarray


def batches(
    seed: int,
    t: int,
    clients: Integers,
    draws: Integers,
    sizes: Integers,
    local: Local,
    rows: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(rows of every batch, int64 [C, Q, B]; rows in each batch of a client, int64 [C]).

    `clients`, `draws` and `sizes` have length C, a dummy has size 0. Q is the most steps; what is
    beyond a client's steps means nothing. B is the batch size of a client with `rows` rows (None:
    the largest here), and a smaller batch ends in zeros. Sampled in `epochs`, a batch may straddle
    two of them, so that all have one size and every row comes up once in every n_i.
    """
    clients, draws = np.asarray(clients), np.asarray(draws)
    counts = np.asarray(sizes, dtype=np.int64)
    width = local.batch_size(int(counts.max(initial=1)) if rows is None else rows)
    batch_sizes = local.batch_sizes(counts)
    steps = local.step_counts(counts)
    index = np.zeros((len(counts), int(steps.max(initial=0)), width), dtype=np.int64)
    full_mask = batch_sizes == counts
    if full_mask.any():
        columns = np.arange(width)
        index[full_mask] = np.where(columns < counts[full_mask, None, None], columns, 0)
    fresh_mask = ~full_mask & (local.sampling == "fresh")
    ranked_mask = fresh_mask & (counts <= RANKED_RATIO * batch_sizes)
    shuffled_mask = ~full_mask & ~fresh_mask | ranked_mask
    # a client with many rows is shuffled alone: its bits may not show in the others
    slots = np.flatnonzero(ranked_mask & (counts <= 1 << BITS))
    if len(slots):
        key = (seed, Purpose.BATCH, t)
        parts = (clients[slots], draws[slots], steps[slots], counts[slots], slots)
        shuffled_mask[slots] = not native.shuffle_rows(key, *parts, batch_sizes[slots], index)
    for slot in np.flatnonzero(shuffled_mask).tolist():
        name = {"client": int(clients[slot]), "draw": int(draws[slot])}
        generator = stream(seed, Purpose.BATCH, t=t, **name)
        client_batches = _shuffled_batches(generator, int(counts[slot]), int(steps[slot]), local)
        index[slot, : len(client_batches), : batch_sizes[slot]] = client_batches
    floyd_sizes = np.where(fresh_mask & ~ranked_mask, batch_sizes, 0)
    for b in np.unique(floyd_sizes[floyd_sizes > 0]).tolist():
        slots = np.flatnonzero(floyd_sizes == b)
        streams = bit_streams(seed, Purpose.BATCH, t=t, clients=clients[slots], draws=draws[slots])
        pairs = zip(streams, (b * steps[slots]).tolist(), strict=True)
        words = np.concatenate([bits.random_raw(count) for bits, count in pairs])
        uniform = (words.reshape(-1, b) >> np.uint64(11)) * 2.0**-53  # as numpy's
        places, batch = np.nonzero(np.arange(index.shape[1]) < steps[slots, None])
        index[slots[places], batch, :b] = _floyd(uniform, np.repeat(counts[slots], steps[slots]))
    return index, batch_sizes


def _shuffled_batches(rng: np.random.Generator, n: int, steps: int, local: Local) -> np.ndarray:
    """The batches of one client of `n` rows, all of them shuffled, int64 [steps, b]."""
    b = local.batch_size(n)
    epochs = local.sampling == "epochs"
    count = math.ceil(steps * b / n) if epochs else steps
    rows = _shuffle_rows(rng.bit_generator.random_raw(count * n).reshape(-1, n))
    return rows.ravel()[: steps * b].reshape(steps, b) if epochs else rows[:, :b]


def pick_rows(
    index: np.ndarray, batch_sizes: np.ndarray, sizes: np.ndarray, local: Local
) -> tuple[list[np.ndarray | None], np.ndarray]:
    """(the rows of every client that its batches take, int64, ascending; `index` with their places
    among these). Of a client that could use all of its rows (`Local.max_rows`) None, and its part
    of `index`: so a client of millions of rows costs what it trains on.
    """
    rows: list[np.ndarray | None] = [None] * len(sizes)
    places = index.copy()
    steps = local.step_counts(sizes)
    for slot in np.flatnonzero(local.max_rows(sizes) < sizes):
        batches = (slot, slice(steps[slot]), slice(batch_sizes[slot]))
        rows[slot], inverse = np.unique(index[batches], return_inverse=True)
        places[batches] = inverse.reshape(index[batches].shape)
    return rows, places


def _shuffle_rows(words: np.ndarray) -> np.ndarray:
    """Row numbers shuffled along the last axis by random uint64 `words` (changed in place).

    The row's number takes the low bits and the words are sorted. Two rows tie, and then keep their
    order, with probability 2^-40, or 2^(b - 64) where its number takes b > 24 bits.
    """
    count = words.shape[-1]
    low = np.uint64((1 << max(BITS, (count - 1).bit_length())) - 1)
    words &= ~low
    words |= np.arange(count, dtype=np.uint64)
    words.sort(axis=-1)
    return words & low


def _floyd(uniform: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Uniform subsets of b of n rows, ascending, int64 [k, b], from `uniform`, float64 [k, b] in
    [0, 1), and `n` of each, int64 [k] (Floyd; Bentley 1987).
    """
    count, b = uniform.shape
    subsets = np.empty((b, count), dtype=np.int64)
    for k in range(b):
        last = n - b + k
        candidates = (uniform[:, k] * (last + 1)).astype(np.int64)
        duplicates = (subsets[:k] == candidates).any(axis=0)
        subsets[k] = np.where(duplicates, last, candidates)
    return np.sort(subsets.T, axis=-1)
