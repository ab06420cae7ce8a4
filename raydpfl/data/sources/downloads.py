"""Data sets that torchvision downloads and reads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from raydpfl.data.sources.base import Samples
from raydpfl.data.sources.named_images import Images
from raydpfl.errors import ConfigError
from raydpfl.storage.files import data_root, digest, impatient


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
                f"files under {folder} that can be read; they are intact, but cannot be ({reason})",
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
        if cls.present(root):
            return str(root)
        return f"not under {root}; raydpfl data fetch {cls.model_fields['kind'].default}"

    @classmethod
    def fetch(cls, root: Path) -> Path | None:
        return cls().ensure(root)

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
            with _made(folder):
                self._download(folder)
        # no network, no space, a mirror's own error page: all end the same way
        except Exception as error:
            said = str(error).strip() or type(error).__name__
            reason = said.splitlines()[-1]
            where = f"under {folder} (--data-root, RAYDPFL_DATA)"
            expected = f"a data set that is {where}; it is not, and was not downloaded ({reason})"
            raise ConfigError("data.kind", self.kind, expected) from None
        return folder

    def _download(self, folder: Path) -> None:
        """Downloads the files beside their places, and then moves them there."""
        if not os.access(folder, os.W_OK):
            raise PermissionError("the folder is read-only")
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            with impatient():
                for train in (True, False):
                    self._part(Path(scratch), train, download=True)
            for file in sorted(path for path in Path(scratch).rglob("*") if path.is_file()):
                place = folder / file.relative_to(scratch)
                place.parent.mkdir(parents=True, exist_ok=True)
                file.replace(place)


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Within it the folder is there; afterwards what was made for it is gone, if it is empty."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for each in missing:
            with suppress(OSError):
                each.rmdir()


def idx_files(folder: str, train: str, test: str) -> tuple[str, ...]:
    return tuple(
        f"{folder}/raw/{part}-{what}-ubyte"
        for part in (train, test)
        for what in ("images-idx3", "labels-idx1")
    )
