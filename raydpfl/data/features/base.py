"""The base of the family: a fixed front end."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from raydpfl.config.registry import Member
from raydpfl.storage.cache import fill_folder, is_intact
from raydpfl.storage.files import cache_root

Rows = tuple[np.ndarray, np.ndarray]  # training and test rows


class Features(Member):
    """Base of the family."""

    learns: ClassVar[bool] = True  # from training rows; false: a row's columns are its own matter

    @property
    def exclusions(self) -> tuple[str, ...]:
        """Queries of the training data that no accountant counts, in words."""
        return ()

    def absent_files(self) -> list[str]:
        """What it reads and is not on this machine, in words."""
        return []

    def identity(self, root: Path | None) -> list:
        """The contents of the files that the columns depend on, in JSON types."""
        return []

    def columns(self, x: np.ndarray, test_x: np.ndarray, root: Path | None) -> Rows:
        """The training and test rows, uint8 or float32 [rows, *shape], as float32 [rows, k]. Raises
        `ConfigError`.
        """
        raise NotImplementedError

    def columns_without(
        self, x: np.ndarray, test_x: np.ndarray, held_out_rows: np.ndarray, root: Path | None
    ) -> Rows:
        """As `columns`, but the training rows `held_out_rows`, int64, are given with the test rows,
        so that nothing is learnt from them.
        """
        if not self.learns:
            return self.columns(x, test_x, root)
        training_mask = np.ones(len(x), bool)
        training_mask[held_out_rows] = False
        remaining_rows = np.concatenate([x[~training_mask], test_x])
        columns, remaining_columns = self.columns(x[training_mask], remaining_rows, root)
        rows = np.empty((len(x), *columns.shape[1:]), columns.dtype)
        rows[training_mask] = columns
        count = len(x) - len(columns)
        rows[~training_mask] = remaining_columns[:count]
        return rows, remaining_columns[count:]


def cached_columns(
    dependencies: Sequence[Any], images: np.ndarray, extract: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """What `extract` makes of images or rows, uint8 or float32 [rows, ...], from the cache where it
    is there. `dependencies`: what else it depends on, in types whose `repr` says all of it.
    """
    pixels = hashlib.sha256(np.ascontiguousarray(images).data).hexdigest()
    name = hashlib.sha256(repr([*dependencies, images.shape, pixels]).encode()).hexdigest()
    folder = cache_root() / "features" / name
    if not is_intact(folder):
        fill_folder(folder, lambda scratch: np.save(scratch / "columns.npy", extract(images)))
    return np.load(folder / "columns.npy")
