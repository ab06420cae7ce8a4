"""Convolutional networks of a few layers."""

from itertools import pairwise
from math import prod
from typing import Annotated

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
        return dense(layers, [second * (height // 4) * (width // 4), third, last], nn.ReLU, outputs)


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
        return dense(layers, [last * (height // 8) * (width // 8), last], nn.Tanh, outputs)


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
        for (width_in, width_out), pool in zip(pairwise(widths), (2, 2, 0, 0, 3), strict=True):
            layers += [
                nn.Conv2d(width_in, width_out, 3, padding=1),
                *([nn.MaxPool2d(pool, 2)] if pool else []),
                nn.ReLU(),
            ]
        last = widths[-1] * prod((side // 4 - 3) // 2 + 1 for side in (height, width))
        return dense(layers, [last, self.units(1024)], nn.ReLU, outputs)


Rate = Annotated[float, Field(ge=0, lt=1)]


class DropoutCnn(Net):
    """The CNN of Reddi et al. 2021 (table 4, EMNIST), which pfl-research trains on CIFAR-10: 3 x 3
    convolutions of 32 and 64 channels without padding, 2 x 2 max-pooling, dropout, a dense layer of
    128 units, dropout, ReLU. 1,626,442 parameters on 3 x 32 x 32 pixels and 10 classes.
    """

    kind: str = "dropout_cnn"
    dropout: tuple[Rate, Rate] = Field(
        default=(0.25, 0.5), description="rates behind the pooling, and behind the dense layer"
    )

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        channels, height, width = self.image(shape, 6)
        first, second, last = map(self.units, (32, 64, 128))
        return nn.Sequential(
            nn.Conv2d(channels, first, 3),
            nn.ReLU(),
            nn.Conv2d(first, second, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(self.dropout[0]),
            nn.Flatten(),
            nn.Linear(second * ((height - 4) // 2) * ((width - 4) // 2), last),
            nn.ReLU(),
            nn.Dropout(self.dropout[1]),
            nn.Linear(last, outputs),
        )


class Lenet(Net):
    """LeNet-5 (LeCun et al. 1998) as the tutorials of PyTorch and Flower train it on CIFAR-10: 5 x
    5 convolutions of 6 and 16 channels without padding, each 2 x 2 max-pooled, dense layers of 120
    and 84 units, ReLU.
    """

    kind: str = "lenet"

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        channels, height, width = self.image(shape, 16)
        first, second, third, last = map(self.units, (6, 16, 120, 84))
        pixels = ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
        layers = [nn.Conv2d(channels, first, 5), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2)]
        return dense(layers, [second * pixels, third, last], nn.ReLU, outputs)
