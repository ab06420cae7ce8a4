"""Finds the stack of linear layers that a module is, if it is one.

>>> layers = nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10, bias=False)
>>> first, second = stack(nn.Sequential(*layers))
>>> first.inputs, first.outputs, first.weight, first.bias, first.activation.name
(784, 200, 0, 156800, 'relu')
>>> second.inputs, second.outputs, second.weight, second.bias, second.activation
(200, 10, 157000, None, None)
>>> stack(nn.Sequential(nn.Linear(784, 200), nn.Dropout(0.5), nn.Linear(200, 10)))
Traceback (most recent call last):
raydpfl.models.linear_stack.NoStack: Dropout is not supported
"""

import operator
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from raydpfl.errors import USER_EXCEPTIONS

aten = torch.ops.aten

_TRACING = threading.Lock()  # a trace patches nn.Module for the whole process


class NoStack(Exception):
    """The module is no stack of linear layers; says why."""


@dataclass(frozen=True)
class Activation:
    """`forward` works in place; `kernel(g, a, *settings)`, an operator of torch's, is the gradient
    by the input from that by the output, g, and the output itself, a.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    kernel: Any
    settings: tuple[Any, ...] = ()

    def backward(self, g: Tensor, a: Tensor) -> Tensor:
        """The gradient by the input, from `g` by the output and the output `a`."""
        return self.kernel.default(g, a, *self.settings)

    def backward_(self, g: Tensor, a: Tensor) -> Tensor:
        """As `backward`, in place of `g`."""
        return self.kernel.grad_input(g, a, *self.settings, grad_input=g)


@dataclass(frozen=True)
class Layer:
    """activation(W a + b); `weight` and `bias` are the places of W and b in the flat parameters."""

    inputs: int
    outputs: int
    weight: int
    bias: int | None
    activation: Activation | None = None

    def views(self, flat: Tensor) -> list[Tensor]:
        """W [..., out, in] and b [..., 1, out], if there is one, within `flat` [..., d]."""
        flat_weight = flat[..., self.weight : self.weight + self.inputs * self.outputs]
        weight = flat_weight.view(*flat.shape[:-1], self.outputs, self.inputs)
        if self.bias is None:
            return [weight]
        return [weight, flat[..., None, self.bias : self.bias + self.outputs]]


RELU = Activation("relu", torch.relu_, aten.threshold_backward, (0,))
TANH = Activation("tanh", torch.tanh_, aten.tanh_backward)
SIGMOID = Activation("sigmoid", torch.sigmoid_, aten.sigmoid_backward)


def _leaky_relu(slope: float) -> Activation:
    if slope <= 0:
        raise NoStack(
            f"the output of a leaky ReLU of slope {slope:g} does not tell the sign of its input"
        )
    forward = partial(F.leaky_relu_, negative_slope=slope)
    return Activation("leaky_relu", forward, aten.leaky_relu_backward, (slope, True))


ACTIVATIONS: dict[Any, Activation] = {
    nn.ReLU: RELU, torch.relu: RELU, F.relu: RELU, "relu": RELU,
    nn.Tanh: TANH, torch.tanh: TANH, F.tanh: TANH, "tanh": TANH,
    nn.Sigmoid: SIGMOID, torch.sigmoid: SIGMOID, F.sigmoid: SIGMOID, "sigmoid": SIGMOID,
}  # fmt: skip


Step = Activation | tuple[Tensor, Tensor | None] | None


def stack(module: nn.Module) -> tuple[Layer, ...]:
    """The layers of a chain [flatten] (Linear [activation])*, in modules or in functions.

    Raises `NoStack` for anything else: a layer used twice, tied to another, frozen or with hooks,
    an active Dropout, a branch, control flow that torch.fx cannot follow. A `view` is taken for a
    flatten; whether it is one shows when the backend is checked.
    """
    places = parameter_offsets(module)
    layers: list[Layer] = []
    activation = None
    for call in reverse_calls(module):
        step = read_step(call)
        if isinstance(step, Activation):
            if activation:
                raise NoStack(f"{activation.name} follows {step.name}")
            activation = step
        elif step is not None:
            weight, bias = step
            offsets = take_places(places, weight, bias)
            layers.append(Layer(weight.shape[1], weight.shape[0], *offsets, activation))
            activation = None
    if not layers or activation or places:
        raise NoStack("it is more than linear layers and activations after them")
    return tuple(reversed(layers))


@dataclass(frozen=True)
class Call:
    """A function or method in the traced code of a module."""

    root: nn.Module  # by whose attributes the node names parameters
    node: fx.Node


def reverse_calls(module: nn.Module) -> Iterator[nn.Module | Call]:
    """The layers and calls from the module's output back to its input, each taking what the next
    one gives. Raises `NoStack` where they do not lead there.
    """
    root = nn.Sequential(module)  # wrapped, so that a lone Linear is seen as a layer
    try:
        with _TRACING:
            graph = fx.Tracer().trace(root)
    except USER_EXCEPTIONS as error:  # whatever the module's own code does when it runs on proxies
        raise NoStack(f"torch.fx cannot follow it ({type(error).__name__})") from None
    node = next(node for node in graph.nodes if node.op == "output").args[0]
    while isinstance(node, fx.Node) and node.op != "placeholder":
        layer = node.op == "call_module"
        yield root.get_submodule(str(node.target)) if layer else Call(root, node)
        node = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(node, fx.Node):
        raise NoStack("it is more than layers one after another")


def parameter_offsets(module: nn.Module) -> dict[int, int]:
    """Where each trainable parameter, by its id, begins in the flat vector."""
    places = {}
    place = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            places[id(parameter)] = place
            place += parameter.numel()
    return places


def take_places(
    places: dict[int, int], weight: Tensor, bias: Tensor | None
) -> tuple[int, int | None]:
    """The places of a layer's weight and bias, taken out of `places`. Raises `NoStack`."""
    if id(weight) not in places or (bias is not None and id(bias) not in places):
        raise NoStack("a layer is used twice, tied to another or frozen")
    return places.pop(id(weight)), None if bias is None else places.pop(id(bias))


def read_step(call: nn.Module | Call) -> Step:
    """The activation, the (weight, bias) of the linear layer, or None for what changes nothing but
    the shape.
    """
    if isinstance(call, nn.Module):
        return _module_step(call)
    node = call.node
    arguments = node.args[1:]
    if node.op in ("call_function", "call_method") and node.target in ACTIVATIONS:
        return ACTIVATIONS[node.target]
    if node.target is F.leaky_relu:
        slope = arguments[0] if arguments else node.kwargs.get("negative_slope", 0.01)
        if not isinstance(slope, (int, float)):
            raise NoStack("a leaky ReLU whose slope is computed is not supported")
        return _leaky_relu(slope)
    if node.target is F.linear:
        return _linear_parameters(call)
    if node.target in (torch.flatten, "flatten"):
        if arguments == (1,) or node.kwargs.get("start_dim") == 1:
            return None
    elif node.target in ("view", "reshape"):
        shape = arguments[0] if isinstance(arguments[0], tuple) else arguments
        if len(shape) == 2:
            return None
    raise NoStack(f"{getattr(node.target, '__name__', node.target)} is not supported")


def _module_step(module: nn.Module) -> Step:
    """What a module within the stack is; see `read_step`."""
    check_no_hooks(module)
    if type(module) is nn.Linear:
        return module.weight, module.bias
    if type(module) in ACTIVATIONS:
        return ACTIVATIONS[type(module)]
    if type(module) is nn.LeakyReLU:
        return _leaky_relu(module.negative_slope)
    flat = isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1)
    idle = isinstance(module, nn.Dropout) and module.p == 0
    if flat or idle or isinstance(module, nn.Identity):
        return None
    raise NoStack(f"{type(module).__name__} is not supported")


def check_no_hooks(module: nn.Module) -> None:
    """Raises `NoStack` for a layer with hooks."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name) for name in names):
        raise NoStack(f"{type(module).__name__} with hooks is not supported")


def _linear_parameters(call: Call) -> tuple[Tensor, Tensor | None]:
    """The (weight, bias) of a call of `torch.nn.functional.linear`."""
    node = call.node
    keyword_nodes = [node.kwargs[name] for name in ("weight", "bias") if name in node.kwargs]
    weight, *bias = (_attribute(call.root, source) for source in (*node.args[1:], *keyword_nodes))
    if weight is None:
        raise NoStack("a linear layer without weight is not supported")
    return weight, bias[0] if bias else None


def _attribute(root: nn.Module, source: object) -> Tensor | None:
    """The parameter or buffer that an argument is; None for None."""
    if source is None:
        return None
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        raise NoStack("a linear layer whose weight or bias is computed is not supported")
    return operator.attrgetter(str(source.target))(root)
