"""One client after another: any module, on one flat vector of parameters.

The parameters of a working copy of the module are views of one flat buffer and their gradients of
another, so a step is one or two in-place operations over all of them and needs no optimiser.
Convolutional nets with max-pooling keep their weights and images channels-last inside, which is
faster there and slower where GroupNorm follows; what goes in and out is in torch's logical order.
Large linear layers take their products from oneDNN (`raydpfl.local.products`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from raydpfl import models
from raydpfl.local.base import Linear, Local, Step
from raydpfl.local.products import speed_up
from raydpfl.local.way import Block, LaneData, Way, clip_factors
from raydpfl.local.whole import trained_whole
from raydpfl.tasks import Task


class Loop(Way):
    """Trains each client with autograd, sample by sample where each sample's gradient is to be
    clipped.

    What a module draws (dropout) is keyed by the client, and what it keeps in its buffers starts
    afresh with each, so nothing passes from one client to the next.
    """

    one_by_one = True
    twice = True
    trains = True
    # whether autograd goes back to the layers' inputs alone, and gradients by parameters are made
    # in another way
    inputs_only = False

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        super().__init__(module, local, device, task)
        self.device = device
        self.given = module
        self.module: nn.Module = copy.deepcopy(module).to(device).train()
        speed_up(self.module, inputs_only=self.inputs_only)
        has = [
            any(isinstance(layer, kind) for layer in self.module.modules())
            for kind in (nn.MaxPool2d, nn.GroupNorm)
        ]
        self.layout = torch.channels_last if has == [True, False] else torch.contiguous_format
        self.trainable = [
            parameter for parameter in self.module.parameters() if parameter.requires_grad
        ]
        self.shapes = [parameter.shape for parameter in self.trainable]
        self.flat = torch.empty(models.parameter_count(module), device=device)
        self.gradient = torch.empty_like(self.flat)
        self.velocity = torch.empty_like(self.flat)
        for parameter, now, gradient in zip(
            self.trainable, self._views(self.flat), self._views(self.gradient), strict=True
        ):
            parameter.data = now
            parameter.grad = gradient
        self.buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        # that the client's samples were clipped by in the steps so far
        self.factors: list[torch.Tensor] = []

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Of a vector in the order that the parameters have inside, the part of each parameter, in
        its shape.
        """
        parts = flat.split([shape.numel() for shape in self.shapes])
        return [self._view(part, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _add_inside(self, to: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """Adds `vector` [d], which is in the order of `raydpfl.models.flatten`, to `to`, which is
        in the order that the parameters have inside.
        """
        for view, part in zip(
            self._views(to), vector.split([shape.numel() for shape in self.shapes]), strict=True
        ):
            view.add_(part.view(view.shape))
        return to

    def _view(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if self.layout is torch.channels_last and len(shape) == 4:
            out, channels, height, width = shape
            return part.view(out, height, width, channels).permute(0, 3, 1, 2)
        return part.view(shape)

    def run(self, parameters: torch.Tensor, lane: LaneData) -> Iterator[Block]:
        """See `raydpfl.local.way.Way`."""
        for slot in lane.slots:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                generator = lane.generator(slot)
                torch.set_rng_state(generator.get_state())
                if self.device.type == "cuda":
                    torch.cuda.manual_seed(int(torch.randint(1 << 62, (), generator=generator)))
                if self.local.trains:
                    made = (self.local, self.given, self.task)
                    update, loss = trained_whole(*made, parameters, lane, slot)
                else:
                    loss = self._train(parameters, lane, slot)
                    update = models.flatten(self.module) - parameters
            yield Block(np.array([slot]), update[None], np.array([loss]))

    def _train(self, parameters: torch.Tensor, lane: LaneData, slot: int) -> float:
        models.load(self.module, parameters)
        step = self._rule(lane, slot)
        for buffer, initial in self.buffers:
            buffer.copy_(initial)
        self.factors.clear()
        losses = torch.zeros((), device=self.device)
        x = lane.x[slot]
        y = lane.y[slot]
        drawn = lane.index[slot, : lane.steps[slot], : lane.batch_sizes[slot]]
        index = torch.from_numpy(drawn).to(self.device)
        for k, rows in enumerate(index):
            batch = x.index_select(0, rows)
            batch = batch.to(memory_format=self.layout) if batch.dim() == 4 else batch
            losses += self._gradient(batch, y.index_select(0, rows), lane.clip)
            if self.local.perturbs:
                self._again(step, k, batch, y.index_select(0, rows))
            if lane.noise is not None:
                self._add_inside(self.gradient, lane.noise([slot], k)[0])
            step.make(k)
        if self.factors and lane.clipped is not None:
            lane.clipped[slot] = float(torch.cat(self.factors).lt(1).double().mean())
        return float(losses) / len(index)

    def _gradient(self, x: torch.Tensor, y: torch.Tensor, clip: float | None) -> torch.Tensor:
        """Writes the mean of the samples' gradients, each clipped if asked, into `self.gradient`;
        returns the mean of their losses.
        """
        if clip is None:
            self.gradient.zero_()
            loss = self.task.loss(self.module(x), y).mean()
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

    def _again(self, step: _Step, k: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Takes the gradient of a batch again where the rule says, in the place of that at x."""
        now = self.flat.clone()
        self.flat.copy_(step.perturbed(k))
        self._gradient(x, y, None)
        self.flat.copy_(now)

    def _rule(self, lane: LaneData, slot: int) -> _Step:
        """What makes the steps of a client, at the round's model now."""
        corrections = []
        if lane.corrections is not None:
            correction = torch.zeros_like(self.flat)
            corrections.append(self._add_inside(correction, lane.corrections[slot]))
        linear = self.local.linear()
        if linear is None:
            return _General(self, lane, corrections)
        return _Linear(self, lane, corrections, linear)


class _Step:
    """Makes the steps of a client from `Loop.gradient`. All vectors are in the order inside."""

    def __init__(self, loop: Loop, lane: LaneData, corrections: list[torch.Tensor]):
        self.loop = loop
        self.lane = lane
        self.corrections = corrections

    def make(self, k: int) -> None:
        """The k-th step."""
        raise NotImplementedError

    def perturbed(self, k: int) -> torch.Tensor:
        """Where the k-th step has its gradient taken, float32 [d], from that at x."""
        raise NotImplementedError


class _Linear(_Step):
    def __init__(self, loop: Loop, lane: LaneData, corrections: list[torch.Tensor], linear: Linear):
        super().__init__(loop, lane, corrections)
        self.linear = linear
        self.velocity = [loop.velocity.zero_()]
        self.began = [loop.flat.clone()] if linear.proximal else []

    @torch.no_grad()
    def make(self, k: int) -> None:
        loop = self.loop
        about = (self.velocity, self.began, self.corrections)
        self.linear.move([loop.flat], [loop.gradient], *about, self.lane.lr)


class _General(_Step):
    def __init__(self, loop: Loop, lane: LaneData, corrections: list[torch.Tensor]):
        super().__init__(loop, lane, corrections)
        self.model = loop.flat.clone()
        self.state = loop.local.fresh(self.model)

    @torch.no_grad()
    def make(self, k: int) -> None:
        for correction in self.corrections:
            self.loop.gradient.add_(correction)
        after, self.state = self.loop.local.step(*self._given(k))
        self.loop.flat.copy_(after)

    @torch.no_grad()
    def perturbed(self, k: int) -> torch.Tensor:
        return self.loop.local.perturb(*self._given(k))

    def _given(self, k: int) -> tuple[torch.Tensor, torch.Tensor, Any, Step]:
        # copies: the state may keep what it is given, and both of these are written to
        x = self.loop.flat.clone()
        gradient = self.loop.gradient.clone()
        return x, gradient, self.state, Step(k, self.lane.rate(k), self.model)
