"""MNIST."""

from __future__ import annotations

from typing import ClassVar

from raydpfl.data.sources.downloads import TorchvisionImages, idx_files


class Mnist(TorchvisionImages):
    """LeCun, Cortes, Burges: 60,000 + 10,000 digits, 28 x 28 grey."""

    kind: str = "mnist"
    dataset: ClassVar[str] = "MNIST"
    stored: ClassVar[tuple[str, ...]] = idx_files("MNIST", "train", "t10k")
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)
