"""A whole chunk by torch.func: vmap over clients of the gradient of one client's loss.

It pays for small modules that are no stack of linear layers, and loses to the loop on convolutions
and recurrent layers. Where each sample's gradient is to be clipped, it is vmap over clients of vmap
over samples, of as many at a time as `LIMIT` allows. Where a step takes no more than `Vmap.few`
clients of a chunk, as the others have made theirs, autograd takes each by itself: vmap adds about
0.15 ms to every step.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from raydpfl.core.device import index
from raydpfl.methods.local.base import Local
from raydpfl.models.tasks import Task
from raydpfl.training.backends.base import CORE, Backend, Block, ChunkData, Rule, clip_factors, take
from raydpfl.training.layers.dropout import Dropout, DropoutCall, Record, draw

# the form of attention whose gradient torch can take of all clients at once: of the others it has
# no batching rule, and would go through the clients one by one
ATTENTION_BACKEND = SDPBackend.MATH
LIMIT = 1 << 28  # bytes of samples' gradients at a time

Parts = Callable[[torch.Tensor], list[torch.Tensor]]
Weights = dict[str, torch.Tensor]  # by the parameter's name, [C, *its shape]


class Batch(NamedTuple):
    """What a step takes of all clients; of one client, without the axis C."""

    x: torch.Tensor  # [C, B, *shape]
    y: torch.Tensor  # [C, B, *target]
    shares: torch.Tensor  # [C, B]
    masks: list[torch.Tensor]  # of every dropout, [C, B, ...]


Gradients = Callable[[Weights, Batch], Any]
"""Of the parameters: the gradients of the clients' losses, these [C], and where samples are clipped
the factors [C, B]."""


class _Forward:
    """What `torch.func.functional_call` does, but the trained parameters are looked for once."""

    def __init__(self, module: nn.Module, names: list[str]):
        """`names`: of the parameters, in the order of the others."""
        self.module = module
        holders: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for layer in module.modules():
            for name, parameter in layer._parameters.items():
                holders.setdefault(id(parameter), []).append((layer._parameters, name))
        trained_parameters = [module.get_parameter(name) for name in names]
        # where each is held, more than once if layers share it
        self.places = [
            (layer_parameters, name, place, parameter)
            for place, parameter in enumerate(trained_parameters)
            for layer_parameters, name in holders[id(parameter)]
        ]

    def __call__(self, batch: Batch, *parameters: torch.Tensor) -> torch.Tensor:
        try:
            for layer_parameters, name, place, _ in self.places:
                layer_parameters[name] = parameters[place]
            with Dropout(batch.masks) if batch.masks else nullcontext():
                return self.module(batch.x)
        finally:
            for layer_parameters, name, _, parameter in self.places:
                layer_parameters[name] = parameter


class _Steps:
    """The steps of a chunk on `weights`: every parameter, [c, *its shape], of the slots that a step
    takes. Any rule but a linear one takes the parameters of a client as one vector.
    """

    def __init__(self, local: Local, parts: Parts, parameters: torch.Tensor, chunk: ChunkData):
        self.parts = parts
        self.chunk = chunk
        self.linear = local.linear()
        self.velocity: list[torch.Tensor] = []
        self.corrections: list[torch.Tensor] = []
        self.model: list[torch.Tensor] = []
        if self.linear is None:
            self.rule = Rule.from_chunk(local, parameters, chunk)
            self.weights = parts(self.rule.x)
            return
        self.model = parts(parameters)
        if chunk.starts is None:
            clients = len(chunk.sizes)
            self.weights = [part.expand(clients, *part.shape).clone() for part in self.model]
        else:
            initial = parts(chunk.starts.initial[:, : len(parameters)])
            self.weights = [part.clone() for part in initial]
            self.model = self.model if chunk.starts.to_model else initial
        self.all_weights = self.weights
        self.velocity = [torch.zeros_like(part) for part in self.weights if self.linear.momentum]
        if chunk.corrections is not None:
            self.corrections = [part.contiguous() for part in parts(chunk.corrections)]

    def narrow(self, count: int) -> None:
        """Goes on with the first slots alone."""
        self.weights = [part[:count] for part in self.weights]
        self.velocity = [part[:count] for part in self.velocity]
        self.corrections = [part[:count] for part in self.corrections]
        if self.chunk.starts is not None and not self.chunk.starts.to_model:
            self.model = [part[:count] for part in self.model]

    def final(self) -> list[torch.Tensor]:
        """Each parameter of all slots, [C, *its shape]."""
        return self.parts(self.rule.final()) if self.linear is None else self.all_weights

    def make(self, gradients: list[torch.Tensor], k: int) -> None:
        """The k-th step."""
        if self.linear is None:
            self.weights = self.parts(self.rule.step(_flatten(gradients), k))
            return
        slots = self.chunk.finished_slots[k]
        copies = [] if slots is None else [part[slots] for part in self.weights]
        lr = self.chunk.lr
        self.linear.move(self.weights, gradients, self.velocity, self.model, self.corrections, lr)
        for part, values in zip(self.weights, copies, strict=False):
            part[slots] = values

    def perturbed_parameters(self, gradients: list[torch.Tensor], k: int) -> list[torch.Tensor]:
        """Where the gradients of the k-th step are to be taken, of a rule that perturbs."""
        return self.parts(self.rule.perturbed_parameters(_flatten(gradients), k))


def paddings(module: nn.Module) -> set[int]:
    """The tokens of padding, whose rows of trained embeddings are not trained."""
    tables = (layer for layer in module.modules() if isinstance(layer, nn.Embedding))
    trained = (table.padding_idx for table in tables if table.weight.requires_grad)
    return {token for token in trained if token is not None}


def _flatten(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)


class Vmap(Backend):
    """Trains the chunk at once, every parameter [C, *its shape]. A module that draws random numbers
    other than for dropout raises RuntimeError when it is run.
    """

    capabilities = frozenset(CORE)
    calls = 1 << 23
    # where a step takes no more than these of a chunk's clients, each is trained by itself
    few: ClassVar[int] = 2
    module: nn.Module

    def __init__(self, module: nn.Module, local: Local, device: torch.device, task: Task):
        super().__init__(module, local, device, task)
        self.module = copy.deepcopy(module).to(device).train()
        items = [item for item in self.module.named_parameters() if item[1].requires_grad]
        self.names = [name for name, _ in items]
        self.shapes = [parameter.shape for _, parameter in items]
        self.sizes = [shape.numel() for shape in self.shapes]
        # torch has no form of a recurrent layer for all clients at once but beneath a gradient, and
        # of a padded embedding a wrong one: it keeps the padding of the first client alone
        is_recurrent = any(isinstance(layer, nn.RNNBase) for layer in self.module.modules())
        self._has_mapped_gradients = is_recurrent or bool(paddings(self.module))
        self._forward = _Forward(self.module, self.names)
        self._forwards = vmap(self._forward, randomness="error")
        self._mapped_gradients = vmap(grad_and_value(self._loss), randomness="error")
        sample_gradients = grad_and_value(self._loss)
        self._sample_gradients = vmap(sample_gradients, in_dims=(None, 0), randomness="error")
        self._dropout_calls: list[DropoutCall] | None = None  # in a batch; None: not yet known

    def _outputs(self, weights: Weights, batch: Batch) -> torch.Tensor:
        """What the module gives for the samples of all clients, [C B, ...]."""
        with self.autocast(), sdpa_kernel(ATTENTION_BACKEND):
            outputs = self._forwards(batch, *weights.values())
        return outputs.flatten(0, 1).float()

    def _masks(
        self, chunk: ChunkData, draws: dict[int, torch.Generator], weights: Weights, batch: Batch
    ) -> list[torch.Tensor]:
        """The masks of a step. `draws`: the generators of the slots, which the first fills in."""
        if self._dropout_calls is None:
            record = Record()
            sample = tree_map(itemgetter((slice(1), slice(1))), batch)
            with torch.no_grad(), torch.random.fork_rng(devices=[]), record:
                self._run_sample({name: part[:1] for name, part in weights.items()}, sample)
            self._dropout_calls = record.calls
        if not self._dropout_calls:
            return []
        if not draws:
            draws.update({slot: self._generator(chunk, slot) for slot in chunk.slots})
        sizes = chunk.batch_sizes[: len(batch.shares)].tolist()
        slot_draws = [(draws.get(slot), size) for slot, size in enumerate(sizes)]
        low = self.precision == "bfloat16"
        return draw(
            slot_draws, self._dropout_calls, batch.shares.bfloat16() if low else batch.shares
        )

    def _run_sample(self, weights: Weights, sample: Batch) -> None:
        """Has the module run on a sample of one client, x [1, 1, *shape]."""
        with self.autocast(), sdpa_kernel(ATTENTION_BACKEND):
            self._forward(*tree_map(itemgetter(0), (sample, *weights.values())))

    def _means(self, weights: Weights, batch: Batch) -> tuple[Weights, torch.Tensor]:
        """The gradients of the clients' losses, and these [C]."""
        leaves = {name: part.detach().requires_grad_() for name, part in weights.items()}
        losses = self.task.loss(self._outputs(leaves, batch), batch.y.flatten(0, 1))
        means = (losses.view(batch.shares.shape) * batch.shares).sum(1)
        gradients = torch.autograd.grad(means.sum(), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True)), means.detach()

    def _loss(self, weights: Weights, batch: Batch) -> torch.Tensor:
        with self.autocast(), sdpa_kernel(ATTENTION_BACKEND):
            outputs = self._forward(batch, *weights.values())
        return self.task.loss(outputs.float(), batch.y) @ batch.shares

    def _client_gradients(self, weights: Weights, batch: Batch) -> tuple[Weights, torch.Tensor]:
        """The gradients of one client's loss, and this."""
        leaves = {name: part.detach().requires_grad_() for name, part in weights.items()}
        loss = self._loss(leaves, batch)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True)), loss.detach()

    def _clipped_sums(self, weights: Weights, batch: Batch, clip: float) -> Any:
        """One client's sums of clipped gradients and of losses by shares, and the factors [B]."""
        total = {name: torch.zeros_like(part) for name, part in weights.items()}
        loss = 0.0
        clipping: list[torch.Tensor] = []
        samples = max(1, LIMIT // (4 * sum(self.sizes)))
        for start in range(0, len(batch.shares), samples):
            span = slice(start, start + samples)
            share = batch.shares[span]
            singles = tree_map(itemgetter((span, None)), batch)
            singles = singles._replace(shares=torch.ones_like(singles.shares))
            gradients, losses = self._sample_gradients(weights, singles)
            flat = [part.reshape(len(part), -1) for part in gradients.values()]
            squares = [part.square().sum(1) for part in flat]
            clipping.append(clip_factors(torch.stack(squares).sum(0).sqrt(), clip))
            factors = clipping[-1] * share
            total = {
                name: total[name] + torch.tensordot(factors, part, 1)
                for name, part in gradients.items()
            }
            loss = loss + losses @ share
        return total, loss, torch.cat(clipping)

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of `flat` [..., d], as [..., *its shape]."""
        return [
            part.reshape(part.shape[:-1] + shape)
            for part, shape in zip(flat.split(self.sizes, dim=-1), self.shapes, strict=True)
        ]

    def _gradients_of(self, chunk: ChunkData) -> Gradients:
        """What gives the gradients of a step's batches."""
        if chunk.clip is None:
            # autocast does not see a convolution of all clients at once but beneath a gradient
            mapped = self._has_mapped_gradients or self.precision == "bfloat16"
            return self._mapped_gradients if mapped else self._means
        numbers = chunk.index.shape[2] * sum(self.sizes)
        return vmap(
            partial(self._clipped_sums, clip=chunk.clip),
            randomness="error",
            chunk_size=max(1, LIMIT // (4 * numbers)),
        )

    def _client_by_client(self, clip: float | None) -> Gradients:
        """The same of few clients."""
        client_gradients: Gradients = self._client_gradients
        if clip is not None:
            client_gradients = partial(self._clipped_sums, clip=clip)

        def gradients_of(weights: Weights, batch: Batch) -> Any:
            clients = []
            for slot in range(len(batch.shares)):
                client_weights = {name: part[slot] for name, part in weights.items()}
                masks = [mask[slot] for mask in batch.masks]
                client_batch = Batch(batch.x[slot], batch.y[slot], batch.shares[slot], masks)
                clients.append(client_gradients(client_weights, client_batch))
            return tree_map(lambda *values: torch.stack(values), *clients)

        return gradients_of

    def run(self, parameters: torch.Tensor, chunk: ChunkData) -> Iterator[Block]:
        x, y = chunk.rows()
        steps = _Steps(self.local, self._parts, parameters, chunk)
        losses = parameters.new_zeros(len(chunk.sizes))
        factors: list[torch.Tensor] = []
        gradients_of = self._gradients_of(chunk)
        single_limit = self.few if len(chunk.sizes) > self.few else 0
        draws: dict[int, torch.Generator] = {}
        for step, (rows, shares) in enumerate(chunk.batches()):
            count = len(shares)
            if count <= single_limit:
                gradients_of = self._client_by_client(chunk.clip)
            if count < len(steps.weights[0]):
                steps.narrow(count)
            weights = self._name_parts(steps.weights)
            batch = Batch(take(x[:count], rows), take(y[:count], rows), shares[:, 0], [])
            batch = batch._replace(masks=self._masks(chunk, draws, weights, batch))
            clipping: list[torch.Tensor]  # the clip factors, where samples are clipped
            gradients, loss, *clipping = gradients_of(weights, batch)
            factors += clipping
            losses[:count] += loss
            direction = list(gradients.values())
            if self.local.perturbs and steps.linear is None:
                point = self._name_parts(steps.perturbed_parameters(direction, step))
                batch = batch._replace(masks=self._masks(chunk, draws, weights, batch))
                direction = list(gradients_of(point, batch)[0].values())
            noise = chunk.step_noise(step)
            if noise is not None:
                torch._foreach_add_(direction, self._parts(noise))
            steps.make(direction, step)
        chunk.count_clipped(factors)
        means = chunk.means(losses)
        final = steps.final()
        d = len(parameters)
        for _, block_slots in chunk.blocks(d):
            slots = index(block_slots, parameters.device)
            final_parameters = _flatten([part.index_select(0, slots) for part in final])
            start = parameters
            if chunk.starts is not None:
                chunk.starts.final[slots, :d] = final_parameters
                start = chunk.starts.initial[slots, :d]
            yield Block(block_slots, final_parameters - start, means[block_slots])

    def _generator(self, chunk: ChunkData, slot: int) -> torch.Generator:
        """What the masks of a client are drawn from: on the CPU as the loop draws them."""
        generator = chunk.generator(slot)
        if self.device.type == "cpu":
            return generator
        seed = int(torch.randint(1 << 62, (), generator=generator))
        return torch.Generator(self.device).manual_seed(seed)

    def _name_parts(self, parts: list[torch.Tensor]) -> Weights:
        return dict(zip(self.names, parts, strict=True))
