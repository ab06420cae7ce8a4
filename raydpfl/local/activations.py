"""GELU by tanh, as GPT-2 and its like have it, in one pass over memory.

torch takes three to four times as long for it, and a module of other libraries may write it out in
ten operations. What the compiled code (`raydpfl.native.gelu`) does not take is torch's: what is no
float32 in the CPU's memory, and the inside of torch.func.

>>> x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
>>> torch.allclose(gelu(x), F.gelu(x, approximate="tanh"))
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from raydpfl import native

# the classes of other libraries that are GELU by tanh
NAMES = {"NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation", "GELUTanh"}


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh, elementwise."""
    here = x.device.type == "cpu" and x.dtype == torch.float32
    if not here or torch._C._are_functorch_transforms_active():
        return F.gelu(x, approximate="tanh")
    return _Gelu.apply(x)


def faster(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What computes the same as `layer`, an activation, in less time; None: nothing here."""
    tanh = type(layer) is nn.GELU and layer.approximate == "tanh"
    return gelu if tanh or type(layer).__name__ in NAMES else None


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        slope = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        native.gelu(_numbers(x), _numbers(y), None if slope is None else _numbers(slope))
        if slope is not None:
            ctx.save_for_backward(slope)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (slope,) = ctx.saved_tensors
        return g * slope


def _numbers(x: torch.Tensor) -> np.ndarray:
    """Those of a tensor, where they lie, [n]."""
    return x.detach().view(-1).numpy()
