"""A whole lane by torch.func: vmap over clients of the gradient of one client's loss.

It pays for small modules that are no stack of linear layers, and loses to the loop on convolutions
and recurrent layers. Where each sample's gradient is to be clipped, it is vmap over clients of vmap
over samples, of as many at a time as `LIMIT` allows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.conv import _ConvNd

from raydpfl.local.sgd import Sgd
from raydpfl.local.way import Block, LaneData, clip_factors, sample_loss, take

LIMIT = 1 << 28  # bytes of samples' gradients at a time


class Vmap:
    """Trains the lane at once, each parameter [C, *its shape]. A module that draws random numbers
    raises RuntimeError when it is run.
    """

    private = None
    corrects = True
    one_by_one = False

    def __init__(self, module: nn.Module, local: Sgd, device: torch.device):
        self.local = local
        self.module = copy.deepcopy(module).to(device).train()
        self.names = [
            name for name, parameter in self.module.named_parameters() if parameter.requires_grad
        ]
        self.shapes = [self.module.get_parameter(name).shape for name in self.names]
        self.convolves = any(
            isinstance(layer, (_ConvNd, nn.RNNBase)) for layer in self.module.modules()
        )
        self._gradients = vmap(grad_and_value(self._loss), randomness="error")
        self._each = vmap(
            grad_and_value(self._loss), in_dims=(None, 0, 0, None), randomness="error"
        )

    def _loss(
        self,
        parameters: dict[str, torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        return (
            sample_loss(functional_call(self.module, parameters, (x,)), y, reduction="none")
            @ weights
        )

    def _clipped(
        self,
        parameters: dict[str, torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        shares: torch.Tensor,
        clip: float,
    ) -> Any:
        """Of one client, what `_gradients` gives: the sum of its samples' clipped gradients, and
        that of their losses, by their shares.

        And the factors that they were clipped by, float32 [B].
        """
        total = {name: torch.zeros_like(part) for name, part in parameters.items()}
        loss = 0.0
        found = []
        samples = max(1, LIMIT // (4 * sum(shape.numel() for shape in self.shapes)))
        for some, labels, share in zip(
            x.split(samples), y.split(samples), shares.split(samples), strict=True
        ):
            gradients, losses = self._each(
                parameters, some[:, None], labels[:, None], torch.ones_like(share[:1])
            )
            squares = [each.flatten(1).square().sum(1) for each in gradients.values()]
            found.append(clip_factors(torch.stack(squares).sum(0).sqrt(), clip))
            factors = found[-1] * share
            total = {
                name: total[name] + torch.tensordot(factors, each, 1)
                for name, each in gradients.items()
            }
            loss = loss + losses @ share
        return total, loss, torch.cat(found)

    def numbers(self, rows: int, features: int, batch: int, clip: bool) -> int | None:
        """See `raydpfl.local.way.Way`. The bits of a convolution may depend on the number of
        clients.
        """
        if self.convolves:
            return None
        d = sum(shape.numel() for shape in self.shapes)
        return rows * features + (4 + batch * clip) * d

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of `flat` [..., d], as [..., *its shape]."""
        parts = flat.split([shape.numel() for shape in self.shapes], dim=-1)
        return [
            part.reshape(part.shape[:-1] + shape)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def run(self, parameters: torch.Tensor, lane: LaneData) -> Iterator[Block]:
        """See `raydpfl.local.way.Way`."""
        clients = len(lane.sizes)
        batches = lane.batches()
        x, y = lane.rows(picked=batches[0][0] is not None)
        starts = self._parts(parameters)
        corrections = (
            []
            if lane.corrections is None
            else [part.contiguous() for part in self._parts(lane.corrections)]
        )
        now = [start.expand(clients, *start.shape).clone() for start in starts]
        velocity = [torch.zeros_like(part) for part in now] if self.local.momentum else []
        losses = x.new_zeros(clients)
        factors = []
        gradients_of = self._gradients
        if lane.clip is not None:
            numbers = lane.index.shape[2] * len(parameters)
            gradients_of = vmap(
                partial(self._clipped, clip=lane.clip),
                randomness="error",
                chunk_size=max(1, LIMIT // (4 * numbers)),
            )
        for step, (rows, shares) in enumerate(batches):
            named = dict(zip(self.names, now, strict=True))
            gradients, loss, *found = gradients_of(
                named, take(x, rows), take(y, rows), shares[:, 0]
            )
            factors += found
            losses += loss
            direction = list(gradients.values())
            if lane.noise is not None:
                torch._foreach_add_(direction, self._parts(lane.step_noise(step)))
            if self.local.weight_decay:
                torch._foreach_add_(direction, now, alpha=self.local.weight_decay)
            if self.local.proximal:
                torch._foreach_add_(
                    direction,
                    [part - start for part, start in zip(now, starts, strict=True)],
                    alpha=self.local.proximal,
                )
            if corrections:
                torch._foreach_add_(direction, corrections)
            if velocity:
                torch._foreach_mul_(velocity, self.local.momentum)
                torch._foreach_add_(velocity, direction)
                direction = velocity
            torch._foreach_add_(now, direction, alpha=-lane.lr)
        lane.count_clipped(factors)
        means = (losses / lane.index.shape[1]).double().cpu().numpy()
        for _, given in lane.blocks(len(parameters)):
            moved = [
                (part[torch.from_numpy(given)] - start).flatten(1)
                for part, start in zip(now, starts, strict=True)
            ]
            yield Block(given, torch.cat(moved, dim=1), means[given])
