"""Clients that the data name."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.random import Generator
from pydantic import Field, model_validator

from raydpfl.data.partitions.base import Assignment, Partition
from raydpfl.data.sizes import Sizes
from raydpfl.errors import ConfigError


class Natural(Partition):
    """By the column that `data.client` names, clients in the order of its sorted values."""

    follows_sizes: ClassVar[bool] = False
    by: ClassVar[Literal["label", "client", "row"]] = "client"
    added_fields: ClassVar[frozenset[str]] = frozenset({"least", "most"})
    kind: str = "natural"
    least: int = Field(default=1, ge=1, description="rows; clients with fewer are left out")
    most: int | None = Field(default=None, ge=1, description="rows of a client, drawn; None: all")

    @model_validator(mode="after")
    def _check_bounds(self) -> Natural:
        if self.most is not None and self.most < self.least:
            expected = f"at least data.partition.least = {self.least}, or none"
            raise ConfigError("data.partition.most", self.most, expected)
        return self

    def assign(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: Generator
    ) -> Assignment:
        order = np.argsort(labels, kind="stable")
        counts = np.bincount(labels, minlength=clients)
        client_mask = counts >= self.least
        if not client_mask.any():
            expected = f"at most {counts.max()}, the rows of the largest client"
            raise ConfigError("data.partition.least", self.least, expected)
        if self.most is not None:  # of clients with too many rows those with the lowest keys
            owner = np.repeat(np.arange(len(counts)), counts)
            random_order = np.lexsort((generator.random(len(order)), owner))
            rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
            order = order[np.sort(random_order[rank < self.most])]
            counts = np.minimum(counts, self.most)
        return order[np.repeat(client_mask, counts)], counts[client_mask]
