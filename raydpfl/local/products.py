"""Large matrix products by oneDNN, where torch would take them to MKL and that is slower.

MKL keeps processors of other makers than Intel from their AVX-512 units; oneDNN, which torch builds
in for its convolutions, does not. On such a processor the CNN of `experiments/benchmarks/engine.py
--only cnn` went from 1.5 to 1.7 times the plain loop. On Intel's, MKL is the faster of the two, and
adds a product to what is there, which this operator does not. torch reaches oneDNN's product of
float32 matrices by one operator alone, which its compiler uses and which has no public name; where
it is missing, on Intel's processors, and below `CALL_COST`, the products are torch's. `library` is
a part of what a run's bits depend on (`raydpfl.origin`).

>>> layer = nn.Linear(1568, 512)
>>> x = torch.ones(128, 1568)
>>> torch.allclose(linear(layer, x), layer(x), atol=1e-4)
True
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from raydpfl import hardware

# multiplications: up to so many, what calling the operator costs is not won back
CALL_COST = 1 << 22
TALL_COST = 1 << 20  # of many rows by few outputs, at which MKL is slow


_overloads = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if torch.backends.mkldnn.is_available()
    else None
)
OPERATOR = None if _overloads is None else _overloads.default
_dnnl = None if hardware.maker() == "GenuineIntel" else OPERATOR
library = "torch" if _dnnl is None else "oneDNN"


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b for matrices [m, k] and [k, n], however they lie in memory."""
    if _dnnl is None or not _pays(a, b.shape[1]):
        return a @ b
    return _dnnl(a, b.T, None, "none", [], "")


def add_product_(
    to: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float
) -> None:
    """to <- beta to + alpha a @ b, for float32 `to` and matrices float32 or bfloat16; with beta 0
    whatever `to` holds.
    """
    if a.dtype == to.dtype and not _pays(a, b.shape[1]):
        to.addmm_(a, b, beta=beta, alpha=alpha)
    elif beta:
        (to if beta == 1 else to.mul_(beta)).add_(product(a, b), alpha=alpha)
    else:
        torch.mul(product(a, b), alpha, out=to)


def affine(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """rows W^T + b, float32 [m, outputs], for many rows [m, inputs], W [outputs, inputs] and b
    [outputs]; no gradient goes back.
    """
    if _dnnl is None or not _pays(rows, len(weight), TALL_COST):
        return F.linear(rows, weight, bias)
    return _dnnl(rows, weight, bias, "none", [], "")


def linear(layer: nn.Linear, rows: torch.Tensor, inputs_only: bool = False) -> torch.Tensor:
    """What the layer gives for `rows`, as `nn.Linear.forward` does; with `inputs_only` no gradient
    goes back to its weight and bias.
    """
    # what _Linear does not know of
    plain = torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cpu")
    if plain or not _pays(rows, layer.out_features):
        return F.linear(rows, layer.weight, layer.bias)
    flat = rows.reshape(-1, rows.shape[-1])
    outputs = _Linear.apply(flat, layer.weight, layer.bias, inputs_only)
    return outputs.view(*rows.shape[:-1], -1)


def _forward(
    layer: nn.Linear, inputs_only: bool, *rows: torch.Tensor, **named: torch.Tensor
) -> torch.Tensor:
    """As `nn.Linear.forward`, whose argument may be given by its name, input."""
    (x,) = rows or (named["input"],)
    return linear(layer, x, inputs_only=inputs_only)


def speed_up(module: nn.Module, inputs_only: bool = False) -> None:
    """Has the layers of `module` that are `nn.Linear`, of no class derived from it, take their
    products here. Changes the module.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.forward = partial(_forward, layer, inputs_only)  # type: ignore[method-assign]


def _pays(a: torch.Tensor, outputs: int, cost: int = CALL_COST) -> bool:
    return (
        _dnnl is not None
        and a.device.type == "cpu"
        and a.dtype == torch.float32
        and a.numel() * outputs > cost
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        inputs_only: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.inputs_only = inputs_only
        assert _dnnl is not None  # see `_pays`
        return _dnnl(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_x, by_weight, by_bias, _ = ctx.needs_input_grad
        # a gradient of this gradient: oneDNN's operator has none
        multiply = torch.matmul if torch.is_grad_enabled() else product
        by_x = multiply(g, weight) if by_x else None
        if ctx.inputs_only:
            return by_x, None, None, None
        return by_x, multiply(g.T, x) if by_weight else None, g.sum(0) if by_bias else None, None
