"""Per-sample clipping of networks, from one forward and one backward pass of a batch.

A sample's gradient by a layer's parameters follows from the layer's inputs a [T, D] and the
gradient g [T, p] by its outputs alone; T is the number of positions, 1 for a plain linear layer. So
one `autograd.grad` by the outputs of all layers gives the squared norm of every sample's gradient,
layer by layer, and the sum of the clipped gradients is one product a layer, of the same a and the
scaled g:

| layer                | a sample's gradient               | its squared norm                      |
|----------------------|-----------------------------------|---------------------------------------|
| Linear               | g^T a; sum_t g                    | T = 1: (|a|^2 + 1) |g|^2; else formed |
|                      |                                   | or ghost                              |
| convolution          | g^T a, a its patches; sum_t g     | formed or ghost                       |
| GroupNorm, LayerNorm | sums of g and of g times the      | formed                                |
|                      | normalised inputs                 |                                       |
| any other            | vmap of the layer's own backward  | formed                                |

formed: the gradients themselves, of a convolution by one with a group for every sample. ghost: the
sum over t, u of (a a^T)_tu (g g^T)_tu.

The ghost norm (Goodfellow 2015; Bu, Mao and Xu 2022) takes T^2 (D + p) products where forming
(Rochette, Manoel and Tramel 2019) takes D p numbers to be stored and read again; `GHOST` products
cost as much as one number. Where the positions' contributions cancel, rounding could make a ghost
norm too small, and the sample pass for shorter than it is. So `SLACK` of (sum_t |a_t| |g_t|)^2 is
added to its square.

>>> from raydpfl.methods.local.base import Local
>>> from raydpfl.models.tasks import Classification
>>> net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
>>> Layerwise(net, Local(), torch.device("cpu"), Classification())
Traceback (most recent call last):
raydpfl.training.backends.ghost_clipping.NotLayerwise: BatchNorm1d mixes the samples of a batch
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from raydpfl import models
from raydpfl.methods.local.base import Local
from raydpfl.models.tasks import Task
from raydpfl.training.backends.base import (
    BFLOAT16,
    UNCLIPPED,
    UNDERFLOW_SQUARE,
    clip_factors,
)
from raydpfl.training.backends.loop import Loop

GHOST = 32
# numbers in a patch: up to so many, a product of patches takes less than a convolution of as many
# groups as samples
SMALL_FILTER = 32
SLACK = 2.0**-22  # four roundings of float32
# bytes that one pass should keep at most, about; a batch that needs more is cut into several
LIMIT = 1 << 29

Term = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]
"""Of one parameter: the squared norm of each sample's gradient [B], and a function from factors [B]
to the sum of the gradients weighted by them."""


class NotLayerwise(Exception):
    """The trained parameters do not all sit in layers that are called once; says why."""


@dataclass
class _Leaf:
    """A layer with parameters, and what a forward pass leaves of it."""

    layer: nn.Module
    # of its trainable parameters: the name, and which of the module's it is
    places: list[tuple[str, int]]
    inputs: tuple[torch.Tensor, ...] = ()
    versions: list[int] = field(default_factory=list)
    output: tuple[int, ...] = ()  # its shape
    edge: GradientEdge | None = None

    @property
    def kind(self) -> str:
        return type(self.layer).__name__

    def hook(
        self, layer: nn.Module, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any], output: Any
    ) -> None:
        """A forward hook."""
        if self.inputs:
            raise NotLayerwise(f"{self.kind} is called more than once")
        tensors = (*inputs, output)
        if keyword_inputs or not all(isinstance(t, torch.Tensor) and t.dim() for t in tensors):
            raise NotLayerwise(f"{self.kind} takes or gives more than tensors")
        if len({len(tensor) for tensor in tensors}) > 1:
            raise NotLayerwise(f"the first axis of {self.kind}'s inputs is not that of its output")
        self.inputs = inputs
        self.versions = [tensor._version for tensor in inputs]
        self.output = output.shape
        # now: the output may be changed in place later
        self.edge = get_gradient_edge(output) if output.requires_grad else None

    def backward_edge(self) -> GradientEdge:
        """Where the gradient by the output is. Raises `NotLayerwise` if it has none."""
        if self.edge is None:
            raise NotLayerwise(f"no gradient reaches the output of {self.kind}")
        return self.edge

    def terms(self, g: torch.Tensor) -> Iterator[tuple[int, Term]]:
        """(which parameter, its term), from the gradient by the outputs."""
        if [tensor._version for tensor in self.inputs] != self.versions:
            raise NotLayerwise(f"the input of {self.kind} is changed in place after it")
        for name, place in self.places:
            yield place, RULES.get(type(self.layer), _vmap)(self.layer, name, self.inputs, g)


def _uses_ghost_norm(layer: nn.Module, name: str, output: tuple[int, ...]) -> bool:
    """Whether the ghost norm by this parameter is possible, and cheaper than gradients."""
    if (
        name != "weight"
        or type(layer) not in (nn.Linear, nn.Conv2d)
        or getattr(layer, "groups", 1) > 1
    ):
        return False
    weight = layer.get_parameter("weight")
    outputs = len(weight)
    inputs = weight[0].numel()
    positions = prod(output[1:]) // outputs
    return positions**2 * (inputs + outputs) < GHOST * inputs * outputs


def _gradient_term(gradients: torch.Tensor) -> Term:
    flat = gradients.flatten(1)
    return flat.square().sum(1), lambda s: (s @ flat).view(gradients.shape[1:])


def _ghost_squares(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """[B], from a [B, T, D] and g [B, T, p]."""
    if a.shape[1] == 1:
        inputs, outputs = (  # norms, so that underflow makes neither too small
            part.square().sum(2).sqrt() + sqrt(part.shape[2] * UNDERFLOW_SQUARE) for part in (a, g)
        )
        return (inputs * outputs).square().sum(1)
    # in float64, as a float32 product adds up numbers one after another
    inputs, outputs = (torch.bmm(part, part.mT) for part in (a.double(), g.double()))
    products = inputs * outputs
    norms = products.diagonal(dim1=1, dim2=2).sqrt().sum(1)
    return (products.sum((1, 2)) + norms.square() * SLACK).float()


def _scale(g: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return g * s.view(-1, *[1] * (g.dim() - 1))


def _linear(layer: nn.Linear, name: str, inputs: tuple[torch.Tensor, ...], g: torch.Tensor) -> Term:
    ghost = _uses_ghost_norm(layer, name, g.shape)
    a, g = (part.reshape(len(g), -1, part.shape[-1]) for part in (*inputs, g))
    if name == "bias":
        return _gradient_term(g.sum(1))
    if ghost:
        return _ghost_squares(a, g), lambda s: _scale(g, s).flatten(0, 1).T @ a.flatten(0, 1)
    return _gradient_term(torch.bmm(g.mT, a))


def _weight_gradient(
    layer: _ConvNd, padding: tuple[int, ...], x: torch.Tensor, g: torch.Tensor, times: int
) -> torch.Tensor:
    """The gradient by a weight that is `times` as many channels and groups as the layer's."""
    weight = x.new_empty(times * layer.weight.shape[0], *layer.weight.shape[1:])
    strides = (layer.stride, padding, layer.dilation)
    geometry = (*strides, layer.transposed, layer.output_padding, times * layer.groups)
    output_mask = (False, True, False)
    return torch.ops.aten.convolution_backward(g, x, weight, None, *geometry, output_mask)[1]


def _convolution(
    layer: _ConvNd, name: str, inputs: tuple[torch.Tensor, ...], g: torch.Tensor
) -> Term:
    if name == "bias":
        return _gradient_term(g.sum(tuple(range(2, g.dim()))))
    (x,) = inputs
    shape = layer.weight.shape
    padding: str | tuple[int, ...] = layer.padding
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        padding = (0,) * len(layer.kernel_size)

    backward = functools.partial(_weight_gradient, layer, padding)
    if _uses_ghost_norm(layer, name, g.shape):
        patches = _patches(layer, x, padding, g.shape[2:])
        return _ghost_squares(patches.mT, g.flatten(2).mT), lambda s: backward(x, _scale(g, s), 1)
    if type(layer) is nn.Conv2d and layer.groups == 1 and layer.weight[0].numel() <= SMALL_FILTER:
        patches = _patches(layer, x, padding, g.shape[2:])
        return _gradient_term(torch.bmm(patches, g.flatten(2).mT).mT.reshape(len(g), *shape))
    # every sample in channels of its own
    inputs_by_sample = x.reshape(1, -1, *x.shape[2:])
    outputs_by_sample = g.reshape(1, -1, *g.shape[2:])
    gradients = backward(inputs_by_sample, outputs_by_sample, len(g))
    return _gradient_term(gradients.reshape(len(g), *shape))


def _patches(
    layer: _ConvNd, x: torch.Tensor, padding: tuple[int, ...], size: torch.Size
) -> torch.Tensor:
    """The patches [B, D, T] of a `Conv2d` as `F.unfold` gives them, many times faster."""
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    sample, channel, *place = x.stride()
    strides = [
        times * stride
        for factors in (layer.dilation, layer.stride)
        for times, stride in zip(factors, place, strict=True)
    ]
    return x.as_strided(
        (*x.shape[:2], *layer.kernel_size, *size), (sample, channel, *strides)
    ).reshape(len(x), -1, size.numel())


def _norm(
    layer: nn.GroupNorm | nn.LayerNorm, name: str, inputs: tuple[torch.Tensor, ...], g: torch.Tensor
) -> Term:
    (x,) = inputs
    shape: tuple[int, ...]
    if isinstance(layer, nn.GroupNorm):
        normal = functools.partial(F.group_norm, x, layer.num_groups, eps=layer.eps)
        shape = (layer.num_channels, -1)
        axis = 2
    else:
        normal = functools.partial(F.layer_norm, x, layer.normalized_shape, eps=layer.eps)
        shape = (-1, *layer.normalized_shape)
        axis = 1
    return _gradient_term((g if name == "bias" else g * normal()).reshape(len(g), *shape).sum(axis))


def _vmap(layer: nn.Module, name: str, inputs: tuple[torch.Tensor, ...], g: torch.Tensor) -> Term:
    def gradient(g: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        def output(parameter: torch.Tensor) -> torch.Tensor:
            return functional_call(layer, {name: parameter}, tuple(value[None] for value in inputs))

        return vjp(output, layer.get_parameter(name).detach())[1](g[None])[0]

    return _gradient_term(vmap(gradient)(g, *inputs))


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
RULES: dict[type[nn.Module], Callable[[Any, str, tuple[torch.Tensor, ...], torch.Tensor], Term]] = {
    nn.Linear: _linear,
    **dict.fromkeys((*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS), _convolution),
    **dict.fromkeys((nn.GroupNorm, nn.LayerNorm), _norm),
}


def _places(layer: nn.Module, places: dict[int, int]) -> list[tuple[str, int]]:
    """(name, place) of the layer's trainable parameters, taken out of `places`, which has the place
    of every parameter by its id. Raises `NotLayerwise`.
    """
    kind = type(layer).__name__
    if isinstance(layer, _BatchNorm) and not models.has_frozen_buffer(layer):
        raise NotLayerwise(f"{kind} mixes the samples of a batch")
    pairs = []
    for name, parameter in layer.named_parameters(recurse=False):
        if not parameter.requires_grad:
            continue
        if id(parameter) not in places:
            raise NotLayerwise(f"a parameter of {kind} is tied to another layer's")
        pairs.append((name, places.pop(id(parameter))))
    if pairs and len(list(layer.parameters())) > len(list(layer.parameters(recurse=False))):
        raise NotLayerwise(f"{kind} has parameters outside of its layers")
    return pairs


class Layerwise(Loop):
    """Trains as `Loop` does, with every sample's gradient clipped. Raises `NotLayerwise` for
    BatchNorm, and for parameters outside of layers that are called once in a pass and take and give
    samples along the first axis.
    """

    capabilities = Loop.capabilities - {UNCLIPPED, BFLOAT16}
    whole_batches = True
    crops = False  # a layer's own weight is what its inputs and gradients fit
    samples: int  # of a pass

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        super().__init__(module, local, device, task)
        places = {id(parameter): place for place, parameter in enumerate(self.trainable)}
        layer_places = [(layer, _places(layer, places)) for layer in self.module.modules()]
        self.leaves = [_Leaf(layer, parameters) for layer, parameters in layer_places if parameters]

    def _prepare(self, x: torch.Tensor) -> None:
        super()._prepare(x)
        with torch.no_grad():
            self._forward(x.new_zeros(1, *x.shape[2:]))
        numbers = 0
        for leaf in self.leaves:  # activations count twice, for what lies between the layers
            numbers += 2 * sum(tensor.numel() for tensor in leaf.inputs) + 2 * prod(leaf.output)
            numbers += sum(
                prod(self.shapes[place])
                for name, place in leaf.places
                if not _uses_ghost_norm(leaf.layer, name, leaf.output)
            )
        self.samples = max(1, LIMIT // (4 * numbers))

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as hooks:
            for leaf in self.leaves:
                leaf.inputs = ()
                hooks.callback(leaf.layer.register_forward_hook(leaf.hook, with_kwargs=True).remove)
            outputs = self.module(x)
        for leaf in self.leaves:
            if not leaf.inputs:
                raise NotLayerwise(f"{leaf.kind} is not called")
            if len(leaf.inputs[0]) != len(x):
                axis = f"the first axis of {leaf.kind}'s input"
                raise NotLayerwise(f"{axis} is not that of the samples")
        return outputs

    def _gradient(self, x: torch.Tensor, y: torch.Tensor, clip: float | None) -> torch.Tensor:
        assert clip is not None
        self.gradient.zero_()
        losses = torch.zeros((), device=self.device)
        sums = self._views(self.gradient)
        for rows, labels in zip(x.split(self.samples), y.split(self.samples), strict=True):
            loss = self.task.loss(self._forward(rows), labels).sum()
            losses += loss.detach()
            edges = [leaf.backward_edge() for leaf in self.leaves]
            gradients = torch.autograd.grad(loss, edges, allow_unused=True)
            with torch.no_grad():
                terms = [
                    term
                    for leaf, g in zip(self.leaves, gradients, strict=True)
                    if g is not None
                    for term in leaf.terms(g)
                ]
                norms = torch.stack([squares for _, (squares, _) in terms]).sum(0).sqrt()
                self.factors.append(clip_factors(norms, clip))
                s = self.factors[-1] / len(x)
                for place, (_, total) in terms:
                    sums[place].add_(total(s))
        return losses / len(x)
