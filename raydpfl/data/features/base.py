"""The base of the family: a fixed front end."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from raydpfl.config.registry import Member


class Features(Member):
    """Base of the family."""

    learns: ClassVar[bool] = True  # from training rows; false: a row's columns are its own matter

    @property
    def exclusions(self) -> tuple[str, ...]:
        """Queries of the training data that no accountant counts, in words."""
        return ()

    def identity(self, root: Path | None) -> list:
        """The contents of the files that the columns depend on, in JSON types."""
        return []

    def columns(
        self, x: np.ndarray, test_x: np.ndarray, root: Path | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The training and the test rows (uint8 or float32 [rows, *shape]) as float32 [rows, k].
        Raises `ConfigError`.
        """
        raise NotImplementedError

    def columns_without(
        self, x: np.ndarray, test_x: np.ndarray, held: np.ndarray, root: Path | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `columns`, of which nothing is learnt from training rows that are held out: they are
        given with the test rows.

        Args:
            x: the training rows.
            test_x: the test rows.
            held: int64, the training rows that are held out.
            root: the folder of data sets.
        """
        if not self.learns:
            return self.columns(x, test_x, root)
        trained = np.ones(len(x), bool)
        trained[held] = False
        others = np.concatenate([x[~trained], test_x])
        columns, other_columns = self.columns(x[trained], others, root)
        rows = np.empty((len(x), *columns.shape[1:]), columns.dtype)
        rows[trained] = columns
        count = len(x) - len(columns)
        rows[~trained] = other_columns[:count]
        return rows, other_columns[count:]
