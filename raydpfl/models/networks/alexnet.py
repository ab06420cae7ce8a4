"""AlexNet, as 000 has it."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from torch import nn

from raydpfl.models.base import Net, Shape, dense


class AlexNet(Net):
    """AlexNet for small images: five 3 x 3 convolutions of 32, 64, 128, 256 and 256 channels,
    max-pooled after the first, second and fifth, a dense layer of 1024 units, ReLU.

    000 prints 3.3M parameters and no layer; this form has 3.35M on EMNIST, on 28 x 28 and 32 x 32
    alike (both end in 256 x 3 x 3).
    """

    kind: str = "alexnet"

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        channels, height, width = self.image(shape, 12)
        layers: list[nn.Module] = []
        widths = [channels, *map(self.units, (32, 64, 128, 256, 256))]
        hidden = self.units(1024)
        for (width_in, width_out), pool in zip(pairwise(widths), (2, 2, 0, 0, 3), strict=True):
            layers += [
                nn.Conv2d(width_in, width_out, 3, padding=1),
                *([nn.MaxPool2d(pool, 2)] if pool else []),
                nn.ReLU(),
            ]
        last = widths[-1] * prod((side // 4 - 3) // 2 + 1 for side in (height, width))
        return nn.Sequential(
            *layers, nn.Flatten(), *dense([last, hidden], nn.ReLU), nn.Linear(hidden, outputs)
        )
