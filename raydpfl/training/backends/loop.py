"""One client after another: any module, with its own code and autograd.

The parameters of a working copy of the module are views of one flat buffer. Where a step needs the
gradient and the parameters alone it takes the gradients as autograd leaves them; for any other they
are views of a second buffer. Convolutional nets with max-pooling keep their weights and images
channels-last inside, which is faster there and slower where GroupNorm follows; what goes in and out
is in torch's logical order.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from raydpfl import models
from raydpfl.methods.local.base import Local
from raydpfl.models.tasks import Task
from raydpfl.training.backends.base import ChunkData, clip_factors
from raydpfl.training.backends.per_client import Descent, OneByOne
from raydpfl.training.user_loop import trained_whole


class Loop(OneByOne):
    """Trains each client with autograd, sample by sample where each sample's gradient is to be
    clipped.

    What a module draws (dropout) is keyed by the client, and what it keeps in its buffers starts
    afresh with each, so nothing passes from one client to the next.
    """

    trains = True
    buffers = True

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        self.given = module
        self.module: nn.Module = copy.deepcopy(module).to(device).train()
        has = [
            any(isinstance(layer, kind) for layer in self.module.modules())
            for kind in (nn.MaxPool2d, nn.GroupNorm)
        ]
        self.channels_last = has == [True, False]
        self.trainable = [
            parameter for parameter in self.module.parameters() if parameter.requires_grad
        ]
        self.shapes = [parameter.shape for parameter in self.trainable]
        sizes = [shape.numel() for shape in self.shapes]
        super().__init__(module, local, device, task, sizes)
        self.now = self._views(self.flat)
        self.gradients = self._views(self.gradient)
        for parameter, now in zip(self.trainable, self.now, strict=True):
            parameter.data = now
        self.initial = [(buffer, buffer.clone()) for buffer in self.module.buffers()]

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Of a vector in the order that the parameters have inside, the part of each parameter, in
        its shape.
        """
        parts = flat.split(self.sizes)
        return [self._view(part, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _view(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if self.channels_last and len(shape) == 4:
            out, channels, height, width = shape
            return part.view(out, height, width, channels).permute(0, 3, 1, 2)
        return part.view(shape)

    def _client(
        self, parameters: torch.Tensor, chunk: ChunkData, slot: int
    ) -> tuple[torch.Tensor, float]:
        for buffer, initial in self.initial:
            buffer.copy_(initial)
        if chunk.starts is not None:
            own = models.shared_and_local.local_buffers(self.module)
            models.shared_and_local.fill(own, chunk.starts.begun[slot, len(parameters) :])
        cuda = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if cuda else []):
            generator = chunk.generator(slot)
            torch.set_rng_state(generator.get_state())
            if cuda:
                torch.cuda.manual_seed(int(torch.randint(1 << 62, (), generator=generator)))
            if self.local.trains:
                return trained_whole(self.local, self.given, self.task, parameters, chunk, slot)
            found = super()._client(parameters, chunk, slot)
            if chunk.starts is not None:
                own = models.shared_and_local.local_buffers(
                    self.module
                )  # which a forward may have put anew
                chunk.starts.ended[slot, len(parameters) :] = models.shared_and_local.joined(own)
            return found

    def _descend(self, x: torch.Tensor, y: torch.Tensor, descent: Descent) -> torch.Tensor:
        for parameter in self.trainable:
            parameter.grad = None
        loss = self._loss(x, y)
        loss.backward()
        with torch.no_grad():
            if descent.shrink != 1:
                self.flat.mul_(descent.shrink)
            moving = [
                (now, parameter.grad)
                for now, parameter in zip(self.now, self.trainable, strict=True)
                if parameter.grad is not None
            ]
            if moving:
                torch._foreach_add_(*zip(*moving, strict=True), alpha=-descent.lr)
        return loss.detach()

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self.low():
            outputs = self.module(x)
        return self.task.loss(outputs.float(), y).mean()

    def _gradient(self, x: torch.Tensor, y: torch.Tensor, clip: float | None) -> torch.Tensor:
        if clip is None:
            for parameter, gradient in zip(self.trainable, self.gradients, strict=True):
                parameter.grad = gradient
            self.gradient.zero_()
            loss = self._loss(x, y)
            loss.backward()
            return loss.detach()
        total = torch.zeros_like(self.gradient)
        losses = torch.zeros((), device=self.device)
        factors = []
        for sample in zip(x.split(1), y.split(1), strict=True):
            losses += self._gradient(*sample, None)
            factors.append(clip_factors(torch.linalg.vector_norm(self.gradient), clip))
            total += self.gradient * factors[-1]
        self.factors.append(torch.stack(factors))
        torch.div(total, len(x), out=self.gradient)
        return losses / len(x)
