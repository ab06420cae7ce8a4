"""Clients that share samples."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.random import Generator
from pydantic import Field, model_validator

from raydpfl.data.partitions.base import Assignment, Partition
from raydpfl.data.sizes import Sizes, apportion
from raydpfl.errors import ConfigError


class Overlapping(Partition):
    """Every client's own drawing; clients may share samples, and some samples go unused (000 sec.
    2.2, CIFAR-10: 500 samples for each of 1920 clients). As even over the classes as can be; or
    evenly from dominant classes, drawn for each client, and evenly from all others.
    """

    added_fields: ClassVar[frozenset[str]] = frozenset({"classes", "share"})
    follows_sizes: ClassVar[bool] = False
    kind: str = "overlapping"
    per_client: int = Field(ge=1, description="samples that a client draws")
    classes: int | None = Field(default=None, ge=1, description="dominant; None: all alike")
    share: float | None = Field(
        default=None, gt=0, le=1, description="of a client's samples that are of dominant classes"
    )
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"per_client": 20},
        {"per_client": 20, "classes": 2, "share": 0.9},
    )

    @model_validator(mode="after")
    def _check_dominant(self) -> Overlapping:
        if (self.classes is None) != (self.share is None):
            missing = "share" if self.share is None else "classes"
            present = "classes" if missing == "share" else "share"
            expected = f"a value, as data.partition.{present} has one; or neither"
            raise ConfigError(f"data.partition.{missing}", None, expected)
        return self

    def overlaps(self) -> bool:
        return True

    def assign(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: Generator
    ) -> Assignment:
        rows = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        if self.classes is not None and self.classes >= len(rows):
            expected = f"fewer than the {len(rows)} classes of the data"
            raise ConfigError("data.partition.classes", self.classes, expected)
        counts = self._counts(len(rows))
        smallest = min(map(len, rows))
        if max(counts) > smallest:
            limit = f"at most {smallest} of a class, not {max(counts)}"
            expected = f"one by which a client takes {limit}"
            if self.classes is None:
                expected = f"at most {len(rows) * smallest}: the smallest class times the classes"
            raise ConfigError("data.partition.per_client", self.per_client, expected)
        draws = []
        for _ in range(clients):
            class_counts = counts
            if self.classes is not None:  # which classes are dominant is drawn
                class_counts = np.empty_like(counts)
                class_counts[generator.permutation(len(rows))] = counts
            draws += [
                generator.choice(class_rows, count, replace=False)
                for count, class_rows in zip(class_counts, rows, strict=True)
            ]
        return np.concatenate(draws), np.full(clients, self.per_client)

    def _counts(self, classes: int) -> np.ndarray:
        """Samples of each class that a client draws, int64 [classes], dominant classes first."""
        if self.classes is None or self.share is None:
            return apportion(self.per_client, np.ones(classes))
        dominant = round(self.share * self.per_client)
        dominant_counts = apportion(dominant, np.ones(self.classes))
        other_counts = apportion(self.per_client - dominant, np.ones(classes - self.classes))
        return np.concatenate([dominant_counts, other_counts])
