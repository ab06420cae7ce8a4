"""The clients' rows where they train: on the CPU as they are read, on a GPU for the whole run."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from raydpfl.core import device
from raydpfl.core.messages import Chunk
from raydpfl.data import Shards
from raydpfl.models.tasks import Form
from raydpfl.training.backends.base import Block
from raydpfl.training.minibatches import batches, picked
from raydpfl.training.trainer import Trainer

SHARE = 4  # rows may take 1 / SHARE of the actor's share of the device's memory
PIECE = 1 << 26  # bytes that are copied there at once


def check(there: torch.device, form: Form, x: np.ndarray, y: np.ndarray) -> None:
    """Raises IndexError for tokens and labels that the model does not know, before they reach a GPU
    (`device.check_numbers`).
    """
    if form.tokens:
        device.check_numbers(there, x, form.tokens, "token")
    if form.target.classes:
        counted = y[y != form.task.ignored()]
        device.check_numbers(there, counted, form.target.classes, "Target")


class Rows:
    """Reads the rows of clients from the shards, and trains clients on them."""

    def __init__(self, shards: Shards, form: Form, there: torch.device):
        self.shards = shards
        self.form = form
        self.device = there

    def sizes(self, clients: np.ndarray) -> np.ndarray:
        """Samples of clients, int64 [C]; 0 for -1."""
        return np.where(clients < 0, 0, self.shards.sizes[clients])

    def chunk(
        self,
        clients: Sequence[int] | np.ndarray,
        rows: int,
        picked: Sequence[np.ndarray | None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """See `Shards.chunk`, with tensors of the device that trains. Raises IndexError on a GPU,
        for a label or a token that the model does not know.
        """
        x, y, n = self.shards.chunk(clients, rows, picked)
        for slot in np.flatnonzero(n).tolist() if self.device.type != "cpu" else ():
            check(self.device, self.form, x[slot, : n[slot]], y[slot, : n[slot]])
        return self._there(x), self._there(y), n

    def train(
        self,
        trainer: Trainer,
        model: torch.Tensor,
        chunk: Chunk,
        members: np.ndarray,
        t: int,
        **more: Any,
    ) -> Iterator[Block]:
        """Trains `members` (int64 [C], -1 for all other slots) of a chunk from the model, float32
        [D], on the batches of round t. `more`: see `Trainer`.
        """
        rule = trainer.local
        sizes = self.sizes(members)
        keys = (trainer.seed, t, members, chunk.draws)
        index, batch_sizes = batches(*keys, sizes, rule, rows=chunk.rows)
        wanted, index = picked(index, batch_sizes, sizes, rule)
        return trainer.chunk(
            *(model, *self.chunk(members, chunk.rows, wanted)),
            t=t,
            clients=members,
            draws=chunk.draws,
            drawn=(index, batch_sizes, rule.step_counts(sizes)),
            planned=rule.step_counts(self.sizes(chunk.clients)),
            **more,
        )

    def _there(self, array: np.ndarray) -> torch.Tensor:
        return device.sent(torch.from_numpy(array), self.device)


class GpuRows(Rows):
    """Keeps all rows in a GPU's memory, if they take little of it: they are copied there once, and
    a chunk picks out its rows. Otherwise every chunk's rows are copied when it trains.
    """

    def __init__(self, shards: Shards, form: Form, there: torch.device, num_gpus: float):
        super().__init__(shards, form, there)
        numbers = math.prod(form.shape) * (2 if form.tokens else 1)
        self._row = 4 * (numbers + 2 * math.prod(form.target.shape))  # bytes
        # before every client: how many rows others have
        self._first = np.concatenate([[0], np.cumsum(shards.sizes)])
        self._fit = int(self._first[-1] + 1) * self._row <= device.memory(num_gpus) // SHARE
        self._wrong: dict[int, str] = {}  # client -> what is wrong with its rows

    def chunk(
        self,
        clients: Sequence[int] | np.ndarray,
        rows: int,
        picked: Sequence[np.ndarray | None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        if not self._fit:
            return super().chunk(clients, rows, picked)
        stored_x, stored_y = self._stored
        members = np.asarray(clients, np.int64)
        index = np.full((len(members), rows), self._first[-1])  # the last row is of zeros
        n = np.zeros(len(members), np.int64)
        for slot in np.flatnonzero(members >= 0).tolist():
            client = int(members[slot])
            if client in self._wrong:
                raise IndexError(self._wrong[client])
            wanted = None if picked is None else picked[slot]
            if wanted is None:
                wanted = np.arange(self.shards.sizes[client])
            n[slot] = len(wanted)
            index[slot, : n[slot]] = self._first[client] + wanted
        places = self._there(index.ravel())
        x = stored_x.index_select(0, places).view(*index.shape, *stored_x.shape[1:])
        y = stored_y.index_select(0, places).view(*index.shape, *stored_y.shape[1:])
        return x, y, n

    @cached_property
    def _stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N + 1, *shape] and y [N + 1] of all rows by client; the last row is zeros."""
        form = self.form
        sizes = np.asarray(self.shards.sizes)
        whole = (form.tokens, form.target.classes)
        dtypes = [torch.int64 if integers else torch.float32 for integers in whole]
        rows = int(self._first[-1]) + 1
        x = torch.zeros(rows, *form.shape, dtype=dtypes[0], device=self.device)
        y = torch.zeros(rows, *form.target.shape, dtype=dtypes[1], device=self.device)
        first = 0
        for end in range(1, len(sizes) + 1):
            # padded to the client with most rows
            padded = self._row * (end + 1 - first) * int(sizes[first : end + 1].max())
            if end < len(sizes) and padded <= PIECE:
                continue
            self._store(x, y, np.arange(first, end), sizes[first:end])
            first = end
        return x, y

    def _store(
        self, x: torch.Tensor, y: torch.Tensor, clients: np.ndarray, sizes: np.ndarray
    ) -> None:
        most = int(sizes.max(initial=0))
        if not most:
            return
        read_x, read_y, _ = self.shards.chunk(clients, most)
        for place, (client, size) in enumerate(zip(clients.tolist(), sizes.tolist(), strict=True)):
            try:
                check(self.device, self.form, read_x[place, :size], read_y[place, :size])
            except IndexError as error:
                self._wrong[client] = str(error)
        real = np.arange(most) < sizes[:, None]
        rows = slice(int(self._first[clients[0]]), int(self._first[clients[-1] + 1]))
        # wrong rows are never trained on: their client is refused
        x[rows] = self._there(read_x[real])
        y[rows] = self._there(read_y[real])
