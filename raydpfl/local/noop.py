"""No training at all: what a round costs without it is the runtime's own share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from raydpfl.local.base import Local
from raydpfl.local.way import Block, LaneData


class Noop:
    """Every update and every loss is 0, with clipping and without."""

    private = None
    corrects = True
    linear = False
    one_by_one = False

    def __init__(self, module: nn.Module, local: Local, device: torch.device): ...

    def numbers(self, rows: int, features: int, batch: int, clip: bool) -> int:
        """See `raydpfl.local.way.Way`."""
        return rows * features

    def run(self, parameters: torch.Tensor, lane: LaneData) -> Iterator[Block]:
        """See `raydpfl.local.way.Way`."""
        for _, given in lane.blocks(len(parameters)):
            updates = parameters.new_zeros(len(given), len(parameters))
            yield Block(given, updates, np.zeros(len(given)))
