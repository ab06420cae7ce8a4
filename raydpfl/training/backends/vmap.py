"""A whole chunk by torch.func: vmap over clients of the gradient of one client's loss.

It pays for small modules that are no stack of linear layers, and loses to the loop on convolutions
and recurrent layers. Where each sample's gradient is to be clipped, it is vmap over clients of vmap
over samples, of as many at a time as `LIMIT` allows. Where a step takes no more than `Vmap.few`
clients of a chunk, as the others have made theirs, autograd takes each by itself: vmap adds about
0.15 ms to every step.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd

from raydpfl.core.device import index
from raydpfl.methods.local.base import LinearRule, Local
from raydpfl.models.linear_stack import is_placed
from raydpfl.models.tasks import Task
from raydpfl.training.backends.base import Backend, Block, ChunkData, Rule, clip_factors, take

# the form of attention whose gradient torch can take of all clients at once: of the others it has
# no batching rule, and would go through the clients one by one
PRODUCTS = SDPBackend.MATH
LIMIT = 1 << 28  # bytes of samples' gradients at a time


Parts = Callable[[torch.Tensor], list[torch.Tensor]]
Named = dict[str, torch.Tensor]  # by the parameter's name, [C, *its shape]
Gradients = Callable[[Named, torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""Of the parameters, x [C, B, *shape], y [C, B, *target] and shares [C, B]: the gradients of the
clients' losses, these [C], and where samples are clipped the factors [C, B]."""


class _Attention:
    """Attention takes the form `PRODUCTS` while any thread is within: torch has one setting of it
    for the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._setting = ExitStack()
        self._context = copy_context()  # of the variables that torch sets and sets back

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._context.run(self._setting.enter_context, sdpa_kernel(PRODUCTS))
            self._inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._context.run(self._setting.close)


_ATTENTION = _Attention()


class _Forward:
    """A module's forward with other tensors in the place of its trained parameters: what
    `torch.func.functional_call` does, which looks for them anew in every call.
    """

    def __init__(self, module: nn.Module, names: list[str]):
        """`names`: of the parameters, in the order in which others are given."""
        self.module = module
        at: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for layer in module.modules():
            for name, parameter in layer._parameters.items():
                at.setdefault(id(parameter), []).append((layer._parameters, name))
        own = [module.get_parameter(name) for name in names]
        # where each is held, more than once if layers share it
        self.places = [
            (held, name, place, parameter)
            for place, parameter in enumerate(own)
            for held, name in at[id(parameter)]
        ]

    def __call__(self, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        try:
            for held, name, place, _ in self.places:
                held[name] = parameters[place]
            return self.module(x)
        finally:
            for held, name, _, own in self.places:
                held[name] = own


class _Linear:
    """A linear rule, on `now`: each parameter, [c, *its shape], of the slots that a step takes."""

    def __init__(
        self, linear: LinearRule, parts: Parts, parameters: torch.Tensor, chunk: ChunkData
    ):
        self.linear = linear
        self.chunk = chunk
        self.model = parts(parameters)
        if chunk.starts is None:
            self.now = [
                start.expand(len(chunk.sizes), *start.shape).clone() for start in self.model
            ]
        else:
            begun = parts(chunk.starts.begun[:, : len(parameters)])
            self.now = [part.clone() for part in begun]
            self.model = self.model if chunk.starts.drawn else begun
        self.every = self.now
        self.velocity = [torch.zeros_like(part) for part in self.now if linear.momentum]
        self.corrections: list[torch.Tensor] = []
        if chunk.corrections is not None:
            self.corrections = [part.contiguous() for part in parts(chunk.corrections)]

    def narrow(self, count: int) -> None:
        """Goes on with the first slots alone."""
        self.now = [part[:count] for part in self.now]
        self.velocity = [part[:count] for part in self.velocity]
        self.corrections = [part[:count] for part in self.corrections]
        if self.chunk.starts is not None and not self.chunk.starts.drawn:
            self.model = [part[:count] for part in self.model]

    def ended(self) -> list[torch.Tensor]:
        """Each parameter of all slots, [C, *its shape]."""
        return self.every

    def step(self, gradients: list[torch.Tensor], k: int) -> None:
        done = self.chunk.done(k)
        held = [] if done is None else [part[done] for part in self.now]
        lr = self.chunk.lr
        self.linear.move(self.now, gradients, self.velocity, self.model, self.corrections, lr)
        for part, still in zip(self.now, held, strict=False):
            part[done] = still

    def perturbed(self, gradients: list[torch.Tensor], k: int) -> list[torch.Tensor]:
        raise TypeError("a linear rule takes one gradient")


class _General:
    """Any rule: it is given the parameters of a client as one vector."""

    def __init__(self, local: Local, parts: Parts, parameters: torch.Tensor, chunk: ChunkData):
        self.parts = parts
        self.rule = Rule(local, parameters, chunk)
        self.now = parts(self.rule.x)

    def narrow(self, count: int) -> None:
        self.now = [part[:count] for part in self.now]

    def ended(self) -> list[torch.Tensor]:
        return self.parts(self.rule.ended())

    def step(self, gradients: list[torch.Tensor], k: int) -> None:
        self.now = self.parts(self.rule.step(_flat(gradients), k))

    def perturbed(self, gradients: list[torch.Tensor], k: int) -> list[torch.Tensor]:
        return self.parts(self.rule.perturbed(_flat(gradients), k))


def _flat(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten(1) for part in parts], dim=1)


class Vmap(Backend):
    """Trains the chunk at once, each parameter [C, *its shape]. A module that draws random numbers
    raises RuntimeError when it is run.
    """

    calls = 1 << 23
    few = 2
    padded = False  # it looks at the rows of a batch alone
    starts = True
    twice = True
    half = True

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        super().__init__(module, local, device, task)
        self.module: nn.Module = copy.deepcopy(module).to(device).train()
        self.names = [
            name for name, parameter in self.module.named_parameters() if parameter.requires_grad
        ]
        self.shapes = [self.module.get_parameter(name).shape for name in self.names]
        self.convolves = any(
            isinstance(layer, (_ConvNd, nn.RNNBase)) for layer in self.module.modules()
        )
        self._anywhere = task.closed() is not None and not is_placed(self.module)
        self.shares = any(not parameter.requires_grad for parameter in self.module.parameters())
        # of recurrent layers torch has no form for all clients at once but beneath a gradient
        self._recurs = any(isinstance(layer, nn.RNNBase) for layer in self.module.modules())
        self._forward = _Forward(self.module, self.names)
        self._forwards = vmap(self._forward, randomness="error")
        self._beneath = vmap(grad_and_value(self._loss), randomness="error")
        self._each = vmap(
            grad_and_value(self._loss), in_dims=(None, 0, 0, None), randomness="error"
        )

    def _outputs(self, named: Named, x: torch.Tensor) -> torch.Tensor:
        """What the module gives for x [C, B, *shape], [C B, ...]."""
        with self.low(), _ATTENTION:
            outputs = self._forwards(x, *named.values())
        return outputs.flatten(0, 1).float()

    def _means(
        self, named: Named, x: torch.Tensor, y: torch.Tensor, shares: torch.Tensor
    ) -> tuple[Named, torch.Tensor]:
        """The gradients of the clients' losses, and these [C]."""
        held = {name: part.detach().requires_grad_() for name, part in named.items()}
        losses = self.task.loss(self._outputs(held, x), y.flatten(0, 1)).view(shares.shape)
        means = (losses * shares).sum(1)
        gradients = torch.autograd.grad(means.sum(), list(held.values()), allow_unused=True)
        found = {
            name: torch.zeros_like(part) if gradient is None else gradient
            for (name, part), gradient in zip(held.items(), gradients, strict=True)
        }
        return found, means.detach()

    def _loss(
        self,
        parameters: dict[str, torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        with self.low(), _ATTENTION:
            outputs = self._forward(x, *parameters.values())
        return self.task.loss(outputs.float(), y) @ weights

    def _alone(
        self, parameters: Named, x: torch.Tensor, y: torch.Tensor, shares: torch.Tensor
    ) -> tuple[Named, torch.Tensor]:
        """The gradients of one client's loss, and this."""
        held = {name: part.detach().requires_grad_() for name, part in parameters.items()}
        loss = self._loss(held, x, y, shares)
        gradients = torch.autograd.grad(loss, list(held.values()), materialize_grads=True)
        return dict(zip(held, gradients, strict=True)), loss.detach()

    def _clipped(
        self,
        parameters: dict[str, torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        shares: torch.Tensor,
        clip: float,
    ) -> Any:
        """Of one client: the sum of its samples' clipped gradients by their shares (as `_gradients`
        gives it, by the parameter's name), that of their losses, and the clip factors, float32 [B].
        """
        total = {name: torch.zeros_like(part) for name, part in parameters.items()}
        loss = 0.0
        found: list[torch.Tensor] = []
        samples = max(1, LIMIT // (4 * sum(shape.numel() for shape in self.shapes)))
        for some, labels, share in zip(
            x.split(samples), y.split(samples), shares.split(samples), strict=True
        ):
            gradients, losses = self._each(
                parameters, some[:, None], labels[:, None], torch.ones_like(share[:1])
            )
            squares = [gradient.flatten(1).square().sum(1) for gradient in gradients.values()]
            found.append(clip_factors(torch.stack(squares).sum(0).sqrt(), clip))
            factors = found[-1] * share
            total = {
                name: total[name] + torch.tensordot(factors, each, 1)
                for name, each in gradients.items()
            }
            loss = loss + losses @ share
        return total, loss, torch.cat(found)

    def arrays(self, rows: int, features: int, batch: int, clip: bool) -> tuple[int, ...] | None:
        """See `raydpfl.training.backends.base.Backend`. The bits of a convolution may depend on the
        number of clients, and so may those of a product that is one for all of them, by a frozen
        weight.
        """
        if self.convolves or self.shares:
            return None
        parts = [shape.numel() for shape in self.shapes]
        return (rows * features, batch * features, sum(parts), *(3 + batch * clip) * parts)

    def placed(self, rows: int, batch: int) -> tuple[int, ...]:
        """See `raydpfl.training.backends.base.Backend`: any array may be such a one, of a batch
        or of parameters.
        """
        if self._anywhere:
            return ()
        return (batch, *(shape.numel() for shape in self.shapes))

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of `flat` [..., d], as [..., *its shape]."""
        parts = flat.split([shape.numel() for shape in self.shapes], dim=-1)
        return [
            part.reshape(part.shape[:-1] + shape)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def _named(self, parts: list[torch.Tensor]) -> Named:
        return dict(zip(self.names, parts, strict=True))

    def _walk(self, parameters: torch.Tensor, chunk: ChunkData) -> _Linear | _General:
        """The parameters of every client, and what makes their steps."""
        linear = self.local.linear()
        if linear is None:
            return _General(self.local, self._parts, parameters, chunk)
        return _Linear(linear, self._parts, parameters, chunk)

    def _gradients_of(self, chunk: ChunkData) -> Gradients:
        """What gives the gradients of a step's batches."""
        if chunk.clip is None:
            return self._beneath if self._recurs else self._means
        numbers = chunk.index.shape[2] * sum(shape.numel() for shape in self.shapes)
        return vmap(
            partial(self._clipped, clip=chunk.clip),
            randomness="error",
            chunk_size=max(1, LIMIT // (4 * numbers)),
        )

    def _each_alone(self, chunk: ChunkData) -> Gradients:
        """The same client by client, of few."""
        of_one: Callable[..., Any] = self._alone
        if chunk.clip is not None:
            of_one = partial(self._clipped, clip=chunk.clip)

        def found(named: Named, *batch: torch.Tensor) -> tuple[Any, ...]:
            clients = [
                of_one({name: part[slot] for name, part in named.items()}, *given)
                for slot, given in enumerate(zip(*batch, strict=True))
            ]
            gradients, *others = zip(*clients, strict=True)
            joined = {
                name: torch.stack([gradient[name] for gradient in gradients]) for name in named
            }
            return joined, *map(torch.stack, others)

        return found

    def run(self, parameters: torch.Tensor, chunk: ChunkData) -> Iterator[Block]:
        """See `raydpfl.training.backends.base.Backend`."""
        batches = chunk.batches()
        x, y = chunk.rows(picked=batches[0][0] is not None)
        walk = self._walk(parameters, chunk)
        losses = parameters.new_zeros(len(chunk.sizes))
        factors: list[torch.Tensor] = []
        gradients_of = self._gradients_of(chunk)
        few = self.few if len(chunk.chunks) == 1 and len(chunk.sizes) > self.few else 0
        for step, (rows, shares) in enumerate(batches):
            count = len(shares)
            if count <= few:
                gradients_of = self._each_alone(chunk)
            if count < len(walk.now[0]):
                walk.narrow(count)
            batch = take(x[:count], rows), take(y[:count], rows), shares[:, 0]
            found: list[torch.Tensor]  # the clip factors, where samples are clipped
            gradients, loss, *found = gradients_of(self._named(walk.now), *batch)
            factors += found
            losses[:count] += loss
            direction = list(gradients.values())
            if self.local.perturbs:
                elsewhere = self._named(walk.perturbed(direction, step))
                direction = list(gradients_of(elsewhere, *batch)[0].values())
            noise = chunk.step_noise(step)
            if noise is not None:
                torch._foreach_add_(direction, self._parts(noise))
            walk.step(direction, step)
        chunk.count_clipped(factors)
        means = chunk.means(losses)
        ended = walk.ended()
        for _, given in chunk.blocks(len(parameters)):
            slots = index(given, parameters.device)
            yield Block(given, self._moved(parameters, ended, chunk, slots), means[given])

    def _moved(
        self,
        parameters: torch.Tensor,
        now: list[torch.Tensor],
        chunk: ChunkData,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """The updates of some slots, float32 [k, D]."""
        if chunk.starts is not None:
            ended = _flat([part.index_select(0, slots) for part in now])
            chunk.starts.ended[slots, : len(parameters)] = ended
            return ended - chunk.starts.begun[slots, : len(parameters)]
        moved = [
            (part.index_select(0, slots) - start).flatten(1)
            for part, start in zip(now, self._parts(parameters), strict=True)
        ]
        return torch.cat(moved, dim=1)
