"""Street View House Numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from raydpfl.data.sources.downloads import TorchvisionImages


class Svhn(TorchvisionImages):
    """Netzer et al. 2011, cropped: 73,257 + 26,032 house-number digits, 32 x 32 colour."""

    kind: str = "svhn"
    dataset: ClassVar[str] = "SVHN"
    stored: ClassVar[tuple[str, ...]] = ("train_32x32.mat", "test_32x32.mat")
    mean: ClassVar[tuple[float, ...]] = (0.4377, 0.4438, 0.4728)
    std: ClassVar[tuple[float, ...]] = (0.1980, 0.2010, 0.1970)

    def _part(self, folder: Path, train: bool, **options: Any) -> Any:
        from torchvision import datasets

        return datasets.SVHN(str(folder), split="train" if train else "test", **options)

    def _read(self, folder: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
        part = self._part(folder, train)
        return part.data, part.labels.astype(np.int64)
