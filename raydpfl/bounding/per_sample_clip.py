"""Clipping of every sample's gradient."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from raydpfl.bounding.none import Unbounded


class PerSampleClip(Unbounded):
    """clip(g_j, G) for the gradient of every sample of a local batch, the norm over all parameters
    (002 sec. III, 003 Alg. 1).

    The sum over a batch moves by at most G when a sample is added and 2 G when it is replaced; the
    mean over B by 2 G / B. What the client sends after its steps is not bounded again. 002 assumes
    gradients bounded by G and never clips them.

    Column `clipped` of a client in clients.parquet is the share of its (sample, step) pairs whose
    gradient was longer than G, NaN for one without samples or whose update failed; that of a round
    in rounds.parquet is the mean over its other clients.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"bound": 1.0},)
    kind: str = "per_sample_clip"
    bound: float = Field(gt=0, le=1e15)

    @property
    def initial_bound(self) -> float | None:
        return None

    @property
    def sample_bound(self) -> float | None:
        return self.bound

    def clipped(self, factors: np.ndarray, samples: np.ndarray) -> np.ndarray:
        return samples
