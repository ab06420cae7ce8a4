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
    rounded_counts = np.floor(np.round(share * sizes, 9) + 0.5).astype(np.int64)
    return np.clip(rounded_counts, 0, np.maximum(sizes - 1, 0))


def hold_out_rows(
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
        held_mask = _holdout_mask(split.sizes, samples, part, seed)
        rows = _rows_from_masks(split.sizes, held_mask, _scored_mask(samples, held_mask))
    else:
        rows = _rows(split.sizes, part, seed)
    if int(rows.sizes.sum()) == int(split.sizes.sum()):
        limit_text = f"the largest has {int(split.sizes.max())} rows, of which one must stay"
        raise ConfigError(FIELD, share, f"a share that comes to a row of some client; {limit_text}")
    return rows


def _rows_from_masks(
    sizes: np.ndarray,
    held_mask: np.ndarray,
    scored_mask: np.ndarray,
    clients: np.ndarray | None = None,
) -> HeldOutRows:
    """Rows that are held out and scored, bool [rows] of all clients."""
    ends = np.concatenate([[0], np.cumsum(sizes)])

    def rows(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        place = slice(int(ends[first]), int(ends[last]))
        return held_mask[place], scored_mask[place]

    return HeldOutRows(sizes - per_client(held_mask, sizes), rows, clients)


def _scored_mask(samples: np.ndarray, held_mask: np.ndarray) -> np.ndarray:
    """Which held-out rows are scored, bool [rows]: the first of a sample that is not trained on."""
    mask = np.zeros(len(samples), bool)
    mask[np.flatnonzero(held_mask)[np.unique(samples[held_mask], return_index=True)[1]]] = True
    return mask & ~np.isin(samples, samples[~held_mask])


def _clients(sizes: np.ndarray, samples: np.ndarray | None, share: float, seed: int) -> HeldOutRows:
    """That share of the clients, all their rows."""
    count = len(sizes)
    held_out_count = int(counts(np.array([count]), share)[0])
    client_mask = np.zeros(count, bool)
    client_mask[stream(seed, Purpose.VALIDATION).permutation(count)[:held_out_count]] = True
    if not sizes[client_mask].any() or not sizes[~client_mask].any():
        expected = f"a share that leaves some of the {count} clients, with rows, on either side"
        raise ConfigError(f"{FIELD}.clients", share, expected)
    row_mask = np.repeat(client_mask, sizes)
    scored_mask = row_mask if samples is None else _scored_mask(samples, row_mask)
    return _rows_from_masks(sizes, row_mask, scored_mask, client_mask)


def _rows(sizes: np.ndarray, share: float, seed: int) -> HeldOutRows:
    """That share of each client's rows: those with the lowest of its random words."""
    held_out_counts = counts(sizes, share)

    def rows(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        client_sizes = sizes[first:last]
        words = np.zeros(int(client_sizes.sum()), np.uint64)
        ends = np.cumsum(client_sizes)
        client_offsets = np.flatnonzero(held_out_counts[first:last])
        clients = (first + client_offsets).tolist()
        draws = [0] * len(client_offsets)
        streams = bit_streams(seed, Purpose.VALIDATION, t=0, clients=clients, draws=draws)
        for place, philox in zip(client_offsets.tolist(), streams, strict=True):
            size = int(client_sizes[place])
            words[ends[place] - size : ends[place]] = philox.random_raw(size)
        order = np.lexsort((words, np.repeat(np.arange(len(client_sizes)), client_sizes)))
        rank = np.arange(len(words)) - np.repeat(ends - client_sizes, client_sizes)
        lowest_mask = np.zeros(len(words), bool)
        lowest_mask[order] = rank < np.repeat(held_out_counts[first:last], client_sizes)
        return lowest_mask, lowest_mask

    return HeldOutRows(sizes - held_out_counts, rows)


def _holdout_mask(sizes: np.ndarray, samples: np.ndarray, share: float, seed: int) -> np.ndarray:
    """That share of all samples that some client holds, for all its holders, bool [rows]."""
    order = stream(seed, Purpose.VALIDATION).permutation(np.unique(samples))
    held_mask = np.isin(samples, order[: int(counts(np.array([len(order)]), share)[0])])
    empty_mask = (per_client(held_mask, sizes) == sizes) & (sizes > 0)
    held_mask[(np.cumsum(sizes) - sizes)[empty_mask]] = False
    return held_mask


def per_client(flags: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """How many of the rows of each client are flagged, int64 [clients]."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return np.bincount(owner[flags], minlength=len(sizes)).astype(np.int64)
