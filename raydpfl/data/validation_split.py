"""Rows of clients that are held out of training, to choose by: `evaluate.validation`, a share of
each client's own; or `{clients: 0.1}`, all rows of such a share of the clients.

>>> counts(np.array([0, 1, 4, 5, 25, 30]), 0.1)
array([0, 0, 0, 1, 3, 3])

Which rows of a client is drawn by (seed, VALIDATION, client), and so depends on no other client.
Clients that are held out are drawn from all, by (seed, VALIDATION), and the others are renumbered.

Where one sample may be held by several clients (`Data.overlaps`), a row that one of them holds out
would be trained on by another. There that share of the samples is drawn, held out by everyone, and
each is scored once. A client that would have no row left keeps its first one. Of a sample that
somebody trains on no row is scored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from raydpfl.core.prng import Purpose, bit_streams, stream
from raydpfl.data.sources import Split
from raydpfl.errors import ConfigError

FIELD = "evaluate.validation"


@dataclass(frozen=True)
class HeldOutRows:
    """Which rows are not trained on. `sizes`: int64 [clients], the rows left. `rows(first, last)`:
    of clients first to last - 1, those held out and those scored, bool [rows] each.
    """

    sizes: np.ndarray
    rows: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
    clients: np.ndarray | None = None  # bool [clients]: held out altogether; None: no client is


def counts(sizes: np.ndarray, share: float) -> np.ndarray:
    """How many rows each client holds out, int64 [clients], of `sizes` rows, int64 [clients]."""
    # 0.29 x 50 is 14.499999999999998 in floating point
    wanted = np.floor(np.round(share * sizes, 9) + 0.5).astype(np.int64)
    return np.clip(wanted, 0, np.maximum(sizes - 1, 0))


def held_out(
    split: Split, share: float | Mapping[str, float], seed: int, overlaps: bool
) -> HeldOutRows:
    """The rows of a share in (0, 1) of every client's own, or of `{"clients": share}`; `overlaps`:
    clients may share samples. Raises `ConfigError` for none, or unknown samples.
    """
    part = share["clients"] if isinstance(share, Mapping) else share
    if overlaps and split.samples is None:
        expected = "0 for data whose clients may share samples and that do not say which ones"
        raise ConfigError(FIELD, share, f"{expected} (raydpfl.data.Split.samples)")
    samples = split.samples(0, len(split.sizes)) if overlaps and split.samples else None
    if isinstance(share, Mapping):
        return _clients(split.sizes, samples, part, seed)
    if samples is not None:
        held = _held_by_all(split.sizes, samples, part, seed)
        rows = _stored(split.sizes, held, _scored(samples, held))
    else:
        rows = _rows(split.sizes, part, seed)
    if int(rows.sizes.sum()) == int(split.sizes.sum()):
        most = f"the largest has {int(split.sizes.max())} rows, of which one must stay"
        raise ConfigError(FIELD, share, f"a share that comes to a row of some client; {most}")
    return rows


def _stored(
    sizes: np.ndarray, held: np.ndarray, scored: np.ndarray, clients: np.ndarray | None = None
) -> HeldOutRows:
    """Rows that are held out and scored, bool [rows] of all clients."""
    ends = np.concatenate([[0], np.cumsum(sizes)])

    def rows(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        place = slice(int(ends[first]), int(ends[last]))
        return held[place], scored[place]

    return HeldOutRows(sizes - per_client(held, sizes), rows, clients)


def _scored(samples: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Of rows `held` out those scored, bool [rows]: of samples not trained on, the first row."""
    scored = np.zeros(len(samples), bool)
    scored[np.flatnonzero(held)[np.unique(samples[held], return_index=True)[1]]] = True
    return scored & ~np.isin(samples, samples[~held])


def _clients(sizes: np.ndarray, samples: np.ndarray | None, share: float, seed: int) -> HeldOutRows:
    """That share of the clients, all their rows."""
    count = len(sizes)
    wanted = int(counts(np.array([count]), share)[0])
    held = np.zeros(count, bool)
    held[stream(seed, Purpose.VALIDATION).permutation(count)[:wanted]] = True
    if not sizes[held].any() or not sizes[~held].any():
        expected = f"a share that leaves some of the {count} clients, with rows, on either side"
        raise ConfigError(f"{FIELD}.clients", share, expected)
    out = np.repeat(held, sizes)
    return _stored(sizes, out, out if samples is None else _scored(samples, out), held)


def _rows(sizes: np.ndarray, share: float, seed: int) -> HeldOutRows:
    """That share of each client's rows: those with the lowest of its random words."""
    held = counts(sizes, share)

    def rows(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        own = sizes[first:last]
        words = np.zeros(int(own.sum()), np.uint64)
        ends = np.cumsum(own)
        some = np.flatnonzero(held[first:last])
        clients = (first + some).tolist()
        draws = [0] * len(some)
        streams = bit_streams(seed, Purpose.VALIDATION, t=0, clients=clients, draws=draws)
        for place, philox in zip(some.tolist(), streams, strict=True):
            words[ends[place] - own[place] : ends[place]] = philox.random_raw(int(own[place]))
        order = np.lexsort((words, np.repeat(np.arange(len(own)), own)))
        rank = np.arange(len(words)) - np.repeat(ends - own, own)
        lowest = np.zeros(len(words), bool)
        lowest[order] = rank < np.repeat(held[first:last], own)
        return lowest, lowest

    return HeldOutRows(sizes - held, rows)


def _held_by_all(sizes: np.ndarray, samples: np.ndarray, share: float, seed: int) -> np.ndarray:
    """That share of all samples that some client holds, for all its holders, bool [rows]."""
    drawn = stream(seed, Purpose.VALIDATION).permutation(np.unique(samples))
    held = np.isin(samples, drawn[: int(counts(np.array([len(drawn)]), share)[0])])
    bare = (per_client(held, sizes) == sizes) & (sizes > 0)
    held[(np.cumsum(sizes) - sizes)[bare]] = False
    return held


def per_client(flags: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """How many of the rows of each client are flagged, int64 [clients]."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return np.bincount(owner[flags], minlength=len(sizes)).astype(np.int64)
