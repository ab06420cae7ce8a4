"""The CNN of 003."""

from __future__ import annotations

from pydantic import Field, field_validator
from torch import nn

from raydpfl.models.base import Net, Shape, dense


class Cnn(Net):
    """The CNN of 003 sec. VI-C: convolutions of 16 and 32 channels, each 2 x 2 max-pooled, dense
    layers of 512 and 32 units, ReLU.

    The paper prints neither the kernel size nor the padding: here 5 x 5 by default, padded to keep
    the size.
    """

    kind: str = "cnn"
    kernel: int = Field(default=5, ge=1, description="width of the convolutions, in pixels")

    @field_validator("kernel")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("an odd number, so that padding can keep the size")
        return value

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        channels, height, width = self.image(shape, 4)
        layers: list[nn.Module] = []
        first, second, third, last = map(self.units, (16, 32, 512, 32))
        for width_in, width_out in ((channels, first), (first, second)):
            layers += [
                nn.Conv2d(width_in, width_out, self.kernel, padding=self.kernel // 2),
                nn.MaxPool2d(2),
                nn.ReLU(),
            ]
        return nn.Sequential(
            *layers,
            nn.Flatten(),
            *dense([second * (height // 4) * (width // 4), third, last], nn.ReLU),
            nn.Linear(last, outputs),
        )
