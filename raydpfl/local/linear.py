"""Stacks of linear layers, a whole lane in batched products: forward, backward and step by hand, without autograd.

Two ways, which differ in the first layer, the one whose inputs are the client's rows X [n, p] throughout:

**fused** holds its weights, [C, out, in] for a lane, and the step is made inside the backward product, W <- (1 - lr wd) W - lr G^T a:
one `baddbmm_`, no gradient, no optimiser. **sample space** never forms them. They move only within the span of the client's rows,
W = gamma W0 + A^T X (and b = gamma b0 + A^T 1), so it carries the layer's outputs on all rows, Z = X W^T + b, and A [n, out]. With
K = X X^T + 1 (the 1 is the bias), the step along a batch's gradient G by the outputs is

    Z <- (1 - lr wd) Z - lr K[:, batch] G,        A[batch] += c_t G,        W_Q - W_0 = (gamma - 1) W_0 + A^T X,

where c_t and gamma are numbers that lr, weight decay and momentum give (momentum keeps a second Z, its velocity's outputs). That is
n coefficients an output instead of p weights. The mathematics is that of the loop, up to rounding.

>>> SampleSpace.pays(stack(nn.Linear(784, 10)), rows=20, local=Sgd(steps=20, batch=10))
True
>>> SampleSpace.pays(stack(nn.Linear(784, 10)), rows=600, local=Sgd(steps=1, batch=10))
False
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from raydpfl.local.sgd import Sgd
from raydpfl.local.stack import Layer, stack
from raydpfl.local.way import LaneData, take

CHUNK = 1 << 18  # numbers of updates that are formed at once
PICK = 1 << 18  # products that take as long as picking the rows of a batch out of small tensors
MEMORY = 24  # products that take as long as reading and writing one weight


class _Weights:
    """A layer of C clients by its weights [C, out, in] and biases [C, 1, out]."""

    def __init__(self, layer: Layer, parameters: torch.Tensor, clients: int, local: Sgd, lr: float):
        self.layer, self.local, self.lr = layer, local, lr
        self.start = layer.views(parameters)
        self.now = [part.expand(clients, *part.shape).clone() for part in self.start]
        self.velocity = [torch.zeros_like(part) for part in self.now] if local.momentum else []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[C, B, in] -> [C, B, out], which lies in memory as [C, out, B]."""
        self.inputs = inputs
        weight, *bias = self.now
        return (torch.baddbmm(bias[0].mT, weight, inputs.mT) if bias else torch.bmm(weight, inputs.mT)).mT

    def backward(self, g: torch.Tensor, wanted: bool) -> torch.Tensor | None:
        """Makes the step from the gradient `g` by the outputs, [C, B, out]; if `wanted`, returns that by the inputs, laid out as they are."""
        weight, before = self.now[0], None
        if wanted:
            before = torch.bmm(g, weight) if self.inputs.is_contiguous() else torch.bmm(weight.mT, g.mT).mT
        momentum, decay, lr = self.local.momentum, self.local.weight_decay, self.lr
        moved, keep, step = (self.velocity, momentum, 1.0) if momentum else (self.now, 1 - lr * decay, -lr)
        moved[0].baddbmm_(g.mT, self.inputs, beta=keep, alpha=step)
        for bias in moved[1:]:
            bias.mul_(keep).add_(g.sum(1, keepdim=True), alpha=step)
        for now, velocity in zip(self.now, self.velocity, strict=False):
            now.sub_(velocity.add_(now, alpha=decay), alpha=lr)
        return before

    def delta(self, slots: slice, out: torch.Tensor) -> None:
        """Writes the layer's part of the slots' updates into `out` [slots, d]."""
        for part, now, start in zip(self.layer.views(out), self.now, self.start, strict=True):
            torch.sub(now[slots], start, out=part)


class _Inputs(_Weights):
    """The first layer by its weights; `x` [C, n, in]."""

    def __init__(self, layer: Layer, parameters: torch.Tensor, x: torch.Tensor, steps: int, local: Sgd, lr: float, whole: bool):
        super().__init__(layer, parameters, len(x), local, lr)
        self.x = x

    def forward(self, rows: torch.Tensor | None) -> torch.Tensor:
        return super().forward(take(self.x, rows))


class _Span:
    """The first layer in sample space; `x` [C, n, in]. Z and A are [C, n, out], or [C, out, n] if steps take the `whole` of them."""

    def __init__(self, layer: Layer, parameters: torch.Tensor, x: torch.Tensor, steps: int, local: Sgd, lr: float, whole: bool):
        self.layer, self.x, self.local, self.lr, self.whole = layer, x, local, lr, whole
        self.start = layer.views(parameters)
        self.gamma, responses = _responses(local, lr, steps)
        self.responses = iter(responses)
        weight, *bias = self.start
        flat = x.flatten(0, 1)
        now = (torch.addmm(*bias, flat, weight.mT) if bias else torch.mm(flat, weight.mT)).view(*x.shape[:2], -1)
        self.now = now.mT.contiguous() if whole else now  # Z
        self.velocity = torch.zeros_like(self.now) if local.momentum else None
        self.coefficients = torch.zeros_like(self.now)  # A
        self.kernel = torch.bmm(x, x.mT).add_(len(bias))

    def forward(self, rows: torch.Tensor | None) -> torch.Tensor:
        self.rows = rows
        if not self.whole:
            return take(self.now, rows)
        return self.now.mT.clone() if self.layer.activation else self.now.mT

    def backward(self, g: torch.Tensor, wanted: bool) -> None:
        momentum, decay, lr = self.local.momentum, self.local.weight_decay, self.lr
        product = (g.mT, self.kernel) if self.whole else (take(self.kernel, self.rows).mT, g)
        if momentum:
            self.now.sub_(self.velocity.baddbmm_(*product, beta=momentum).add_(self.now, alpha=decay), alpha=lr)
        else:
            self.now.baddbmm_(*product, beta=1 - lr * decay, alpha=-lr)
        if self.whole:
            self.coefficients.add_(g.mT, alpha=next(self.responses))
        else:  # a row may stand in a batch twice, at the end of an epoch and the start of the next
            self.coefficients.view(-1, g.shape[2]).index_add_(0, self.rows, g.flatten(0, 1), alpha=next(self.responses))

    def delta(self, slots: slice, out: torch.Tensor) -> None:
        a, shrunk = self.coefficients[slots], self.gamma - 1
        a = a if self.whole else a.mT
        weight, *bias = self.layer.views(out)
        torch.baddbmm(self.start[0], a, self.x[slots], beta=shrunk, out=weight)
        for part in bias:
            torch.add(a.sum(2)[:, None], self.start[1], alpha=shrunk, out=part)


def _responses(local: Sgd, lr: float, steps: int) -> tuple[float, list[float]]:
    """(gamma, [c_0, ..., c_{Q-1}]) such that W_Q = gamma W_0 + sum_t c_t g_t when step t meets the gradient g_t."""

    def run(w: float, v: float, steps: int) -> list[float]:
        seen = [w]
        for _ in range(steps):
            v = local.momentum * v + local.weight_decay * w
            w -= lr * v
            seen.append(w)
        return seen

    return run(1.0, 0.0, steps)[-1], run(-lr, 1.0, steps - 1)[::-1]


class _Stack:
    first: type[_Inputs] | type[_Span]

    def __init__(self, module: nn.Module, local: Sgd, device: torch.device):
        self.local, self.layers = local, stack(module)

    def whole(self, lane: LaneData) -> bool:
        """Whether a step takes all rows, those outside of the batch with share 0, rather than picking some out."""
        return False

    def run(self, parameters: torch.Tensor, lane: LaneData) -> Iterator[tuple[int, torch.Tensor, float]]:
        """See `raydpfl.local.way.Way`."""
        with torch.inference_mode():
            chain, losses = self._train(parameters, lane)
        clients, d = len(lane.sizes), len(parameters)
        together = max(1, CHUNK // d)
        for first in range(0, clients, together):
            slots = slice(first, min(first + together, clients))
            wanted = [slot for slot in lane.slots if slots.start <= slot < slots.stop]
            if not wanted:
                continue
            deltas = torch.empty(slots.stop - first, d, device=parameters.device)
            with torch.inference_mode():
                for place in chain:
                    place.delta(slots, deltas)
            for slot in wanted:
                yield slot, deltas[slot - first], losses[slot]

    def _train(self, parameters: torch.Tensor, lane: LaneData) -> tuple[list[_Weights | _Span], list[float]]:
        """The layers after the last step, and the mean losses [C]."""
        x, y = lane.rows()
        batches = lane.batches(self.whole(lane))
        whole = batches[0][0] is None
        one_hot = x.new_zeros(*y.shape, self.layers[-1].outputs).scatter_(2, y[:, :, None], 1.0)
        one_hot = one_hot.mT.contiguous().mT if whole else one_hot
        chain = [self.first(self.layers[0], parameters, x.flatten(2), len(batches), self.local, lane.lr, whole)]
        chain += [_Weights(layer, parameters, len(x), self.local, lane.lr) for layer in self.layers[1:]]
        losses = x.new_zeros(len(x), one_hot.shape[2], batches[0][1].shape[2])
        for rows, shares in batches:
            a, outputs = rows, []
            for place in chain:
                a = place.forward(a)
                if place.layer.activation:
                    a = place.layer.activation.forward(a)
                outputs.append(a)
            # [C, classes, B] from here: over a last axis of few classes torch's softmax is slow
            label = take(one_hot, rows).mT
            log_p = torch.log_softmax(a.mT, 1)
            losses.addcmul_(log_p, shares if whole else label)  # of the two the one that changes; the other at the end
            g = log_p.exp_().sub_(label).mul_(shares).mT
            for place, a in zip(reversed(chain), reversed(outputs), strict=True):
                if place.layer.activation:
                    g = place.layer.activation.backward(g, a)
                g = place.backward(g, wanted=place is not chain[0])
        return chain, (losses.mul_(label if whole else shares).sum((1, 2)) / -len(batches)).tolist()


class Fused(_Stack):
    """Every layer by its weights. Raises `NoStack` for a module that is no stack of linear layers."""

    first = _Inputs


class SampleSpace(_Stack):
    """The first layer in the span of each client's rows. Raises `NoStack` as `Fused` does.

    A row that is not finite makes its client's update so, whether or not a batch holds it.
    """

    first = _Span

    def whole(self, lane: LaneData) -> bool:
        clients, n = lane.y.shape
        return clients * n * (n - lane.index.shape[2]) * self.layers[0].outputs <= PICK

    @staticmethod
    def pays(layers: tuple[Layer, ...], rows: int, local: Sgd) -> bool:
        """Whether a client with so many rows takes fewer operations in sample space than fused."""
        p, o, n, b, q = layers[0].inputs, layers[0].outputs, rows, local.batch_size(rows), local.steps
        return 2 * n * p * o + n * n * p + q * n * b * o < q * (2 * b + MEMORY) * p * o
