"""Prepares data: writes the rows of all clients into a folder of the cache, once.

A prepared folder is named by a digest of (format, data config, seed, contents of the source files,
code of user-defined classes and of modules that they import, share of rows held out), wherever the
files are. It never changes:

- `train.arrow`, a row per sample: x, uint8, float32 or int64 [prod(shape)], and y, int64 (classes)
  or float32 (numbers), a list where a sample has several; in batches that end where a client ends.
- `clients.arrow`, a row per client: first, int64, its first row in `train.arrow`, and size, int64,
  its number of rows.
- `rows.arrow`, where clients share samples: `train.arrow` then has each sample once, and this for
  each row of each client, in client order, its row there; `first` is a row of this.
- `test.arrow`, as `train.arrow`, in one batch.
- `ids.arrow`: the id of each client, text, where the data name clients.
- `held.arrow`: the number of validation rows of each client, where there are any.
- `validation.arrow`, as `train.arrow`: the validation rows (`evaluate.validation`).
- `data.json`: shape, classes (0: numbers), unseen, mean and std, and the description of the
  clients; where they are not 0 or empty, tokens, targets (the shape of a sample's) and names. There
  is no `train.arrow` where rows take more than `GENERATED_BYTES` and their source can generate them
  (`Data.maker`); `made` is then its seed.
- `digests.json`: size and digest of each; what does not agree with them is prepared again.

It is written under another name and renamed, so a half-written one is never used, and of two runs
that prepare the same data the later takes the earlier's.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raydpfl.config.registry import code_digests
from raydpfl.data.shard_files import BATCH_BYTES, RowWriter, rows_batch, write_batch
from raydpfl.data.source_checks import add_checks, source_errors
from raydpfl.data.sources import Data, Split
from raydpfl.data.validation_split import HeldOutRows, hold_out_rows, per_client
from raydpfl.errors import ConfigError
from raydpfl.storage.arrow import pack_column
from raydpfl.storage.cache import fill_folder, is_intact
from raydpfl.storage.files import STILL, cache_root

FORMAT = 4
GENERATED_BYTES = 8 << 30  # of rows: beyond, they are generated whenever read, if the source can

Validation = float | Mapping[str, float]


def prepare(
    data: Data,
    seed: int,
    root: Path | None = None,
    cache: Path | None = None,
    validation: Validation = 0.0,
) -> Path:
    """The folder that holds the rows of all clients, written unless it is there, whole and
    unchanged.

    Args:
        data: the source of samples.
        seed: of the experiment; `data.seed` stands in its place.
        root: where the source files are (None: RAYDPFL_DATA).
        cache: where folders are kept (None: RAYDPFL_CACHE, or raydpfl under XDG_CACHE_HOME or
            ~/.cache).
        validation: the share of each client's rows that is held out of training, in [0, 1); or
            `{"clients": share}`, of the clients.

    Raises:
        ConfigError: before anything is written, for what the data cannot give.
    """
    seed = seed if data.seed is None else data.seed
    with source_errors(data):
        identity = _identity(data, seed, root, validation)
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    folder = (cache or cache_root()) / "data" / name
    if is_intact(folder):
        return folder
    split, holdout = _load_split(data, seed, root, validation)
    rows_bytes = int(split.sizes.sum()) * _row_bytes(split)
    is_generated = rows_bytes > GENERATED_BYTES and holdout is None and data.maker(seed) is not None

    def fill(scratch: Path) -> None:
        _write(split, holdout, identity["data"], seed if is_generated else None, scratch)
        if _identity(data, seed, root, validation) != identity:
            raise ConfigError("data.kind", data.kind, STILL)

    fill_folder(folder, fill)
    return folder


def _identity(data: Data, seed: int, root: Path | None, validation: Validation) -> dict[str, Any]:
    """All that the prepared files are a function of, in JSON types."""
    facts = {
        "format": FORMAT,
        "data": data.facts(),
        "seed": seed,
        "sources": data.identity(root),
        "code": code_digests(data),
    }
    if data.names_clients:
        facts["ids"] = "of clients"
    return facts | ({"validation": validation, "held": "by client"} if validation else {})


def _load_split(
    data: Data, seed: int, root: Path | None, validation: Validation
) -> tuple[Split, HeldOutRows | None]:
    """The samples, with features that are learnt without the rows held out; and these rows."""
    with source_errors(data):
        split = add_checks(data, data.split(seed, root))
        if data.clients not in (None, len(split.sizes)):
            expected = f"{len(split.sizes)}, the number of clients in the data, or none"
            raise ConfigError("data.clients", data.clients, expected)
        if not validation:
            return split, None
        holdout = hold_out_rows(split, validation, seed, data.overlaps())
        if split.without is not None and split.samples is not None:
            mask, _ = holdout.rows(0, len(split.sizes))
            samples = split.samples(0, len(split.sizes))
            split = add_checks(data, split.without(np.setdiff1d(samples[mask], samples[~mask])))
    return split, holdout


def _row_bytes(split: Split) -> int:
    """Bytes of a row and its target in a file."""
    client = int(np.argmax(split.sizes > 0))  # which has a row
    return split.rows(client, client + 1)[0][0].nbytes + 8 * math.prod(split.targets)


class _Counts:
    """What is counted while rows are written.

    `classes`, `commonest_rows`: int64 [clients], the classes of each client, and the rows of its
    commonest; `class_rows`: int64 [classes], the training rows of each class, none where rows have
    not one class each; `validation`: int64 [clients], validation rows; `distinct_samples`: training
    samples, where clients share them; else 0.
    """

    def __init__(self, clients: int, classes: int):
        self.classes, self.commonest_rows, self.validation = np.zeros((3, clients), np.int64)
        self.class_rows = np.zeros(classes, np.int64)
        self.distinct_samples = 0

    def add(self, sizes: np.ndarray, start: int, y: np.ndarray) -> None:
        """Counts the labels of clients from `start` on, of `sizes` rows each."""
        number = len(self.class_rows)
        if not number:
            return
        owner = np.repeat(np.arange(len(sizes)), sizes)
        pairs, counts = np.unique(owner * number + y, return_counts=True)
        client = pairs // number
        self.classes[start : start + len(sizes)] = np.bincount(client, minlength=len(sizes))
        np.maximum.at(self.commonest_rows, start + client, counts)
        np.add.at(self.class_rows, pairs % number, counts)


def _write(
    split: Split, holdout: HeldOutRows | None, config: dict, row_seed: int | None, folder: Path
) -> None:
    """Writes all files but `digests.json`. `row_seed`: of rows that are not written."""
    sizes = holdout.sizes if holdout else split.sizes
    ids = split.ids
    counts = _Counts(len(sizes), 0 if split.targets else split.classes)
    if row_seed is None:
        write = _write_shared_samples if split.at and split.samples else _write_rows
        write(split, holdout, counts, folder)
    if holdout is not None and holdout.clients is not None:
        client_mask = ~holdout.clients
        counts.validation = counts.validation[holdout.clients]
        sizes = sizes[client_mask]
        counts.classes = counts.classes[client_mask]
        counts.commonest_rows = counts.commonest_rows[client_mask]
        ids = None if ids is None else [*compress(ids, client_mask)]
    test = rows_batch(*split.test())
    write_batch(folder / "test.arrow", test)
    columns = {"first": np.cumsum(sizes) - sizes, "size": sizes}
    clients = {name: pack_column(column, pa.int64()) for name, column in columns.items()}
    write_batch(folder / "clients.arrow", pa.record_batch(clients))
    if ids is not None:
        write_batch(folder / "ids.arrow", pa.record_batch({"id": ids}))
    if holdout:
        write_batch(folder / "held.arrow", pa.record_batch({"rows": counts.validation}))
    unseen = np.flatnonzero(counts.class_rows == 0) if row_seed is None else np.zeros(0)
    optional = {"tokens": split.tokens, "targets": list(split.targets), "names": list(split.names)}
    metadata = {
        "shape": list(split.shape),
        "classes": split.classes,
        "unseen": unseen.tolist(),
        "mean": list(split.mean),
        "std": list(split.std),
        "config": config,
        "description": _description(split, sizes, counts, test.num_rows, row_seed is None),
        **{name: value for name, value in optional.items() if value},
        **({} if row_seed is None else {"made": row_seed}),
    }
    (folder / "data.json").write_text(json.dumps(metadata, indent=1))


def _write_rows(split: Split, holdout: HeldOutRows | None, counts: _Counts, folder: Path) -> None:
    """Writes training and validation rows, some clients at a time."""
    ends = np.cumsum(split.sizes)
    sizes = holdout.sizes if holdout else split.sizes
    max_rows = BATCH_BYTES // _row_bytes(split)
    with ExitStack() as stack:
        train = RowWriter(folder / "train.arrow", stack)
        validation = RowWriter(folder / "validation.arrow", stack)
        client = 0
        while client < len(ends):
            row_limit = ends[client] - split.sizes[client] + max_rows
            next_client = max(client + 1, int(np.searchsorted(ends, row_limit, side="right")))
            x, y = split.rows(client, next_client)
            if holdout:
                held_out_mask, scored_mask = holdout.rows(client, next_client)
                if scored_mask.any():
                    validation.write(x[scored_mask], y[scored_mask])
                    rows = per_client(scored_mask, split.sizes[client:next_client])
                    counts.validation[client:next_client] = rows
                x, y = x[~held_out_mask], y[~held_out_mask]
            train.write(x, y)
            counts.add(sizes[client:next_client], client, y)
            client = next_client


def _write_shared_samples(
    split: Split, holdout: HeldOutRows | None, counts: _Counts, folder: Path
) -> None:
    """Writes each training sample once, the sample of each row, and the validation rows."""
    assert split.at is not None and split.samples is not None
    samples = split.samples(0, len(split.sizes))
    step = max(1, BATCH_BYTES // _row_bytes(split))
    targets = []
    with ExitStack() as stack:
        train = RowWriter(folder / "train.arrow", stack)
        validation = RowWriter(folder / "validation.arrow", stack)
        if holdout:
            held_out_mask, scored_mask = holdout.rows(0, len(split.sizes))
            counts.validation = per_client(scored_mask, split.sizes)
            for start in range(0, int(scored_mask.sum()), step):
                validation.write(*split.at(samples[scored_mask][start : start + step]))
            samples = samples[~held_out_mask]
        distinct_samples, index = np.unique(samples, return_inverse=True)
        for start in range(0, len(distinct_samples), step):
            x, y = split.at(distinct_samples[start : start + step])
            train.write(x, y)
            targets.append(y)
    write_batch(folder / "rows.arrow", pa.record_batch({"row": index.astype(np.int32)}))
    counts.add(holdout.sizes if holdout else split.sizes, 0, np.concatenate(targets)[index])
    counts.distinct_samples = len(distinct_samples)


def _description(
    split: Split, sizes: np.ndarray, counts: _Counts, test: int, has_counts: bool
) -> dict[str, Any]:
    """See `Shards.describe`. `has_counts`: whether the rows were counted."""
    description = {
        "clients": len(sizes),
        "samples": int(sizes.sum()),
        "test_samples": test,
        "unused": split.unused,
        "samples_per_client": _spread(sizes),
    }
    if split.names:
        description["class_names" if split.classes else "target_names"] = list(split.names)
    if counts.distinct_samples:
        description["distinct_samples"] = counts.distinct_samples
    if counts.validation.any():
        description["validation_samples"] = int(counts.validation.sum())
    if len(counts.class_rows) and has_counts:
        client_mask = sizes > 0
        share = (counts.commonest_rows[client_mask] / sizes[client_mask]).round(4)
        description["classes_per_client"] = _spread(counts.classes)
        description["commonest_class_per_client"] = _spread(share)
    if split.optimum is not None:
        description["optimum"] = split.optimum
    return description


def _spread(values: np.ndarray) -> dict[str, float]:
    median = float(np.median(values))
    return {"min": values.min().item(), "median": median, "max": values.max().item()}
