"""A few classes that dominate."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from raydpfl.data.partitions.base import Partition
from raydpfl.data.partitions.label_mixture import assign_rows, choose_classes, fit
from raydpfl.data.sizes import Sizes
from raydpfl.errors import ConfigError


class DominantLabels(Partition):
    """A `share` of each client's samples from `classes` dominant classes, evenly, the rest evenly
    from all others.

    000 sec. 2.2: of 500 samples, 2 classes with 230 each and 8 with about 5 each, a share of 0.92.
    Each class is dominant for a number of clients in proportion to its samples.
    """

    kind: str = "dominant-labels"
    classes: int = Field(default=2, ge=1)
    share: float = Field(default=0.92, gt=0, le=1)

    def assign(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        supply = np.unique(labels, return_counts=True)[1]
        if not self.classes < len(supply):
            raise ConfigError(
                "data.partition.classes",
                self.classes,
                f"fewer than the {len(supply)} classes of the data",
            )
        counts = sizes.counts(len(labels), clients, generator)
        dominant = choose_classes(clients, self.classes, supply, generator, least=0)
        mixture = np.where(
            dominant, self.share / self.classes, (1 - self.share) / (len(supply) - self.classes)
        )
        table = fit(mixture, counts, supply)
        if table is None:
            raise ConfigError(
                "data.partition.share",
                self.share,
                "a share below 1: these dominant classes alone cannot hold every sample",
            )
        return assign_rows(table, labels, generator), counts
