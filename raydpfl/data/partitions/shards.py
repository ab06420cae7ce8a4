"""Shards of one class."""

from typing import ClassVar

import numpy as np
from numpy.random import Generator
from pydantic import Field

from raydpfl.data.partitions.base import Assignment, Partition
from raydpfl.data.sizes import Sizes, apportion
from raydpfl.errors import ConfigError


class LabelShards(Partition):
    """One-class shards, as many for each client, at random (001 App. G, with 5).

    A class gets shards in proportion to its samples (at least one), equal to within one sample; so
    no shard straddles two classes, and Fashion-MNIST for 3000 clients gives 15,000 of exactly 4.
    """

    follows_sizes: ClassVar[bool] = False
    kind: str = "shards"
    per_client: int = Field(default=5, ge=1, description="one-class shards of a client")

    def assign(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: Generator
    ) -> Assignment:
        classes, counts = np.unique(labels, return_counts=True)
        shards = clients * self.per_client
        if not len(classes) <= shards <= len(labels):
            minimum = -(-len(classes) // self.per_client)
            maximum = len(labels) // self.per_client
            expected = f"from {minimum} to {maximum} with {self.per_client} one-class shards"
            expected += f" each: {len(labels)} samples of {len(classes)} classes"
            raise ConfigError("data.clients", clients, expected)
        weights = np.maximum(counts * (shards / counts.sum()) - 1, 1e-12)
        quotas = 1 + apportion(shards - len(classes), weights, counts - 1)
        rows = generator.permutation(len(labels))
        rows = rows[np.argsort(labels[rows], kind="stable")]
        pairs = zip(counts, quotas, strict=True)
        lengths = np.concatenate([apportion(count, np.ones(quota)) for count, quota in pairs])
        owner = np.empty(shards, np.int64)
        owner[generator.permutation(shards)] = np.arange(shards) // self.per_client
        order = np.argsort(np.repeat(owner, lengths), kind="stable")
        return rows[order], np.bincount(owner, lengths, clients).astype(np.int64)
