"""Named image data sets, and pixels that are the published ones."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from raydpfl.data.sources.base import InMemoryData
from raydpfl.errors import ConfigError


class Images(InMemoryData):
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


def _histograms(x: np.ndarray) -> np.ndarray:
    """How often each level 0 to 255 occurs in each channel of uint8 images, [channels, 256]."""
    return np.stack(
        [np.bincount(x[:, channel].ravel(), minlength=256) for channel in range(x.shape[1])]
    )
