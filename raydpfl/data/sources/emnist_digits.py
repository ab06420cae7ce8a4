"""The digits of EMNIST."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from raydpfl.data.sources.downloads import TorchvisionImages, idx_files


class EmnistDigits(TorchvisionImages):
    """Cohen et al. 2017, the digits: 240,000 + 40,000, 28 x 28 grey, turned upright (the files hold
    them transposed).
    """

    kind: str = "emnist_digits"
    dataset: ClassVar[str] = "EMNIST"
    stored: ClassVar[tuple[str, ...]] = idx_files(
        "EMNIST", "emnist-digits-train", "emnist-digits-test"
    )
    mean: ClassVar[tuple[float, ...]] = (0.1733,)
    std: ClassVar[tuple[float, ...]] = (0.3317,)

    def _part(self, folder: Path, train: bool, **options: Any) -> Any:
        return super()._part(folder, train, split="digits", **options)

    def _read(self, folder: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
        x, y = super()._read(folder, train)
        return np.ascontiguousarray(x.transpose(0, 1, 3, 2)), y
