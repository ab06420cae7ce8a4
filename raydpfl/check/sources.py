"""The contract of a source of data: see `raydpfl.data.sources`."""

import numpy as np

from raydpfl.check.contract import hold
from raydpfl.check.example import Example
from raydpfl.core.prng import keyed_globals
from raydpfl.data import Shards, Split, prepare
from raydpfl.storage.files import data_root

SEED = 5
MAX_CLIENTS = 12  # clients whose rows are read one by one
INPUTS = ("uint8", "float32", "int64")


def _split(case: Example) -> Split:
    split: Split = case.member.split(SEED, data_root(None))
    return split


def _rows(split: Split, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = split.rows(first, last)
    return np.asarray(x), np.asarray(y)


def sizes(case: Example) -> str:
    """It says how many rows each client has, and gives as many."""
    split = _split(case)
    counts = np.asarray(split.sizes)
    hold(counts.ndim == 1 and counts.dtype.kind in "iu", f"sizes are {counts.dtype}, not int64")
    hold((counts >= 0).all() and counts.any(), "sizes are below 0, or all 0")
    count = case.member.clients
    hold(count in (None, len(counts)), f"{len(counts)} clients, where data.clients is {count}")
    x, y = _rows(split, 0, len(counts))
    total = int(counts.sum())
    hold(len(x) == len(y) == total, f"{len(x)} rows and {len(y)} targets, of {total}")
    return f"{len(counts)} clients, {total:,} rows, {counts.min()} to {counts.max()} each"


def types(case: Example) -> str:
    """Rows and targets have the types and shapes that it says, those for testing too."""
    split = _split(case)
    kind = "int64" if split.classes else "float32"
    client = int(np.argmax(split.sizes > 0))
    for subset, (x, y) in (("clients", _rows(split, client, client + 1)), ("test", split.test())):
        hold(str(x.dtype) in INPUTS, f"x of {subset} is {x.dtype}, none of {', '.join(INPUTS)}")
        hold(x.shape[1:] == split.shape, f"x of {subset} is {list(x.shape[1:])}, not {split.shape}")
        type_matches = (x.dtype == np.int64) == bool(split.tokens)
        hold(type_matches, f"x of {subset} is {x.dtype}, and tokens {split.tokens}")
        hold(str(y.dtype) == kind, f"y of {subset} is {y.dtype}, not {kind}")
        detail = f"y of {subset} is {list(y.shape[1:])}, and targets {split.targets}"
        hold(y.shape[1:] == split.targets, detail)
    return f"x {x.dtype} {list(split.shape)}, y {kind} {list(split.targets)}"


def values(case: Example) -> str:
    """Numbers are finite; classes and tokens are from 0 to one below how many there are."""
    split = _split(case)
    ignored_label = case.member.task.ignore_index()
    for subset, (x, y) in (("clients", _rows(split, 0, len(split.sizes))), ("test", split.test())):
        hold(np.isfinite(x).all() and np.isfinite(y).all(), f"those of {subset} are not finite")
        if split.classes and len(y):
            labels = y[y != ignored_label]
            detail = f"classes of {subset} are {labels.min(initial=0)} to {labels.max(initial=0)}"
            is_valid = (labels >= 0).all() and (labels < split.classes).all()
            hold(is_valid, f"{detail}, of {split.classes}")
        if split.tokens and len(x):
            detail = f"tokens of {subset} are {x.min()} to {x.max()}, of {split.tokens}"
            hold(x.min() >= 0 and x.max() < split.tokens, detail)
    return f"{split.classes} classes" if split.classes else "numbers"


def same_rows_twice(case: Example) -> str:
    """Asked twice, it gives the same rows to the same clients, whatever the process has drawn."""
    splits = []
    for process_seed in (0, 1):
        with keyed_globals(process_seed):
            np.random.rand(3)
            split = _split(case)
            all_rows = _rows(split, 0, len(split.sizes))
            splits.append((np.asarray(split.sizes), *all_rows, *split.test()))
    is_equal = all(np.array_equal(*pair) for pair in zip(*splits, strict=True))
    hold(is_equal, "asked twice, it gives others: draw by raydpfl.core.prng.stream(seed, ...)")
    second = [case.member.identity(data_root(None)) for _ in range(2)]
    hold(second[0] == second[1], "asked twice, its identity is another")
    return "the same bits"


def any_clients(case: Example) -> str:
    """The rows of some clients are those they have among all, in whatever order they are read."""
    split = _split(case)
    all_rows = _rows(split, 0, len(split.sizes))
    ends = np.concatenate([[0], np.cumsum(split.sizes)])
    last = len(split.sizes)
    ranges = [(k, k + 1) for k in reversed(range(min(last, MAX_CLIENTS)))]
    ranges += [(last // 2, last), (1, 1)]
    for start, stop in ranges:
        rows = _rows(split, start, stop)
        for range_values, all_values in zip(rows, all_rows, strict=True):
            detail = f"clients {start} to {stop - 1} have others than among all"
            hold(np.array_equal(range_values, all_values[ends[start] : ends[stop]]), detail)
    return f"{len(ranges)} ranges"


def made(case: Example) -> str:
    """The rows that it makes of one client alone are those that the client has among all."""
    rows_of = case.member.maker(SEED)
    if rows_of is None:
        return "its rows are written to files"
    split = _split(case)
    clients = range(min(len(split.sizes), MAX_CLIENTS))
    for client in clients:
        x, y = _rows(split, client, client + 1)
        row = 0
        for part_x, part_y in rows_of(client, len(y)):
            row_slice = slice(row, row + len(part_y))
            is_equal = np.array_equal(part_x, x[row_slice]) and np.array_equal(part_y, y[row_slice])
            hold(is_equal, f"client {client} is made other rows")
            row = row_slice.stop
        hold(row == len(y), f"client {client} is made {row} rows of {len(y)}")
    return f"{len(clients)} clients"


def shard_rows(case: Example) -> str:
    """What clients train on, from the files that are made of it, is what it gave."""
    split = _split(case)
    shards = Shards.open(prepare(case.member, SEED, data_root(None), case.folder / "cache"))
    hold(np.array_equal(shards.sizes, split.sizes), "the sizes are others")
    for client in range(min(shards.clients, MAX_CLIENTS)):
        rows = int(shards.sizes[client])
        x, y, n = shards.chunk([client], max(rows, 1))
        source_x, source_y = shards.decode(*_rows(split, client, client + 1))
        is_equal = np.array_equal(x[0, :rows], source_x) and np.array_equal(y[0, :rows], source_y)
        hold(int(n[0]) == rows and is_equal, f"client {client} has other rows")
    return f"{min(shards.clients, MAX_CLIENTS)} clients"


def held_out(case: Example) -> str:
    """Rows that are held out of training are those that training lacks."""
    if case.member.overlaps():
        return "clients share samples"
    split = _split(case)
    if split.samples:
        samples = split.samples(0, len(split.sizes))
        copies = len(samples) - len(np.unique(samples))
        hold(not copies, f"{copies} rows are of samples that others hold, and overlaps() is False")
    if np.max(split.sizes) < 2:
        return "no client has a row to spare"
    folder = case.folder / "held_out"
    shards = Shards.open(prepare(case.member, SEED, data_root(None), folder, validation=0.4))
    held_out_rows = shards.client_rows
    detail = "rows that are held out and those that are left are not all"
    hold(np.array_equal(np.asarray(shards.sizes) + held_out_rows, split.sizes), detail)
    return f"{int(held_out_rows.sum())} of {int(np.sum(split.sizes))} at 40 %"
