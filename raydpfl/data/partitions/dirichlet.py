"""Random mixtures of classes."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from raydpfl.data.partitions.base import Partition
from raydpfl.data.partitions.label_mixture import assign_rows, fit
from raydpfl.data.sizes import Sizes


class Dirichlet(Partition):
    """Each client's mixture of classes is a draw from the symmetric Dirichlet(psi) (Hsu, Qi, Brown
    2019; 002: psi = 100, 5, 0.1).
    """

    kind: str = "dirichlet"
    psi: float = Field(
        gt=0,
        description="the concentration, alpha elsewhere: the smaller, the less alike clients are",
    )
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"psi": 0.1}, {"psi": 100.0})

    def assign(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        supply = np.unique(labels, return_counts=True)[1]
        counts = sizes.counts(len(labels), clients, generator)
        # so that a solution exists at any psi
        mixture = np.maximum(generator.dirichlet(np.full(len(supply), self.psi), clients), 1e-9)
        table = fit(mixture, counts, supply)
        assert table is not None  # a mixture that is positive everywhere has a solution
        return assign_rows(table, labels, generator), counts
