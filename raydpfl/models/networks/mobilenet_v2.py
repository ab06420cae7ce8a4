"""MobileNetV2."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import nn

from raydpfl.models.base import Net, Shape
from raydpfl.models.norms import group_norm


class MobileNetV2(Net):
    """torchvision's MobileNetV2 with GroupNorm for BatchNorm. `stem: small` leaves out the first
    two strides, for small images.

    `width` is torchvision's width_mult: channels are rounded to multiples of 8, and the last
    convolution keeps its 1280 where the net is narrower.
    """

    kind: str = "mobilenet_v2"
    stem: Literal["small", "imagenet"] = "small"
    groups: int = Field(
        default=32,
        ge=1,
        description=(
            "at width 1, at most: a layer uses the largest number that divides both this times the "
            "width and its channels"
        ),
    )

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        from torchvision.models import mobilenet_v2

        channels, *_ = self.image(shape, 8)
        net = mobilenet_v2(num_classes=outputs, width_mult=self.width, dropout=0.0)
        stride = 1 if self.stem == "small" else 2
        first = net.features[0][0].out_channels
        net.features[0][0] = nn.Conv2d(channels, first, 3, stride, padding=1, bias=False)
        nn.init.kaiming_normal_(net.features[0][0].weight, mode="fan_out")
        if self.stem == "small":
            net.features[2].conv[1][0].stride = (1, 1)
        return group_norm(net, self.units(self.groups))
