"""Stacks of linear layers, a whole lane in batched products: forward, backward and step by hand,
without autograd.

Two ways, which differ in the first layer, the one whose inputs are the client's rows X [n, p]
throughout:

**fused** holds its weights, [C, out, in] for a lane, and the step is made inside the backward
product, W <- (1 - lr wd) W - lr G^T a: one `baddbmm_`, no gradient, no optimiser. **sample space**
never forms them. They move only within the span of the client's rows, W = gamma W0 + A^T X (and b =
gamma b0 + A^T 1), so it carries the layer's outputs on all rows, Z = X W^T + b, and A [n, out].
With K = X X^T + 1 (the 1 is the bias), the step along a batch's gradient G by the outputs is

    Z <- (1 - lr wd) Z - lr K[:, batch] G,        A[batch] += c_t G,        W_Q - W_0 = (gamma - 1)
    W_0 + A^T X,

where c_t and gamma are numbers that lr, weight decay, momentum and the proximal term give. Momentum
keeps a second Z, its velocity's outputs, and a proximal term mu the first one, Z_0: its gradient mu
(W - W_0) gives mu (Z - Z_0), for the outputs are linear in W and b. That is n coefficients an
output instead of p weights. The mathematics is that of the loop, up to rounding.

Where each sample's gradient is clipped (fused alone), its squared norm is the sum over the layers
of (||a||^2 + 1) ||g||^2, a the layer's inputs and g the gradient by its outputs, and to clip it is
to scale its g in every layer (Goodfellow 2015).

>>> SampleSpace.pays(stack(nn.Linear(784, 10)), rows=20, local=Sgd(steps=20, batch=10))
True
>>> SampleSpace.pays(stack(nn.Linear(784, 10)), rows=600, local=Sgd(steps=1, batch=10))
False
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from raydpfl.local.sgd import Sgd
from raydpfl.local.stack import Layer, stack
from raydpfl.local.way import Block, LaneData, clip_factors, take

PICK = 1 << 18  # products that take as long as picking the rows of a batch out of small tensors
MEMORY = 24  # products that take as long as reading and writing one weight


class _Weights:
    """A layer of C clients by its weights [C, out, in] and biases [C, 1, out]."""

    def __init__(self, layer: Layer, parameters: torch.Tensor, lane: LaneData, local: Sgd):
        self.layer = layer
        self.local = local
        self.lr = lane.lr
        clients = len(lane.sizes)
        self.start = layer.views(parameters)
        # What a step adds to the gradient that stays the same throughout: the correction, and of
        # proximal (x - start) the start's part.
        self.constant = (
            []
            if lane.corrections is None
            else [part.contiguous() for part in layer.views(lane.corrections)]
        )
        if local.proximal:
            pull = [part * -local.proximal for part in self.start]
            self.constant = (
                [a + b for a, b in zip(self.constant, pull, strict=True)] if self.constant else pull
            )
        self.now = [part.expand(clients, *part.shape).clone() for part in self.start]
        self.velocity = [torch.zeros_like(part) for part in self.now] if local.momentum else []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[C, B, in] -> [C, B, out], which lies in memory as [C, out, B]."""
        self.inputs = inputs
        weight, *bias = self.now
        return (
            torch.baddbmm(bias[0].mT, weight, inputs.mT) if bias else torch.bmm(weight, inputs.mT)
        ).mT

    def backward(self, g: torch.Tensor) -> torch.Tensor:
        """The gradient by the inputs, laid out as they are, from the gradient `g` by the outputs,
        [C, B, out].
        """
        weight = self.now[0]
        return (
            torch.bmm(g, weight) if self.inputs.is_contiguous() else torch.bmm(weight.mT, g.mT).mT
        )

    def squares(self, g: torch.Tensor) -> torch.Tensor:
        """The squared norm of each sample's gradient by weight and bias, float32 [C, B, 1], from
        each sample's `g`: (||a||^2 + 1) ||g||^2.
        """
        return (
            torch.linalg.vector_norm(self.inputs, dim=2, keepdim=True)
            .square_()
            .add_(len(self.now) - 1)
            .mul_(g.square().sum(2, keepdim=True))
        )

    def step(self, g: torch.Tensor, noise: torch.Tensor | None) -> None:
        """Makes the step from the gradient `g` by the outputs, and the noise [C, d] that is added
        to the gradient by the parameters.
        """
        momentum = self.local.momentum
        decay = self.local.weight_decay + self.local.proximal
        lr = self.lr
        moved, keep, step = (
            (self.velocity, momentum, 1.0) if momentum else (self.now, 1 - lr * decay, -lr)
        )
        moved[0].baddbmm_(g.mT, self.inputs, beta=keep, alpha=step)
        for bias in moved[1:]:
            (bias if keep == 1 else bias.mul_(keep)).add_(g.sum(1, keepdim=True), alpha=step)
        for part, constant in zip(moved, self.constant, strict=False):
            part.add_(constant, alpha=step)
        for part, drawn in zip(
            moved, () if noise is None else self.layer.views(noise), strict=False
        ):
            part.add_(drawn, alpha=step)
        for now, velocity in zip(self.now, self.velocity, strict=False):
            now.sub_(velocity.add_(now, alpha=decay), alpha=lr)

    def delta(self, slots: slice, out: torch.Tensor) -> None:
        """Writes the layer's part of the slots' updates into `out` [slots, d]."""
        for part, now, start in zip(self.layer.views(out), self.now, self.start, strict=True):
            torch.sub(now[slots], start, out=part)


class _Inputs(_Weights):
    """The first layer by its weights; `x` [C, n, in]."""

    def __init__(
        self,
        layer: Layer,
        parameters: torch.Tensor,
        x: torch.Tensor,
        lane: LaneData,
        local: Sgd,
        whole: bool,
    ):
        super().__init__(layer, parameters, lane, local)
        self.x = x

    def forward(self, rows: torch.Tensor | None) -> torch.Tensor:
        return super().forward(take(self.x, rows))


class _Span:
    """The first layer in sample space; `x` [C, n, in]. Z and A are [C, n, out], or [C, out, n] if
    steps take the `whole` of them.
    """

    def __init__(
        self,
        layer: Layer,
        parameters: torch.Tensor,
        x: torch.Tensor,
        lane: LaneData,
        local: Sgd,
        whole: bool,
    ):
        self.layer = layer
        self.x = x
        self.local = local
        self.lr = lane.lr
        self.whole = whole
        self.start = layer.views(parameters)
        self.gamma, responses = _responses(local, lane.lr, lane.index.shape[1])
        self.responses = iter(responses)
        weight, *bias = self.start
        now = x.new_empty(*x.shape[:2], layer.outputs)
        self.kernel = x.new_empty(*x.shape[:2], x.shape[1])
        # lane by lane: the bits of the first product may depend on the number of its rows
        for slots in lane.lanes:
            flat = x[slots].flatten(0, 1)
            outputs = now[slots].flatten(0, 1)
            if bias:
                torch.addmm(*bias, flat, weight.mT, out=outputs)
            else:
                torch.mm(flat, weight.mT, out=outputs)
            torch.bmm(x[slots], x[slots].mT, out=self.kernel[slots])
        self.kernel.add_(len(bias))
        self.now = now.mT.contiguous() if whole else now  # Z
        self.first = self.now.clone() if local.proximal else None  # Z_0
        self.velocity = torch.zeros_like(self.now) if local.momentum else None
        self.coefficients = torch.zeros_like(self.now)  # A

    def forward(self, rows: torch.Tensor | None) -> torch.Tensor:
        self.rows = rows
        if not self.whole:
            return take(self.now, rows)
        return self.now.mT.clone() if self.layer.activation else self.now.mT

    def step(self, g: torch.Tensor, noise: None) -> None:
        momentum = self.local.momentum
        decay = self.local.weight_decay + self.local.proximal
        lr = self.lr
        moved, keep, step = (
            (self.velocity, momentum, 1.0) if momentum else (self.now, 1 - lr * decay, -lr)
        )
        product = (g.mT, self.kernel) if self.whole else (take(self.kernel, self.rows).mT, g)
        moved.baddbmm_(*product, beta=keep, alpha=step)
        if self.first is not None:
            moved.add_(self.first, alpha=-step * self.local.proximal)
        if momentum:
            self.now.sub_(self.velocity.add_(self.now, alpha=decay), alpha=lr)
        if self.whole:
            self.coefficients.add_(g.mT, alpha=next(self.responses))
        else:  # a row may stand in a batch twice, at the end of an epoch and the start of the next
            self.coefficients.view(-1, g.shape[2]).index_add_(
                0, self.rows, g.flatten(0, 1), alpha=next(self.responses)
            )

    def delta(self, slots: slice, out: torch.Tensor) -> None:
        a = self.coefficients[slots]
        shrunk = self.gamma - 1
        a = a if self.whole else a.mT
        weight, *bias = self.layer.views(out)
        torch.baddbmm(self.start[0], a, self.x[slots], beta=shrunk, out=weight)
        for part in bias:
            torch.add(a.sum(2)[:, None], self.start[1], alpha=shrunk, out=part)


def _responses(local: Sgd, lr: float, steps: int) -> tuple[float, list[float]]:
    """(gamma, [c_0, ..., c_{Q-1}]) such that W_Q = gamma W_0 + sum_t c_t g_t when step t meets the
    gradient g_t.
    """

    def run(start: float, w: float, v: float, steps: int) -> list[float]:
        """A number w that stands for the weights' part along W_0, of which the start has `start`,
        or along a gradient, which it lacks.
        """
        seen = [w]
        for _ in range(steps):
            v = local.momentum * v + local.weight_decay * w + local.proximal * (w - start)
            w -= lr * v
            seen.append(w)
        return seen

    def single(number: float) -> float:
        """Infinite where float32 would be: torch raises for a factor that overflows, and a client
        that diverged is to show it.
        """
        return number if abs(number) < 3e38 else math.inf

    return single(run(1.0, 1.0, 0.0, steps)[-1]), [
        single(c) for c in run(0.0, -lr, 1.0, steps - 1)[::-1]
    ]


class _Stack:
    private = None
    corrects = True
    one_by_one = False
    first: type[_Inputs] | type[_Span]

    def __init__(self, module: nn.Module, local: Sgd, device: torch.device):
        self.local = local
        self.layers = stack(module)

    def whole(self, lane: LaneData) -> bool:
        """Whether a step takes all rows, those outside of the batch with share 0, rather than
        picking some out.
        """
        return False

    def run(self, parameters: torch.Tensor, lane: LaneData) -> Iterator[Block]:
        """See `raydpfl.local.way.Way`."""
        with torch.inference_mode():
            chain, losses = self._train(parameters, lane)
        for slots, given in lane.blocks(len(parameters)):
            deltas = parameters.new_empty(slots.stop - slots.start, len(parameters))
            with torch.inference_mode():
                for place in chain:
                    place.delta(slots, deltas)
            if len(given) < len(deltas):
                deltas = deltas[torch.from_numpy(given - slots.start)]
            yield Block(given, deltas, losses[given])

    def _train(
        self, parameters: torch.Tensor, lane: LaneData
    ) -> tuple[list[_Weights | _Span], np.ndarray]:
        """The layers after the last step, and the mean losses, float64 [C]."""
        batches = lane.batches(self.whole(lane))
        whole = batches[0][0] is None
        x, y = lane.rows(picked=not whole and self.first is _Inputs)
        target = _target(y, self.layers[-1].outputs)
        target = target.mT.contiguous().mT if whole else target
        chain = [self.first(self.layers[0], parameters, x.flatten(2), lane, self.local, whole)]
        chain += [_Weights(layer, parameters, lane, self.local) for layer in self.layers[1:]]
        losses = x.new_zeros(len(x), target.shape[2], batches[0][1].shape[2])
        clipped_by = []
        for step, (rows, shares) in enumerate(batches):
            a = rows
            outputs = []
            for place in chain:
                a = place.forward(a)
                if place.layer.activation:
                    a = place.layer.activation.forward(a)
                outputs.append(a)
            # [C, outputs, B] from here: over a last axis of few classes torch's softmax is slow
            wanted = take(target, rows).mT
            if lane.regression:
                g = a.mT - wanted
                losses.addcmul_(g * shares, g, value=-0.5)
            else:
                log_p = torch.log_softmax(a.mT, 1)
                # of the two the one that changes; the other at the end
                losses.addcmul_(log_p, shares if whole else wanted)
                g = log_p.exp_().sub_(wanted)
            g = (g if lane.clip is not None else g.mul_(shares)).mT
            # of each sample, by the outputs of each layer from the last to the first
            gradients = []
            for place, later, a in zip(
                reversed(chain), (None, *reversed(chain)), reversed(outputs), strict=False
            ):
                g = later.backward(g) if later else g
                g = place.layer.activation.backward(g, a) if place.layer.activation else g
                gradients.append(g)
            if lane.clip is not None:
                norms = sum(
                    place.squares(g) for place, g in zip(reversed(chain), gradients, strict=True)
                ).sqrt_()
                clipped_by.append(clip_factors(norms, lane.clip))
                factors = clipped_by[-1] * shares.mT
                gradients = [g * factors for g in gradients]
            noise = lane.step_noise(step)
            for place, g in zip(reversed(chain), gradients, strict=True):
                place.step(g, noise)
        if not lane.regression:
            losses.mul_(wanted if whole else shares)
        lane.count_clipped(clipped_by)
        return chain, (losses.sum((1, 2)) / -len(batches)).double().cpu().numpy()


def _target(y: torch.Tensor, outputs: int) -> torch.Tensor:
    """What the outputs are held against, [C, n, outputs]: classes as one-hot, the numbers of
    regression as they are.

    Raises RuntimeError for a class that the model does not know, and for regression with several
    outputs.
    """
    if not y.is_floating_point():
        return torch.zeros(*y.shape, outputs, device=y.device).scatter_(2, y[:, :, None], 1.0)
    if outputs != 1:
        raise RuntimeError(f"regression needs a single output, and the model has {outputs}")
    return y[:, :, None]


class Fused(_Stack):
    """Every layer by its weights. Raises `NoStack` for a module that is no stack of linear layers."""

    first = _Inputs

    def numbers(self, rows: int, features: int, batch: int, clip: bool) -> int:
        """See `raydpfl.local.way.Way`."""
        weights = sum(layer.inputs * layer.outputs for layer in self.layers)
        return (rows + batch) * features + (1 + clip) * weights


class SampleSpace(_Stack):
    """The first layer in the span of each client's rows. Raises `NoStack` as `Fused` does.

    A row that is not finite makes its client's update so, whether or not a batch holds it.
    """

    private = False
    one_by_one = False
    corrects = False  # a correction is of the size of the weights that this way never forms
    first = _Span

    def whole(self, lane: LaneData) -> bool:
        n = lane.y.shape[1]
        clients = lane.width or len(lane.y)
        return clients * n * (n - lane.index.shape[2]) * self.layers[0].outputs <= PICK

    def numbers(self, rows: int, features: int, batch: int, clip: bool) -> int:
        """See `raydpfl.local.way.Way`."""
        outputs = sum(layer.outputs for layer in self.layers)
        later = sum(layer.inputs * layer.outputs for layer in self.layers[1:])
        return rows * (features + rows) + 8 * rows * outputs + 2 * later

    @staticmethod
    def pays(layers: tuple[Layer, ...], rows: int, local: Sgd) -> bool:
        """Whether a client with so many rows takes fewer operations in sample space than fused."""
        p = layers[0].inputs
        o = layers[0].outputs
        n = rows
        b = local.batch_size(rows)
        q = local.steps
        return 2 * n * p * o + n * n * p + q * n * b * o < q * (2 * b + MEMORY) * p * o
