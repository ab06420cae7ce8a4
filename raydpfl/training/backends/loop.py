"""One client after another: any module, with its own code and autograd.

The parameters of a working copy of the module are views of one flat buffer, and the gradients of
another, unless a step needs these two alone. Convolutional nets with max-pooling are channels-last
inside, which is faster there and slower where GroupNorm follows, unless their code fails so, as by
a `view`.
"""

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import nn

from raydpfl import models
from raydpfl.core import prng
from raydpfl.methods.local.base import Local
from raydpfl.models.shared_and_local import concatenate, fill, local_buffers
from raydpfl.models.tasks import Task
from raydpfl.training.backends.base import (
    CORE,
    LOCAL_BUFFERS,
    TRAIN,
    Block,
    ChunkData,
    clip_factors,
)
from raydpfl.training.backends.per_client import Descent, OneByOne
from raydpfl.training.layers.dropout import RowMajor
from raydpfl.training.layers.tap_crop import crop, images_of, set_leaf

ROWS = 1024  # in a pass of those that the loss is taken on before a user-defined `train`


class Loop(OneByOne):
    """Trains every client with autograd, sample by sample where samples are clipped. Draws of the
    module are keyed by the client, and its buffers start afresh with each.
    """

    capabilities = frozenset(CORE | {TRAIN, LOCAL_BUFFERS})
    crops = True  # whether convolutions are cropped
    module: nn.Module

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        # a user-defined `train` starts from it
        self.initial = copy.deepcopy(module) if local.trains else None
        self.module = copy.deepcopy(module).to(device).train()
        pools, norms, drops = (
            any(isinstance(layer, kind) for layer in self.module.modules())
            for kind in (nn.MaxPool2d, nn.GroupNorm, nn.Dropout)
        )
        self.channels_last = pools and not norms
        self.drops = drops and self.channels_last
        self.trainable: list[torch.Tensor] = [
            part for part in self.module.parameters() if part.requires_grad
        ]
        self.shapes = [parameter.shape for parameter in self.trainable]
        super().__init__(module, local, device, task)
        self._allocate([shape.numel() for shape in self.shapes])
        self._bind()
        self.prepared = False
        # of each cropped convolution: its taps in `flat`, their copy in autograd, their gradient
        self.cropped_taps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]

    def _bind(self) -> None:
        """Moves the parameters into `flat`, laid out as `channels_last` says."""
        self.views = self._views(self.flat)
        self.gradients = self._views(self.gradient)
        for parameter, view in zip(self.trainable, self.views, strict=True):
            parameter.data = view.copy_(parameter.data.clone())

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views = []
        for part, shape in zip(flat.split(self.sizes), self.shapes, strict=True):
            if self.channels_last and len(shape) == 4:
                out, channels, height, width = shape
                views.append(part.view(out, height, width, channels).permute(0, 3, 1, 2))
            else:
                views.append(part.view(shape))
        return views

    def run(self, parameters: torch.Tensor, chunk: ChunkData) -> Iterator[Block]:
        if not self.prepared and not self.local.trains:
            with prng.keyed_globals(0):
                self._prepare(chunk.x)
            self.prepared = True
        yield from super().run(parameters, chunk)

    def _prepare(self, x: torch.Tensor) -> None:
        """What is decided before the first client, on made-up rows of the shape and the type of
        those in `x`.
        """
        rows = x.new_zeros(2, *x.shape[2:])
        if self.channels_last:
            if rows.dim() == 4:
                rows = rows.new_zeros(2, *rows.shape[2:], rows.shape[1]).permute(0, 3, 1, 2)
            try:
                outputs = self._outputs(rows)
                outputs.backward(torch.ones_like(outputs))
            except RuntimeError:  # as of a `view`
                self.channels_last = self.drops = False
                self._bind()
                rows = x.new_zeros(2, *x.shape[2:])
            self.module.zero_grad()
        if self.crops:
            self._crop(rows)

    def _client(
        self, parameters: torch.Tensor, chunk: ChunkData, slot: int
    ) -> tuple[torch.Tensor, float]:
        for buffer, initial in self.buffers:
            buffer.copy_(initial)
        if chunk.starts is not None:
            fill(local_buffers(self.module), chunk.starts.initial[slot, len(parameters) :])
        with self._seed_generators(chunk, slot):
            if self.local.trains:
                return self._train_user_defined(parameters, chunk, slot)
            update_and_loss = super()._client(parameters, chunk, slot)
            if chunk.starts is not None:  # a forward may have replaced the buffers
                final = concatenate(local_buffers(self.module))
                chunk.starts.final[slot, len(parameters) :] = final
            return update_and_loss

    def _crop(self, x: torch.Tensor) -> None:
        """Takes the taps that see padding alone, where the images are as those of `x`, out of the
        convolutions. A weight keeps its own gradient, as a module may read it itself.
        """
        places = {id(parameter): place for place, parameter in enumerate(self.trainable)}
        for layer, images in images_of(self.module, lambda: self.module(x)).items():
            part = crop(layer, images[0]) if len(images) == 1 else None
            if part is not None and id(layer.weight) in places:
                place = places.pop(id(layer.weight))
                taps, gradient = self.views[place][part], self.gradients[place][part]
                leaf = taps.detach().requires_grad_()
                self.cropped_taps.append((taps, leaf, gradient))
                set_leaf(layer, leaf, images[0])

    def _descend(self, x: torch.Tensor, y: torch.Tensor, descent: Descent) -> torch.Tensor:
        leaves = [(taps, leaf) for taps, leaf, _ in self.cropped_taps]
        parameters = [*zip(self.views, self.trainable, strict=True)]
        for _, parameter in (*parameters, *leaves):
            parameter.grad = None
        loss = self._loss(x, y)
        loss.backward()
        with torch.no_grad():
            if descent.shrink != 1:
                self.flat.mul_(descent.shrink)
            for tensors in (parameters, leaves):  # in turn, as taps are a part of a parameter
                pairs = [(view, part.grad) for view, part in tensors if part.grad is not None]
                if pairs:
                    torch._foreach_add_(*zip(*pairs, strict=True), alpha=-descent.lr)
                for _, part in tensors:  # the update takes their memory
                    part.grad = None
        return loss.detach()

    def _outputs(self, x: torch.Tensor) -> torch.Tensor:
        with self.autocast(), RowMajor() if self.drops else nullcontext():
            return self.module(x).float()

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.task.loss(self._outputs(x), y).mean()

    def _gradient(self, x: torch.Tensor, y: torch.Tensor, clip: float | None) -> torch.Tensor:
        if clip is None:
            for parameter, gradient in zip(self.trainable, self.gradients, strict=True):
                parameter.grad = gradient
            for _, leaf, _ in self.cropped_taps:
                leaf.grad = None
            self.gradient.zero_()
            loss = self._loss(x, y)
            loss.backward()
            for _, leaf, gradient in self.cropped_taps:
                if leaf.grad is not None:
                    gradient.add_(leaf.grad)
            return loss.detach()
        total = torch.zeros_like(self.gradient)
        losses = torch.zeros((), device=self.device)
        factors = []
        for sample in zip(x.split(1), y.split(1), strict=True):
            losses += self._gradient(*sample, None)
            factors.append(clip_factors(self.gradient.square().sum().sqrt(), clip))
            total += self.gradient * factors[-1]
        self.factors.append(torch.stack(factors))
        torch.div(total, len(x), out=self.gradient)
        return losses / len(x)

    def _train_user_defined(
        self, parameters: torch.Tensor, chunk: ChunkData, slot: int
    ) -> tuple[torch.Tensor, float]:
        """The update by `Local.train`, on copies, and the mean loss before. Raises ValueError."""
        assert self.initial is not None
        module = copy.deepcopy(self.initial).to(self.device).train()
        start = chunk.start(parameters, slot)
        models.set_trained(module, start)
        size = int(chunk.sizes[slot])
        x, y = chunk.x[slot, :size].clone(), chunk.y[slot, :size].clone()
        module.eval()
        with torch.no_grad():
            loss = sum(
                float(self.task.loss(module(rows), labels).sum())
                for rows, labels in zip(x.split(ROWS), y.split(ROWS), strict=True)
            )
        module.train()
        originals = [parameter for parameter in module.parameters() if parameter.requires_grad]
        local = self.local.model_copy(update={"lr": chunk.lr})  # as `schedule` says
        local.train(module, x, y, chunk.generator(slot))
        remaining_ids = {id(parameter) for parameter in module.parameters()}
        if not all(id(parameter) in remaining_ids for parameter in originals):
            raise ValueError("train puts other parameters in the place of the module's")
        flat = torch.cat([parameter.detach().float().reshape(-1) for parameter in originals])
        if len(flat) != len(parameters):
            raise ValueError(f"train leaves {len(flat)} parameters of {len(parameters)}")
        if chunk.starts is not None:
            chunk.starts.final[slot] = models.trained(module)
        return flat.to(self.device) - start[: len(parameters)], loss / size
