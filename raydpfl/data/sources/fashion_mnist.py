"""Fashion-MNIST."""

from __future__ import annotations

from typing import ClassVar

from raydpfl.data.sources.downloads import TorchvisionImages, idx_files


class FashionMnist(TorchvisionImages):
    """Xiao, Rasul, Vollgraf 2017: 60,000 + 10,000 articles of clothing, 28 x 28 grey."""

    kind: str = "fashion_mnist"
    dataset: ClassVar[str] = "FashionMNIST"
    stored: ClassVar[tuple[str, ...]] = idx_files("FashionMNIST", "train", "t10k")
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)
