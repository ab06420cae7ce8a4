"""A frozen linear layer with every client's adapter, in as few passes over memory as there are.

y = x W + b + scale (x A^T) B^T, and its gradients by x, A and B. Autograd keeps the two terms
separate, writes both and adds them; here the second is added to the first in place, forward and
back.

>>> layer = nn.Linear(4, 3).requires_grad_(False)
>>> x, a, b = torch.ones(2, 5, 4), torch.ones(2, 1, 4), torch.ones(2, 3, 1)
>>> outputs = adapted(layer, layer.weight.T, 0.5, x, a, b)
>>> torch.allclose(outputs, layer(x) + 2)
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn  # noqa: F401  (the example above)

Plain = Callable[[torch.Tensor], torch.Tensor]


def adapted(
    plain: Plain,
    weight: torch.Tensor,
    scale: float,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
) -> torch.Tensor:
    """What the layers of C clients give for their inputs.

    Args:
        plain: the frozen layer, whose output is written to.
        weight: its W, [in, out].
        scale: of what an adapter adds.
        x: the inputs, [n, ..., in]: those of the first client, of the second, and so on.
        a: the adapters' A, [C, rank, in].
        b: their B, [C, out, rank].
    """
    if torch.is_autocast_enabled(x.device.type):  # which does not reach into a backward
        low = torch.bmm(x.reshape(len(a), -1, x.shape[-1]), a.mT)
        outputs = plain(x)
        return outputs + torch.bmm(scale * low, b.mT).view(outputs.shape)
    return _Adapted.apply(plain, weight, scale, x, a, b)


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plain: Plain,
        weight: torch.Tensor,
        scale: float,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> torch.Tensor:
        rows = x.reshape(len(a), -1, x.shape[-1])
        outputs = plain(x)
        low = torch.bmm(rows, a.mT).mul_(scale)
        outputs.view(*rows.shape[:2], -1).baddbmm_(low, b.mT)
        ctx.save_for_backward(rows, weight, low, a, b)
        ctx.scale = scale
        ctx.shape = x.shape
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        rows, weight, low, a, b = ctx.saved_tensors
        flat = g.reshape(-1, g.shape[-1])
        by_client = flat.view(*rows.shape[:2], -1)
        back = torch.bmm(by_client, b).mul_(ctx.scale)  # the gradient by x A^T
        by_x = None
        if ctx.needs_input_grad[3]:
            by_x = flat @ weight.T
            by_x.view(rows.shape).baddbmm_(back, a)
            by_x = by_x.view(ctx.shape)
        return None, None, None, by_x, torch.bmm(back.mT, rows), torch.bmm(by_client.mT, low)
