"""No training at all: what a round costs without it is the runtime's own share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from raydpfl.local.sgd import Sgd
from raydpfl.local.way import LaneData


class Noop:
    """Every update and every loss is 0, with clipping and without."""

    private = None
    corrects = True
    one_by_one = False

    def __init__(self, module: nn.Module, local: Sgd, device: torch.device): ...

    def run(
        self, parameters: torch.Tensor, lane: LaneData
    ) -> Iterator[tuple[int, torch.Tensor, float]]:
        """See `raydpfl.local.way.Way`."""
        for slot in lane.slots:
            yield slot, torch.zeros_like(parameters), 0.0
