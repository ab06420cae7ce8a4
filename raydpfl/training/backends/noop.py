"""No training at all: what a round costs without it is the runtime's own share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from raydpfl.methods.local.base import Local
from raydpfl.training.backends.base import Backend, Block, ChunkData


class Noop(Backend):
    """Every update and every loss is 0, with clipping and without."""

    @classmethod
    def lacks(cls, local: Local, clip: float | None) -> None:
        """See `raydpfl.training.backends.base.Backend`."""

    half = True

    def arrays(self, rows: int, features: int, batch: int, clip: bool) -> tuple[int, ...]:
        """See `raydpfl.training.backends.base.Backend`."""
        return (rows * features,)

    def run(self, parameters: torch.Tensor, chunk: ChunkData) -> Iterator[Block]:
        """See `raydpfl.training.backends.base.Backend`."""
        for _, given in chunk.blocks(len(parameters)):
            updates = parameters.new_zeros(len(given), len(parameters))
            yield Block(given, updates, np.zeros(len(given)))
