"""A frozen ResNet-18."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from raydpfl.data.features.base import Features, Rows, cached_columns
from raydpfl.errors import ConfigError, one_line
from raydpfl.storage.files import STILL, digest, file_identity, find_file, network_timeout

if TYPE_CHECKING:
    from torch import nn
    from torchvision.models import WeightsEnum

IMAGES = 64  # that go through a net at once


class ResNet18Features(Features):
    """The 512 averaged outputs of a frozen ResNet-18 without its last layer (003 sec. VI; Tramer
    and Boneh 2021), images only.

    `imagenet` is torchvision's IMAGENET1K_V1, downloaded once; a file is as `torch.save` writes the
    state of torchvision's `resnet18`, whose last layer may be missing. Images are made ready as
    ImageNet's: 3 channels, resized, cut, normalised. The table is cached by the digests of weights
    and images, and by the GPU where one extracts it.
    """

    file_fields: ClassVar[frozenset[str]] = frozenset({"weights"})
    learns: ClassVar[bool] = False

    kind: str = "resnet18"
    weights: str = Field(default="imagenet", description="imagenet, or a file of a state dict")
    resize: int = Field(default=256, ge=32, description="pixels of the shorter side")
    crop: int = Field(default=224, ge=32, description="pixels, high and wide, of the middle cut")

    @model_validator(mode="after")
    def _check_crop(self) -> ResNet18Features:
        if self.crop > self.resize:
            expected = f"at most data.features.resize, {self.resize}"
            raise ConfigError("data.features.crop", self.crop, expected)
        return self

    def files(self) -> dict[str, str]:
        """None for the weights that torchvision downloads."""
        return {} if self.weights == "imagenet" else super().files()

    def absent_files(self) -> list[str]:
        has_weights = self.weights != "imagenet" or _weights_path().exists()
        return [] if has_weights else ["the weights of resnet18"]

    def identity(self, root: Path | None) -> list:
        from raydpfl.core import device

        gpu = device.facts(1)  # other bits than a CPU's
        facts = [gpu] if gpu else []
        if self.weights == "imagenet":
            return [_imagenet_weights().url, *facts]
        return [file_identity("data.features.weights", self.weights, root), *facts]

    def columns(self, x: np.ndarray, test_x: np.ndarray, root: Path | None) -> Rows:
        if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1] not in (1, 3):
            expected = f"grey or colour images; the samples are {x.dtype} {x.shape[1:]}"
            raise ConfigError("data.features.kind", self.kind, expected)
        weights = self.identity(root)

        def extract(images: np.ndarray) -> np.ndarray:
            columns = self._extract(images, root)
            if self.identity(root) != weights:
                raise ConfigError("data.features.weights", self.weights, STILL)
            return columns

        settings = [*weights, self.resize, self.crop]
        return cached_columns(settings, x, extract), cached_columns(settings, test_x, extract)

    def _net(self, root: Path | None) -> nn.Module:
        """torchvision's resnet18 with these weights, and nothing for its last layer."""
        import torch
        from torchvision.models import resnet18

        try:
            state = self._state(root)
            with torch.device("meta"):  # no parameters are drawn
                net = resnet18()
            net.fc = torch.nn.Identity()
            layers = {name: value for name, value in state.items() if not name.startswith("fc.")}
            net.load_state_dict(layers, assign=True)
        except OSError as error:  # no network, or no room
            hint = f"put in {_weights_path().parent} or named here; it was not downloaded ({error})"
            expected = f"a file with these weights: {_imagenet_weights().url}, {hint}"
            raise ConfigError("data.features.weights", self.weights, expected) from None
        except ConfigError:
            raise
        except Exception as error:  # whatever a broken file makes its reader raise
            expected = f"a file with a state dict of torchvision's resnet18 ({one_line(error)})"
            raise ConfigError("data.features.weights", self.weights, expected) from None
        return net.float().eval()

    def _state(self, root: Path | None) -> Mapping[str, Any]:
        import torch

        if self.weights != "imagenet":
            file = find_file("data.features.weights", self.weights, root)
            return torch.load(file, map_location="cpu", weights_only=True)
        path = _weights_path()
        # resnet18-f37072fd.pth, by the start of its SHA-256: of a file that is there torchvision
        # does not check it
        if path.exists() and not digest(path).startswith(path.stem.rpartition("-")[2]):
            expected = f"{path} as it was published; remove it, so that it is downloaded again"
            raise ConfigError("data.features.weights", "imagenet", expected)
        with network_timeout():
            return _imagenet_weights().get_state_dict(progress=False, check_hash=True)

    def _extract(self, images: np.ndarray, root: Path | None) -> np.ndarray:
        """Float32 [rows, 512], on a GPU if there is one (in full float32 there too)."""
        import torch

        from raydpfl.core import device

        place = device.choose_device(int(torch.cuda.is_available()))
        net = self._net(root).to(place).to(memory_format=torch.channels_last)
        transform = _imagenet_weights().transforms(resize_size=self.resize, crop_size=self.crop)
        columns = np.empty((len(images), 512), np.float32)
        with torch.inference_mode(), device.preserve_settings():
            device.settle(place, 1)
            for start in range(0, len(images), IMAGES):
                batch = torch.from_numpy(images[start : start + IMAGES]).to(place)
                colour = transform(batch.expand(-1, 3, -1, -1))
                outputs = net(colour.contiguous(memory_format=torch.channels_last))
                columns[start : start + IMAGES] = outputs.cpu().numpy()
        return columns


def _imagenet_weights() -> WeightsEnum:
    from torchvision.models import ResNet18_Weights

    return ResNet18_Weights.IMAGENET1K_V1


def _weights_path() -> Path:
    """Where torchvision keeps ImageNet's weights."""
    import torch

    return Path(torch.hub.get_dir()) / "checkpoints" / _imagenet_weights().url.rpartition("/")[2]
