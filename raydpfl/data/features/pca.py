"""Principal components."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from raydpfl.data.features.base import Features, Rows, cached_columns
from raydpfl.errors import ConfigError, one_line
from raydpfl.storage.files import file_identity, find_file


class Pca(Features):
    """A projection of centred rows on principal components (002 sec. VI: 60), images in [0, 1].

    A file has `mean` [p] and `components` [k, p], for p numbers to a sample, as
    `principal_components` gives them and scikit-learn's PCA names them.
    """

    file_fields: ClassVar[frozenset[str]] = frozenset({"file"})

    kind: str = "pca"
    components: int = Field(default=60, ge=1, description="that are taken, the first ones")
    file: str | None = Field(default=None, description="an NPZ of public ones; None: learnt")

    @property
    def exclusions(self) -> tuple[str, ...]:
        exclusion = "the principal components are computed from the training data without noise"
        return () if self.file else (exclusion,)

    def identity(self, root: Path | None) -> list:
        return [file_identity("data.features.file", self.file, root)] if self.file else []

    def columns(self, x: np.ndarray, test_x: np.ndarray, root: Path | None) -> Rows:
        p = int(np.prod(x.shape[1:]))
        if self.components > p:
            expected = f"at most the {p} numbers of a sample"
            raise ConfigError("data.features.components", self.components, expected)
        mean, axes = self._read_components(p, root) if self.file else self._compute_components(x)
        empty = np.zeros((0, self.components))
        projection, test_projection = (
            np.concatenate([empty, *(part @ axes.T for part in _centred_rows(rows, mean))])
            for rows in (x, test_x)
        )
        return projection.astype(np.float32), test_projection.astype(np.float32)

    def _compute_components(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        def learn(rows: np.ndarray) -> np.ndarray:
            return np.vstack(principal_components(rows, self.components))

        settings = ["principal components", self.components, str(x.dtype)]
        components = cached_columns(settings, x, learn)
        return components[0], components[1:]

    def _read_components(self, p: int, root: Path | None) -> tuple[np.ndarray, np.ndarray]:
        field = "data.features.file"
        components = f"components [{self.components} or more, {p}]"
        expected = f"an NPZ file with mean [{p}] and {components}, finite numbers"
        path = find_file(field, self.file or "", root)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                mean = arrays["mean"].astype(np.float64)
                axes = arrays["components"].astype(np.float64)[: self.components]
        except Exception as error:  # whatever a broken file makes its reader raise
            raise ConfigError(field, self.file, f"{expected} ({one_line(error)})") from None
        shapes = (mean.shape, axes.shape)
        finite = np.isfinite(mean).all() and np.isfinite(axes).all()
        if shapes != ((p,), (self.components, p)) or not finite:
            actual = f"this one has {mean.shape} and {axes.shape}"
            raise ConfigError(field, self.file, f"{expected}; {actual}")
        return mean, axes


def principal_components(x: np.ndarray, components: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean [p] and principal components [components, p] of rows x [n, *shape], float64; uint8 is
    scaled to [0, 1]. `np.savez("public.npz", mean=mean, components=axes)` writes a `Pca.file`.
    """
    mean = x.reshape(len(x), -1).mean(0, dtype=np.float64) / _levels(x)
    covariance = sum((part.T @ part).astype(np.float64) for part in _centred_rows(x, mean))
    axes = np.linalg.eigh(covariance)[1][:, ::-1][:, :components]
    # eigenvectors have no sign of their own
    axes *= np.sign(axes[np.abs(axes).argmax(0), np.arange(components)])
    return mean, axes.T


def _levels(x: np.ndarray) -> float:
    return 255.0 if x.dtype == np.uint8 else 1.0


def _centred_rows(x: np.ndarray, mean: np.ndarray) -> Iterator[np.ndarray]:
    """The rows less `mean` [p], float32 [<= 4096, p] at a time."""
    flat = x.reshape(len(x), -1)
    for start in range(0, len(flat), 4096):
        yield (flat[start : start + 4096] / _levels(x) - mean).astype(np.float32)
