"""Named image data sets: the embedded images, and CIFAR-10 as JPEG images."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from raydpfl.data.sources.base import InMemoryData, Samples
from raydpfl.data.sources.table import TableFile
from raydpfl.errors import ConfigError
from raydpfl.storage.files import data_root, digest

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)


class ImageSet(InMemoryData):
    """A named image data set with published constants to normalise by."""

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
            self._check_constants(samples.x)
        return samples

    def images(self, root: Path | None) -> Samples:
        """All images, uint8 [rows, channels, height, width]. Raises `ConfigError`."""
        raise NotImplementedError

    def _check_constants(self, x: np.ndarray) -> None:
        """Raises `ConfigError` where the published constants are not those of the pixels."""
        levels = np.arange(256) / 255
        counts = np.zeros((x.shape[1], 256))
        for start in range(0, len(x), 4096):  # of the levels in each channel
            for channel, pixels in enumerate(x[start : start + 4096].swapaxes(0, 1)):
                counts[channel] += np.bincount(pixels.ravel(), minlength=256)
        counts /= x.size / x.shape[1]
        mean = counts @ levels
        std = np.sqrt(np.maximum(counts @ levels**2 - mean**2, 0))
        if not np.allclose([*mean, *std], [*self.mean, *self.std], rtol=0, atol=0.01):
            measured_constants = f"{mean.round(3).tolist()} and {std.round(3).tolist()}"
            published_constants = f"{self.mean} and {self.std} as published"
            expected = f"false: mean and std are {measured_constants}, not {published_constants}"
            raise ConfigError("data.normalize", True, expected)


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
    folder: ClassVar[str] = "cifar10_jpeg"
    file_names: ClassVar[tuple[str, ...]] = (f"{folder}/train.parquet", f"{folder}/test.parquet")

    @classmethod
    def located(cls, root: Path) -> str:
        missing = [name for name in cls.file_names if not (root / name).is_file()]
        return f"not under {root}: {' and '.join(missing)}" if missing else str(root / cls.folder)

    def images(self, root: Path | None) -> Samples:
        return self._files(root).samples(0, root)

    def sources(self, root: Path | None) -> list:
        return self._files(root).sources(root)

    def _files(self, root: Path | None) -> TableFile:
        folder = data_root(root)
        missing = [name for name in self.file_names if not (folder / name).is_file()]
        if missing:
            expected = f"{' and '.join(missing)} under {folder} (--data-root, RAYDPFL_DATA)"
            raise ConfigError("data.kind", self.kind, expected)
        train, test = self.file_names
        return TableFile(train=train, test=test)
