"""One client after another on one flat vector of parameters, by whatever makes its gradients."""

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
from raydpfl.training.backends.base import Backend, Block, ChunkData


@dataclass(frozen=True)
class Descent:
    """A step x <- shrink x - lr g, which whoever makes the gradients can make with them."""

    shrink: float
    lr: float


class OneByOne(Backend):
    """The parameters of a client lie in `flat`, in an order that the backend chooses, so that a
    step is one or two operations in place over all of them and needs no optimiser.

    A backend gives `_gradient`, and for steps that need a gradient and the parameters alone
    `_descend`.
    """

    one_by_one = True
    starts = True
    twice = True
    half = True
    channels_last = False  # whether images lie so that a pixel's channels are next to each other

    def __init__(
        self,
        module: nn.Module,
        local: Local,
        device: torch.device,
        task: Task,
        sizes: Sequence[int],
    ):
        """`sizes` has the numbers of each parameter, in the order of `raydpfl.models.flatten`."""
        super().__init__(module, local, device, task)
        self.sizes = list(sizes)
        self.flat = torch.empty(sum(sizes), device=device)
        self.gradient = torch.empty_like(self.flat)
        self.velocity = torch.empty_like(self.flat)
        # that the client's samples were clipped by in the steps so far
        self.factors: list[torch.Tensor] = []

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Of a vector in the order that the parameters have inside, the part of each parameter, in
        that of `raydpfl.models.flatten`.
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

    def _batch(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows of `x`, which is as `_data` gave it."""
        batch = x.index_select(0, rows)
        return batch.permute(0, 3, 1, 2) if self.channels_last and x.dim() == 4 else batch

    def _data(self, x: torch.Tensor) -> torch.Tensor:
        """All rows of a client, x [n, *shape], as they are kept for its steps."""
        if self.channels_last and x.dim() == 4:
            return x.permute(0, 2, 3, 1).contiguous()
        return x

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
        update = torch.empty_like(parameters)
        begun = chunk.begins(parameters, slot)[: len(parameters)]
        pairs = zip(self._views(self.flat), begun.split(self.sizes), strict=True)
        for (now, start), out in zip(pairs, update.split(self.sizes), strict=True):
            torch.sub(now, start.view(now.shape), out=out.view(now.shape))
        if chunk.starts is not None:
            ended = chunk.starts.ended[slot, : len(parameters)].split(self.sizes)
            for now, out in zip(self._views(self.flat), ended, strict=True):
                out.view(now.shape).copy_(now)
        return update, loss

    @torch.no_grad()
    def _load(self, parameters: torch.Tensor) -> None:
        for view, part in zip(self._views(self.flat), parameters.split(self.sizes), strict=True):
            view.copy_(part.view(view.shape))

    def _train(self, parameters: torch.Tensor, chunk: ChunkData, slot: int) -> float:
        """The mean of the losses of the client's steps, which leave its parameters in `flat`."""
        begun = chunk.begins(parameters, slot)[: len(parameters)]
        pulled = chunk.starts is not None and chunk.starts.drawn
        self._load(parameters if pulled else begun)
        self.factors.clear()
        descent = self._descent(chunk)
        step = None if descent else self._rule(chunk, slot)
        if pulled:
            self._load(begun)
        losses = torch.zeros((), device=self.device)
        x = self._data(chunk.x[slot])
        y = chunk.y[slot]
        drawn = chunk.index[slot, : chunk.steps[slot], : chunk.batch_sizes[slot]]
        index = sent(torch.from_numpy(drawn), self.device)
        for k, rows in enumerate(index):
            batch = self._batch(x, rows)
            labels = y.index_select(0, rows)
            if descent is not None:
                losses += self._descend(batch, labels, descent)
                continue
            assert step is not None
            losses += self._gradient(batch, labels, chunk.clip)
            if self.local.perturbs:
                self._again(step, k, batch, labels)
            if chunk.noise is not None:
                self._add_inside(self.gradient, chunk.noise([slot], k)[0])
            step.make(k)
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
        """Adds `vector` [d], which is in the order of `raydpfl.models.flatten`, to `to`, which is
        in the order that the parameters have inside.
        """
        for view, part in zip(self._views(to), vector.split(self.sizes), strict=True):
            view.add_(part.view(view.shape))
        return to

    def _rule(self, chunk: ChunkData, slot: int) -> _Step:
        """What makes the steps of a client, at what it is pulled to now."""
        corrections = []
        if chunk.corrections is not None:
            correction = torch.zeros_like(self.flat)
            corrections.append(self._add_inside(correction, chunk.corrections[slot]))
        linear = self.local.linear()
        if linear is None:
            return _General(self, chunk, corrections)
        return _Linear(self, chunk, corrections, linear)

    def _again(self, step: _Step, k: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Takes the gradient of a batch again where the rule says, in the place of that at x."""
        now = self.flat.clone()
        self.flat.copy_(step.perturbed(k))
        self._gradient(x, y, None)
        self.flat.copy_(now)


class _Step:
    """Makes the steps of a client from `OneByOne.gradient`. All vectors are in the order inside."""

    def __init__(self, backend: OneByOne, chunk: ChunkData, corrections: list[torch.Tensor]):
        self.backend = backend
        self.chunk = chunk
        self.corrections = corrections

    def make(self, k: int) -> None:
        """The k-th step."""
        raise NotImplementedError

    def perturbed(self, k: int) -> torch.Tensor:
        """Where the k-th step has its gradient taken, float32 [d], from that at x."""
        raise NotImplementedError


class _Linear(_Step):
    def __init__(
        self,
        backend: OneByOne,
        chunk: ChunkData,
        corrections: list[torch.Tensor],
        linear: LinearRule,
    ):
        super().__init__(backend, chunk, corrections)
        self.linear = linear
        self.velocity = [backend.velocity.zero_()]
        self.began = [backend.flat.clone()] if linear.proximal else []

    @torch.no_grad()
    def make(self, k: int) -> None:
        backend = self.backend
        about = (self.velocity, self.began, self.corrections)
        self.linear.move([backend.flat], [backend.gradient], *about, self.chunk.lr)


class _General(_Step):
    def __init__(self, backend: OneByOne, chunk: ChunkData, corrections: list[torch.Tensor]):
        super().__init__(backend, chunk, corrections)
        self.model = backend.flat.clone()
        self.state = backend.local.fresh(self.model)

    @torch.no_grad()
    def make(self, k: int) -> None:
        for correction in self.corrections:
            self.backend.gradient.add_(correction)
        after, self.state = self.backend.local.step(*self._given(k))
        self.backend.flat.copy_(after)

    @torch.no_grad()
    def perturbed(self, k: int) -> torch.Tensor:
        return self.backend.local.perturb(*self._given(k))

    def _given(self, k: int) -> tuple[torch.Tensor, torch.Tensor, Any, Step]:
        # copies: the state may keep what it is given, and both of these are written to
        x = self.backend.flat.clone()
        gradient = self.backend.gradient.clone()
        return x, gradient, self.state, Step(k, self.chunk.rate(k), self.model)
