"""One client after another on one flat vector of parameters, however its gradients are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from raydpfl.core.device import sent
from raydpfl.methods.local.base import LinearRule, Local, Step
from raydpfl.models.tasks import Task
from raydpfl.training.backends.base import ALL, Backend, Block, ChunkData


@dataclass(frozen=True)
class Descent:
    """A step x <- shrink x - lr g, which can be made together with the gradients."""

    shrink: float
    lr: float


class OneByOne(Backend):
    """The parameters of a client lie in `flat`, in an order that the backend chooses, so that a
    step is one or two operations in place over all of them and needs no optimiser.
    """

    can = frozenset(ALL)
    one_by_one = True
    channels_last = False  # whether images lie so that a pixel's channels are next to each other

    def __init__(
        self,
        module: nn.Module,
        local: Local,
        device: torch.device,
        task: Task,
        sizes: Sequence[int],
    ):
        """`sizes` has the numbers of every parameter, in the order of `raydpfl.models.flatten`."""
        super().__init__(module, local, device, task)
        self.sizes = list(sizes)
        self.flat = torch.empty(sum(sizes), device=device)
        self.gradient = torch.empty_like(self.flat)
        self.velocity = torch.empty_like(self.flat)
        self.factors: list[torch.Tensor] = []  # clip factors of the client's steps so far

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Of a vector in the order inside, the part of every parameter, in the order of
        `raydpfl.models.flatten`.
        """
        raise NotImplementedError

    def _gradient(self, x: torch.Tensor, y: torch.Tensor, clip: float | None) -> torch.Tensor:
        """Writes the mean of the samples' gradients, each clipped if asked, into `self.gradient`;
        returns the mean of their losses.
        """
        raise NotImplementedError

    def _descend(self, x: torch.Tensor, y: torch.Tensor, descent: Descent) -> torch.Tensor:
        """Makes a step of `self.flat` by the mean of the samples' gradients; returns the mean of
        their losses.
        """
        raise NotImplementedError

    def run(self, parameters: torch.Tensor, chunk: ChunkData) -> Iterator[Block]:
        """See `raydpfl.training.backends.base.Backend`."""
        for slot in chunk.slots:
            update, loss = self._client(parameters, chunk, slot)
            yield Block(np.array([slot]), update[None], np.array([loss]))

    def _client(
        self, parameters: torch.Tensor, chunk: ChunkData, slot: int
    ) -> tuple[torch.Tensor, float]:
        """The update, float32 [d], and the mean loss of one client."""
        loss = self._train(parameters, chunk, slot)
        final = torch.empty_like(parameters)
        for now, out in zip(self._views(self.flat), final.split(self.sizes), strict=True):
            out.view(now.shape).copy_(now)
        if chunk.starts is not None:
            chunk.starts.final[slot, : len(parameters)] = final
        return final - chunk.start(parameters, slot)[: len(parameters)], loss

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
        steps = None if descent else self._steps(chunk, slot)
        if to_model:
            self._load(start)
        losses = torch.zeros((), device=self.device)
        x, y = chunk.x[slot], chunk.y[slot]
        images_last = self.channels_last and x.dim() == 4
        if images_last:
            x = x.permute(0, 2, 3, 1).contiguous()
        index = chunk.index[slot, : chunk.steps[slot], : chunk.batch_sizes[slot]]
        for k, rows in enumerate(sent(torch.from_numpy(index), self.device)):
            batch = x.index_select(0, rows)
            if images_last:
                batch = batch.permute(0, 3, 1, 2)
            labels = y.index_select(0, rows)
            if steps is None:
                assert descent is not None
                losses += self._descend(batch, labels, descent)
                continue
            losses += self._gradient(batch, labels, chunk.clip)
            if self.local.perturbs:
                now = self.flat.clone()
                self.flat.copy_(steps.perturbed(k))
                self._gradient(batch, labels, None)
                self.flat.copy_(now)
            if chunk.noise is not None:
                self._add_inside(self.gradient, chunk.noise([slot], k)[0])
            steps.make(k)
        shares = [torch.cat(self.factors).lt(1).double().mean()] if self.factors else []
        # a GPU is waited for once
        loss, *clipped = torch.stack([losses.double(), *shares]).tolist()
        if clipped and chunk.clipped is not None:
            chunk.clipped[slot] = clipped[0]
        return loss / len(index)

    def _descent(self, chunk: ChunkData) -> Descent | None:
        """What all steps are, if each needs the gradient of its batch and the parameters alone."""
        linear = self.local.linear()
        if linear is None or linear.momentum or linear.proximal:
            return None
        if chunk.clip is not None or chunk.noise is not None or chunk.corrections is not None:
            return None
        return Descent(1 - chunk.lr * linear.decay, chunk.lr)

    def _add_inside(self, to: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """Adds `vector` [d], in the order of `raydpfl.models.flatten`, to `to`, in that inside."""
        for view, part in zip(self._views(to), vector.split(self.sizes), strict=True):
            view.add_(part.view(view.shape))
        return to

    def _steps(self, chunk: ChunkData, slot: int) -> _LinearSteps | _Steps:
        """What makes the steps of a client, with `flat` at what it is pulled to."""
        corrections = []
        if chunk.corrections is not None:
            correction = torch.zeros_like(self.flat)
            corrections.append(self._add_inside(correction, chunk.corrections[slot]))
        linear = self.local.linear()
        if linear is None:
            return _Steps(self, chunk, corrections)
        return _LinearSteps(self, chunk, corrections, linear)


class _Steps:
    """Makes the steps of a client by any rule, from `OneByOne.gradient`, in the order inside."""

    def __init__(self, backend: OneByOne, chunk: ChunkData, corrections: list[torch.Tensor]):
        self.backend = backend
        self.chunk = chunk
        self.corrections = corrections
        self.model = backend.flat.clone()
        self.state = backend.local.fresh(self.model)

    @torch.no_grad()
    def make(self, k: int) -> None:
        """The k-th step."""
        for correction in self.corrections:
            self.backend.gradient.add_(correction)
        after, self.state = self.backend.local.step(*self._arguments(k))
        self.backend.flat.copy_(after)

    @torch.no_grad()
    def perturbed(self, k: int) -> torch.Tensor:
        """Where the k-th step has its gradient taken, float32 [d], from that at x."""
        return self.backend.local.perturb(*self._arguments(k))

    def _arguments(self, k: int) -> tuple[torch.Tensor, torch.Tensor, Any, Step]:
        # copies: the state may keep what it is given, and both of these are written to
        x = self.backend.flat.clone()
        gradient = self.backend.gradient.clone()
        return x, gradient, self.state, Step(k, self.chunk.rate(k), self.model)


class _LinearSteps(_Steps):
    def __init__(
        self,
        backend: OneByOne,
        chunk: ChunkData,
        corrections: list[torch.Tensor],
        linear: LinearRule,
    ):
        self.backend = backend
        self.linear = linear
        self.lr = chunk.lr
        self.about = (
            [backend.velocity.zero_()],
            [backend.flat.clone()] if linear.proximal else [],
            corrections,
        )

    @torch.no_grad()
    def make(self, k: int) -> None:
        backend = self.backend
        self.linear.move([backend.flat], [backend.gradient], *self.about, self.lr)
