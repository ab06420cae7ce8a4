"""The base of the family: which samples each client holds."""

from typing import ClassVar, Literal

import numpy as np
from numpy.random import Generator

from raydpfl.config.registry import Member
from raydpfl.data.sizes import Sizes
from raydpfl.errors import ConfigError

# rows of the data set in client order, and sizes of clients
Assignment = tuple[np.ndarray, np.ndarray]


class Partition(Member):
    """Base of the family. `follows_sizes`: whether it follows `data.sizes`; `by`: the column that
    it deals by (row: none, only the number of rows).
    """

    follows_sizes: ClassVar[bool] = True
    by: ClassVar[Literal["label", "client", "row"]] = "label"

    def assign(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: Generator
    ) -> Assignment:
        """Which samples each client holds: rows of the data set in client order, int64 [samples],
        and sizes, int64 [clients].

        `labels` is the int64 column [n] that `by` names, or float32 targets for a partition by row.
        Raises `ConfigError` naming the `data.partition` key, or `data.clients`, that the data
        cannot give.
        """
        raise NotImplementedError

    def overlaps(self) -> bool:
        """Whether one sample may be held by several clients."""
        return False

    def check_sizes(self, sizes: Sizes) -> None:
        """Raises `ConfigError` for sizes that it would not follow."""
        if not self.follows_sizes and not sizes.even():
            reason = f"partition {self.kind}, which itself decides the sizes"
            raise ConfigError("data.sizes.kind", sizes.kind, f"balanced with {reason}")

    def partition(
        self,
        y: np.ndarray,
        owners: np.ndarray | None,
        clients: int | None,
        sizes: Sizes,
        generator: Generator,
    ) -> Assignment:
        """`assign` by the column that it goes by: classes int64 or targets float32 `y` [n], or
        `owners`, the client of each row, int64 [n]. Raises `ConfigError` without such a column, for
        other `clients` than it gives, and for a row that several hold unless it overlaps.
        """
        count = clients
        if self.by == "client":
            if owners is None:
                expected = "a table whose column of client ids data.client names"
                raise ConfigError("data.partition.kind", self.kind, expected)
            y, count = owners, int(owners.max()) + 1
        elif count is None:
            expected = "a number of clients (only partition natural finds it in the data)"
            raise ConfigError("data.clients", None, expected)
        elif self.by == "label" and (y.dtype.kind == "f" or y.ndim > 1):
            expected = "iid or natural for targets that are not one class, to divide by"
            raise ConfigError("data.partition.kind", self.kind, expected)
        rows, counts = self.assign(y, count, sizes, generator)
        expected = ""
        if clients not in (None, len(counts)):
            if self.by == "client":
                expected = f"{len(counts)}, the number of clients in the data, or none"
                raise ConfigError("data.clients", clients, expected)
            expected = f"{clients} clients, not {len(counts)}"
        elif not 0 < counts.sum() == len(rows):
            expected = f"as many rows as its sizes say, not {len(rows)} of {counts.sum()}"
        elif not self.overlaps() and np.bincount(rows).max() > 1:
            expected = "a row to one client; or whose overlaps() is True, as several may hold it"
        if expected:
            raise ConfigError("data.partition.kind", self.kind, f"one that gives {expected}")
        return rows, counts
