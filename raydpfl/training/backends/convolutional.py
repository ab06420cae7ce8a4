"""One client after another: nets of convolutions, max-pooling, dropout and linear layers, by hand.

Every layer's step is made with its gradient, where the rule needs no more (W <- shrink W - lr g^T a
is one product, which reads and writes W once). An activation is taken after the pooling that
follows it: they commute, as it does not fall. Images, filters and the columns of the first linear
layer are channels-last inside. On the CPU in float32 a convolution and its pooling are one, in
compiled code (`raydpfl.training.layers.pooled_convolution`).

>>> layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(676, 10)
>>> [type(link).__name__ for link in links(nn.Sequential(*layers))]
['Convolution', 'Pointwise', 'Flat', 'Dense']
>>> links(nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2)))
Traceback (most recent call last):
raydpfl.models.linear_stack.NoStack: GroupNorm is not supported
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from raydpfl.core import native
from raydpfl.methods.local.base import Local
from raydpfl.models.linear_stack import (
    Activation,
    Call,
    NoStack,
    check_no_hooks,
    parameter_offsets,
    read_step,
    reverse_calls,
    take_places,
)
from raydpfl.models.tasks import Task
from raydpfl.training.backends.base import UNDERFLOW_SQUARE, ChunkData, clip_factors
from raydpfl.training.backends.per_client import Descent, OneByOne
from raydpfl.training.layers.dropout import RowMajor
from raydpfl.training.layers.pooled_convolution import Filters, Window

aten = torch.ops.aten
CHAIN_MESSAGE = "it is more than convolutions, and linear layers after them"
POOLING = ("kernel_size", "stride", "padding", "dilation")


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


@dataclass(frozen=True)
class Gradients:
    """What becomes of a gradient: the step of `flat` is made with it, or it is written to `out`."""

    flat: torch.Tensor
    out: torch.Tensor
    descent: Descent | None

    def product(self, parameter: Parameter, a: torch.Tensor, b: torch.Tensor) -> None:
        """The gradient by a parameter, as a matrix, is a @ b, in float32 or bfloat16."""
        if self.descent is None:
            target, beta, alpha = self.out, 0.0, 1.0
        else:
            target, beta, alpha = self.flat, self.descent.shrink, -self.descent.lr
        view = parameter.of(target).view(len(a), -1)
        if a.dtype == view.dtype:
            view.addmm_(a, b, beta=beta, alpha=alpha)
        else:
            (view.mul_(beta) if beta else view.zero_()).add_(a @ b, alpha=alpha)

    def add(self, parameter: Parameter, gradient: torch.Tensor) -> None:
        """`gradient` is in the order of `raydpfl.models.flatten`."""
        if self.descent is None:
            parameter.outside(self.out).copy_(gradient)
            return
        if self.descent.shrink != 1:
            parameter.of(self.flat).mul_(self.descent.shrink)
        parameter.outside(self.flat).sub_(gradient, alpha=self.descent.lr)


@dataclass(frozen=True)
class WeightedLayer:
    """A link with parameters. Every link has `forward` (its output and the `context` of the pass)
    and `backward` (the gradient by its input); this one also `squares`, the squared norms of
    samples' gradients, float32 [B], and their `total`, weighted by `factors`.
    """

    weight: Parameter
    bias: Parameter | None

    def bias_of(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Its bias among all parameters."""
        return None if self.bias is None else self.bias.of(flat)


@dataclass(frozen=True)
class Convolution(WeightedLayer):
    """A convolution and any max-pooling after it: the arguments of torch's operators."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    pool: tuple[Any, ...] | None = None
    is_first: bool = False  # of the chain: nothing takes the gradient by its input

    @property
    def compiled(self) -> bool:
        """Whether it is for compiled code, with its pooling, in float32 on the CPU."""
        return self.pool is not None and self.groups == 1 and list(self.dilation) == [1, 1]

    def forward(self, a: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        bias = self.bias_of(flat)
        if self.compiled and a.device.type == "cpu" and a.dtype == torch.float32:
            assert self.pool is not None
            window = Window(self.weight.shape[1:3], self.stride, self.padding, self.pool)
            filters = Filters(a, self.weight.shape[0], window)
            return filters.maxima(self.weight.of(flat), bias), [filters]
        weight = self.weight.outside(flat)
        z = F.conv2d(a, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        if self.pool is None:
            return z, [a, None, None]
        maxima, indices = aten.max_pool2d_with_indices(z, *self.pool)
        return maxima, [a, z, indices]

    def backward(self, g: torch.Tensor, context: list[Any], flat: torch.Tensor) -> torch.Tensor:
        if len(context) == 1:
            context[0].follow(g)
            return g if self.is_first else context[0].by_images(self.weight.of(flat))
        a, z, indices = context
        weight = self.weight.outside(flat)
        if self.pool is not None:
            scatter = aten.max_pool2d_with_indices_backward.grad_input
            g = scatter(g, z, *self.pool, indices, grad_input=z)  # z is no longer needed
        geometry = (self.stride, self.padding, self.dilation, False, [0, 0], self.groups)
        mask = (not self.is_first, True, False)
        by_input, by_weight, _ = aten.convolution_backward(g, a, weight, None, *geometry, mask)
        context[:] = [by_weight, None]
        return by_input

    def squares(self, g: torch.Tensor, context: list[Any]) -> torch.Tensor:
        squares = context[0].squares()
        return squares if self.bias is None else squares + g.sum((2, 3)).square().sum(1)

    def total(
        self, g: torch.Tensor, context: list[Any], factors: torch.Tensor | None, target: Gradients
    ) -> None:
        if self.bias is not None:
            target.add(self.bias, g.sum((0, 2, 3)) if factors is None else factors @ g.sum((2, 3)))
        if len(context) == 1:
            by_weight = context[0].total(factors).view(self.weight.shape).permute(self.weight.axes)
        else:
            by_weight = context[0]
        target.add(self.weight, by_weight)


@dataclass(frozen=True)
class Dense(WeightedLayer):
    """A linear layer."""

    def forward(self, a: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        return F.linear(a, self.weight.of(flat).flatten(1), self.bias_of(flat)), [a]

    def backward(self, g: torch.Tensor, context: list[Any], flat: torch.Tensor) -> torch.Tensor:
        return g @ self.weight.of(flat).flatten(1)

    def squares(self, g: torch.Tensor, context: list[Any]) -> torch.Tensor:
        (a,) = context
        inputs = a.square().sum(1) + ((self.bias is not None) + UNDERFLOW_SQUARE * a.shape[1])
        return inputs * (g.square().sum(1) + UNDERFLOW_SQUARE * g.shape[1])

    def total(
        self, g: torch.Tensor, context: list[Any], factors: torch.Tensor | None, target: Gradients
    ) -> None:
        g = g if factors is None else g * factors[:, None]
        target.product(self.weight, g.T, *context)
        if self.bias is not None:
            target.add(self.bias, g.sum(0))


@dataclass(frozen=True)
class Pointwise:
    """An activation."""

    activation: Activation

    def forward(self, a: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        a = self.activation.forward(a)
        return a, [a]

    def backward(self, g: torch.Tensor, context: list[Any], flat: torch.Tensor) -> torch.Tensor:
        return self.activation.backward_(g, *context)


@dataclass(frozen=True)
class Flat:
    """An image as a row, channels last."""

    def forward(self, a: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        images = a.permute(0, 2, 3, 1)
        return images.reshape(len(a), -1), [images.shape]

    def backward(self, g: torch.Tensor, context: list[Any], flat: torch.Tensor) -> torch.Tensor:
        return g.view(*context).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Drop:
    """Dropout."""

    p: float

    def forward(self, a: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        mask = RowMajor().mask(a, self.p)
        return a * mask, [mask]

    def backward(self, g: torch.Tensor, context: list[Any], flat: torch.Tensor) -> torch.Tensor:
        return g * context[0]


Link = Convolution | Dense | Pointwise | Flat | Drop
Pool = tuple[Any, ...]  # the arguments of max-pooling


def clipping_refusal(chain: Sequence[Link]) -> str | None:
    """Why single samples' gradients are not taken by hand; None where they are."""
    for link in chain:
        if isinstance(link, Convolution) and (link.pool is None or link.groups > 1):
            return "samples are clipped by hand where one max-pooling follows each convolution"
        if isinstance(link, Convolution) and list(link.dilation) != [1, 1]:
            return "a dilated convolution's samples are not clipped by hand"
    library = native.library_or_reason()
    return library if isinstance(library, str) else None


def links(module: nn.Module) -> tuple[Link, ...]:
    """The links of a chain (convolution [activation] [max-pooling] [dropout])*, flatten,
    [activation] [dropout], (Linear [activation] [dropout])*: convolutions, dropout and linear
    layers are modules, the others modules or functions, and max-pooling may come before the
    activation.

    Raises `NoStack` for anything else; see `raydpfl.models.linear_stack.stack`.
    """
    places = parameter_offsets(module)
    chain: list[Link] = []
    for link in reversed([_link(places, call) for call in reverse_calls(module)]):
        if isinstance(link, tuple):
            _attach(link, chain)
        elif isinstance(link, Pointwise) and _ends_in_activation(chain):
            raise NoStack("an activation follows another")  # in whose output it would write
        elif link is not None:
            chain.append(link)
    kinds = [type(link) for link in chain]
    if places or kinds.count(Flat) != 1:
        raise NoStack(CHAIN_MESSAGE)
    flat = kinds.index(Flat)
    has_both = kinds[0] is Convolution and Dense in kinds[flat + 1 :]
    other_kinds = set(kinds[:flat]) - {Convolution, Pointwise, Drop}
    if not has_both or other_kinds or set(kinds[flat + 1 :]) - {Dense, Pointwise, Drop}:
        raise NoStack(CHAIN_MESSAGE)
    # the first linear layer has its columns in the order of images with channels last
    dense_index = kinds.index(Dense)
    # what is between is by number, and draws its masks in the order of axes, which images have
    chain.insert(dense_index - 1, chain.pop(flat))
    dense = chain[dense_index]
    assert isinstance(dense, Dense)
    outputs, inputs = dense.weight.shape
    convolutions = [link for link in chain if isinstance(link, Convolution)]
    chain[0] = replace(convolutions[0], is_first=True)
    channels = convolutions[-1].weight.shape[0]
    if inputs % channels:
        raise NoStack("its first linear layer does not take the images")
    shape = (outputs, inputs // channels, channels)
    chain[dense_index] = replace(dense, weight=replace(dense.weight, shape=shape, axes=(0, 2, 1)))
    return tuple(chain)


def _ends_in_activation(chain: Sequence[Link]) -> bool:
    """Whether it does, a flattening aside, which is a view."""
    links = [link for link in chain if not isinstance(link, Flat)]
    return bool(links) and isinstance(links[-1], Pointwise)


def _attach(pool: Pool, chain: list[Link]) -> None:
    """Gives the pooling to the convolution before it, behind an activation or not."""
    place = len(chain) - (2 if chain and isinstance(chain[-1], Pointwise) else 1)
    previous_link = chain[place] if place >= 0 else None
    if not isinstance(previous_link, Convolution) or previous_link.pool is not None:
        raise NoStack("max-pooling that follows no convolution is not supported")
    chain[place] = replace(previous_link, pool=pool)


def _link(places: dict[int, int], call: nn.Module | Call) -> Link | Pool | None:
    """What a layer or a call is; None for what changes nothing."""
    if type(call) is nn.Conv2d:
        check_no_hooks(call)
        if isinstance(call.padding, str) or call.padding_mode != "zeros":
            raise NoStack("a convolution whose padding is not so many zeros is not supported")
        outputs, inputs, height, width = call.weight.shape
        place, bias_place = take_places(places, call.weight, call.bias)
        weight = Parameter(place, (outputs, height, width, inputs), (0, 3, 1, 2))
        bias = _bias(bias_place, outputs)
        return Convolution(weight, bias, call.stride, call.padding, call.dilation, call.groups)
    if type(call) is nn.MaxPool2d:
        check_no_hooks(call)
        return _pooling(vars(call))
    if type(call) is nn.Dropout and call.p > 0:
        check_no_hooks(call)
        return Drop(call.p)
    if isinstance(call, Call) and call.node.target is F.max_pool2d:
        bound_arguments = inspect.signature(F.max_pool2d_with_indices).bind(
            *call.node.args, **call.node.kwargs
        )
        bound_arguments.apply_defaults()
        return _pooling(bound_arguments.arguments)
    step = read_step(call)
    if step is None:
        idle = isinstance(call, nn.Module) and not isinstance(call, nn.Flatten)
        return None if idle else Flat()
    if isinstance(step, Activation):
        return Pointwise(step)
    matrix, vector = step
    place, bias_place = take_places(places, matrix, vector)
    return Dense(Parameter(place, tuple(matrix.shape), (0, 1)), _bias(bias_place, len(matrix)))


def _bias(place: int | None, outputs: int) -> Parameter | None:
    return None if place is None else Parameter(place, (outputs,), (0,))


def _pooling(arguments: Mapping[str, Any]) -> Pool:
    """From the arguments of `F.max_pool2d_with_indices` by name."""
    if arguments["return_indices"]:
        raise NoStack("max-pooling that gives its indices is not supported")
    kernel, stride, *other_arguments = (arguments[name] for name in POOLING)
    pairs = (
        [value, value] if isinstance(value, int) else list(value)
        for value in (kernel, stride or kernel, *other_arguments)
    )
    pool = (*pairs, arguments["ceil_mode"])
    *_, padding, dilation, _ = pool
    if any(pad and step > 1 for pad, step in zip(padding, dilation, strict=True)):
        raise NoStack("max-pooling with padding and dilation is not supported")
    return pool


class Convolutional(OneByOne):
    """See the module. Raises `NoStack` for a net that `links` does not know, and when it is to clip
    the samples of one that `clipping_refusal` refuses.
    """

    channels_last = True

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        self.links = links(module)
        has_pooling = any(isinstance(link, Convolution) and link.compiled for link in self.links)
        library = native.library_or_reason()
        if has_pooling and device.type == "cpu" and isinstance(library, str):
            raise NoStack(library)
        self.refusal = clipping_refusal(self.links)  # why samples are not clipped
        if device.type != "cpu":
            self.refusal = self.refusal or "compiled code is for the CPU"
        layers = [link for link in self.links if isinstance(link, WeightedLayer)]
        all_parameters = [part for layer in layers for part in (layer.weight, layer.bias) if part]
        self.parameters = sorted(all_parameters, key=lambda parameter: parameter.place)
        super().__init__(module, local, device, task)
        self._allocate([prod(parameter.shape) for parameter in self.parameters])

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [parameter.outside(flat) for parameter in self.parameters]

    def _client(
        self, parameters: torch.Tensor, chunk: ChunkData, slot: int
    ) -> tuple[torch.Tensor, float]:
        has_dropout = any(isinstance(link, Drop) for link in self.links)
        with self._seed_generators(chunk, slot) if has_dropout else nullcontext():
            return super()._client(parameters, chunk, slot)

    def _gradient(self, x: torch.Tensor, y: torch.Tensor, clip: float | None) -> torch.Tensor:
        if clip is not None and self.refusal:
            raise NoStack(self.refusal)
        return self._pass(x, y, clip, None)

    def _descend(self, x: torch.Tensor, y: torch.Tensor, descent: Descent) -> torch.Tensor:
        return self._pass(x, y, None, descent)

    @torch.no_grad()
    def _pass(
        self, x: torch.Tensor, y: torch.Tensor, clip: float | None, descent: Descent | None
    ) -> torch.Tensor:
        low = self.precision == "bfloat16" and clip is None
        dtype = torch.bfloat16 if low else torch.float32
        flat = self.flat.to(dtype)
        gradients = Gradients(self.flat, self.gradient, descent)
        a = x.to(dtype)
        passes = []
        for link in self.links:
            a, context = link.forward(a, flat)
            passes.append(context)
        loss, g = self._loss_gradient(a.float(), y)
        g = g.to(dtype) if clip is None else g * len(x)
        layers = []
        for link in reversed(self.links):
            context = passes.pop()
            by_input = link.backward(g, context, flat)
            if isinstance(link, Convolution | Dense):
                if clip is None:
                    link.total(g, context, None, gradients)
                else:
                    layers.append((link, g, context))
            g = by_input
        if clip is not None:
            norms = torch.stack([link.squares(g, context) for link, g, context in layers])
            self.factors.append(clip_factors(norms.sum(0).sqrt(), clip))
            for link, g, context in layers:
                link.total(g, context, self.factors[-1] / len(x), gradients)
        return loss

    def _loss_gradient(
        self, outputs: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss of a batch, and its gradient by the outputs."""
        if self.task.loss_form() == "softmax":
            log_p = torch.log_softmax(outputs, 1)
            classes = y[:, None]
            g = log_p.exp().sub_(torch.zeros_like(log_p).scatter_(1, classes, 1.0))
            return -log_p.gather(1, classes).mean(), g.div_(len(y))
        with torch.enable_grad():
            outputs.requires_grad_()
            loss = self.task.loss(outputs, y).mean()
            (g,) = torch.autograd.grad(loss, outputs)
        return loss.detach(), g
