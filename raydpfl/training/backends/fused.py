"""Stacks of linear layers: all clients of a chunk in batched products.

Forward pass, backward pass and step are written out, without autograd. A layer holds its clients'
weights, [C, out, in], and makes the step inside the backward product

    W <- (1 - lr wd) W - lr G^T a,

one `baddbmm_` without a gradient in memory. The mathematics is that of the loop, up to rounding.

Where every sample's gradient is clipped, its squared norm is the sum over the layers of
(||a||^2 + 1) ||g||^2, with a the layer's inputs and g the gradient by its outputs. Clipping scales
the sample's g in every layer (Goodfellow 2015).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from raydpfl.core.device import index
from raydpfl.methods.local.base import LinearRule, Local
from raydpfl.models.linear_stack import Layer, NoStack, aten, stack
from raydpfl.models.tasks import Task
from raydpfl.models.tasks.base import LossForm
from raydpfl.training.backends.base import (
    ANY_RULE,
    UNCLIPPED,
    UNDERFLOW_SQUARE,
    Backend,
    Batches,
    Block,
    ChunkData,
    Rule,
    clip_factors,
    take,
)

by_log_p = aten._log_softmax_backward_data.default
VECTOR = 16  # the most float32 numbers that a processor takes at once


class _Layer:
    """A layer of C clients by its weights [C, out, in] and biases [C, 1, out]: `all_parts` those of
    all slots, `parts` of those that still make steps. A linear rule's step is made inside the
    backward product; of any other rule `parts` are views of the parameters.
    """

    inputs: torch.Tensor  # of the last forward pass

    def __init__(
        self,
        layer: Layer,
        parameters: torch.Tensor,
        chunk: ChunkData,
        linear: LinearRule | None,
        weights: torch.Tensor | None,
    ):
        self.layer = layer
        self.start = layer.views(parameters)
        self.lr = chunk.lr
        self.velocity: list[torch.Tensor] = []
        # What a step adds to the gradient that stays the same throughout: the correction, and of
        # proximal (x - start) the start's part.
        self.constant: list[torch.Tensor] = []
        if linear is None:
            assert weights is not None
            self.follow(weights)
            return
        self.linear = linear
        count = len(chunk.sizes)
        self.parts = [part.expand(count, *part.shape).clone() for part in self.start]
        self.all_parts = self.parts
        if chunk.corrections is not None:
            self.constant = [part.contiguous() for part in layer.views(chunk.corrections)]
        if linear.proximal:
            pull = [part[None] * -linear.proximal for part in self.start]
            if self.constant:
                pull = [a + b for a, b in zip(self.constant, pull, strict=True)]
            self.constant = pull
        self.velocity = [torch.zeros_like(part) for part in self.parts if linear.momentum]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs [C, B, out], in memory [C, out, B], from the inputs, float32 [C, B, in]."""
        self.inputs = inputs
        weight, *bias = self.parts
        if bias:
            return torch.baddbmm(bias[0].mT, weight, inputs.mT).mT
        return torch.bmm(weight, inputs.mT).mT

    def backward(self, g: torch.Tensor) -> torch.Tensor:
        """The gradient by the inputs, laid out as they are, from `g` by the outputs."""
        weight = self.parts[0]
        if self.inputs.is_contiguous():
            return torch.bmm(g, weight)
        return torch.bmm(weight.mT, g.mT).mT

    def squares(self, g: torch.Tensor) -> torch.Tensor:
        """The squared norm of every sample's gradient by weight and bias, float32 [C, B, 1], from
        every sample's `g`: (||a||^2 + 1) ||g||^2. What underflow may have taken is added to both
        factors, as the other one may be large.
        """
        inputs = self.inputs.square().sum(2, keepdim=True)
        inputs.add_(len(self.parts) - 1 + UNDERFLOW_SQUARE * self.inputs.shape[2])
        return inputs.mul_(g.square().sum(2, keepdim=True).add_(UNDERFLOW_SQUARE * g.shape[2]))

    def gradient(self, g: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the layer's part of the gradients into `out` [C, d]."""
        weight, *bias = self.layer.views(out)
        weight.copy_(torch.bmm(g.mT, self.inputs))
        for part in bias:
            part.copy_(g.sum(1, keepdim=True))

    def follow(self, parameters: torch.Tensor) -> None:
        """Takes `parameters` [C, d], which a rule has stepped to."""
        self.all_parts = self.parts = self.layer.views(parameters)

    def step(self, g: torch.Tensor, noise: torch.Tensor | None, slots: torch.Tensor | None) -> None:
        """A linear rule's step by `g` [C, B, out] and noise [C, d], but for finished `slots`."""
        copies = [] if slots is None else [part[slots] for part in self.parts]
        decay = self.linear.decay + self.linear.proximal
        targets = self.velocity or self.parts
        keep, step = step_factors(self.linear, self.lr)
        targets[0].baddbmm_(g.mT, self.inputs, beta=keep, alpha=step)
        for bias in targets[1:]:
            scaled_bias = bias if keep == 1 else bias.mul_(keep)
            scaled_bias.add_(g.sum(1, keepdim=True), alpha=step)
        extra_terms = [self.constant] if noise is None else [self.constant, self.layer.views(noise)]
        for parts in extra_terms:
            for part, term in zip(targets, parts, strict=False):
                part.add_(term, alpha=step)
        for part, velocity in zip(self.parts, self.velocity, strict=False):
            part.sub_(velocity.add_(part, alpha=decay), alpha=self.lr)
        for part, values in zip(self.parts, copies, strict=False):
            part[slots] = values

    def narrow(self, count: int) -> None:
        """Goes on with the first slots alone."""
        self.parts = [part[:count] for part in self.parts]
        self.velocity = [part[:count] for part in self.velocity]
        self.constant = [part[:count] for part in self.constant]

    def delta(self, slots: slice, out: torch.Tensor) -> None:
        """Writes the layer's part of the slots' updates into `out` [slots, d]."""
        for part, end, start in zip(self.layer.views(out), self.all_parts, self.start, strict=True):
            torch.sub(end[slots], start, out=part)


def step_factors(linear: LinearRule, lr: float) -> tuple[float, float]:
    """(keep, step) such that v <- keep v + step g for the gradient g; v: the velocity with
    momentum, else the weights.
    """
    if linear.momentum:
        return linear.momentum, 1.0
    return 1 - lr * (linear.decay + linear.proximal), -lr


class _Loss:
    """The losses of a chunk's samples, and their gradients by the outputs.

    Outputs lie as [out, L], where log-softmax takes a third of the time; L is a multiple of
    `VECTOR`, as columns that fill no vector would be rounded otherwise.
    """

    def __init__(self, target: torch.Tensor, batches: Batches, loss_form: LossForm):
        """`target` [C, n, out] is as `_target` gives it; `loss_form` is the form of the loss."""
        self.squares = loss_form == "squares"
        self.batches = batches
        self.target = target.neg().flatten(0, 1).mT.contiguous()  # [out, C n]
        self.finished_losses = target.new_zeros(len(target))  # of slots that make no more steps
        self._begin(len(target))

    def _begin(self, count: int) -> None:
        """Makes what the steps of the first `count` slots work on."""
        rows, shares = self.batches[0]
        batch = shares.shape[2]
        outputs = len(self.target)
        self.columns = count * batch
        width = -(-self.columns // VECTOR) * VECTOR
        self.shape = (count, batch, outputs)
        self.strides = (batch, 1, width)
        zeros = self.target.new_zeros(3, outputs, width)
        self.outputs, self.batch_target, self.total = zeros.unbind()
        self.shares = self.target.new_zeros(width)
        self.seen = self._rows_of(self.outputs)
        if rows is None:
            self.batch_target[:, : self.columns] = self.target[:, : self.columns]

    def narrow(self, count: int) -> None:
        """Goes on with the first slots alone."""
        self.finished_losses = self.sums()
        previous_total = self.total
        self._begin(count)
        self.total[:, : self.columns] = previous_total[:, : self.columns]

    def _rows_of(self, columns: torch.Tensor) -> torch.Tensor:
        """The columns as [C, B, out]."""
        return columns.as_strided(self.shape, self.strides)

    def step(self, a: torch.Tensor, k: int, by_sample: bool) -> torch.Tensor:
        """The gradient of step k's mean loss by the last outputs, [C, B, out], or `by_sample`."""
        rows, shares = self.batches[k]
        self.seen.copy_(a)
        if rows is not None:  # past the last column any row, of share 0
            padded_rows = F.pad(rows, (0, self.shares.numel() - self.columns))
            self.batch_target = self.target.index_select(1, padded_rows)
        self.shares[: self.columns].view(self.shape[:2]).copy_(shares[:, 0])
        if self.squares:
            residuals = self.outputs + self.batch_target
            g = residuals / len(residuals) if len(residuals) > 1 else residuals
            share = g * self.shares
            self.total.addcmul_(share, residuals, value=0.5)
            return self._rows_of(g).contiguous() if by_sample else self._rows_of(share)
        share = self.batch_target * self.shares
        log_p = torch.log_softmax(self.outputs, 0)
        self.total.addcmul_(log_p, share)
        # as autograd has it: y - p sum(y) for what y = -batch_target is multiplied by
        g = by_log_p(self.batch_target if by_sample else share, log_p, 0, log_p.dtype)
        # Sample by sample where norms are taken: a sum over columns would be taken otherwise for
        # other numbers of them.
        return self._rows_of(g).contiguous() if by_sample else self._rows_of(g)

    def sums(self) -> torch.Tensor:
        """Each client's losses, its mean of every step added up, [C]."""
        # client by client: a sum over columns, as they lie with batches of one row, would be taken
        # otherwise for other numbers of them
        active_sums = self._rows_of(self.total).flatten(1).contiguous().sum(1)
        return torch.cat([active_sums, self.finished_losses[len(active_sums) :]])


class _Training:
    """A chunk in training: its layers, the first of them first, and what its steps leave."""

    def __init__(self, backend: Fused, parameters: torch.Tensor, chunk: ChunkData):
        self.chunk = chunk
        self.batches = chunk.batches()
        x, y = chunk.rows()
        self.x = x.flatten(2)
        linear = backend.local.linear()
        self.rule = None if linear else Rule.from_chunk(backend.local, parameters, chunk)
        flat = None if self.rule is None else self.rule.x
        self.layers = [_Layer(layer, parameters, chunk, linear, flat) for layer in backend.layers]
        self.loss = _Loss(_target(y, backend.layers[-1].outputs), self.batches, backend.loss_form)
        self.factors: list[torch.Tensor] = []  # that samples' gradients were clipped by

    def train(self) -> np.ndarray:
        """Makes all steps; the mean losses, float64 [C]."""
        clip = self.chunk.clip
        for k, (rows, shares) in enumerate(self.batches):
            if len(shares) < self.loss.shape[0]:
                self.x = self.x[: len(shares)]
                self.loss.narrow(len(shares))
                for layer in self.layers:
                    layer.narrow(len(shares))
            outputs = self._forward(take(self.x, rows))
            g = self.loss.step(outputs[-1], k, by_sample=clip is not None)
            gradients = self._backward(g, outputs)
            if clip is not None:
                layers = zip(reversed(self.layers), gradients, strict=True)
                norms = reduce(torch.add, (layer.squares(g) for layer, g in layers)).sqrt_()
                self.factors.append(clip_factors(norms, clip))
                factors = self.factors[-1] * shares.mT
                gradients = [g * factors for g in gradients]
            self._step(gradients, k)
        if self.rule is not None:
            for layer in self.layers:
                layer.follow(self.rule.final())
        self.chunk.count_clipped(self.factors)
        return self.chunk.means(self.loss.sums())

    def _forward(self, a: torch.Tensor) -> list[torch.Tensor]:
        """The outputs of every layer, [C, B, out]."""
        outputs: list[torch.Tensor] = []
        for layer in self.layers:
            a = layer.forward(a)
            if layer.layer.activation:
                a = layer.layer.activation.forward(a)
            outputs.append(a)
        return outputs

    def _backward(self, g: torch.Tensor, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients by every layer's outputs before activation, the last layer's first."""
        gradients: list[torch.Tensor] = []
        next_layer: _Layer | None = None
        for layer, a in zip(reversed(self.layers), reversed(outputs), strict=True):
            if next_layer is not None:
                g = next_layer.backward(g)
            if layer.layer.activation:
                g = layer.layer.activation.backward(g, a)
            gradients.append(g)
            next_layer = layer
        return gradients

    def _step(self, gradients: list[torch.Tensor], k: int) -> None:
        noise = self.chunk.step_noise(k)
        layers = zip(reversed(self.layers), gradients, strict=True)
        if self.rule is None:
            finished_slots = self.chunk.finished_slots[k]
            for layer, g in layers:
                layer.step(g, noise, finished_slots)
            return
        gradient = gradients[0].new_empty(len(gradients[0]), self.rule.x.shape[1])
        for layer, g in layers:
            layer.gradient(g, gradient)
        x = self.rule.step(gradient if noise is None else gradient.add_(noise), k)
        for layer in self.layers:
            layer.follow(x)


def _target(y: torch.Tensor, outputs: int) -> torch.Tensor:
    """What outputs are held against, [C, n, outputs], classes as one-hot. Raises RuntimeError."""
    if not y.is_floating_point():
        return torch.zeros(*y.shape, outputs, device=y.device).scatter_(2, y[:, :, None], 1.0)
    if y[0, 0].numel() != outputs:
        raise RuntimeError(f"{y[0, 0].numel()} targets, and the model has {outputs} outputs")
    return y.view(*y.shape[:2], outputs)


class Fused(Backend):
    """See the module. Raises `NoStack` for what is no stack of linear layers."""

    capabilities = frozenset({UNCLIPPED, ANY_RULE})

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        super().__init__(module, local, device, task)
        self.layers = stack(module)
        self.loss_form = closed_form(task)

    def run(self, parameters: torch.Tensor, chunk: ChunkData) -> Iterator[Block]:
        with torch.inference_mode():
            training = _Training(self, parameters, chunk)
            losses = training.train()
        d = parameters.numel()
        for span, slots in chunk.blocks(d):
            count = span.stop - span.start
            updates = parameters.new_empty(count, d)
            with torch.inference_mode():
                for layer in training.layers:
                    layer.delta(span, updates)
            if len(slots) < count:
                updates = updates[index(slots - span.start, updates.device)]
            yield Block(slots, updates, losses[slots])


def closed_form(task: Task) -> LossForm:
    """Of the task's loss. Raises `NoStack` where its gradient is not written out here."""
    form = task.loss_form()
    if form is None:
        raise NoStack(f"the gradient of the loss of task {task.kind} is not written out here")
    return form
