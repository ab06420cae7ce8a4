"""CIFAR-10 from JPEG images."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from raydpfl.data.sources.base import Samples
from raydpfl.data.sources.cifar10 import Cifar10
from raydpfl.data.sources.named_images import Images
from raydpfl.data.sources.table import TableFile
from raydpfl.errors import ConfigError
from raydpfl.storage.files import data_root, file_identity

FOLDER = "cifar10_jpeg"
TRAIN = f"{FOLDER}/train.parquet"
TEST = f"{FOLDER}/test.parquet"


class Cifar10Jpeg(Images):
    """CIFAR-10 as Parquet of JPEG images, columns `image` and `label`, which is lossy: its results
    are no results on `cifar10`, for which it stands where that cannot be had.
    """

    kind: str = "cifar10_jpeg"
    mean: ClassVar[tuple[float, ...]] = Cifar10.mean
    std: ClassVar[tuple[float, ...]] = Cifar10.std

    @classmethod
    def located(cls, root: Path) -> str:
        if all((root / name).is_file() for name in (TRAIN, TEST)):
            return str(root / FOLDER)
        return f"not under {root}: {' and '.join((TRAIN, TEST))}"

    def samples(self, seed: int, root: Path | None) -> Samples:
        self._check_present(root)
        found = TableFile(train=TRAIN, test=TEST).samples(seed, root)
        self.check_pixels(found.x)
        return found

    def sources(self, root: Path | None) -> list:
        self._check_present(root)
        return [file_identity("data.kind", name, root) for name in (TRAIN, TEST)]

    def _check_present(self, root: Path | None) -> None:
        folder = data_root(root)
        missing = [name for name in (TRAIN, TEST) if not (folder / name).is_file()]
        if missing:
            expected = f"{' and '.join(missing)} under {folder} (--data-root, RAYDPFL_DATA)"
            raise ConfigError("data.kind", self.kind, expected)
