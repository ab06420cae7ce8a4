"""Equally likely subsets."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from raydpfl.data.partitions.base import Partition
from raydpfl.data.sizes import Sizes


class Iid(Partition):
    """Every client an equally likely subset of its size."""

    by: ClassVar[Literal["label", "client", "row"]] = "row"
    kind: str = "iid"

    def assign(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        counts = sizes.counts(len(labels), clients, generator)
        return generator.permutation(len(labels)), counts
