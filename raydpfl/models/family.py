"""The models of the papers, and any module of the user's own.

Every convolutional net is a stack of ordinary torch layers in a `torch.nn.Sequential`, pooled
before the activation where that is monotone (they commute, and the activation then works on a
quarter of the numbers). None has dropout or BatchNorm. Of AlexNet, 000 gives the number of
parameters and not the layers.

| kind         | parameters                                         | source                      |
|--------------|----------------------------------------------------|-----------------------------|
| softmax      | 7,850 (1 x 28 x 28)                                | 001 sec. 6, 002 sec. VI     |
| linear       | 200 (200 features, regression)                     | 000 sec. 2.1, 001 sec. 5.3  |
| mlp          | 159,010 (1 x 28 x 28)                              | 000 Table 3: 159K           |
| cnn          | 833,322 (1 x 28 x 28), 1,079,882 (3 x 32 x 32)     | 003 sec. VI-C               |
| dp_cnn       | 550,570 (3 x 32 x 32)                              | Tramer, Boneh 2021: Table 9 |
| alexnet      | 3,348,490 (1 x 28 x 28), 3,349,066 (3 x 32 x 32)   | 000 Table 3: 3.3M           |
| mobilenet_v2 | 2,236,106 (1 x 28 x 28), 2,236,682 (3 x 32 x 32)   | 000 Table 3: 2.3M           |
| resnet18     | 11,172,810 (1 x 28 x 28), 11,173,962 (3 x 32 x 32) | 000 Table 3: 11.1M          |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from math import prod
from types import FunctionType
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from torch import nn

from raydpfl.errors import RAISED, ConfigError
from raydpfl.member import Member, load
from raydpfl.models.norms import group_norm

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}
Shape = tuple[int, ...]


class Model(Member):
    """Base of the family: `module` gives a fresh module that takes [batch, *shape] and returns
    [batch, outputs]: a score for each class, or the one number of a regression.

    It draws its initial parameters from torch's default generator, which `raydpfl.models.build`
    sets.
    """

    regression: ClassVar[bool] = True  # whether it takes regression data too

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        raise NotImplementedError

    def image(self, shape: Shape, least: int) -> Shape:
        """`shape` if it is (channels, height, width) with height and width at least `least`; else
        raises `ConfigError`.
        """
        if len(shape) != 3 or min(shape[1:]) < least:
            images = f"images (channels, height, width), {least} x {least} or more"
            accepted = f"a model for samples of shape {shape}; this one takes {images}"
            raise ConfigError("model.kind", self.kind, accepted)
        return shape


class Softmax(Model):
    """Softmax regression: one linear layer with bias. For numeric targets see `linear`."""

    regression: ClassVar[bool] = False
    kind: str = "softmax"

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), outputs))


class Linear(Model):
    """One linear layer, every parameter of which starts at `start` + U(0, `spread`), for regression
    and classification.

    With the quadratics of 001 sec. 5.3, whose optimum is the origin, `spread` 0.2 and 1 are its
    starts w* + z/5 and w* + z, z ~ U(0,1)^d.
    """

    kind: str = "linear"
    bias: bool = False
    start: float = 0.0
    spread: float = Field(default=0.0, ge=0)

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        layer = nn.Linear(prod(shape), outputs, self.bias)
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, self.start, self.start + self.spread)
        return nn.Sequential(nn.Flatten(), layer)


class Mlp(Model):
    """Dense layers of `hidden` units each, one or several (000: 200; 002: 1200 on 60 principal
    components).

    Sigmoid and ELU are left out: torch computes them differently by the position in a tensor, so a
    run's bits would depend on the lane.
    """

    kind: str = "mlp"
    hidden: tuple[int, ...] = (200,)
    activation: Literal["relu", "tanh"] = "relu"

    @field_validator("hidden", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) else value

    @field_validator("hidden")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or min(value) < 1:
            raise ValueError("at least one hidden layer, each of at least 1 unit")
        return value

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        hidden = _dense([prod(shape), *self.hidden], ACTIVATIONS[self.activation])
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(self.hidden[-1], outputs))


class Cnn(Model):
    """The CNN of 003 sec. VI-C: convolutions of 16 and 32 channels, each 2 x 2 max-pooled, dense
    layers of 512 and 32 units, ReLU.

    The paper prints neither the kernel size nor the padding: here 5 x 5 by default, padded to keep
    the size.
    """

    kind: str = "cnn"
    kernel: int = Field(default=5, ge=1)

    @field_validator("kernel")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("an odd number, so that padding can keep the size")
        return value

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        channels, height, width = self.image(shape, 4)
        layers: list[nn.Module] = []
        for width_in, width_out in ((channels, 16), (16, 32)):
            layers += [
                nn.Conv2d(width_in, width_out, self.kernel, padding=self.kernel // 2),
                nn.MaxPool2d(2),
                nn.ReLU(),
            ]
        return nn.Sequential(
            *layers,
            nn.Flatten(),
            *_dense([32 * (height // 4) * (width // 4), 512, 32], nn.ReLU),
            nn.Linear(32, outputs),
        )


class DpCnn(Model):
    """The CNN that Tramer and Boneh 2021 train on CIFAR-10 with differential privacy: three pairs
    of 3 x 3 convolutions of 32, 64 and 128 channels, each pair 2 x 2 max-pooled, a dense layer of
    128 units, tanh.
    """

    kind: str = "dp_cnn"

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        channels, height, width = self.image(shape, 8)
        layers: list[nn.Module] = []
        for width_in, width_out in ((channels, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(width_in, width_out, 3, padding=1), nn.Tanh()]
            layers += [nn.Conv2d(width_out, width_out, 3, padding=1), nn.MaxPool2d(2), nn.Tanh()]
        return nn.Sequential(
            *layers,
            nn.Flatten(),
            *_dense([128 * (height // 8) * (width // 8), 128], nn.Tanh),
            nn.Linear(128, outputs),
        )


class AlexNet(Model):
    """AlexNet for small images: five 3 x 3 convolutions of 32, 64, 128, 256 and 256 channels,
    max-pooled after the first, second and fifth, a dense layer of 1024 units, ReLU.

    000 prints 3.3M parameters and no layer; this form has 3.35M on EMNIST, on 28 x 28 and 32 x 32
    alike (both end in 256 x 3 x 3).
    """

    kind: str = "alexnet"

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        channels, height, width = self.image(shape, 12)
        layers: list[nn.Module] = []
        for width_in, width_out, pool in (
            (channels, 32, 2),
            (32, 64, 2),
            (64, 128, 0),
            (128, 256, 0),
            (256, 256, 3),
        ):
            layers += [
                nn.Conv2d(width_in, width_out, 3, padding=1),
                *([nn.MaxPool2d(pool, 2)] if pool else []),
                nn.ReLU(),
            ]
        last = 256 * prod((side // 4 - 3) // 2 + 1 for side in (height, width))
        return nn.Sequential(
            *layers, nn.Flatten(), *_dense([last, 1024], nn.ReLU), nn.Linear(1024, outputs)
        )


class MobileNetV2(Model):
    """torchvision's MobileNetV2 with GroupNorm for BatchNorm. `stem: small` leaves out the first
    two strides, for small images.
    """

    kind: str = "mobilenet_v2"
    stem: Literal["small", "imagenet"] = "small"
    # at most; a layer uses the largest number that divides both this and its channels
    groups: int = Field(default=32, ge=1)

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        from torchvision.models import mobilenet_v2

        channels, *_ = self.image(shape, 8)
        net = mobilenet_v2(num_classes=outputs, dropout=0.0)
        net.features[0][0] = nn.Conv2d(
            channels, 32, 3, stride=1 if self.stem == "small" else 2, padding=1, bias=False
        )
        nn.init.kaiming_normal_(net.features[0][0].weight, mode="fan_out")
        if self.stem == "small":
            net.features[2].conv[1][0].stride = (1, 1)
        return group_norm(net, self.groups)


class ResNet18(Model):
    """torchvision's ResNet-18 with GroupNorm for BatchNorm. `stem: small`, for small images: a 3 x
    3 convolution, no stride, no pooling.
    """

    kind: str = "resnet18"
    stem: Literal["small", "imagenet"] = "small"
    groups: int = Field(default=32, ge=1)  # as in mobilenet_v2

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        from torchvision.models import resnet18

        channels, *_ = self.image(shape, 8)
        net = resnet18(num_classes=outputs)
        small = self.stem == "small"
        net.conv1 = nn.Conv2d(
            channels,
            64,
            3 if small else 7,
            stride=1 if small else 2,
            padding=1 if small else 3,
            bias=False,
        )
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        if small:
            net.maxpool = nn.Identity()
        return group_norm(net, self.groups)


class Module(Model):
    """Any `torch.nn.Module`: `kind` is the import path of a class or function (see `factory`),
    `args` what it is called with."""

    kind: str
    args: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        return True

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        make = factory(self.kind)
        try:
            return make(**self.args)
        except RAISED as error:  # a user's constructor may raise anything
            raise ConfigError(
                "model.args",
                self.args,
                f"what {self.kind} can be called with ({type(error).__name__}: {error})",
            ) from None


def factory(path: str) -> Callable[..., Any]:
    """What an import path names: a subclass of `Model` or of `torch.nn.Module`, or a function that
    is declared to return a module, `def net() -> torch.nn.Module`.

    Raises `ConfigError` for all else, having called nothing.
    """
    found = load(path, "model.kind")
    if isinstance(found, type):
        if issubclass(found, (nn.Module, Model)):
            return found
        raise ConfigError("model.kind", path, f"a torch.nn.Module, not {found.__name__}")
    makes = _declared(found) if isinstance(found, FunctionType) else None
    if isinstance(makes, type) and issubclass(makes, nn.Module):
        return found
    accepted = "a class or a function that makes a torch.nn.Module"
    if callable(found):
        said = f"def {path.split(':')[-1]}(...) -> torch.nn.Module"
        accepted = f"a subclass of torch.nn.Module, or a function that says so: {said}"
    raise ConfigError("model.kind", path, accepted)


def _declared(function: FunctionType) -> Any:
    """The return annotation of a function; text is looked up as a name, not evaluated."""
    said = function.__annotations__.get("return")
    if not isinstance(said, str):
        return said
    first, *parts = said.strip("'\"").split(".")
    found = inspect.unwrap(function).__globals__.get(first)
    for part in parts:
        found = getattr(found, part, None)
    return found


FAMILY: dict[str, type[Model]] = {
    "softmax": Softmax,
    "mlp": Mlp,
    "cnn": Cnn,
    "dp_cnn": DpCnn,
    "alexnet": AlexNet,
    "mobilenet_v2": MobileNetV2,
    "resnet18": ResNet18,
    "linear": Linear,
}


def _dense(widths: list[int], activation: type[nn.Module]) -> list[nn.Module]:
    return [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), activation())]
