"""A whole chunk as one batch through the module: what is frozen is one product for all clients, and
only the layers that are trained are one for each.

The module's own code runs on the samples of all clients, [C B, ...], as on any batch; the inputs of
a layer with trained parameters [C, *shape] are split by client, and its products are batched. By
`experiments/benchmarks/lora.py` that is twice as fast as vmap, which folds the products of frozen
layers too but none of what lies between them.

Where every sample's gradient is clipped, a sample is taken for a client of its own: its gradient is
then what autograd gives, and the norms and sums are a few operations on what is trained.

>>> net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
>>> _ = net[0].requires_grad_(False)
>>> backend = OneBatch(net, Local(), torch.device("cpu"), Classification())
>>> backend.names
['2.weight', '2.bias']
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map

from raydpfl.methods.local.base import Local
from raydpfl.models import lora
from raydpfl.models.tasks import Classification, Task  # noqa: F401  (the example above)
from raydpfl.training.backends.base import ChunkData, clip_factors
from raydpfl.training.backends.vmap import Batch, Gradients, Vmap, Weights, paddings
from raydpfl.training.layers.dropout import Dropout

# bytes of activations in a pass, about: more clients at once lie in no cache
LIMIT = 1 << 26


class NotOneBatch(Exception):
    """A layer with trained parameters takes or gives no samples along its first axis."""


@dataclass
class _Pass:
    """What is run now: the trained parameters by name, [C, *shape], for as many clients."""

    clients: int = 1
    samples: int = 1  # of all clients
    parameters: Weights = field(default_factory=dict)

    def expand_samples(self, kind: str, value: Any) -> torch.Tensor:
        """An input of a layer for every sample, also one that is for all. Raises `NotOneBatch`."""
        if not isinstance(value, torch.Tensor) or not value.dim():
            raise NotOneBatch(f"{kind} takes more than tensors")
        if len(value) == 1:
            return value.expand(self.samples, *value.shape[1:])
        if len(value) != self.samples:
            raise NotOneBatch(f"the first axis of {kind}'s input is not that of the samples")
        return value


class _Plain(nn.Module):
    """A layer as it was."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.forward = layer.forward


class _PerClient:
    """The forward of a layer with trained parameters, of which every client has its values."""

    def __init__(self, layer: nn.Module, names: dict[str, str], running: _Pass):
        """`names`: of its trained parameters, in the layer and in the module."""
        self.kind = type(layer).__name__
        self.plain = _Plain(layer)
        self.names = names
        self.running = running
        self.products = type(layer) is nn.Linear and "weight" in names
        bias = getattr(layer, "bias", None)
        self.frozen_bias = bias if self.products and "bias" not in names else None

    def __call__(self, *inputs: Any, **keyword_inputs: Any) -> torch.Tensor:
        if keyword_inputs:
            raise NotOneBatch(f"{self.kind} is given {next(iter(keyword_inputs))} by name")
        inputs = tuple(self.running.expand_samples(self.kind, value) for value in inputs)
        parameters = {name: self.running.parameters[place] for name, place in self.names.items()}
        if not self.products:
            by_client = [value.unflatten(0, (self.running.clients, -1)) for value in inputs]
            return vmap(self._client, randomness="error")(parameters, *by_client).flatten(0, 1)
        (x,) = inputs
        weight = parameters["weight"]
        rows = x.reshape(len(weight), -1, x.shape[-1])
        if "bias" in parameters:
            outputs = torch.baddbmm(parameters["bias"][:, None], rows, weight.mT)
        else:
            outputs = torch.bmm(rows, weight.mT)
        outputs = outputs.view(*x.shape[:-1], -1)
        return outputs if self.frozen_bias is None else outputs + self.frozen_bias

    def _client(self, parameters: Weights, *inputs: torch.Tensor) -> torch.Tensor:
        layer = self.plain.layer
        if isinstance(layer, _ConvNd) and torch.is_autocast_enabled(inputs[0].device.type):
            # autocast does not see a convolution under vmap
            parameters = {**dict(layer.named_parameters(recurse=False)), **parameters}
            parameters, inputs = tree_map(torch.Tensor.bfloat16, (parameters, inputs))
        inside = {f"layer.{name}": part for name, part in parameters.items()}
        return functional_call(self.plain, inside, inputs)


class _Adapted:
    """The forward of a frozen linear layer with an adapter of every client."""

    def __init__(self, layer: nn.Module, scale: float, names: list[str], running: _Pass):
        """`names`: of the adapter's A and B in the module."""
        self.kind = type(layer).__name__
        self.plain = layer.forward
        self.weight = lora.input_major_weight(layer)
        self.scale = scale
        self.names = names
        self.running = running

    def __call__(self, *inputs: Any, **keyword_inputs: Any) -> torch.Tensor:
        (value,) = inputs or keyword_inputs.values()
        x = self.running.expand_samples(self.kind, value)
        a, b = (self.running.parameters[name] for name in self.names)
        if not torch.is_autocast_enabled(x.device.type):
            return AdaptedLinear.apply(self.plain, self.weight, self.scale, x, a, b)
        # autocast does not reach into a backward
        low = torch.bmm(x.reshape(len(a), -1, x.shape[-1]), a.mT)
        outputs = self.plain(x)
        return outputs + torch.bmm(self.scale * low, b.mT).view(outputs.shape)


class AdaptedLinear(torch.autograd.Function):
    """y = x W + b + scale (x A^T) B^T, and its gradients by x [n, ..., in], client after client, A
    [C, rank, in] and B [C, out, rank], for W [in, out]. Autograd writes both terms and adds them;
    here the second is added to the first in place, forward and back.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plain: Callable[[torch.Tensor], torch.Tensor],
        weight: torch.Tensor,
        scale: float,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> torch.Tensor:
        rows = x.reshape(len(a), -1, x.shape[-1])
        outputs = plain(x)
        low = torch.bmm(rows, a.mT).mul_(scale)
        outputs.view(*rows.shape[:2], -1).baddbmm_(low, b.mT)
        ctx.save_for_backward(rows, weight, low, a, b)
        ctx.scale = scale
        ctx.shape = x.shape
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        rows, weight, low, a, b = ctx.saved_tensors
        flat = g.reshape(-1, g.shape[-1])
        by_client = flat.view(*rows.shape[:2], -1)
        back = torch.bmm(by_client, b).mul_(ctx.scale)  # the gradient by x A^T
        by_x = None
        if ctx.needs_input_grad[3]:
            by_x = flat @ weight.T
            by_x.view(rows.shape).baddbmm_(back, a)
            by_x = by_x.view(ctx.shape)
        return None, None, None, by_x, torch.bmm(back.mT, rows), torch.bmm(by_client.mT, low)


class OneBatch(Vmap):
    """Trains the chunk at once, as one batch. Raises `NotOneBatch` where trained parameters are
    outside of layers that take samples along the first axis, or in a padded embedding.
    """

    whole_batches = True
    few = 0  # it has no vmap to do without
    calls = 1 << 19  # as a row goes through what is frozen too

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        super().__init__(module, local, device, task)
        if paddings(module):  # see `Vmap`
            raise NotOneBatch("a trained Embedding has a padding_idx")
        self.running = _Pass()
        self.numbers = 0  # of the layers' outputs for a sample
        layers = list(self.module.modules())
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for layer in layers:
            trained_names = {
                name: names[id(parameter)]
                for name, parameter in layer.named_parameters(recurse=False)
                if parameter.requires_grad
            }
            halves = lora.adapter_factors(layer)
            if trained_names:
                layer.forward = _PerClient(layer, trained_names, self.running)
            elif halves and all(half.requires_grad for half in halves):
                scale = lora.remove_adapter(layer)
                if scale is not None:
                    half_names = [names[id(half)] for half in halves]
                    layer.forward = _Adapted(layer, scale, half_names, self.running)

    def _gradients_of(self, chunk: ChunkData) -> Gradients:
        return partial(self._step, chunk)

    def _step(self, chunk: ChunkData, weights: Weights, batch: Batch) -> Any:
        """See `Gradients`: pass by pass, of as many clients as lie in the cache."""
        clip = chunk.clip
        clients, rows = batch.shares.shape
        numbers = self.numbers + (sum(self.sizes) if clip is not None else 0)
        width = max(1, LIMIT // (4 * numbers * rows))
        parts: list[tuple[Any, ...]] = []
        for start in range(0, clients, width):
            span = slice(start, min(start + width, clients))
            parameters, part = tree_map(itemgetter(span), (weights, batch))
            if any(slot in chunk.slots for slot in range(span.start, span.stop)):
                means = self._means if clip is None else partial(self._clipped_means, clip=clip)
                parts.append(means(parameters, part))
                continue
            zero_gradients = {name: torch.zeros_like(weight) for name, weight in parameters.items()}
            factors = [] if clip is None else [torch.ones_like(part.shares)]
            parts.append((zero_gradients, torch.zeros_like(part.shares[:, 0]), *factors))
        return parts[0] if len(parts) == 1 else tree_map(lambda *blocks: torch.cat(blocks), *parts)

    def _run_sample(self, weights: Weights, sample: Batch) -> None:
        """Counts what layers give for a sample. Raises `NotOneBatch` for draws, but dropout's."""
        counts = [1]

        def count(layer: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                counts.append(output.numel())

        hook = register_module_forward_hook(count)
        try:
            rng_state = torch.get_rng_state()
            self._outputs(weights, sample._replace(x=torch.zeros_like(sample.x)))
            if not torch.equal(rng_state, torch.get_rng_state()):
                raise NotOneBatch("it draws random numbers, and not by dropout")
        finally:
            hook.remove()
        self.numbers = sum(counts)

    def _outputs(self, weights: Weights, batch: Batch) -> torch.Tensor:
        """What the module gives for `batch.x`, [C, B, *shape]: [C B, ...]."""
        self.running.clients = len(batch.x)
        self.running.samples = len(batch.x) * batch.x.shape[1]
        self.running.parameters = weights
        masks = [mask.flatten(0, 1) for mask in batch.masks]
        with self.autocast(), Dropout(masks) if masks else nullcontext():
            return self.module(batch.x.flatten(0, 1)).float()

    def _clipped_means(
        self, weights: Weights, batch: Batch, clip: float
    ) -> tuple[Weights, torch.Tensor, torch.Tensor]:
        """The same of samples' gradients that are clipped each, and the factors [C, B]."""
        shares = batch.shares
        clients, rows = shares.shape
        by_sample = {name: part.repeat_interleave(rows, 0) for name, part in weights.items()}
        singles = tree_map(lambda part: part.flatten(0, 1)[:, None], batch)
        singles = singles._replace(shares=torch.ones_like(singles.shares))
        gradients, losses = self._means(by_sample, singles)
        flat = [gradient.reshape(len(gradient), -1) for gradient in gradients.values()]
        squares = [gradient.square().sum(1) for gradient in flat]
        factors = clip_factors(torch.stack(squares).sum(0).sqrt(), clip).view(shares.shape)
        scales = (factors * shares)[:, None]
        sums = {
            name: torch.bmm(scales, gradient.reshape(clients, rows, -1)).view(weights[name].shape)
            for name, gradient in gradients.items()
        }
        return sums, (losses.view(shares.shape) * shares).sum(1), factors
