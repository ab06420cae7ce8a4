"""Stacks of linear layers, a whole chunk in batched products.

Forward pass, backward pass and step are written out, without autograd. There are two ways. They
differ in the first layer, whose inputs are the client's rows X [n, p] at every step.

**fused** holds its weights, [C, out, in] for a chunk, and makes the step inside the backward
product

    W <- (1 - lr wd) W - lr G^T a,

one `baddbmm_` without a gradient in memory. **sample space** never forms the weights. They move
only within the span of the client's rows,

    W = gamma W_0 + A^T X,
    b = gamma b_0 + A^T 1,

so it carries the layer's outputs on all rows, Z = X W^T + b, and A [n, out]: n coefficients an
output instead of p weights. With K = X X^T + 1 (the 1 is the bias), the step along a batch's
gradient G by the outputs is

    Z <- (1 - lr wd) Z - lr K[:, batch] G,
    A[batch] += c_t G,
    W_Q - W_0 = (gamma - 1) W_0 + A^T X,

where lr, weight decay, momentum and the proximal term give the numbers c_t and gamma. Momentum
keeps a second Z, the velocity's outputs. A proximal term mu keeps the first Z, Z_0: its gradient
mu (W - W_0) gives mu (Z - Z_0), for the outputs are linear in W and b. The mathematics is that of
the loop, up to rounding.

Where each sample's gradient is clipped (fused alone), its squared norm is the sum over the layers
of (||a||^2 + 1) ||g||^2, with a the layer's inputs and g the gradient by its outputs. Clipping
scales the sample's g in every layer (Goodfellow 2015).

>>> SampleSpace.pays(stack(nn.Linear(784, 10)), rows=20, local=Local(steps=20, batch=10))
True
>>> SampleSpace.pays(stack(nn.Linear(784, 10)), rows=600, local=Local(steps=1, batch=10))
False
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from raydpfl.core.device import index
from raydpfl.methods.local.base import Linear, Local
from raydpfl.models.linear_stack import Layer, NoStack, aten, stack
from raydpfl.models.tasks import Task
from raydpfl.models.tasks.base import Closed
from raydpfl.training.backends.base import (
    LOST,
    Backend,
    Batches,
    Block,
    ChunkData,
    Rule,
    clip_factors,
    take,
)

PICK = 1 << 18  # products that take as long as picking the rows of a batch out of small tensors
by_log_p = aten._log_softmax_backward_data.default
VECTOR = 16  # the most float32 numbers that a processor takes at once
MEMORY = 24  # products that take as long as reading and writing one weight


class _Place:
    """A layer of a chunk in training. `start` are its initial parameters.

    A layer that stands first is never asked for the gradient by its inputs, one that steps by
    itself never for the gradient by its parameters.
    """

    layer: Layer
    start: list[torch.Tensor]

    def forward(self, inputs: torch.Tensor | None) -> torch.Tensor:
        """The outputs [C, B, out] before the activation, which lie in memory as [C, out, B].

        `inputs` is float32 [C, B, in]; for the first layer, the batch's rows (see `take`).
        """
        raise NotImplementedError

    def backward(self, g: torch.Tensor) -> torch.Tensor:
        """The gradient by the inputs, laid out as they are, from the gradient `g` by the outputs,
        [C, B, out].
        """
        raise NotImplementedError

    def squares(self, g: torch.Tensor) -> torch.Tensor:
        """The squared norm of each sample's gradient by weight and bias, float32 [C, B, 1], from
        each sample's `g`: (||a||^2 + 1) ||g||^2. What underflow may have taken is added to both,
        as the other may be large.
        """
        raise NotImplementedError

    def gradient(self, g: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the layer's part of the gradients into `out` [C, d]."""
        raise NotImplementedError

    def step(self, g: torch.Tensor, noise: torch.Tensor | None) -> None:
        """Makes the step from the gradient `g` by the outputs, and the noise [C, d] that is added
        to the gradient by the parameters.
        """
        raise NotImplementedError

    def held(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """What the step of these slots, int64 [m], would change."""
        raise NotImplementedError

    def put_back(self, slots: torch.Tensor, held: list[torch.Tensor]) -> None:
        """Undoes the step for these slots, from what `held` gave before it."""
        raise NotImplementedError

    def follow(self, parameters: torch.Tensor) -> None:
        """Takes `parameters` [C, d], which a rule has stepped to."""
        raise NotImplementedError

    def narrow(self, count: int) -> None:
        """Goes on with the first slots alone."""
        raise NotImplementedError

    def delta(self, slots: slice, out: torch.Tensor) -> None:
        """Writes the layer's part of the slots' updates into `out` [slots, d]."""
        raise NotImplementedError


class _Layer(_Place):
    """A layer of C clients by its weights [C, out, in] and biases [C, 1, out], which are `every`;
    `now` are those of the slots that are at work.

    `x`, of the first layer alone, are the rows [C, n, in] that batches are taken from.
    """

    inputs: torch.Tensor  # of the last forward pass

    def __init__(
        self,
        layer: Layer,
        parameters: torch.Tensor,
        now: list[torch.Tensor],
        x: torch.Tensor | None = None,
    ):
        self.layer = layer
        self.start = layer.views(parameters)
        self.every = self.now = now
        self.x = x

    def forward(self, inputs: torch.Tensor | None) -> torch.Tensor:
        if self.x is not None:
            inputs = take(self.x, inputs)
        assert inputs is not None
        self.inputs = inputs
        weight, *bias = self.now
        if bias:
            return torch.baddbmm(bias[0].mT, weight, self.inputs.mT).mT
        return torch.bmm(weight, self.inputs.mT).mT

    def backward(self, g: torch.Tensor) -> torch.Tensor:
        weight = self.now[0]
        if self.inputs.is_contiguous():
            return torch.bmm(g, weight)
        return torch.bmm(weight.mT, g.mT).mT

    def squares(self, g: torch.Tensor) -> torch.Tensor:
        norms = torch.linalg.vector_norm(self.inputs, dim=2, keepdim=True)
        inputs = norms.square_().add_(len(self.now) - 1 + LOST * self.inputs.shape[2])
        return inputs.mul_(g.square().sum(2, keepdim=True).add_(LOST * g.shape[2]))

    def gradient(self, g: torch.Tensor, out: torch.Tensor) -> None:
        weight, *bias = self.layer.views(out)
        weight.copy_(torch.bmm(g.mT, self.inputs))
        for part in bias:
            part.copy_(g.sum(1, keepdim=True))

    def follow(self, parameters: torch.Tensor) -> None:
        self.every = self.now = self.layer.views(parameters)

    def narrow(self, count: int) -> None:
        self.now = [part[:count] for part in self.now]
        if self.x is not None:
            self.x = self.x[:count]

    def delta(self, slots: slice, out: torch.Tensor) -> None:
        for part, now, start in zip(self.layer.views(out), self.every, self.start, strict=True):
            torch.sub(now[slots], start, out=part)


class _Weights(_Layer):
    """A layer whose step, of a linear rule, is made inside the backward product."""

    def __init__(
        self,
        layer: Layer,
        parameters: torch.Tensor,
        chunk: ChunkData,
        linear: Linear,
        x: torch.Tensor | None = None,
    ):
        start = layer.views(parameters)
        now = [part.expand(len(chunk.sizes), *part.shape).clone() for part in start]
        super().__init__(layer, parameters, now, x)
        self.linear = linear
        self.lr = chunk.lr
        # What a step adds to the gradient that stays the same throughout: the correction, and of
        # proximal (x - start) the start's part.
        self.constant: list[torch.Tensor] = []
        if chunk.corrections is not None:
            self.constant = [part.contiguous() for part in layer.views(chunk.corrections)]
        if linear.proximal:
            pull = [part[None] * -linear.proximal for part in start]
            if self.constant:
                pull = [a + b for a, b in zip(self.constant, pull, strict=True)]
            self.constant = pull
        self.velocity = [torch.zeros_like(part) for part in now if linear.momentum]

    def step(self, g: torch.Tensor, noise: torch.Tensor | None) -> None:
        decay = self.linear.decay + self.linear.proximal
        moved = self.velocity or self.now
        keep, step = step_factors(self.linear, self.lr)
        moved[0].baddbmm_(g.mT, self.inputs, beta=keep, alpha=step)
        for bias in moved[1:]:
            kept = bias if keep == 1 else bias.mul_(keep)
            kept.add_(g.sum(1, keepdim=True), alpha=step)
        added = [self.constant] if noise is None else [self.constant, self.layer.views(noise)]
        for parts in added:
            for part, more in zip(moved, parts, strict=False):
                part.add_(more, alpha=step)
        for now, velocity in zip(self.now, self.velocity, strict=False):
            now.sub_(velocity.add_(now, alpha=decay), alpha=self.lr)

    def narrow(self, count: int) -> None:
        super().narrow(count)
        self.velocity = [part[:count] for part in self.velocity]
        self.constant = [part[:count] for part in self.constant]

    def held(self, slots: torch.Tensor) -> list[torch.Tensor]:
        return [part[slots] for part in self.now]

    def put_back(self, slots: torch.Tensor, held: list[torch.Tensor]) -> None:
        for part, before in zip(self.now, held, strict=True):
            part[slots] = before


def step_factors(linear: Linear, lr: float) -> tuple[float, float]:
    """(keep, step) such that v <- keep v + step g for the gradient g, where v is the velocity if
    there is momentum, or else the weights.
    """
    if linear.momentum:
        return linear.momentum, 1.0
    return 1 - lr * (linear.decay + linear.proximal), -lr


class _Span(_Place):
    """The first layer in sample space, with x [C, n, in].

    Z and A are [C, n, out], or [C, out, n] if steps take the `whole` of them; `every` is A of all
    slots.
    """

    rows: torch.Tensor | None  # of the last forward pass

    def __init__(
        self,
        layer: Layer,
        parameters: torch.Tensor,
        chunk: ChunkData,
        linear: Linear,
        x: torch.Tensor,
        whole: bool,
    ):
        self.layer = layer
        self.x = x
        self.linear = linear
        self.lr = chunk.lr
        self.factors = step_factors(linear, chunk.lr)
        self.whole = whole
        self.start = layer.views(parameters)
        gammas, each = responses(linear, chunk.lr, chunk.index.shape[1])
        self.gamma = gammas[-1]
        self.responses = iter(each)
        now = self._products(chunk)
        self.now = now.mT.contiguous() if whole else now  # Z
        self.first = self.now.clone() if linear.proximal else None  # Z_0
        self.velocity = torch.zeros_like(self.now) if linear.momentum else None
        self.kernel = torch.bmm(x, x.mT).add_(len(self.start) - 1)
        self.coefficients = torch.zeros_like(self.now)  # A
        if whole:  # as the gradients that are added to it lie in memory (`_Loss`)
            self.coefficients = torch.zeros_like(self.now.transpose(0, 1)).transpose(0, 1)
        self.every = self.coefficients

    def _products(self, chunk: ChunkData) -> torch.Tensor:
        """X W_0^T + b_0 [C, n, out], chunk by chunk: bits may depend on the number of all rows."""
        x = self.x
        weight, *bias = self.start
        outputs = x.new_empty(*x.shape[:2], self.layer.outputs)
        for slots in chunk.chunks:
            flat = F.linear(x[slots].flatten(0, 1), weight, bias[0][0] if bias else None)
            outputs[slots] = flat.view_as(outputs[slots])
        return outputs

    def forward(self, inputs: torch.Tensor | None) -> torch.Tensor:
        self.rows = inputs
        if not self.whole:
            return take(self.now, inputs)
        return self.now.mT.clone() if self.layer.activation else self.now.mT

    def step(self, g: torch.Tensor, noise: torch.Tensor | None) -> None:
        """See `_Place.step`; there is never noise."""
        moved = self.now if self.velocity is None else self.velocity
        keep, step = self.factors
        if self.whole:
            moved.baddbmm_(g.mT, self.kernel, beta=keep, alpha=step)
        else:
            moved.baddbmm_(take(self.kernel, self.rows).mT, g, beta=keep, alpha=step)
        if self.first is not None:
            moved.add_(self.first, alpha=-step * self.linear.proximal)
        if self.velocity is not None:
            decay = self.linear.decay + self.linear.proximal
            self.now.sub_(self.velocity.add_(self.now, alpha=decay), alpha=self.lr)
        response = next(self.responses)
        if self.rows is None:
            self.coefficients.add_(g.mT, alpha=response)
            return
        # a row may stand in a batch twice, at the end of an epoch and the start of the next
        coefficients = self.coefficients.view(-1, g.shape[2])
        coefficients.index_add_(0, self.rows, g.flatten(0, 1), alpha=response)

    def narrow(self, count: int) -> None:
        self.now = self.now[:count]
        self.kernel = self.kernel[:count]
        self.coefficients = self.coefficients[:count]

    def delta(self, slots: slice, out: torch.Tensor) -> None:
        a = self.every[slots]
        shrunk = self.gamma - 1
        a = a if self.whole else a.mT
        weight, *bias = self.layer.views(out)
        torch.baddbmm(self.start[0], a, self.x[slots], beta=shrunk, out=weight)
        for part in bias:
            torch.add(a.sum(2)[:, None], self.start[1], alpha=shrunk, out=part)

    def held(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """See `_Place.held`; neither velocity nor Z_0 are there (`SampleSpace.lacks`)."""
        return [self.now[slots], self.coefficients[slots]]

    def put_back(self, slots: torch.Tensor, held: list[torch.Tensor]) -> None:
        self.now[slots], self.coefficients[slots] = held


def responses(linear: Linear, lr: float, steps: int) -> tuple[list[float], list[float]]:
    """([gamma_0, ..., gamma_Q], [c_0, ..., c_{Q-1}]) for gradients g_t of the steps t, such that

    W_Q = gamma_Q W_0 + sum_t c_t g_t.

    Who makes q of the steps has gamma_q, and the last q of the c_t.
    """

    def run(start: float, w: float, v: float, steps: int) -> list[float]:
        """A number w that stands for the weights' part along W_0, of which the start has `start`,
        or along a gradient, which it lacks.
        """
        seen = [w]
        for _ in range(steps):
            v = linear.momentum * v + linear.decay * w + linear.proximal * (w - start)
            w -= lr * v
            seen.append(w)
        return seen

    def single(number: float) -> float:
        """Infinite where float32 would be: torch raises for a factor that overflows, and a client
        that diverged is to show it.
        """
        return number if abs(number) < 3e38 else math.inf

    if linear.plain:
        return [1.0] * (steps + 1), [single(-lr)] * steps
    gammas = run(1.0, 1.0, 0.0, steps)
    responses = run(0.0, -lr, 1.0, steps - 1)[::-1]
    return [single(gamma) for gamma in gammas], [single(c) for c in responses]


class _Loss:
    """The losses of a chunk's samples, and their gradients by the outputs.

    Outputs lie here as [out, L], a column for a sample: over a first axis torch's log-softmax takes
    a third of the time that it takes over few classes at the end. L is a multiple of `VECTOR`, as
    its last columns, where they fill no vector, would be rounded otherwise than the others.
    """

    def __init__(self, target: torch.Tensor, batches: Batches, closed: Closed):
        """`target` [C, n, out] is as `_target` gives it; `closed` is the form of the loss."""
        self.squares = closed == "squares"
        self.batches = batches
        self.target = target.neg().flatten(0, 1).mT.contiguous()  # [out, C n]
        self.ended = target.new_zeros(len(target))  # losses of slots that are at work no more
        self._begin(len(target))

    def _begin(self, count: int) -> None:
        """Makes what the steps of the first `count` slots work on."""
        rows, shares = self.batches[0]
        batch = shares.shape[2]
        outputs = len(self.target)
        self.columns = count * batch
        padded = -(-self.columns // VECTOR) * VECTOR
        self.shape = (count, batch, outputs)
        self.strides = (batch, 1, padded)
        self.outputs, self.wanted, self.total = self.target.new_zeros(3, outputs, padded).unbind()
        self.shares = self.target.new_zeros(padded)
        self.given: torch.Tensor | None = None  # the shares that `shares` are
        self.seen = self._rows_of(self.outputs)
        if rows is None:
            self.wanted[:, : self.columns] = self.target[:, : self.columns]

    def narrow(self, count: int) -> None:
        """Goes on with the first slots alone, whose losses are added up as if all went on: when
        others end depends on the chunks that are trained together.
        """
        self.ended = self.sums()
        before = self.total
        self._begin(count)
        self.total[:, : self.columns] = before[:, : self.columns]

    def _rows_of(self, columns: torch.Tensor) -> torch.Tensor:
        """The columns as [C, B, out]."""
        return columns.as_strided(self.shape, self.strides)

    def step(self, a: torch.Tensor, k: int, apart: bool) -> torch.Tensor:
        """The gradient of the mean loss of step k by the last outputs `a`, [C, B, out], or that of
        each sample's loss if they are to be `apart`.
        """
        rows, shares = self.batches[k]
        self.seen.copy_(a)
        if rows is not None:  # past the last column any row, of share 0
            picked = F.pad(rows, (0, self.shares.numel() - self.columns))
            self.wanted = self.target.index_select(1, picked)
        if shares is not self.given:
            self.shares[: self.columns].view(self.shape[:2]).copy_(shares[:, 0])
            self.given = shares
        if self.squares:
            off = self.outputs + self.wanted
            g = off / len(off) if len(off) > 1 else off
            share = g * self.shares
            self.total.addcmul_(share, off, value=0.5)
            return self._rows_of(g).contiguous() if apart else self._rows_of(share)
        share = self.wanted * self.shares
        log_p = torch.log_softmax(self.outputs, 0)
        self.total.addcmul_(log_p, share)
        # as autograd has it: y - p sum(y) for what y = -wanted is multiplied by
        g = by_log_p(self.wanted if apart else share, log_p, 0, log_p.dtype)
        # Sample by sample where norms are taken: a sum over columns would be taken otherwise for
        # other numbers of them.
        return self._rows_of(g).contiguous() if apart else self._rows_of(g)

    def sums(self) -> torch.Tensor:
        """Each client's losses, its mean of each step added up, [C]."""
        # client by client: a sum over columns, as they lie with batches of one row, would be taken
        # otherwise for other numbers of them
        some = self._rows_of(self.total).flatten(1).contiguous().sum(1)
        return torch.cat([some, self.ended[len(some) :]])


class _Training:
    """A chunk in training: its layers, the first of them first, and what its steps leave."""

    def __init__(
        self,
        chain: Sequence[_Place],
        rule: Rule | None,
        chunk: ChunkData,
        y: torch.Tensor,
        batches: Batches,
        closed: Closed,
    ):
        """`rule` is there where it is not linear; `y` [C, n] has zeros for padding."""
        self.chain = chain
        self.last_first = chain[::-1]
        self.rule = rule
        self.chunk = chunk
        self.batches = batches
        self.loss = _Loss(_target(y, chain[-1].layer.outputs), batches, closed)
        self.factors: list[torch.Tensor] = []  # that samples' gradients were clipped by

    def train(self) -> np.ndarray:
        """Makes all steps; the mean losses, float64 [C]."""
        clip = self.chunk.clip
        for k, (rows, shares) in enumerate(self.batches):
            if len(shares) < self.loss.shape[0]:
                self._narrow(len(shares))
            outputs = self._forward(rows)
            g = self.loss.step(outputs[-1], k, apart=clip is not None)
            gradients = self._backward(g, outputs)
            if clip is not None:
                gradients = self._clipped(gradients, clip, shares)
            self._step(gradients, k)
        if self.rule is not None:
            for place in self.chain:
                place.follow(self.rule.ended())
        self.chunk.count_clipped(self.factors)
        return self.chunk.means(self.loss.sums())

    def _narrow(self, count: int) -> None:
        """Goes on with the first slots alone."""
        self.loss.narrow(count)
        for place in self.chain:
            place.narrow(count)

    def _forward(self, rows: torch.Tensor | None) -> list[torch.Tensor]:
        """The outputs of each layer, [C, B, out]."""
        outputs: list[torch.Tensor] = []
        for place in self.chain:
            a = place.forward(outputs[-1] if outputs else rows)
            if place.layer.activation:
                a = place.layer.activation.forward(a)
            outputs.append(a)
        return outputs

    def _backward(self, g: torch.Tensor, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients by the outputs of each layer before its activation, from the last to the
        first.
        """
        gradients: list[torch.Tensor] = []
        later: _Place | None = None
        for place, a in zip(self.last_first, reversed(outputs), strict=True):
            if later is not None:
                g = later.backward(g)
            if place.layer.activation:
                g = place.layer.activation.backward(g, a)
            gradients.append(g)
            later = place
        return gradients

    def _clipped(
        self, gradients: list[torch.Tensor], clip: float, shares: torch.Tensor
    ) -> list[torch.Tensor]:
        """The gradients with each sample's scaled to the bound, and by its share of the mean."""
        places = zip(self.last_first, gradients, strict=True)
        norms = reduce(torch.add, (place.squares(g) for place, g in places)).sqrt_()
        self.factors.append(clip_factors(norms, clip))
        factors = self.factors[-1] * shares.mT
        return [g * factors for g in gradients]

    def _step(self, gradients: list[torch.Tensor], k: int) -> None:
        noise = self.chunk.step_noise(k)
        if self.rule is None:
            done = self.chunk.done(k)
            for place, g in zip(self.last_first, gradients, strict=True):
                held = [] if done is None else place.held(done)
                place.step(g, noise)
                if done is not None:
                    place.put_back(done, held)
            return
        gradient = gradients[0].new_empty(len(gradients[0]), self.rule.x.shape[1])
        for place, g in zip(self.last_first, gradients, strict=True):
            place.gradient(g, gradient)
        x = self.rule.step(gradient if noise is None else gradient.add_(noise), k)
        for place in self.chain:
            place.follow(x)


class _Stack(Backend):
    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        super().__init__(module, local, device, task)
        self.layers = stack(module)
        closed = task.closed()
        if closed is None:
            raise NoStack(f"the gradient of the loss of task {task.kind} is not written out here")
        self.closed: Closed = closed

    def training(self, parameters: torch.Tensor, chunk: ChunkData) -> _Training:
        """The chunk before its first step."""
        raise NotImplementedError

    def placed(self, rows: int, batch: int) -> tuple[int, ...]:
        """See `raydpfl.training.backends.base.Backend`; a step takes a batch, or all rows."""
        outputs = [
            each.outputs for each in self.layers if each.activation and each.activation.placed
        ]
        return tuple(taken * each for each in outputs for taken in (rows, batch))

    def run(self, parameters: torch.Tensor, chunk: ChunkData) -> Iterator[Block]:
        """See `raydpfl.training.backends.base.Backend`."""
        with torch.inference_mode():
            training = self.training(parameters, chunk)
            losses = training.train()
        d = parameters.numel()
        for slots, given in chunk.blocks(d):
            k = slots.stop - slots.start
            updates = parameters.new_empty(k, d)
            with torch.inference_mode():
                for place in training.chain:
                    place.delta(slots, updates)
            if len(given) < k:
                updates = updates[index(given - slots.start, updates.device)]
            yield Block(given, updates, losses[given])


def _target(y: torch.Tensor, outputs: int) -> torch.Tensor:
    """What the outputs are held against, [C, n, outputs]: classes as one-hot, the numbers of
    regression as they are.

    Raises RuntimeError for a class that the model does not know, and for another number of outputs
    than of targets.
    """
    if not y.is_floating_point():
        return torch.zeros(*y.shape, outputs, device=y.device).scatter_(2, y[:, :, None], 1.0)
    if y[0, 0].numel() != outputs:
        raise RuntimeError(f"{y[0, 0].numel()} targets, and the model has {outputs} outputs")
    return y.view(*y.shape[:2], outputs)


class Fused(_Stack):
    """Every layer by its weights. Raises `NoStack` for what is no stack of linear layers."""

    padded = False  # it looks at the rows of a batch alone

    def training(self, parameters: torch.Tensor, chunk: ChunkData) -> _Training:
        batches = chunk.batches()
        x, y = chunk.rows(picked=batches[0][0] is not None)
        rows_of = [x.flatten(2), *[None] * (len(self.layers) - 1)]
        inputs = list(zip(self.layers, rows_of, strict=True))
        linear = self.local.linear()
        if linear is not None:
            weights = [_Weights(layer, parameters, chunk, linear, rows) for layer, rows in inputs]
            return _Training(weights, None, chunk, y, batches, self.closed)
        rule = Rule(self.local, parameters, chunk)
        layers = [_Layer(each, parameters, each.views(rule.x), rows) for each, rows in inputs]
        return _Training(layers, rule, chunk, y, batches, self.closed)

    def arrays(self, rows: int, features: int, batch: int, clip: bool) -> tuple[int, ...]:
        """See `raydpfl.training.backends.base.Backend`. A rule of one's own has all parameters
        in one array.
        """
        weights = [layer.inputs * layer.outputs for layer in self.layers]
        d = sum(weights) + sum(layer.outputs for layer in self.layers if layer.bias is not None)
        ruled = [] if self.local.linear() else [d]
        return (rows * features, batch * features, *(1 + clip) * weights, *ruled)


class SampleSpace(_Stack):
    """The first layer in the span of each client's rows. Raises `NoStack` as `Fused` does.

    A row that is not finite makes its client's update so, whether or not a batch holds it.
    """

    private = False
    linear = True
    corrects = False  # a correction is of the size of the weights that this backend never forms

    @classmethod
    def lacks(cls, local: Local, clip: float | None) -> str | None:
        """See `raydpfl.training.backends.base.Backend`: what is added up by the number of steps
        holds for all.
        """
        linear = local.linear()
        if local.epochs is not None and linear is not None and not linear.plain:
            return "momentum, decay and a proximal term where clients differ in their steps"
        return super().lacks(local, clip)

    def training(self, parameters: torch.Tensor, chunk: ChunkData) -> _Training:
        linear = self.local.linear()
        assert linear is not None  # as the backend says
        n = chunk.y.shape[1]
        clients = chunk.width or len(chunk.y)
        # whether a step takes all rows, those outside of the batch with share 0, rather than
        # picking some out
        work = clients * n * (n - chunk.index.shape[2]) * self.layers[0].outputs
        # all of them on a GPU too, which adds to some by atomics, in any order
        batches = chunk.batches(whole=work <= PICK or chunk.x.device.type != "cpu")
        x, y = chunk.rows()
        whole = batches[0][0] is None
        rows = x.flatten(2)
        first = _Span(self.layers[0], parameters, chunk, linear, rows, whole)
        later = [_Weights(layer, parameters, chunk, linear) for layer in self.layers[1:]]
        return _Training([first, *later], None, chunk, y, batches, self.closed)

    def arrays(self, rows: int, features: int, batch: int, clip: bool) -> tuple[int, ...]:
        """See `raydpfl.training.backends.base.Backend`."""
        outputs = [rows * layer.outputs for layer in self.layers]
        later = [layer.inputs * layer.outputs for layer in self.layers[1:]]
        return (rows * features, rows * rows, *8 * outputs, *2 * later)

    @staticmethod
    def pays(layers: tuple[Layer, ...], rows: int, local: Local) -> bool:
        """Whether a client with so many rows takes fewer operations in sample space than fused."""
        p = layers[0].inputs
        o = layers[0].outputs
        n = rows
        b = local.batch_size(rows)
        q = int(local.step_counts(np.array([rows]))[0])
        return 2 * n * p * o + n * n * p + q * n * b * o < q * (2 * b + MEMORY) * p * o
