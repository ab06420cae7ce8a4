"""Networks of torchvision, with GroupNorm for BatchNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from torch import nn

from raydpfl.models.base import Net, Shape
from raydpfl.models.norms import group_norm

if TYPE_CHECKING:
    from torchvision.models import ResNet


class MobileNetV2(Net):
    """torchvision's MobileNetV2 with GroupNorm for BatchNorm.

    `width` is torchvision's width_mult: channels are rounded to multiples of 8, and the last
    convolution keeps its 1280 where the net is narrower.
    """

    kind: str = "mobilenet_v2"
    stem: Literal["small", "imagenet"] = Field(
        default="small", description="small, for small images: without the first two strides"
    )
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
        stem_channels = net.features[0][0].out_channels
        net.features[0][0] = nn.Conv2d(channels, stem_channels, 3, stride, padding=1, bias=False)
        nn.init.kaiming_normal_(net.features[0][0].weight, mode="fan_out")
        if self.stem == "small":
            net.features[2].conv[1][0].stride = (1, 1)
        return group_norm(net, self.units(self.groups))


class ResNet18(Net):
    """torchvision's ResNet-18 with GroupNorm for BatchNorm."""

    kind: str = "resnet18"
    stem: Literal["small", "imagenet"] = Field(
        default="small", description="small, for small images: 3 x 3, no stride, no pooling"
    )
    groups: int = Field(default=32, ge=1, description="at width 1; see mobilenet_v2")

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        channels, *_ = self.image(shape, 8)
        net = _net(self.units, outputs)
        small = self.stem == "small"
        net.conv1 = nn.Conv2d(
            channels,
            net.bn1.num_features,
            3 if small else 7,
            stride=1 if small else 2,
            padding=1 if small else 3,
            bias=False,
        )
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        if small:
            net.maxpool = nn.Identity()
        return group_norm(net, self.units(self.groups))


def _net(units: Callable[[int], int], outputs: int) -> ResNet:
    """torchvision's resnet18 with its own draws, each layer with as many channels as `units` says
    of those that it has there.
    """
    from torchvision.models import resnet18
    from torchvision.models.resnet import BasicBlock

    net = resnet18(num_classes=outputs)
    if units(512) == 512:
        return net
    net.inplanes = units(64)
    net.bn1 = nn.BatchNorm2d(units(64))
    for number, planes in enumerate((64, 128, 256, 512)):
        layer = net._make_layer(BasicBlock, units(planes), 2, stride=2 if number else 1)
        setattr(net, f"layer{number + 1}", layer)
        for part in layer.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    net.fc = nn.Linear(units(512), outputs)
    return net
