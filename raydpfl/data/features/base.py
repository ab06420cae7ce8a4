"""The base of the family: a fixed front end."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raydpfl.member import Member


class Features(Member):
    """Base of the family."""

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
