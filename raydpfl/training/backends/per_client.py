"""One client after another on one flat vector of parameters, however its gradients are made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from raydpfl.core.device import move_tensor
from raydpfl.training.backends.base import CORE, Backend, Block, ChunkData, Rule

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Descent:
    """A step x <- shrink x - lr g, which can be made together with the gradients."""

    shrink: float
    lr: float


class OneByOne(Backend):
    """The parameters of a client lie in `flat`, in an order that the backend chooses, so that a
    step is one or two operations in place over all of them and needs no optimiser.
    """

    capabilities = frozenset(CORE)
    one_by_one = True
    channels_last = False  # whether images lie so that a pixel's channels are next to each other

    def _allocate(self, sizes: list[int]) -> None:
        """`sizes` has the numbers of every parameter, in the order of `raydpfl.models.flatten`."""
        self.sizes = sizes
        self.flat = torch.empty(sum(sizes), device=self.device)
        self.gradient = torch.empty_like(self.flat)
        self.velocity = torch.empty_like(self.flat)
        self.factors: list[torch.Tensor] = []  # clip factors of the client's steps so far

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Every parameter's part of a vector, in the order of `raydpfl.models.flatten`."""
        raise NotImplementedError

    def _gradient(self, x: torch.Tensor, y: torch.Tensor, clip: float | None) -> torch.Tensor:
        """Writes the mean (clipped) gradient into `self.gradient`; returns the mean loss."""
        raise NotImplementedError

    def _descend(self, x: torch.Tensor, y: torch.Tensor, descent: Descent) -> torch.Tensor:
        """Makes a step of `self.flat` by the mean gradient; returns the mean loss."""
        raise NotImplementedError

    def run(self, parameters: torch.Tensor, chunk: ChunkData) -> Iterator[Block]:
        for slot in chunk.slots:
            update, loss = self._client(parameters, chunk, slot)
            yield Block(np.array([slot]), update[None], np.array([loss]))

    def _client(
        self, parameters: torch.Tensor, chunk: ChunkData, slot: int
    ) -> tuple[torch.Tensor, float]:
        """The update, float32 [d], and the mean loss of one client."""
        loss = self._train(parameters, chunk, slot)
        final = torch.empty_like(parameters)
        for view, out in zip(self._views(self.flat), final.split(self.sizes), strict=True):
            out.view(view.shape).copy_(view)
        if chunk.starts is not None:
            chunk.starts.final[slot, : len(parameters)] = final
        return final.sub_(chunk.start(parameters, slot)[: len(parameters)]), loss

    @contextmanager
    def _seed_generators(self, chunk: ChunkData, slot: int) -> Iterator[None]:
        """Within, torch's generators are those of a client."""
        cuda = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if cuda else []):
            generator = chunk.generator(slot)
            torch.set_rng_state(generator.get_state())
            if cuda:
                torch.cuda.manual_seed(int(torch.randint(1 << 62, (), generator=generator)))
            yield

    @torch.no_grad()
    def _load(self, parameters: torch.Tensor) -> None:
        for view, part in zip(self._views(self.flat), parameters.split(self.sizes), strict=True):
            view.copy_(part.view(view.shape))

    def _train(self, parameters: torch.Tensor, chunk: ChunkData, slot: int) -> float:
        """The mean of the losses of the client's steps, which leave its parameters in `flat`."""
        start = chunk.start(parameters, slot)[: len(parameters)]
        to_model = chunk.starts is not None and chunk.starts.to_model
        self._load(parameters if to_model else start)
        self.factors.clear()
        descent = self._descent(chunk)
        step = None if descent else self._step_of(chunk, slot)
        if to_model:
            self._load(start)
        losses = torch.zeros((), device=self.device)
        for k, batch in enumerate(self._batches(chunk, slot)):
            if descent is not None:
                losses += self._descend(*batch, descent)
                continue
            losses += self._gradient(*batch, chunk.clip)
            assert step is not None
            step(k, batch)
        shares = [torch.cat(self.factors).lt(1).double().mean()] if self.factors else []
        # a GPU is waited for once
        loss, *clipped_shares = torch.stack([losses.double(), *shares]).tolist()
        if clipped_shares and chunk.clipped is not None:
            chunk.clipped[slot] = clipped_shares[0]
        return loss / int(chunk.steps[slot])

    def _batches(self, chunk: ChunkData, slot: int) -> Iterator[Batch]:
        """The rows and the targets of every step of a client."""
        x, y = chunk.x[slot], chunk.y[slot]
        images_last = self.channels_last and x.dim() == 4
        if images_last:
            x = x.permute(0, 2, 3, 1).contiguous()
        index = chunk.index[slot, : chunk.steps[slot], : chunk.batch_sizes[slot]]
        for rows in move_tensor(torch.from_numpy(index), self.device):
            batch = x.index_select(0, rows)
            yield batch.permute(0, 3, 1, 2) if images_last else batch, y.index_select(0, rows)

    def _step_of(self, chunk: ChunkData, slot: int) -> Callable[[int, Batch], None]:
        """What makes step k from `gradient`; called with `flat` at what the client is pulled to."""
        correction = None
        if chunk.corrections is not None:
            correction = self._add_inside(torch.zeros_like(self.flat), chunk.corrections[slot])
        linear = self.local.linear()
        model = self.flat.clone()
        rule = None if linear else Rule(self.local, chunk, model, model, correction)
        move_arguments = (
            [self.velocity.zero_()],
            [model] if linear and linear.proximal else [],
            [] if correction is None else [correction],
        )

        @torch.no_grad()
        def step(k: int, batch: Batch) -> None:
            if rule is not None:
                rule.x = self.flat.clone()
                if self.local.perturbs:
                    self.flat.copy_(rule.perturbed_parameters(self.gradient.clone(), k))
                    with torch.enable_grad():
                        self._gradient(*batch, None)
            if chunk.noise is not None:
                self._add_inside(self.gradient, chunk.noise([slot], k)[0])
            if rule is not None:
                self.flat.copy_(rule.client_step(self.gradient.clone(), k))
            elif linear is not None:
                linear.move([self.flat], [self.gradient], *move_arguments, chunk.lr)

        return step

    def _descent(self, chunk: ChunkData) -> Descent | None:
        """What all steps are, if each needs the gradient of its batch and the parameters alone."""
        linear = self.local.linear()
        if linear is None or linear.momentum or linear.proximal:
            return None
        if chunk.clip is not None or chunk.noise is not None or chunk.corrections is not None:
            return None
        return Descent(1 - chunk.lr * linear.decay, chunk.lr)

    def _add_inside(self, target: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """Adds `vector` [d], in `raydpfl.models.flatten` order, to `target`, in the inner order."""
        for view, part in zip(self._views(target), vector.split(self.sizes), strict=True):
            view.add_(part.view(view.shape))
        return target
