"""Named image data sets: the embedded images, and CIFAR-10 as JPEG images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from raydpfl.data.sources.base import InMemoryData, Samples
from raydpfl.data.sources.table import TableFile
from raydpfl.errors import ConfigError
from raydpfl.storage.files import data_root, digest, file_identity

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)


class ImageSet(InMemoryData):
    """A named image data set with published normalisation constants; otherwise pixels are scaled to
    [0, 1].
    """

    normalize: bool = Field(
        default=False, description="by the published mean and std, after scaling to [0, 1]"
    )
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def constants(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return (self.mean, self.std) if self.normalize else ((), ())

    def samples(self, seed: int, root: Path | None) -> Samples:
        samples = self.images(root)
        if self.normalize:
            self._check_published(samples.x)
        return samples

    def images(self, root: Path | None) -> Samples:
        """All images, uint8 [rows, channels, height, width]. Raises `ConfigError`."""
        raise NotImplementedError

    def _check_published(self, x: np.ndarray) -> None:
        """Raises `ConfigError` where the published constants are not those of the pixels."""
        levels = np.arange(256) / 255
        counts = sum(_histograms(x[at : at + 4096]) for at in range(0, len(x), 4096)) / (
            x.size / x.shape[1]
        )
        mean = counts @ levels
        square = counts @ levels**2
        std = np.sqrt(np.maximum(square - mean**2, 0))
        if not np.allclose([*mean, *std], [*self.mean, *self.std], rtol=0, atol=0.01):
            measured = f"{mean.round(3).tolist()} and {std.round(3).tolist()}"
            published = f"{self.mean} and {self.std} as published"
            expected = f"false: mean and std are {measured}, not {published}"
            raise ConfigError("data.normalize", True, expected)


def _histograms(x: np.ndarray) -> np.ndarray:
    """How often each level 0 to 255 occurs in each channel of uint8 images, [channels, 256]."""
    return np.stack([np.bincount(x[:, k].ravel(), minlength=256) for k in range(x.shape[1])])


class FashionMnistMini(ImageSet):
    """The first 900 training and 200 test images of each class of Fashion-MNIST, embedded in the
    package (see `raydpfl.data.embedded`).
    """

    kind: str = "fashion_mnist_mini"
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"clients": 60},
        {"clients": 20, "partition": {"kind": "overlapping", "per_client": 8}},
    )
    location: ClassVar[str] = "in the package"
    # of these 9,000 images; see raydpfl.data.embedded for why not 0.2860 and 0.3530
    mean: ClassVar[tuple[float, ...]] = (0.3032,)
    std: ClassVar[tuple[float, ...]] = (0.2701,)

    def images(self, root: Path | None) -> Samples:
        from raydpfl.data import embedded

        return Samples(*embedded.read("train"), *embedded.read("test"))

    def sources(self, root: Path | None) -> list:
        from raydpfl.data import embedded

        return [digest(embedded.path(part)) for part in ("train", "test")]


class Cifar10Jpeg(ImageSet):
    """CIFAR-10 as Parquet of JPEG images, columns `image` and `label`, which is lossy: its results
    are no results on `cifar10`, for which it stands where that cannot be had.
    """

    kind: str = "cifar10_jpeg"
    mean: ClassVar[tuple[float, ...]] = CIFAR10_MEAN
    std: ClassVar[tuple[float, ...]] = CIFAR10_STD
    stored: ClassVar[tuple[str, ...]] = ("cifar10_jpeg/train.parquet", "cifar10_jpeg/test.parquet")

    @classmethod
    def located(cls, root: Path) -> str:
        if all((root / name).is_file() for name in cls.stored):
            return str(root / "cifar10_jpeg")
        return f"not under {root}: {' and '.join(cls.stored)}"

    def images(self, root: Path | None) -> Samples:
        self._check_present(root)
        train, test = self.stored
        return TableFile(train=train, test=test).samples(0, root)

    def sources(self, root: Path | None) -> list:
        self._check_present(root)
        return [file_identity("data.kind", name, root) for name in self.stored]

    def _check_present(self, root: Path | None) -> None:
        folder = data_root(root)
        missing = [name for name in self.stored if not (folder / name).is_file()]
        if missing:
            expected = f"{' and '.join(missing)} under {folder} (--data-root, RAYDPFL_DATA)"
            raise ConfigError("data.kind", self.kind, expected)
