"""The rows of each local step: a function of the client's own key and size alone.

>>> local = Sgd(steps=2, batch=3)
>>> index, batch_sizes = batches(0, 0, clients=[4, 9], draws=[0, 0], sizes=[5, 2], local=local)
>>> index.tolist(), batch_sizes.tolist()
([[[1, 0, 2], [0, 4, 2]], [[0, 1, 0], [0, 1, 0]]], [3, 2])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raydpfl.core import native
from raydpfl.core.prng import Purpose, stream, words
from raydpfl.methods.local.base import Local
from raydpfl.methods.local.sgd import Sgd  # noqa: F401  (the example above)

# a batch of at least 1/RANKED of the rows is drawn by ranking all rows, a smaller one row by row
RANKED = 8
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
    beyond a client's own means nothing. B is the batch size of a client with `rows` rows (default:
    the largest here), and a smaller batch ends in zeros. Sampled in `epochs`, a batch may straddle
    two of them, so that all have one size and each row comes up once in every n_i.
    """
    counts = np.asarray(sizes, dtype=np.int64)
    width = local.batch_size(int(counts.max(initial=1)) if rows is None else rows)
    batch_sizes = local.batch_sizes(counts)
    steps = local.step_counts(counts)
    index = np.zeros((len(counts), int(steps.max(initial=0)), width), dtype=np.int64)
    every = batch_sizes == counts
    if every.any():
        index[every] = np.where(np.arange(width) < counts[every, None, None], np.arange(width), 0)
    fresh = ~every & (local.sampling == "fresh")
    few = fresh & (counts <= RANKED * batch_sizes)
    of = _Streams(seed, t, np.asarray(clients), np.asarray(draws))
    # A client with many rows ranks them alone: how many bits they take may not show in the others.
    ranked = np.flatnonzero(few & (counts <= 1 << BITS))
    of.rank(index, ranked, steps[ranked], counts[ranked], batch_sizes[ranked])
    many = np.where(fresh & ~few, batch_sizes, 0)
    for b in np.unique(many[many > 0]).tolist():
        alike = np.flatnonzero(many == b)
        of.choose(index, alike, steps[alike], counts[alike], b)
    for slot in np.flatnonzero(~every & (~fresh | (few & (counts > 1 << BITS)))).tolist():
        keyed = stream(seed, Purpose.BATCH, t=t, client=int(clients[slot]), draw=int(draws[slot]))
        found = _drawn_alone(keyed, int(counts[slot]), int(steps[slot]), local)
        index[slot, : len(found), : batch_sizes[slot]] = found
    return index, batch_sizes


@dataclass(frozen=True)
class _Streams:
    """The streams of a chunk's clients in a round: int64 [C] each, who, and which of its draws."""

    seed: int
    t: int
    clients: np.ndarray
    draws: np.ndarray

    def words(self, slots: np.ndarray, steps: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """See `raydpfl.core.prng.words`; of the clients at these slots."""
        who = {"clients": self.clients[slots], "draws": self.draws[slots]}
        return words(self.seed, Purpose.BATCH, t=self.t, **who, steps=steps, sizes=sizes)

    def rank(
        self,
        index: np.ndarray,
        slots: np.ndarray,
        steps: np.ndarray,
        sizes: np.ndarray,
        batch_sizes: np.ndarray,
    ) -> None:
        """Writes the batches of the clients at these slots, int64 [k], who have so many steps, rows
        and rows in a batch, int64 [k] each, to `index`.
        """
        if not len(slots):
            return
        key = (self.seed, Purpose.BATCH, self.t)
        who = (self.clients[slots], self.draws[slots])
        if not native.shuffled(key, *who, steps, sizes, slots, batch_sizes, index):
            _rank(index, slots, self.words(slots, steps, sizes), batch_sizes)

    def choose(
        self, index: np.ndarray, slots: np.ndarray, steps: np.ndarray, sizes: np.ndarray, b: int
    ) -> None:
        """Writes batches of `b` rows as `rank` does, drawn row by row."""
        chosen = _floyd(self.uniform(slots, steps, b), np.repeat(sizes, steps))
        made, places = np.nonzero(np.arange(index.shape[1]) < steps[:, None])
        index[slots[made], places, :b] = chosen

    def uniform(self, slots: np.ndarray, steps: np.ndarray, b: int) -> np.ndarray:
        """Numbers in [0, 1), float64 [sum of steps, b], as numpy's generators make them."""
        drawn = self.words(slots, steps, np.full(len(slots), b))
        made = np.arange(drawn.shape[1]) < steps[:, None]
        return (drawn[made] >> np.uint64(11)) * 2.0**-53


def _rank(index: np.ndarray, slots: np.ndarray, drawn: np.ndarray, batch_sizes: np.ndarray) -> None:
    """Writes batches of slots, of so many rows each, from random words, uint64 [slots, Q, n]."""
    most = int(batch_sizes.max())
    real = np.arange(most) < batch_sizes[:, None, None]
    index[slots, : drawn.shape[1], :most] = np.where(real, _shuffled(drawn)[:, :, :most], 0)


def _drawn_alone(keyed: np.random.Generator, n: int, steps: int, local: Local) -> np.ndarray:
    """The batches of one client of `n` rows, all of them shuffled, int64 [steps, b]."""
    b = local.batch_size(n)
    if local.sampling == "epochs":
        count = math.ceil(steps * b / n)
        epochs = _shuffled(keyed.bit_generator.random_raw(count * n).reshape(-1, n))
        return epochs.ravel()[: steps * b].reshape(steps, b)
    return _shuffled(keyed.bit_generator.random_raw(steps * n).reshape(-1, n))[:, :b]


def picked(
    index: np.ndarray, batch_sizes: np.ndarray, sizes: np.ndarray, local: Local
) -> tuple[list[np.ndarray | None], np.ndarray]:
    """(the rows of each client that its batches take, int64, ascending; `index` with their places
    among these in place of the rows).

    A client that could use all of its rows (`Local.rows_used`) keeps them, whatever this round
    takes: None, and its part of `index` as it is. So what a client of millions of rows costs is
    what it trains on.
    """
    rows: list[np.ndarray | None] = [None] * len(sizes)
    places = index.copy()
    steps = local.step_counts(sizes)
    for slot in np.flatnonzero(local.rows_used(sizes) < sizes):
        batches = (slot, slice(steps[slot]), slice(batch_sizes[slot]))
        rows[slot], inverse = np.unique(index[batches], return_inverse=True)
        places[batches] = inverse.reshape(index[batches].shape)
    return rows, places


def _shuffled(words: np.ndarray) -> np.ndarray:
    """Row numbers shuffled along the last axis by random uint64 `words` (changed in place); where
    all bits of a word are set, last.

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
    chosen = np.empty((b, count), dtype=np.int64)
    for k in range(b):
        last = n - b + k
        drawn = (uniform[:, k] * (last + 1)).astype(np.int64)
        taken = (chosen[:k] == drawn).any(axis=0)
        chosen[k] = np.where(taken, last, drawn)
    return np.sort(chosen.T, axis=-1)
