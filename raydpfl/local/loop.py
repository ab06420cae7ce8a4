"""One client after another: any module, on one flat vector of parameters.

The parameters of a working copy of the module are views of one flat buffer and their gradients of another, so a step is one or two
in-place operations over all of them and needs no optimiser. Convolutional nets with max-pooling keep their weights and images
channels-last inside, which is faster there and slower where GroupNorm follows; what goes in and out is in torch's logical order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from raydpfl import models
from raydpfl.local.sgd import Sgd
from raydpfl.local.way import LaneData


class Loop:
    """Trains each client with autograd. What a module draws (dropout) is keyed by the client, and what it keeps in its buffers starts
    afresh with each, so nothing passes from one client to the next."""

    def __init__(self, module: nn.Module, local: Sgd, device: torch.device):
        self.local, self.device = local, device
        self.module = copy.deepcopy(module).to(device).train()
        has = [any(isinstance(layer, kind) for layer in self.module.modules()) for kind in (nn.MaxPool2d, nn.GroupNorm)]
        self.layout = torch.channels_last if has == [True, False] else torch.contiguous_format
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.flat = torch.empty(models.parameter_count(module), device=device)
        self.gradient, self.velocity = torch.empty_like(self.flat), torch.empty_like(self.flat)
        parts = [buffer.split([parameter.numel() for parameter in trainable]) for buffer in (self.flat, self.gradient)]
        for parameter, now, gradient in zip(trainable, *parts, strict=True):
            parameter.data, parameter.grad = self._view(now, parameter.shape), self._view(gradient, parameter.shape)
        self.buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]

    def _view(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if self.layout is torch.channels_last and len(shape) == 4:
            out, channels, height, width = shape
            return part.view(out, height, width, channels).permute(0, 3, 1, 2)
        return part.view(shape)

    def run(self, parameters: torch.Tensor, lane: LaneData) -> Iterator[tuple[int, torch.Tensor, float]]:
        """See `raydpfl.local.way.Way`."""
        batch_sizes = lane.batch_sizes.tolist()
        index = torch.from_numpy(lane.index).to(self.device)
        for slot in lane.slots:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                generator = lane.generator(slot)
                torch.set_rng_state(generator.get_state())
                if self.device.type == "cuda":
                    torch.cuda.manual_seed(int(torch.randint(1 << 62, (), generator=generator)))
                loss = self._train(parameters, lane.x[slot], lane.y[slot], index[slot, :, : batch_sizes[slot]], lane.lr)
            yield slot, models.flatten(self.module) - parameters, loss

    def _train(self, parameters: torch.Tensor, x: torch.Tensor, y: torch.Tensor, batches: torch.Tensor, lr: float) -> float:
        models.load(self.module, parameters)
        for buffer, start in self.buffers:
            buffer.copy_(start)
        self.velocity.zero_()
        losses = torch.zeros((), device=self.device)
        for rows in batches:
            batch = x.index_select(0, rows)
            self.gradient.zero_()
            loss = F.cross_entropy(self.module(batch.to(memory_format=self.layout) if batch.dim() == 4 else batch), y.index_select(0, rows))
            loss.backward()
            losses += loss.detach()
            self._step(lr)
        return float(losses) / len(batches)

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        direction = self.gradient
        if self.local.weight_decay:
            direction.add_(self.flat, alpha=self.local.weight_decay)
        if self.local.momentum:
            direction = self.velocity.mul_(self.local.momentum).add_(direction)
        self.flat.add_(direction, alpha=-lr)
