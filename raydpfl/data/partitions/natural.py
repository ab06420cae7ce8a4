"""Clients that the data name."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from raydpfl.data.partitions.base import Partition
from raydpfl.data.sizes import Sizes


class Natural(Partition):
    """The column of a table that `data.client` names is the client; clients are numbered in the
    order of its sorted values.
    """

    sized: ClassVar[bool] = False
    by: ClassVar[Literal["label", "client", "row"]] = "client"
    kind: str = "natural"

    def deal(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        return np.argsort(labels, kind="stable"), np.bincount(labels, minlength=clients)
