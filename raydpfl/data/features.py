"""Fixed front ends: samples become a table of columns once, before they are dealt, and a small
model is trained on top.

A member promises columns float32 [rows, k] that are a function of (its fields, the rows, the files
it reads) alone. Principal components learned from rows that lie about a circle in 3 dimensions need
2 columns, centred at the rows' mean:

>>> angle = np.linspace(0, 2 * np.pi, 12, endpoint=False)
>>> x = np.stack([np.cos(angle), np.sin(angle), 5 + 0 * angle], 1).astype(np.float32)
>>> columns, _ = Pca(components=2).columns(x, x[:3], None)
>>> columns.shape, bool(np.allclose(np.linalg.norm(columns, axis=1), 1))
((12, 2), True)

What a front end learns from the training rows is a query of them that no accountant counts: it is
listed among the exclusions of the run's guarantee. Components from a file and the weights of a
pretrained net are taken to come from public data, and cost nothing.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field, model_validator

from raydpfl.errors import ConfigError
from raydpfl.files import STILL, cache_root, digest, file_identity, find_file, impatient, put, whole
from raydpfl.member import Member

if TYPE_CHECKING:
    from torch import nn
    from torchvision.models import WeightsEnum

log = logging.getLogger("raydpfl")
IMAGES = 64  # that go through a net at once


class Features(Member):
    """Base of the family."""

    @property
    def exclusions(self) -> tuple[str, ...]:
        """Queries of the training data that no accountant counts, in words."""
        return ()

    def identity(self, root: Path | None) -> list:
        """The contents of the files that the columns depend on, in JSON types."""
        return []

    def columns(
        self, x: np.ndarray, test_x: np.ndarray, root: Path | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The training and the test rows (uint8 or float32 [rows, *shape]) as float32 [rows, k].
        Raises `ConfigError`.
        """
        raise NotImplementedError


class Pca(Features):
    """A projection of centred rows on `components` principal components (002 sec. VI: 60), images
    being scaled to [0, 1] first.

    Mean and components are those of the training rows; or public, from `file`: an NPZ with `mean`
    [p] and `components` [k, p], k at least `components`, as `principal_components` gives them and
    scikit-learn's PCA names them (p numbers to a sample).
    """

    named: ClassVar[frozenset[str]] = frozenset({"file"})

    kind: str = "pca"
    components: int = Field(default=60, ge=1)
    file: str | None = None

    @property
    def exclusions(self) -> tuple[str, ...]:
        return (
            ()
            if self.file
            else ("the principal components are computed from the training data without noise",)
        )

    def identity(self, root: Path | None) -> list:
        return [file_identity("data.features.file", self.file, root)] if self.file else []

    def columns(
        self, x: np.ndarray, test_x: np.ndarray, root: Path | None
    ) -> tuple[np.ndarray, np.ndarray]:
        p = int(np.prod(x.shape[1:]))
        if self.components > p:
            raise ConfigError(
                "data.features.components", self.components, f"at most the {p} numbers of a sample"
            )
        mean, axes = (
            self._public(p, root) if self.file else principal_components(x, self.components)
        )
        empty = np.zeros((0, self.components))
        projected, test_projected = (
            np.concatenate([empty, *(part @ axes.T for part in _centred(rows, mean))])
            for rows in (x, test_x)
        )
        return projected.astype(np.float32), test_projected.astype(np.float32)

    def _public(self, p: int, root: Path | None) -> tuple[np.ndarray, np.ndarray]:
        components = f"components [{self.components} or more, {p}]"
        accepted = f"an NPZ file with mean [{p}] and {components}, finite numbers"
        try:
            path = find_file("data.features.file", self.file or "", root)
            with np.load(path, allow_pickle=False) as arrays:
                mean = arrays["mean"].astype(np.float64)
                axes = arrays["components"].astype(np.float64)[: self.components]
        except ConfigError:
            raise
        except Exception as error:  # whatever a broken file makes its reader raise
            raise ConfigError(
                "data.features.file", self.file, f"{accepted} ({type(error).__name__}: {error})"
            ) from None
        if (
            mean.shape != (p,)
            or axes.shape != (self.components, p)
            or not (np.isfinite(mean).all() and np.isfinite(axes).all())
        ):
            raise ConfigError(
                "data.features.file",
                self.file,
                f"{accepted}; this one has {mean.shape} and {axes.shape}",
            )
        return mean, axes


def principal_components(x: np.ndarray, components: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean [p] and principal components [components, p] of rows x [n, *shape], float64; uint8 is
    scaled to [0, 1].

    Of public rows, they are what `Pca.file` reads: `np.savez("public.npz", mean=mean,
    components=axes)`.
    """
    mean = x.reshape(len(x), -1).mean(0, dtype=np.float64) / _levels(x)
    axes = np.linalg.eigh(sum((part.T @ part).astype(np.float64) for part in _centred(x, mean)))[1][
        :, ::-1
    ][:, :components]
    # eigenvectors have no sign of their own
    axes *= np.sign(axes[np.abs(axes).argmax(0), np.arange(components)])
    return mean, axes.T


def _levels(x: np.ndarray) -> float:
    return 255.0 if x.dtype == np.uint8 else 1.0


def _centred(x: np.ndarray, mean: np.ndarray) -> Iterator[np.ndarray]:
    """The rows less `mean` [p], float32 [<= 4096, p] at a time."""
    flat = x.reshape(len(x), -1)
    levels = _levels(x)
    return (
        (flat[at : at + 4096] / levels - mean).astype(np.float32)
        for at in range(0, len(flat), 4096)
    )


class ResNet18Features(Features):
    """The 512 averaged outputs of a frozen ResNet-18 without its last layer (003 sec. VI; Tramer
    and Boneh 2021), images only.

    `weights`: `imagenet` (torchvision's IMAGENET1K_V1, downloaded by torchvision once), or a file
    with a state dict of torchvision's `resnet18`, as `torch.save` writes it; its last layer may be
    missing and is not used. Images are made ready as these weights ask: grey repeated to 3
    channels, the shorter side resized to `resize`, the middle `crop` x `crop` cut out, ImageNet's
    mean and standard deviation. The table is kept in the cache by the digests of weights and
    images, so it is extracted once for all partitions and seeds.
    """

    named: ClassVar[frozenset[str]] = frozenset({"weights"})

    kind: str = "resnet18"
    weights: str = "imagenet"
    resize: int = Field(default=256, ge=32)
    crop: int = Field(default=224, ge=32)

    @model_validator(mode="after")
    def _fits(self) -> ResNet18Features:
        if self.crop > self.resize:
            raise ConfigError(
                "data.features.crop", self.crop, f"at most data.features.resize, {self.resize}"
            )
        return self

    def files(self) -> dict[str, str]:
        """None for the weights that torchvision downloads."""
        return {} if self.weights == "imagenet" else super().files()

    def identity(self, root: Path | None) -> list:
        if self.weights == "imagenet":
            return [_pretrained().url]
        return [file_identity("data.features.weights", self.weights, root)]

    def columns(
        self, x: np.ndarray, test_x: np.ndarray, root: Path | None
    ) -> tuple[np.ndarray, np.ndarray]:
        if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1] not in (1, 3):
            raise ConfigError(
                "data.features.kind",
                self.kind,
                f"grey or colour images; the samples are {x.dtype} {x.shape[1:]}",
            )
        weights = self.identity(root)

        def extract(images: np.ndarray) -> np.ndarray:
            columns = self._extract(images, root)
            if self.identity(root) != weights:
                raise ConfigError("data.features.weights", self.weights, STILL)
            return columns

        def table(images: np.ndarray) -> np.ndarray:
            key = [
                *weights,
                self.resize,
                self.crop,
                images.shape,
                _digest(np.ascontiguousarray(images)),
            ]
            return _kept(_digest(repr(key).encode()), lambda: extract(images))

        return table(x), table(test_x)

    def _file(self, root: Path | None) -> Path:
        return find_file("data.features.weights", self.weights, root)

    def _net(self, root: Path | None) -> nn.Module:
        """torchvision's resnet18 with these weights and nothing for its last layer, to be used as
        it is.
        """
        import torch
        from torchvision.models import resnet18

        try:
            if self.weights == "imagenet":
                _check_published()
                with impatient():
                    state = _pretrained().get_state_dict(progress=False, check_hash=True)
            else:
                state = torch.load(self._file(root), map_location="cpu", weights_only=True)
            with torch.device("meta"):  # no parameters are drawn
                net = resnet18()
            net.fc = torch.nn.Identity()
            net.load_state_dict(
                {name: value for name, value in state.items() if not name.startswith("fc.")},
                assign=True,
            )
        except OSError as error:  # no network, or no room
            where = Path(torch.hub.get_dir()) / "checkpoints"
            missing = f"put in {where} or named here; it was not downloaded ({error})"
            accepted = f"a file with these weights: {_pretrained().url}, {missing}"
            raise ConfigError("data.features.weights", self.weights, accepted) from None
        except ConfigError:
            raise
        except Exception as error:  # whatever a broken file makes its reader raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            accepted = f"a file with a state dict of torchvision's resnet18 ({reason})"
            raise ConfigError("data.features.weights", self.weights, accepted) from None
        return net.float().eval()

    def _extract(self, images: np.ndarray, root: Path | None) -> np.ndarray:
        """Float32 [rows, 512], on a GPU if there is one (in full float32 there too)."""
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        net = self._net(root).to(device).to(memory_format=torch.channels_last)
        ready = _pretrained().transforms(resize_size=self.resize, crop_size=self.crop)
        columns = np.empty((len(images), 512), np.float32)
        began = time.monotonic()
        with (
            torch.inference_mode(),
            torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False),
        ):
            for at in range(0, len(images), IMAGES):
                batch = torch.from_numpy(images[at : at + IMAGES]).to(device)
                colour = ready(batch.expand(-1, 3, -1, -1))
                found = net(colour.contiguous(memory_format=torch.channels_last))
                columns[at : at + IMAGES] = found.cpu().numpy()
                if at == 0:
                    _announce((time.monotonic() - began) * (len(images) / IMAGES), len(images))
        return columns


FEATURES: dict[str, type[Features]] = {"pca": Pca, "resnet18": ResNet18Features}


def _announce(seconds: float, images: int) -> None:
    """Says how long an extraction takes, if that is long."""
    if seconds > 60:
        minutes = seconds / 60
        log.warning(
            "extracting the features of %d images takes about %.0f minutes, once", images, minutes
        )


def _pretrained() -> WeightsEnum:
    from torchvision.models import ResNet18_Weights

    return ResNet18_Weights.IMAGENET1K_V1


def _check_published() -> None:
    """Raises `ConfigError` where torchvision would take a file for ImageNet's weights that is
    another.
    """
    import torch

    # resnet18-f37072fd.pth, by the start of its SHA-256
    name = _pretrained().url.rpartition("/")[2]
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    published = name.rpartition("-")[2].removesuffix(".pth")
    if path.exists() and not digest(path).startswith(published):
        accepted = f"{path} as it was published; remove the file, so that it is downloaded again"
        raise ConfigError("data.features.weights", "imagenet", accepted)


def _digest(data: bytes | np.ndarray) -> str:
    return hashlib.sha256(data if isinstance(data, bytes) else data.data).hexdigest()


def _kept(name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """The array of this name in the cache, computed and put there unless it is there as it was
    computed.
    """
    folder = cache_root() / "features" / name
    if not whole(folder):
        put(folder, lambda scratch: np.save(scratch / "columns.npy", compute()))
    return np.load(folder / "columns.npy")
