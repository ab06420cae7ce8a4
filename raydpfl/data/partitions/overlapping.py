"""Clients that share samples."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from raydpfl.data.apportion import apportion
from raydpfl.data.partitions.base import Partition
from raydpfl.data.sizes import Sizes
from raydpfl.errors import ConfigError


class Overlapping(Partition):
    """Every client `per_client` samples of its own drawing, as even over the classes as can be;
    clients may share samples, and some samples go unused (000 sec. 2.2, CIFAR-10: 500 samples, 50
    of each class, for each of 1920 clients).
    """

    sized: ClassVar[bool] = False
    kind: str = "overlapping"
    per_client: int = Field(ge=1)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"per_client": 20},)

    def overlaps(self) -> bool:
        return True

    def deal(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        each = apportion(self.per_client, np.ones(len(rows)))
        if any(want > len(have) for want, have in zip(each, rows, strict=True)):
            most = len(rows) * min(map(len, rows))
            raise ConfigError(
                "data.partition.per_client",
                self.per_client,
                f"at most {most}: the smallest class times the classes",
            )
        draws = [
            generator.choice(have, want, replace=False)
            for _ in range(clients)
            for want, have in zip(each, rows, strict=True)
        ]
        return np.concatenate(draws), np.full(clients, self.per_client)
