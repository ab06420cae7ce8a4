"""Partitions by chance, as a whole or in part."""

from typing import Any, ClassVar, Literal

import numpy as np
from numpy.random import Generator
from pydantic import Field

from raydpfl.data.partitions.base import Assignment, Partition
from raydpfl.data.sizes import Sizes


class Iid(Partition):
    """Every client an equally likely subset of its size."""

    by: ClassVar[Literal["label", "client", "row"]] = "row"
    kind: str = "iid"

    def assign(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: Generator
    ) -> Assignment:
        counts = sizes.counts(len(labels), clients, generator)
        return generator.permutation(len(labels)), counts


class Similarity(Partition):
    """`s` percent of each client's samples iid, the rest a stretch of what remains sorted by label
    (003 sec. VI: 100, 70, 30, 0).
    """

    kind: str = "similarity"
    s: float = Field(ge=0, le=100, description="percent of samples that are drawn iid")
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"s": 0}, {"s": 70}, {"s": 100})

    def assign(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: Generator
    ) -> Assignment:
        counts = sizes.counts(len(labels), clients, generator)
        ends = np.round(np.cumsum(counts) * (self.s / 100)).astype(np.int64)
        iid_counts = np.diff(ends, prepend=0)
        rows = generator.permutation(len(labels))
        rest = rows[ends[-1] :]
        rest = rest[np.argsort(labels[rest], kind="stable")]
        # which client takes which stretch, so that a client's number does not tell its class
        turn = generator.permutation(clients)
        lengths = np.concatenate([iid_counts, (counts - iid_counts)[turn]])
        owner = np.repeat(np.concatenate([np.arange(clients), turn]), lengths)
        return np.concatenate([rows[: ends[-1]], rest])[np.argsort(owner, kind="stable")], counts
