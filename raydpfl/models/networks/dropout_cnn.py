"""The CNN with dropout of Reddi et al. 2021."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn

from raydpfl.models.base import Net, Shape

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
