"""The CNN of Tramer and Boneh 2021."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from raydpfl.models.base import Net, Shape, dense


class DpCnn(Net):
    """The CNN that Tramer and Boneh 2021 train on CIFAR-10 with differential privacy: three pairs
    of 3 x 3 convolutions of 32, 64 and 128 channels, each pair 2 x 2 max-pooled, a dense layer of
    128 units, tanh.
    """

    kind: str = "dp_cnn"

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        channels, height, width = self.image(shape, 8)
        layers: list[nn.Module] = []
        widths = [channels, *map(self.units, (32, 64, 128))]
        last = self.units(128)
        for width_in, width_out in pairwise(widths):
            layers += [nn.Conv2d(width_in, width_out, 3, padding=1), nn.Tanh()]
            layers += [nn.Conv2d(width_out, width_out, 3, padding=1), nn.MaxPool2d(2), nn.Tanh()]
        return nn.Sequential(
            *layers,
            nn.Flatten(),
            *dense([widths[-1] * (height // 8) * (width // 8), last], nn.Tanh),
            nn.Linear(last, outputs),
        )
