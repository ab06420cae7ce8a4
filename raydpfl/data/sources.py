"""Where samples come from: the base of the family, what a member gives, and the named image data
sets.

A member promises a `Split` that is a function of (its fields, seed, the files it reads) alone, and
checks all it can before the first byte is written. A named data set is read from torchvision's own
layout under a root:

>>> data = FashionMnistMini(clients=300)
>>> split = data.split(seed=0, root=None)
>>> split.shape, split.classes, split.sizes[:3]
((1, 28, 28), 10, array([30, 30, 30]))

Public, because published: the normalisation constants. They belong to the published files, so
`normalize` is refused for files whose own mean or standard deviation is off by more than 0.01: they
are not the published ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from raydpfl.data.features import FEATURES, Features
from raydpfl.data.partitions import PARTITIONS, SIZES, Balanced, Iid, Partition, Sizes
from raydpfl.errors import ConfigError
from raydpfl.files import data_root, digest, impatient
from raydpfl.keys import Purpose, stream
from raydpfl.member import Member, choose

LARGEST = 3 << 26  # numbers of a sample at most: a colour image of 67 million pixels


@dataclass(frozen=True)
class Split:
    """Samples dealt to clients. `rows(first, last)` and `test()` give (x [rows, *shape] uint8 or
    float32, y [rows]).

    y is int64, the class from 0 to `classes` - 1; or for regression, where `classes` is 0, the
    target in float32.
    """

    sizes: np.ndarray  # int64 [clients]
    shape: tuple[int, ...]  # of one sample
    classes: int
    # training rows of clients first to last - 1, client after client
    rows: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
    test: Callable[[], tuple[np.ndarray, np.ndarray]]
    mean: tuple[float, ...] = ()  # per channel, of samples scaled to [0, 1]; empty: not normalised
    std: tuple[float, ...] = ()
    unused: int = 0  # training samples that no client holds
    # the least loss on the test set that any model of `kind: linear` can reach, where it is known
    optimum: float | None = None
    # which sample each row is that `rows` gives, int64 [rows]; needed where clients share samples
    samples: Callable[[int, int], np.ndarray] | None = None


@dataclass(frozen=True)
class Samples:
    """A data set in memory: x [rows, *shape] uint8 (0 to 255) or float32, y [rows] in int64
    (classes) or float32 (regression), and int64 [rows] of clients if the rows tell.
    """

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    client: np.ndarray | None = None


class Data(Member):
    """Base of the family; a user's own source derives from it, or from `Dealt`."""

    clients: int | None = Field(default=None, ge=1, le=10**9)

    def split(self, seed: int, root: Path | None) -> Split:
        """The samples and who holds them. Raises `ConfigError` for what the data cannot give;
        writes nothing.
        """
        raise NotImplementedError

    def identity(self, root: Path | None) -> list:
        """The contents of the files that the samples depend on, in JSON types (see
        `raydpfl.files.file_identity`).
        """
        return []

    def facts(self) -> dict[str, Any]:
        """The config of the data in JSON types, without names of files: `identity` has what is in
        them.
        """
        return self.model_dump(mode="json", exclude=set(self.named))

    @property
    def exclusions(self) -> tuple[str, ...]:
        """Queries of the training data that no accountant counts, in words."""
        return ()

    def overlaps(self) -> bool:
        """Whether one sample may be held by several clients."""
        return False


class Sized(Data):
    """Data of which each client may hold another number of samples."""

    sizes: SerializeAsAny[Sizes] = Balanced()

    @field_validator("sizes", mode="before")
    @classmethod
    def _sizes(cls, value: Any) -> Sizes:
        return choose("data.sizes", value, SIZES, Sizes)


class Dealt(Sized):
    """A data set in memory, its samples made columns by `features` if asked for, dealt to clients
    by a partition.
    """

    partition: SerializeAsAny[Partition] = Iid()
    features: SerializeAsAny[Features] | None = None

    def overlaps(self) -> bool:
        return self.partition.overlaps()

    @field_validator("partition", mode="before")
    @classmethod
    def _partition(cls, value: Any) -> Partition:
        return choose("data.partition", value, PARTITIONS, Partition)

    @field_validator("features", mode="before")
    @classmethod
    def _features(cls, value: Any) -> Features | None:
        return None if value is None else choose("data.features", value, FEATURES, Features)

    @model_validator(mode="after")
    def _consistent(self) -> Dealt:
        if not self.partition.sized and not isinstance(self.sizes, Balanced):
            decides = f"partition {self.partition.kind}, which itself decides the sizes"
            accepted = f"balanced with {decides}"
            raise ConfigError("data.sizes.kind", self.sizes.kind, accepted)
        if self.features and self.constants() != ((), ()):
            constants = "constants to normalise pixels by (data.normalize, data.mean)"
            accepted = f"none with {constants}: it scales them itself"
            raise ConfigError("data.features.kind", self.features.kind, accepted)
        return self

    def samples(self, seed: int, root: Path | None) -> Samples:
        raise NotImplementedError

    def sources(self, root: Path | None) -> list:
        """What `samples` reads, as `identity` has it."""
        return []

    def identity(self, root: Path | None) -> list:
        return [*self.sources(root), *(self.features.identity(root) if self.features else [])]

    def facts(self) -> dict[str, Any]:
        found = super().facts()
        if self.features:
            named = set(self.features.named)
            found["features"] = self.features.model_dump(mode="json", exclude=named)
        return found

    def constants(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation per channel, of samples scaled to [0, 1]; empty: not
        normalised.
        """
        return (), ()

    @property
    def exclusions(self) -> tuple[str, ...]:
        return self.features.exclusions if self.features else ()

    def split(self, seed: int, root: Path | None) -> Split:
        found = self.samples(seed, root)
        if int(np.prod(found.x.shape[1:], dtype=object)) > LARGEST:
            accepted = f"samples of at most {LARGEST:,} numbers, not {found.x.shape[1:]}"
            raise ConfigError("data.kind", self.kind, accepted)
        order, sizes = self._deal(found, stream(seed, Purpose.PARTITION))
        mean, std = self.constants()
        x, test_x = (
            self.features.columns(found.x, found.test_x, root)
            if self.features
            else (found.x, found.test_x)
        )
        ends = np.concatenate([[0], np.cumsum(sizes)])

        def samples(first: int, last: int) -> np.ndarray:
            return order[ends[first] : ends[last]]

        def rows(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
            chosen = samples(first, last)
            return x[chosen], found.y[chosen]

        classes = (
            0
            if found.y.dtype.kind == "f"
            else 1 + int(max(found.y.max(), found.test_y.max(initial=0)))
        )
        unused = len(found.y) - len(np.unique(order))
        return Split(
            sizes=sizes,
            shape=x.shape[1:],
            classes=classes,
            rows=rows,
            test=lambda: (test_x, found.test_y),
            mean=mean,
            std=std,
            unused=unused,
            samples=samples,
        )

    def _deal(
        self, found: Samples, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.partition.by != "client":
            if self.clients is None:
                raise ConfigError(
                    "data.clients",
                    None,
                    "a number of clients (only partition natural finds it in the data)",
                )
            if self.partition.by == "label" and found.y.dtype.kind == "f":
                raise ConfigError(
                    "data.partition.kind",
                    self.partition.kind,
                    "iid or natural for regression, which has no classes to deal by",
                )
            return self.partition.deal(found.y, self.clients, self.sizes, generator)
        if found.client is None:
            raise ConfigError(
                "data.partition.kind",
                self.partition.kind,
                "a table whose column of client ids data.client names",
            )
        present = int(found.client.max()) + 1
        if self.clients not in (None, present):
            raise ConfigError(
                "data.clients",
                self.clients,
                f"{present}, the number of clients in the data, or none",
            )
        return self.partition.deal(found.client, present, self.sizes, generator)


class Images(Dealt):
    """A named image data set with published normalisation constants; otherwise pixels are scaled to
    [0, 1].
    """

    normalize: bool = False
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def constants(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return (self.mean, self.std) if self.normalize else ((), ())

    def check_pixels(self, x: np.ndarray) -> None:
        """Raises `ConfigError` if `normalize` would use the published constants on other pixels
        than the published ones.
        """
        if not self.normalize:
            return
        levels = np.arange(256) / 255
        counts = sum(_histograms(x[at : at + 4096]) for at in range(0, len(x), 4096)) / (
            x.size / x.shape[1]
        )
        mean = counts @ levels
        square = counts @ levels**2
        std = np.sqrt(np.maximum(square - mean**2, 0))
        if not np.allclose([*mean, *std], [*self.mean, *self.std], rtol=0, atol=0.01):
            found = f"{mean.round(3).tolist()} and {std.round(3).tolist()}"
            raise ConfigError(
                "data.normalize",
                True,
                f"false: mean and std are {found}, not {self.mean} and {self.std} as published",
            )


class FashionMnistMini(Images):
    """The first 900 training and 200 test images of each class of Fashion-MNIST, embedded in the
    package (see `raydpfl.data.embedded`).
    """

    kind: str = "fashion_mnist_mini"
    # of these 9,000 images; see raydpfl.data.embedded for why not 0.2860 and 0.3530
    mean: ClassVar[tuple[float, ...]] = (0.3032,)
    std: ClassVar[tuple[float, ...]] = (0.2701,)

    def samples(self, seed: int, root: Path | None) -> Samples:
        from raydpfl.data import embedded

        found = Samples(*embedded.read("train"), *embedded.read("test"))
        self.check_pixels(found.x)
        return found

    def sources(self, root: Path | None) -> list:
        from raydpfl.data import embedded

        return [digest(embedded.path(part)) for part in ("train", "test")]


class TorchvisionImages(Images):
    """A data set that torchvision can download and read; `stored` are its files, relative to the
    root, in torchvision's layout.
    """

    dataset: ClassVar[str]  # name in torchvision.datasets
    stored: ClassVar[tuple[str, ...]]

    def samples(self, seed: int, root: Path | None) -> Samples:
        folder = self.ensure(root)
        try:
            found = Samples(*self._read(folder, True), *self._read(folder, False))
        except Exception as error:  # torchvision raises what its unpicklers and parsers raise
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                "data.kind",
                self.kind,
                f"intact files under {folder}, but they cannot be read ({reason})",
            ) from None
        self.check_pixels(found.x)
        return found

    def sources(self, root: Path | None) -> list:
        folder = self.ensure(root)
        # torchvision prefers them
        older = sorted((folder / self.dataset / "processed").glob("*.pt"))
        names = [*self.stored, *(str(path.relative_to(folder)) for path in older)]
        try:
            return [[name, digest(folder / name)] for name in names]
        except OSError as error:
            accepted = f"files under {folder} that can be read ({error.filename}: {error.strerror})"
            raise ConfigError("data.kind", self.kind, accepted) from None

    def _part(self, folder: Path, train: bool, **options: Any) -> Any:
        from torchvision import datasets

        return getattr(datasets, self.dataset)(str(folder), train=train, **options)

    def _read(self, folder: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
        part = self._part(folder, train)
        x = np.asarray(part.data)
        y = np.asarray(part.targets, np.int64)
        return (x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))), y

    @classmethod
    def present(cls, root: Path) -> bool:
        return all((root / name).is_file() for name in cls.stored)

    def ensure(self, root: Path | None) -> Path:
        """The root that holds the files, downloaded first if they are missing and a network and a
        writable folder are there.
        """
        folder = data_root(root)
        if self.present(folder):
            return folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError("the folder is read-only")
            with impatient():
                for train in (True, False):
                    self._part(folder, train, download=True)
        # no network, no space, a mirror's own error page: all end the same way
        except Exception as error:
            said = str(error).strip() or type(error).__name__
            reason = said.splitlines()[-1]
            where = f"under {folder} (--data-root, RAYDPFL_DATA)"
            accepted = f"a data set that is {where}; it is not, and was not downloaded ({reason})"
            raise ConfigError("data.kind", self.kind, accepted) from None
        return folder


def _idx(folder: str, train: str, test: str) -> tuple[str, ...]:
    return tuple(
        f"{folder}/raw/{part}-{what}-ubyte"
        for part in (train, test)
        for what in ("images-idx3", "labels-idx1")
    )


class Mnist(TorchvisionImages):
    """LeCun, Cortes, Burges: 60,000 + 10,000 digits, 28 x 28 grey."""

    kind: str = "mnist"
    dataset: ClassVar[str] = "MNIST"
    stored: ClassVar[tuple[str, ...]] = _idx("MNIST", "train", "t10k")
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)


class FashionMnist(TorchvisionImages):
    """Xiao, Rasul, Vollgraf 2017: 60,000 + 10,000 articles of clothing, 28 x 28 grey."""

    kind: str = "fashion_mnist"
    dataset: ClassVar[str] = "FashionMNIST"
    stored: ClassVar[tuple[str, ...]] = _idx("FashionMNIST", "train", "t10k")
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)


class EmnistDigits(TorchvisionImages):
    """Cohen et al. 2017, the digits: 240,000 + 40,000, 28 x 28 grey, turned upright (the files hold
    them transposed).
    """

    kind: str = "emnist_digits"
    dataset: ClassVar[str] = "EMNIST"
    stored: ClassVar[tuple[str, ...]] = _idx("EMNIST", "emnist-digits-train", "emnist-digits-test")
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
    stored: ClassVar[tuple[str, ...]] = tuple(
        f"cifar-10-batches-py/{name}"
        for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch", "batches.meta")
    )
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)


class Cifar100(TorchvisionImages):
    """Krizhevsky 2009: 50,000 + 10,000 of 100 classes, 32 x 32 colour."""

    kind: str = "cifar100"
    dataset: ClassVar[str] = "CIFAR100"
    stored: ClassVar[tuple[str, ...]] = tuple(
        f"cifar-100-python/{name}" for name in ("train", "test", "meta")
    )
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)


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


def _histograms(x: np.ndarray) -> np.ndarray:
    """How often each level 0 to 255 occurs in each channel of uint8 images, [channels, 256]."""
    return np.stack(
        [np.bincount(x[:, channel].ravel(), minlength=256) for channel in range(x.shape[1])]
    )
