"""LeNet-5 as PyTorch's tutorial of CIFAR-10 has it."""

from __future__ import annotations

from torch import nn

from raydpfl.models.base import Net, Shape, dense


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
        return nn.Sequential(
            nn.Conv2d(channels, first, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            *dense([second * pixels, third, last], nn.ReLU),
            nn.Linear(last, outputs),
        )
