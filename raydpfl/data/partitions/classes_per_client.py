"""A number of classes to a client."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from raydpfl.data.partitions.base import Partition
from raydpfl.data.partitions.label_mixture import assign_rows, choose_classes, fit
from raydpfl.data.sizes import Sizes
from raydpfl.errors import ConfigError


class ClassesPerClient(Partition):
    """Every client holds samples of exactly `k` classes (002 sec. VI, with 7), each class held by
    clients in proportion to its samples.
    """

    kind: str = "classes-per-client"
    k: int = Field(default=7, ge=1)

    def assign(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        supply = np.unique(labels, return_counts=True)[1]
        if not self.k <= len(supply):
            raise ConfigError(
                "data.partition.k", self.k, f"at most the {len(supply)} classes of the data"
            )
        counts = sizes.counts(len(labels), clients, generator)
        if counts.min() < self.k:
            raise ConfigError(
                "data.partition.k",
                self.k,
                f"at most {counts.min()}, the samples of the smallest client",
            )
        if clients * self.k < len(supply):
            least = -(-len(supply) // clients)
            aim = f"so that {clients} clients can hold all {len(supply)} classes"
            expected = f"at least {least}, {aim}"
            raise ConfigError("data.partition.k", self.k, expected)
        held = choose_classes(clients, self.k, supply, generator, least=1)
        table = None
        if (supply >= held.sum(0)).all():
            table = fit(held.astype(float), counts - self.k, supply - held.sum(0))
        if table is None:
            wish = f"a k for which {sizes.kind} sizes leave no sample over"
            expected = f"{wish}; a larger k or more even sizes make it easier"
            raise ConfigError("data.partition.k", self.k, expected)
        return assign_rows(table + held, labels, generator), counts
