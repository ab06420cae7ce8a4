"""Named image data sets: the embedded images, those that torchvision downloads and reads, and
CIFAR-10 as JPEG images.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from raydpfl.data import embedded
from raydpfl.data.sources.base import InMemoryData, Samples
from raydpfl.data.sources.table import TableFile
from raydpfl.errors import ConfigError
from raydpfl.storage.files import data_root, digest, network_timeout


class ImageSet(InMemoryData):
    """A named image data set with published constants to normalise by."""

    normalize: bool = Field(
        default=False, description="by the published mean and std, after scaling to [0, 1]"
    )
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    file_names: ClassVar[tuple[str, ...]] = ()  # relative to the root of data

    @classmethod
    def missing(cls, root: Path) -> list[str]:
        """Its files that are not under a root."""
        return [name for name in cls.file_names if not (root / name).is_file()]

    def absent_files(self, root: Path | None) -> list[str]:
        words = f"{self.kind} (raydpfl data fetch {self.kind})"
        return [words] * bool(self.missing(data_root(root))) + super().absent_files(root)

    @property
    def tests_clients(self) -> bool:
        return False

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
        return Samples(*embedded.read("train"), *embedded.read("test"))

    def sources(self, root: Path | None) -> list:
        return [digest(embedded.path(part)) for part in ("train", "test")]


class TorchvisionImages(ImageSet):
    """A data set that torchvision reads from `file_names`."""

    dataset: ClassVar[str]  # name in torchvision.datasets

    def images(self, root: Path | None) -> Samples:
        folder = self.ensure(root)
        try:
            return Samples(*self._read(folder, True), *self._read(folder, False))
        except Exception as error:  # torchvision raises what its unpicklers and parsers raise
            reason = f"{type(error).__name__}: {error}"
            expected = f"files under {folder} that can be read; they are intact, but cannot be"
            raise ConfigError("data.kind", self.kind, f"{expected} ({reason})") from None

    def sources(self, root: Path | None) -> list:
        folder = self.ensure(root)
        # torchvision prefers them
        processed_files = sorted((folder / self.dataset / "processed").glob("*.pt"))
        names = [*self.file_names, *(str(path.relative_to(folder)) for path in processed_files)]
        try:
            return [[name, digest(folder / name)] for name in names]
        except OSError as error:
            expected = f"files under {folder} that can be read ({error.filename}: {error.strerror})"
            raise ConfigError("data.kind", self.kind, expected) from None

    def _part(self, folder: Path, train: bool, **options: Any) -> Any:
        from torchvision import datasets

        return getattr(datasets, self.dataset)(str(folder), train=train, **options)

    def _read(self, folder: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
        part = self._part(folder, train)
        x = np.asarray(part.data)
        y = np.asarray(part.targets, np.int64)
        return (x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))), y

    @classmethod
    def located(cls, root: Path) -> str:
        fetch = f"raydpfl data fetch {cls.model_fields['kind'].default}"
        return f"not under {root}; {fetch}" if cls.missing(root) else str(root)

    @classmethod
    def fetch(cls, root: Path) -> Path | None:
        return cls().ensure(root)

    def ensure(self, root: Path | None) -> Path:
        """The root that holds the files, downloaded first if they are missing and a network and a
        writable folder are there.
        """
        folder = data_root(root)
        if not self.missing(folder):
            return folder
        try:
            self._download(folder)
        # no network, no space, a mirror's own error page: all end alike
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            expected = f"a data set that is under {folder} (--data-root, RAYDPFL_DATA)"
            expected += f"; it is not, and was not downloaded ({reason})"
            raise ConfigError("data.kind", self.kind, expected) from None
        return folder

    def _download(self, folder: Path) -> None:
        """Downloads the files next to their places, and then moves them there."""
        base_folder = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not os.access(base_folder, os.W_OK):
            raise PermissionError("the folder is read-only")
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=base_folder) as scratch:
            with network_timeout():
                for train in (True, False):
                    self._part(Path(scratch), train, download=True)
            for file in sorted(path for path in Path(scratch).rglob("*") if path.is_file()):
                target = folder / file.relative_to(scratch)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)


def _idx_files(folder: str, train: str, test: str) -> tuple[str, ...]:
    return tuple(
        f"{folder}/raw/{part}-{content}-ubyte"
        for part in (train, test)
        for content in ("images-idx3", "labels-idx1")
    )


class Mnist(TorchvisionImages):
    """LeCun, Cortes, Burges: 60,000 + 10,000 digits, 28 x 28 grey."""

    kind: str = "mnist"
    dataset: ClassVar[str] = "MNIST"
    file_names: ClassVar[tuple[str, ...]] = _idx_files("MNIST", "train", "t10k")
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)


class FashionMnist(TorchvisionImages):
    """Xiao, Rasul, Vollgraf 2017: 60,000 + 10,000 articles of clothing, 28 x 28 grey."""

    kind: str = "fashion_mnist"
    dataset: ClassVar[str] = "FashionMNIST"
    file_names: ClassVar[tuple[str, ...]] = _idx_files("FashionMNIST", "train", "t10k")
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)


class EmnistDigits(TorchvisionImages):
    """Cohen et al. 2017, the digits: 240,000 + 40,000, 28 x 28 grey, turned upright (the files hold
    them transposed).
    """

    kind: str = "emnist_digits"
    dataset: ClassVar[str] = "EMNIST"
    file_names: ClassVar[tuple[str, ...]] = _idx_files(
        "EMNIST", "emnist-digits-train", "emnist-digits-test"
    )
    mean: ClassVar[tuple[float, ...]] = (0.1733,)
    std: ClassVar[tuple[float, ...]] = (0.3317,)

    def _part(self, folder: Path, train: bool, **options: Any) -> Any:
        return super()._part(folder, train, split="digits", **options)

    def _read(self, folder: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
        x, y = super()._read(folder, train)
        return np.ascontiguousarray(x.transpose(0, 1, 3, 2)), y


class Cifar10(TorchvisionImages):
    """Krizhevsky 2009: 50,000 + 10,000 of 10 classes, 32 x 32 colour."""

    kind: str = "cifar10"
    dataset: ClassVar[str] = "CIFAR10"
    file_names: ClassVar[tuple[str, ...]] = tuple(
        f"cifar-10-batches-py/{name}"
        for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch", "batches.meta")
    )
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)


class Cifar100(TorchvisionImages):
    """Krizhevsky 2009: 50,000 + 10,000 of 100 classes, 32 x 32 colour."""

    kind: str = "cifar100"
    dataset: ClassVar[str] = "CIFAR100"
    file_names: ClassVar[tuple[str, ...]] = tuple(
        f"cifar-100-python/{name}" for name in ("train", "test", "meta")
    )
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)


class Svhn(TorchvisionImages):
    """Netzer et al. 2011, cropped: 73,257 + 26,032 house-number digits, 32 x 32 colour."""

    kind: str = "svhn"
    dataset: ClassVar[str] = "SVHN"
    file_names: ClassVar[tuple[str, ...]] = ("train_32x32.mat", "test_32x32.mat")
    mean: ClassVar[tuple[float, ...]] = (0.4377, 0.4438, 0.4728)
    std: ClassVar[tuple[float, ...]] = (0.1980, 0.2010, 0.1970)

    def _part(self, folder: Path, train: bool, **options: Any) -> Any:
        from torchvision import datasets

        return datasets.SVHN(str(folder), split="train" if train else "test", **options)

    def _read(self, folder: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
        part = self._part(folder, train)
        return part.data, part.labels.astype(np.int64)


class Cifar10Jpeg(ImageSet):
    """CIFAR-10 as Parquet of JPEG images, columns `image` and `label`, which is lossy: its results
    are no results on `cifar10`, for which it stands where that cannot be had.
    """

    kind: str = "cifar10_jpeg"
    mean: ClassVar[tuple[float, ...]] = Cifar10.mean
    std: ClassVar[tuple[float, ...]] = Cifar10.std
    folder: ClassVar[str] = "cifar10_jpeg"
    file_names: ClassVar[tuple[str, ...]] = (f"{folder}/train.parquet", f"{folder}/test.parquet")

    @classmethod
    def located(cls, root: Path) -> str:
        missing = cls.missing(root)
        return f"not under {root}: {' and '.join(missing)}" if missing else str(root / cls.folder)

    def images(self, root: Path | None) -> Samples:
        return self._files(root).samples(0, root)

    def sources(self, root: Path | None) -> list:
        return self._files(root).sources(root)

    def _files(self, root: Path | None) -> TableFile:
        folder = data_root(root)
        missing = self.missing(folder)
        if missing:
            expected = f"{' and '.join(missing)} under {folder} (--data-root, RAYDPFL_DATA)"
            raise ConfigError("data.kind", self.kind, expected)
        train, test = self.file_names
        return TableFile(train=train, test=test)
