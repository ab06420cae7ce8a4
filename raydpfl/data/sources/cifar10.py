"""CIFAR-10."""

from __future__ import annotations

from typing import ClassVar

from raydpfl.data.sources.downloads import TorchvisionImages


class Cifar10(TorchvisionImages):
    """Krizhevsky 2009: 50,000 + 10,000 of 10 classes, 32 x 32 colour."""

    kind: str = "cifar10"
    dataset: ClassVar[str] = "CIFAR10"
    stored: ClassVar[tuple[str, ...]] = tuple(
        f"cifar-10-batches-py/{name}"
        for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch", "batches.meta")
    )
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
