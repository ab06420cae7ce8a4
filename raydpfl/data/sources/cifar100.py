"""CIFAR-100."""

from __future__ import annotations

from typing import ClassVar

from raydpfl.data.sources.downloads import TorchvisionImages


class Cifar100(TorchvisionImages):
    """Krizhevsky 2009: 50,000 + 10,000 of 100 classes, 32 x 32 colour."""

    kind: str = "cifar100"
    dataset: ClassVar[str] = "CIFAR100"
    stored: ClassVar[tuple[str, ...]] = tuple(
        f"cifar-100-python/{name}" for name in ("train", "test", "meta")
    )
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
