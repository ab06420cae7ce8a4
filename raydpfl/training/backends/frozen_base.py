"""A whole chunk as one batch through the module: what is frozen is one product for all clients, and
only the layers that are trained are one for each.

The samples of all clients stand one after another, [C B, ...], and the module's own code runs on
them as on any batch. A layer with trained parameters has those of each client, [C, *shape]: its
inputs are taken apart by client, and its products are batched. So a chunk makes as many calls as
one client, and what a pass costs is what the frozen layers cost on all samples. By
`experiments/benchmarks/lora.py` that is twice as fast as vmap, which folds the products of frozen
layers too but none of what lies between them.

Where each sample's gradient is clipped, a sample is taken for a client of its own: its gradient is
then what autograd gives, and the norms and sums are a few operations on what is trained.

>>> net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
>>> _ = net[0].requires_grad_(False)
>>> backend = OneBatch(net, Local(), torch.device("cpu"), Classification())
>>> backend.names
['2.weight', '2.bias']
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.modules.module import register_module_forward_hook

from raydpfl.methods.local.base import Local
from raydpfl.models import lora
from raydpfl.models.tasks import Classification, Task  # noqa: F401  (the example above)
from raydpfl.training.backends.base import ChunkData, clip_factors
from raydpfl.training.backends.vmap import Gradients, Named, Vmap
from raydpfl.training.layers.adapters import adapted
from raydpfl.training.layers.dropout import Masks

# bytes of activations in a pass, about: more clients at once lie in no cache
LIMIT = 1 << 26


class NotOneBatch(Exception):
    """The module's trained parameters do not all sit in layers that take samples along the first
    axis of their inputs to the first axis of their output; says what stands in the way.
    """


@dataclass
class _Pass:
    """What is run now: the trained parameters by name, [C, *shape], for as many clients."""

    clients: int = 1
    samples: int = 1  # of all clients
    now: Named = field(default_factory=dict)

    def of_samples(self, kind: str, given: Any) -> torch.Tensor:
        """An input of a layer of this kind, for every sample where it is one for all, as positions
        are. Raises `NotOneBatch`.
        """
        if not isinstance(given, torch.Tensor) or not given.dim():
            raise NotOneBatch(f"{kind} takes more than tensors")
        if len(given) == 1:
            return given.expand(self.samples, *given.shape[1:])
        if len(given) != self.samples:
            raise NotOneBatch(f"the first axis of {kind}'s input is not that of the samples")
        return given


class _Plain(nn.Module):
    """A layer as it was."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.call = layer.forward

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.call(*inputs)


class _Apart:
    """The forward of a layer whose parameters are each client's own."""

    def __init__(self, layer: nn.Module, names: dict[str, str], at: _Pass):
        """`names`: of its trained parameters, in the layer and in the module."""
        self.kind = type(layer).__name__
        self.plain = _Plain(layer)
        self.names = names
        self.at = at
        self.products = type(layer) is nn.Linear and "weight" in names
        bias = getattr(layer, "bias", None)
        self.frozen_bias = bias if self.products and "bias" not in names else None

    def __call__(self, *inputs: Any, **named: Any) -> torch.Tensor:
        if named:
            raise NotOneBatch(f"{self.kind} is given {next(iter(named))} by name")
        every = [self.at.of_samples(self.kind, each) for each in inputs]
        own = {name: self.at.now[place] for name, place in self.names.items()}
        if self.products:
            (x,) = every
            return self._product(x, own)
        apart = [each.unflatten(0, (self.at.clients, -1)) for each in every]
        return vmap(self._client, randomness="error")(own, *apart).flatten(0, 1)

    def _product(self, x: torch.Tensor, own: Named) -> torch.Tensor:
        weight = own["weight"]
        rows = x.reshape(len(weight), -1, x.shape[-1])
        if "bias" in own:
            made = torch.baddbmm(own["bias"][:, None], rows, weight.mT)
        else:
            made = torch.bmm(rows, weight.mT)
        made = made.view(*x.shape[:-1], -1)
        return made if self.frozen_bias is None else made + self.frozen_bias

    def _client(self, own: Named, *inputs: torch.Tensor) -> torch.Tensor:
        inside = {f"layer.{name}": part for name, part in own.items()}
        return functional_call(self.plain, inside, inputs)


class _Adapted:
    """The forward of a frozen linear layer with an adapter that is each client's own."""

    def __init__(self, layer: nn.Module, scale: float, names: list[str], at: _Pass):
        """`names`: of the adapter's A and B in the module."""
        self.kind = type(layer).__name__
        self.plain = layer.forward
        self.weight = lora.inputs_first(layer)
        self.scale = scale
        self.names = names
        self.at = at

    def __call__(self, *inputs: Any, **named: Any) -> torch.Tensor:
        (given,) = inputs or named.values()
        x = self.at.of_samples(self.kind, given)
        a, b = (self.at.now[name] for name in self.names)
        return adapted(self.plain, self.weight, self.scale, x, a, b)


class OneBatch(Vmap):
    """Trains the chunk at once, as one batch.

    Raises `NotOneBatch` for a module with trained parameters outside of layers that take samples
    along the first axis.
    """

    few = 0  # it has no vmap to do without
    calls = 1 << 19  # as a row goes through what is frozen too

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        super().__init__(module, local, device, task)
        self.at = _Pass()
        self.numbers = 0  # that the layers give for a sample; 0: not known yet
        layers = list(self.module.modules())
        self.drops = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in layers)
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for layer in layers:
            instead = self._instead_of(layer, names)
            if instead is not None:
                layer.forward = instead

    def _instead_of(self, layer: nn.Module, names: dict[int, str]) -> Callable[..., Any] | None:
        """What a layer does in a pass in the place of its forward, if anything; `names`: of the
        module's parameters, by their identity.
        """
        own = {
            name: names[id(parameter)]
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter.requires_grad
        }
        if own:
            return _Apart(layer, own, self.at)
        halves = lora.halves(layer)
        if halves and all(half.requires_grad for half in halves):
            scale = lora.take_off(layer)
            if scale is not None:
                return _Adapted(layer, scale, [names[id(half)] for half in halves], self.at)
        return None

    def _gradients_of(self, chunk: ChunkData) -> Gradients:
        draws = {slot: self._generator(chunk, slot) for slot in chunk.slots} if self.drops else {}
        return partial(self._step, chunk, draws)

    def _generator(self, chunk: ChunkData, slot: int) -> torch.Generator:
        """What the masks of a client are drawn from: on the CPU as the loop draws them."""
        generator = chunk.generator(slot)
        if self.device.type == "cpu":
            return generator
        seed = int(torch.randint(1 << 62, (), generator=generator))
        return torch.Generator(self.device).manual_seed(seed)

    def _step(
        self,
        chunk: ChunkData,
        draws: dict[int, torch.Generator],
        named: Named,
        x: torch.Tensor,
        y: torch.Tensor,
        shares: torch.Tensor,
    ) -> tuple[Any, ...]:
        """See `Gradients`: pass by pass, of as many clients as lie in the cache."""
        clients = len(shares)
        passes = []
        at_once = self._at_once(named, x, chunk.clip is not None)
        for first in range(0, clients, at_once):
            span = slice(first, min(first + at_once, clients))
            slots = range(span.start, span.stop)
            own = {name: part[span] for name, part in named.items()}
            if not any(slot in chunk.slots for slot in slots):
                passes.append(_nothing(own, shares[span], chunk.clip))
                continue
            masks: AbstractContextManager[Any] = nullcontext()
            if self.drops:
                sizes = chunk.batch_sizes[span].tolist()
                masks = Masks([(draws.get(slot), n) for slot, n in zip(slots, sizes, strict=True)])
            with masks:
                given = own, x[span], y[span], shares[span]
                passes.append(
                    self._means(*given) if chunk.clip is None else self._bounded(*given, chunk.clip)
                )
        if len(passes) == 1:
            return passes[0]
        gradients, *others = zip(*passes, strict=True)
        joined = {name: torch.cat([gradient[name] for gradient in gradients]) for name in named}
        return joined, *(torch.cat(other) for other in others)

    def _at_once(self, named: Named, x: torch.Tensor, clip: bool) -> int:
        """The clients of a pass, by what it keeps."""
        if not self.numbers:
            self.numbers = self._count({name: part[:1] for name, part in named.items()}, x[0, :1])
        numbers = self.numbers
        if clip:
            numbers += sum(shape.numel() for shape in self.shapes)
        return max(1, LIMIT // (4 * numbers * x.shape[1]))

    def _count(self, named: Named, x: torch.Tensor) -> int:
        """How many numbers the layers give for a sample, x [1, *shape]. Raises `NotOneBatch` for a
        module that draws random numbers other than by dropout.
        """
        counted = [1]
        here = threading.get_ident()  # the hook is that of other threads' modules too

        def count(layer: nn.Module, given: Any, made: Any) -> None:
            if isinstance(made, torch.Tensor) and threading.get_ident() == here:
                counted.append(made.numel())

        hook = register_module_forward_hook(count)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), Masks([(None, 1)]):
                before = torch.get_rng_state()
                self._outputs(named, torch.zeros_like(x)[None])
                if not torch.equal(before, torch.get_rng_state()):
                    raise NotOneBatch("it draws random numbers, and not by dropout")
        finally:
            hook.remove()
        return sum(counted)

    def _outputs(self, named: Named, x: torch.Tensor) -> torch.Tensor:
        """What the module gives for x [C, B, *shape], [C B, ...]."""
        clients, batch = x.shape[:2]
        self.at.clients = clients
        self.at.samples = clients * batch
        self.at.now = named
        with self.autocast():
            return self.module(x.flatten(0, 1)).float()

    def _bounded(
        self,
        named: Named,
        x: torch.Tensor,
        y: torch.Tensor,
        shares: torch.Tensor,
        clip: float,
    ) -> tuple[Named, torch.Tensor, torch.Tensor]:
        """The same of samples' gradients that are clipped each, and the factors [C, B]."""
        clients, batch = shares.shape
        each = {name: part.repeat_interleave(batch, 0) for name, part in named.items()}
        alone = x.flatten(0, 1)[:, None], y.flatten(0, 1)[:, None]
        gradients, losses = self._means(each, *alone, shares.new_ones(clients * batch, 1))
        squares = [gradient.flatten(1).square().sum(1) for gradient in gradients.values()]
        factors = clip_factors(torch.stack(squares).sum(0).sqrt(), clip).view(clients, batch)
        weights = (factors * shares)[:, None]
        sums = {
            name: torch.bmm(weights, gradient.reshape(clients, batch, -1)).view(named[name].shape)
            for name, gradient in gradients.items()
        }
        return sums, (losses.view(shares.shape) * shares).sum(1), factors


def _nothing(named: Named, shares: torch.Tensor, clip: float | None) -> tuple[Any, ...]:
    """What slots without a client have; see `Gradients`."""
    none = {name: torch.zeros_like(part) for name, part in named.items()}
    losses = torch.zeros_like(shares[:, 0])
    return (none, losses) if clip is None else (none, losses, torch.ones_like(shares))
