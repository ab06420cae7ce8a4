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
from raydpfl.training.minibatches import batches, pick_rows
from raydpfl.training.trainer import Trainer

SHARE = 4  # rows may take 1 / SHARE of the actor's share of the device's memory
PIECE = 1 << 26  # bytes that are copied there at once


def check(torch_device: torch.device, form: Form, x: np.ndarray, y: np.ndarray) -> None:
    """Raises IndexError for tokens and labels that the model does not know, before they reach a GPU
    (`device.check_numbers`).
    """
    if form.tokens:
        device.check_numbers(torch_device, x, form.tokens, "token")
    if form.target.classes:
        labels = y[y != form.task.ignore_index()]
        device.check_numbers(torch_device, labels, form.target.classes, "Target")


class Rows:
    """Reads the rows of clients from the shards, and trains clients on them."""

    def __init__(self, shards: Shards, form: Form, torch_device: torch.device):
        self.shards = shards
        self.form = form
        self.device = torch_device

    def sizes(self, clients: np.ndarray) -> np.ndarray:
        """Samples of clients, int64 [C]; 0 for -1."""
        return np.where(clients < 0, 0, self.shards.sizes[clients])

    def chunk(
        self,
        clients: Sequence[int] | np.ndarray,
        rows: int,
        row_indices: Sequence[np.ndarray | None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """See `Shards.chunk`, with tensors of the device that trains. Raises IndexError on a GPU,
        for a label or a token that the model does not know.
        """
        x, y, n = self.shards.chunk(clients, rows, row_indices)
        for slot in np.flatnonzero(n).tolist() if self.device.type != "cpu" else ():
            check(self.device, self.form, x[slot, : n[slot]], y[slot, : n[slot]])
        return self._to_device(x), self._to_device(y), n

    def train(
        self,
        trainer: Trainer,
        model: torch.Tensor,
        chunk: Chunk,
        members: np.ndarray,
        t: int,
        **options: Any,
    ) -> Iterator[Block]:
        """Trains `members` (int64 [C], -1 for all other slots) of a chunk from the model, float32
        [D], on the batches of round t. `options`: see `Trainer`.
        """
        rule = trainer.local
        sizes = self.sizes(members)
        keys = (trainer.seed, t, members, chunk.draws)
        index, batch_sizes = batches(*keys, sizes, rule, rows=chunk.rows)
        row_indices, index = pick_rows(index, batch_sizes, sizes, rule)
        return trainer.chunk(
            *(model, *self.chunk(members, chunk.rows, row_indices)),
            t=t,
            clients=members,
            draws=chunk.draws,
            batch_plan=(index, batch_sizes, rule.step_counts(sizes)),
            planned_steps=rule.step_counts(self.sizes(chunk.clients)),
            **options,
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return device.move_tensor(torch.from_numpy(array), self.device)


class GpuRows(Rows):
    """Keeps all rows in a GPU's memory, if they take little of it: they are copied there once, and
    a chunk picks out its rows. Otherwise every chunk's rows are copied when it trains.
    """

    def __init__(self, shards: Shards, form: Form, torch_device: torch.device, num_gpus: float):
        super().__init__(shards, form, torch_device)
        numbers = math.prod(form.shape) * (2 if form.tokens else 1)
        self._row = 4 * (numbers + 2 * math.prod(form.target.shape))  # bytes
        # before every client: how many rows others have
        self._row_offsets = np.concatenate([[0], np.cumsum(shards.sizes)])
        size = int(self._row_offsets[-1] + 1) * self._row
        self._fits_memory = size <= device.memory(num_gpus) // SHARE
        self._row_errors: dict[int, str] = {}  # client -> what is wrong with its rows

    def chunk(
        self,
        clients: Sequence[int] | np.ndarray,
        rows: int,
        row_indices: Sequence[np.ndarray | None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        if not self._fits_memory:
            return super().chunk(clients, rows, row_indices)
        stored_x, stored_y = self._row_tensors
        members = np.asarray(clients, np.int64)
        index = np.full((len(members), rows), self._row_offsets[-1])  # the last row is of zeros
        n = np.zeros(len(members), np.int64)
        for slot in np.flatnonzero(members >= 0).tolist():
            client = int(members[slot])
            if client in self._row_errors:
                raise IndexError(self._row_errors[client])
            client_rows = None if row_indices is None else row_indices[slot]
            if client_rows is None:
                client_rows = np.arange(self.shards.sizes[client])
            n[slot] = len(client_rows)
            index[slot, : n[slot]] = self._row_offsets[client] + client_rows
        places = self._to_device(index.ravel())
        x = stored_x.index_select(0, places).view(*index.shape, *stored_x.shape[1:])
        y = stored_y.index_select(0, places).view(*index.shape, *stored_y.shape[1:])
        return x, y, n

    @cached_property
    def _row_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N + 1, *shape] and y [N + 1] of all rows by client; the last row is zeros."""
        form = self.form
        sizes = np.asarray(self.shards.sizes)
        category_counts = (form.tokens, form.target.classes)
        dtypes = [torch.int64 if count else torch.float32 for count in category_counts]
        rows = int(self._row_offsets[-1]) + 1
        x = torch.zeros(rows, *form.shape, dtype=dtypes[0], device=self.device)
        y = torch.zeros(rows, *form.target.shape, dtype=dtypes[1], device=self.device)
        start = 0
        for end in range(1, len(sizes) + 1):
            # padded to the client with most rows
            padded_bytes = self._row * (end + 1 - start) * int(sizes[start : end + 1].max())
            if end < len(sizes) and padded_bytes <= PIECE:
                continue
            self._store(x, y, np.arange(start, end), sizes[start:end])
            start = end
        return x, y

    def _store(
        self, x: torch.Tensor, y: torch.Tensor, clients: np.ndarray, sizes: np.ndarray
    ) -> None:
        max_rows = int(sizes.max(initial=0))
        if not max_rows:
            return
        read_x, read_y, _ = self.shards.chunk(clients, max_rows)
        for place, (client, size) in enumerate(zip(clients.tolist(), sizes.tolist(), strict=True)):
            try:
                check(self.device, self.form, read_x[place, :size], read_y[place, :size])
            except IndexError as error:
                self._row_errors[client] = str(error)
        row_mask = np.arange(max_rows) < sizes[:, None]
        rows = slice(int(self._row_offsets[clients[0]]), int(self._row_offsets[clients[-1] + 1]))
        # wrong rows are never trained on: their client is refused
        x[rows] = self._to_device(read_x[row_mask])
        y[rows] = self._to_device(read_y[row_mask])
