"""One client after another: nets of convolutions, max-pooling and linear layers, by hand.

What autograd does for any module costs a net of these layers more than it must. Here every layer's
step is made with its gradient, where the rule needs no more (W <- shrink W - lr g^T a is one
product, which reads and writes W once), nothing is zeroed or copied to be thrown away, and the
first layer's input gets no gradient. An activation is taken after the pooling that follows it: they
commute, as it does not fall. A bias has the sum of the gradient by the maxima. Images, filters and
the columns of the first linear layer are channels-last inside. On the CPU in float32 a convolution
and its pooling are one, in compiled code, whose gradients come from the maxima alone, as do the
norms where each sample's gradient is clipped (`raydpfl.training.layers.pooled_convolution`).

>>> layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(676, 10)
>>> [type(link).__name__ for link in links(nn.Sequential(*layers))]
['Convolution', 'Pointwise', 'Flat', 'Dense']
>>> links(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout(), nn.Flatten(), nn.Linear(4, 2)))
Traceback (most recent call last):
raydpfl.models.linear_stack.NoStack: Dropout is not supported
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from raydpfl.core import native
from raydpfl.methods.local.base import Local
from raydpfl.models.linear_stack import (
    Activation,
    Call,
    NoStack,
    backwards,
    check_unhooked,
    places_of,
    step_of,
    taken,
)
from raydpfl.models.tasks import Task
from raydpfl.training.backends.base import LOST, clip_factors
from raydpfl.training.backends.per_client import Descent, OneByOne
from raydpfl.training.layers.pooled_convolution import Filters, Window

aten = torch.ops.aten


@dataclass(frozen=True)
class Parameter:
    """A parameter's part of the flat vector: where it begins, its row-major shape there, and these
    axes in the order of `raydpfl.models.flatten`.
    """

    place: int
    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """In the shape inside."""
        return flat[self.place : self.place + prod(self.shape)].view(self.shape)

    def outside(self, flat: torch.Tensor) -> torch.Tensor:
        """In the order of `raydpfl.models.flatten`."""
        return self.of(flat).permute(self.axes)


def _add_product(
    to: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float
) -> None:
    """to <- beta to + alpha a @ b, for float32 `to` and a, b in float32 or bfloat16; with beta 0
    whatever `to` holds.
    """
    if a.dtype == to.dtype:
        to.addmm_(a, b, beta=beta, alpha=alpha)
    else:
        (to.mul_(beta) if beta else to.zero_()).add_(a @ b, alpha=alpha)


@dataclass(frozen=True)
class Gradients:
    """What becomes of a gradient: the step of `flat` is made with it, or it is written to `out`.
    `low` is `flat` in the precision of products.
    """

    flat: torch.Tensor
    low: torch.Tensor
    out: torch.Tensor
    descent: Descent | None

    def product(self, parameter: Parameter, a: torch.Tensor, b: torch.Tensor) -> None:
        """The gradient by a parameter, as a matrix, is a @ b."""
        if self.descent is None:
            _add_product(parameter.of(self.out).view(len(a), -1), a, b, beta=0, alpha=1)
            return
        now = parameter.of(self.flat).view(len(a), -1)
        _add_product(now, a, b, beta=self.descent.shrink, alpha=-self.descent.lr)

    def add(self, parameter: Parameter, gradient: torch.Tensor) -> None:
        """`gradient` is in the order of `raydpfl.models.flatten`."""
        if self.descent is None:
            parameter.outside(self.out).copy_(gradient)
            return
        now = parameter.of(self.flat)
        if self.descent.shrink != 1:
            now.mul_(self.descent.shrink)
        parameter.outside(self.flat).sub_(gradient, alpha=self.descent.lr)


class Apart:
    """The gradients of single samples by a link's parameters."""

    def squares(self) -> torch.Tensor:
        """Their squared norms, float32 [B]."""
        raise NotImplementedError

    def total(self, factors: torch.Tensor, gradients: Gradients) -> None:
        """What becomes of their sum, weighted by `factors`, float32 [B]."""
        raise NotImplementedError

    def by_input(self, flat: torch.Tensor) -> torch.Tensor:
        """The gradient by the link's input."""
        raise NotImplementedError


class Link:
    """A layer of the chain."""

    parameters: tuple[Parameter, ...] = ()

    def forward(self, a: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """Its output, and what `backward` needs of the pass."""
        raise NotImplementedError

    def backward(
        self, g: torch.Tensor, kept: tuple[Any, ...], gradients: Gradients, first: bool
    ) -> torch.Tensor:
        """The gradient by its input from `g`, that by its output; anything for the first link."""
        raise NotImplementedError

    def apart(self, g: torch.Tensor, kept: tuple[Any, ...]) -> Apart | None:
        """The gradients of single samples, from `g`, that by its output; None: no parameters."""
        return None


@dataclass(frozen=True)
class Convolution(Link):
    """A convolution and the max-pooling that follows it, if any does: the arguments of torch's
    operators for them.
    """

    weight: Parameter
    bias: Parameter | None
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    pool: tuple[Any, ...] | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:  # type: ignore[override]
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def compiled(self) -> bool:
        """Whether it is for compiled code, with its pooling, in float32 on the CPU."""
        return self.pool is not None and self.groups == 1 and list(self.dilation) == [1, 1]

    def forward(self, a: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """See `Link`."""
        bias = None if self.bias is None else self.bias.of(flat)
        if self.compiled and a.device.type == "cpu" and a.dtype == torch.float32:
            assert self.pool is not None
            window = Window(self.weight.shape[1:3], self.stride, self.padding, self.pool)
            filters = Filters(a, self.weight.shape[0], window)
            return filters.maxima(self.weight.of(flat), bias), (filters,)
        weight = self.weight.outside(flat)
        z = F.conv2d(a, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        if self.pool is None:
            return z, (a, None, None)
        maxima, where = aten.max_pool2d_with_indices(z, *self.pool)
        return maxima, (a, z, where)

    def backward(
        self, g: torch.Tensor, kept: tuple[Any, ...], gradients: Gradients, first: bool
    ) -> torch.Tensor:
        """See `Link`."""
        if self.bias is not None:
            gradients.add(self.bias, g.sum((0, 2, 3)))
        if len(kept) == 1:
            part = self.apart(g, kept)
            by_input = g if first else part.by_input(gradients.low)
            part.add(gradients)
            return by_input
        a, z, where = kept
        weight = self.weight.outside(gradients.low)
        if self.pool is not None:
            scatter = aten.max_pool2d_with_indices_backward.grad_input
            g = scatter(g, z, *self.pool, where, grad_input=z)  # z is no longer needed
        geometry = (self.stride, self.padding, self.dilation, False, [0, 0], self.groups)
        wanted = (not first, True, False)
        by_input, by_weight, _ = aten.convolution_backward(g, a, weight, None, *geometry, wanted)
        gradients.add(self.weight, by_weight)
        return by_input

    def apart(self, g: torch.Tensor, kept: tuple[Any, ...]) -> _Filtered:
        """See `Link`."""
        (filters,) = kept
        filters.follow(g)
        return _Filtered(self, g, filters)


@dataclass(frozen=True)
class _Filtered(Apart):
    link: Convolution
    g: torch.Tensor
    filters: Filters

    def squares(self) -> torch.Tensor:
        """See `Apart`."""
        found = self.filters.squares()
        if self.link.bias is None:
            return found
        return found + self.g.sum((2, 3)).square().sum(1)

    def total(self, factors: torch.Tensor, gradients: Gradients) -> None:
        """See `Apart`."""
        self.add(gradients, factors)
        if self.link.bias is not None:
            gradients.add(self.link.bias, factors @ self.g.sum((2, 3)))

    def add(self, gradients: Gradients, factors: torch.Tensor | None = None) -> None:
        """What becomes of the sum, or of that weighted by `factors`, of the gradients by the
        filters.
        """
        weight = self.link.weight
        found = self.filters.total(factors).view(weight.shape)
        gradients.add(weight, found.permute(weight.axes))

    def by_input(self, flat: torch.Tensor) -> torch.Tensor:
        """See `Apart`."""
        return self.filters.by_images(self.link.weight.of(flat))


@dataclass(frozen=True)
class Pointwise(Link):
    """An activation."""

    activation: Activation

    def forward(self, a: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """See `Link`."""
        a = self.activation.forward(a)
        return a, (a,)

    def backward(
        self, g: torch.Tensor, kept: tuple[Any, ...], gradients: Gradients, first: bool
    ) -> torch.Tensor:
        """See `Link`."""
        return self.activation.backward_(g, *kept)


@dataclass(frozen=True)
class Flat(Link):
    """An image as a row, channels last."""

    def forward(self, a: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """See `Link`."""
        images = a.permute(0, 2, 3, 1)
        return images.reshape(len(a), -1), (images.shape,)

    def backward(
        self, g: torch.Tensor, kept: tuple[Any, ...], gradients: Gradients, first: bool
    ) -> torch.Tensor:
        """See `Link`."""
        return g.view(*kept).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Dense(Link):
    """A linear layer."""

    weight: Parameter
    bias: Parameter | None

    @property
    def parameters(self) -> tuple[Parameter, ...]:  # type: ignore[override]
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def forward(self, a: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """See `Link`."""
        weight = self.weight.of(flat).flatten(1)
        return F.linear(a, weight, None if self.bias is None else self.bias.of(flat)), (a,)

    def backward(
        self, g: torch.Tensor, kept: tuple[Any, ...], gradients: Gradients, first: bool
    ) -> torch.Tensor:
        """See `Link`."""
        (a,) = kept
        by_input = g @ self.weight.of(gradients.low).flatten(1)
        gradients.product(self.weight, g.T, a)
        if self.bias is not None:
            gradients.add(self.bias, g.sum(0))
        return by_input

    def apart(self, g: torch.Tensor, kept: tuple[Any, ...]) -> Apart:
        """See `Link`."""
        return _Products(self, g, *kept)


@dataclass(frozen=True)
class _Products(Apart):
    link: Dense
    g: torch.Tensor
    a: torch.Tensor

    def squares(self) -> torch.Tensor:
        """See `Apart`."""
        ones = self.link.bias is not None
        inputs = self.a.square().sum(1) + (ones + LOST * self.a.shape[1])
        return inputs * (self.g.square().sum(1) + LOST * self.g.shape[1])

    def total(self, factors: torch.Tensor, gradients: Gradients) -> None:
        """See `Apart`."""
        scaled = self.g * factors[:, None]
        gradients.product(self.link.weight, scaled.T, self.a)
        if self.link.bias is not None:
            gradients.add(self.link.bias, scaled.sum(0))

    def by_input(self, flat: torch.Tensor) -> torch.Tensor:
        """See `Apart`."""
        return self.g @ self.link.weight.of(flat).flatten(1)


def unpooled(chain: Sequence[Link]) -> str | None:
    """Why single samples' gradients are not taken by hand; None where they are."""
    for link in chain:
        if isinstance(link, Convolution) and (link.pool is None or link.groups > 1):
            return "samples are clipped by hand where one max-pooling follows each convolution"
        if isinstance(link, Convolution) and list(link.dilation) != [1, 1]:
            return "a dilated convolution's samples are not clipped by hand"
    found = native.found()
    return found if isinstance(found, str) else None


MIXED = "it is more than convolutions, and linear layers after them"


@dataclass(frozen=True)
class _Pool:
    arguments: tuple[Any, ...]


def links(module: nn.Module) -> tuple[Link, ...]:
    """The links of a chain (convolution [activation] [max-pooling])*, flatten, (Linear
    [activation])*: convolutions and linear layers are modules, the others modules or functions, and
    max-pooling may come before the activation.

    Raises `NoStack` for anything else; see `raydpfl.models.linear_stack.stack`.
    """
    places = places_of(module)
    chain: list[Link] = []
    for each in reversed([_found(places, call) for call in backwards(module)]):
        if isinstance(each, _Pool):
            _attach(each, chain)
        elif isinstance(each, Pointwise) and chain and isinstance(chain[-1], Pointwise):
            raise NoStack("an activation follows another")
        elif each is not None:
            chain.append(each)
    kinds = [type(link) for link in chain]
    if places or kinds.count(Flat) != 1:
        raise NoStack(MIXED)
    flat = kinds.index(Flat)
    images = {Convolution, Pointwise}
    rows = {Dense, Pointwise}
    begins = kinds[0] is Convolution and kinds[flat + 1 : flat + 2] == [Dense]
    if not begins or set(kinds[:flat]) - images or set(kinds[flat + 1 :]) - rows:
        raise NoStack(MIXED)
    channels = [link.weight.shape[0] for link in chain if isinstance(link, Convolution)][-1]
    chain[flat + 1] = _channels_last(chain[flat + 1], channels)
    return tuple(chain)


def _attach(pool: _Pool, chain: list[Link]) -> None:
    """Gives the pooling to the convolution before it, from which an activation may part it."""
    place = len(chain) - 1
    if chain and isinstance(chain[place], Pointwise):
        place -= 1
    before = chain[place] if place >= 0 else None
    if not isinstance(before, Convolution) or before.pool is not None:
        raise NoStack("max-pooling that follows no convolution is not supported")
    chain[place] = replace(before, pool=pool.arguments)


def _channels_last(dense: Link, channels: int) -> Dense:
    """The layer after the images are made rows, with its columns in their order."""
    assert isinstance(dense, Dense)
    outputs, inputs = dense.weight.shape
    if inputs % channels:
        raise NoStack("its first linear layer does not take the images")
    shape = (outputs, inputs // channels, channels)
    return replace(dense, weight=replace(dense.weight, shape=shape, axes=(0, 2, 1)))


def _found(places: dict[int, int], call: nn.Module | Call) -> Link | _Pool | None:
    """What a layer or a call is; None for what changes nothing."""
    if type(call) is nn.Conv2d:
        return _convolution(places, call)
    if type(call) is nn.MaxPool2d:
        return _pool(call)
    if isinstance(call, Call) and call.node.target is F.max_pool2d:
        return _pool_function(call.node)
    step = step_of(call)
    if step is None:
        idle = isinstance(call, nn.Module) and not isinstance(call, nn.Flatten)
        return None if idle else Flat()
    if isinstance(step, Activation):
        return Pointwise(step)
    weight, bias = step
    place, of_bias = taken(places, weight, bias)
    return Dense(Parameter(place, tuple(weight.shape), (0, 1)), _bias(of_bias, len(weight)))


def _bias(place: int | None, outputs: int) -> Parameter | None:
    return None if place is None else Parameter(place, (outputs,), (0,))


def _convolution(places: dict[int, int], layer: nn.Conv2d) -> Convolution:
    check_unhooked(layer)
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        raise NoStack("a convolution whose padding is not so many zeros is not supported")
    outputs, inputs, height, width = layer.weight.shape
    place, of_bias = taken(places, layer.weight, layer.bias)
    return Convolution(
        Parameter(place, (outputs, height, width, inputs), (0, 3, 1, 2)),
        _bias(of_bias, outputs),
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.groups,
    )


def _pool(layer: nn.MaxPool2d) -> _Pool:
    check_unhooked(layer)
    return _pooling(
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.ceil_mode,
        layer.return_indices,
    )


def _pool_function(node: fx.Node) -> _Pool:
    named = inspect.signature(F.max_pool2d_with_indices).bind(*node.args, **node.kwargs)
    named.apply_defaults()
    return _pooling(*list(named.arguments.values())[1:])


def _pooling(
    kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, indices: bool
) -> _Pool:
    if indices:
        raise NoStack("max-pooling that gives its indices is not supported")
    pairs = (_pair(each) for each in (kernel, stride or kernel, padding, dilation))
    return _Pool((*pairs, ceil))


def _pair(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


class Convolutional(OneByOne):
    """See the module. Raises `NoStack` for a net that `links` does not know."""

    channels_last = True

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        self.links = links(module)
        pooled = any(isinstance(link, Convolution) and link.compiled for link in self.links)
        found = native.found()
        if pooled and device.type == "cpu" and isinstance(found, str):
            raise NoStack(found)
        parameters = [parameter for link in self.links for parameter in link.parameters]
        self.parameters = sorted(parameters, key=lambda parameter: parameter.place)
        sizes = [prod(parameter.shape) for parameter in self.parameters]
        super().__init__(module, local, device, task, sizes)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [parameter.outside(flat) for parameter in self.parameters]

    def fits(self, clip: float | None) -> None:
        """See `raydpfl.training.backends.base.Backend`."""
        reason = unpooled(self.links) if clip is not None else None
        if reason:
            raise NoStack(reason)
        if clip is not None and self.device.type != "cpu":
            raise NoStack("compiled code is for the CPU")

    def _gradient(self, x: torch.Tensor, y: torch.Tensor, clip: float | None) -> torch.Tensor:
        return self._pass(x, y, None) if clip is None else self._clipped(x, y, clip)

    @torch.no_grad()
    def _clipped(self, x: torch.Tensor, y: torch.Tensor, clip: float) -> torch.Tensor:
        """As `_pass`, with each sample's gradient scaled to the bound."""
        gradients = Gradients(self.flat, self.flat, self.gradient, None)
        a = x
        kept = []
        for link in self.links:
            a, of_pass = link.forward(a, self.flat)
            kept.append(of_pass)
        loss, g = self._of_loss(a, y)
        g = g * len(x)
        parts = []
        for place in reversed(range(len(self.links))):
            link = self.links[place]
            part = link.apart(g, kept[place])
            if part is None:
                g = link.backward(g, kept[place], gradients, first=False)
                continue
            parts.append(part)
            if place:
                g = part.by_input(self.flat)
        norms = torch.stack([part.squares() for part in parts]).sum(0).sqrt()
        self.factors.append(clip_factors(norms, clip))
        for part in parts:
            part.total(self.factors[-1] / len(x), gradients)
        return loss

    def _descend(self, x: torch.Tensor, y: torch.Tensor, descent: Descent) -> torch.Tensor:
        return self._pass(x, y, descent)

    @torch.no_grad()
    def _pass(self, x: torch.Tensor, y: torch.Tensor, descent: Descent | None) -> torch.Tensor:
        dtype = torch.bfloat16 if self.precision == "bfloat16" else torch.float32
        low = self.flat.to(dtype)
        gradients = Gradients(self.flat, low, self.gradient, descent)
        a = x.to(dtype)
        kept = []
        for link in self.links:
            a, of_pass = link.forward(a, low)
            kept.append(of_pass)
        loss, g = self._of_loss(a.float(), y)
        g = g.to(dtype)
        for place in reversed(range(len(self.links))):
            g = self.links[place].backward(g, kept.pop(), gradients, first=place == 0)
        return loss

    def _of_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss of a batch, and its gradient by the outputs."""
        if self.task.closed() == "softmax":
            log_p = torch.log_softmax(outputs, 1)
            classes = y[:, None]
            g = log_p.exp().sub_(torch.zeros_like(log_p).scatter_(1, classes, 1.0))
            return -log_p.gather(1, classes).mean(), g.div_(len(y))
        with torch.enable_grad():
            outputs.requires_grad_()
            loss = self.task.loss(outputs, y).mean()
            (g,) = torch.autograd.grad(loss, outputs)
        return loss.detach(), g
