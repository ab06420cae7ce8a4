"""A whole lane by torch.func: vmap over clients of the gradient of one client's loss.

It pays for small modules that are no stack of linear layers, and loses to the loop on convolutions and recurrent layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from raydpfl.local.sgd import Sgd
from raydpfl.local.way import LaneData, take


class Vmap:
    """Trains the lane at once, each parameter [C, *its shape]. A module that draws random numbers raises RuntimeError when it is run."""

    def __init__(self, module: nn.Module, local: Sgd, device: torch.device):
        self.local = local
        self.module = copy.deepcopy(module).to(device).train()
        self.names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        self.shapes = [self.module.get_parameter(name).shape for name in self.names]
        self._gradients = vmap(grad_and_value(self._loss), randomness="error")

    def _loss(self, parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(self.module, parameters, (x,)), y, reduction="none") @ weights

    def run(self, parameters: torch.Tensor, lane: LaneData) -> Iterator[tuple[int, torch.Tensor, float]]:
        """See `raydpfl.local.way.Way`."""
        clients = len(lane.sizes)
        x, y = lane.rows()
        starts = [part.view(shape) for part, shape in zip(parameters.split([shape.numel() for shape in self.shapes]), self.shapes, strict=True)]
        now = [start.expand(clients, *start.shape).clone() for start in starts]
        velocity = [torch.zeros_like(part) for part in now] if self.local.momentum else []
        losses = x.new_zeros(clients)
        for rows, shares in lane.batches():
            named = dict(zip(self.names, now, strict=True))
            gradients, loss = self._gradients(named, take(x, rows), take(y, rows), shares[:, 0])
            losses += loss
            direction = list(gradients.values())
            if self.local.weight_decay:
                torch._foreach_add_(direction, now, alpha=self.local.weight_decay)
            if velocity:
                torch._foreach_mul_(velocity, self.local.momentum)
                torch._foreach_add_(velocity, direction)
                direction = velocity
            torch._foreach_add_(now, direction, alpha=-lane.lr)
        for slot, loss in zip(lane.slots, (losses[list(lane.slots)] / lane.index.shape[1]).tolist(), strict=True):
            yield slot, torch.cat([(part[slot] - start).flatten() for part, start in zip(now, starts, strict=True)]), loss
