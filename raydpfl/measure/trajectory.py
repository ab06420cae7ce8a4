"""The path of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from raydpfl.measure.base import Probe
from raydpfl.tracking import Trajectory


class TrajectoryProbe(Probe):
    """The model before the first round and after each, in trajectory.bin (001 Fig. 3)."""

    kind: str = "trajectory"

    def follow(self, out: Path, d: int, t: int) -> Callable[[int, np.ndarray], None] | None:
        return Trajectory(out / "trajectory.bin", d, t).write


def projection(trajectory: np.ndarray, onto: int = 2) -> np.ndarray:
    """A trajectory of models, float [T, d], on its `onto` principal directions, float64 [T, onto]
    from the first model on (001 Fig. 3).
    """
    moved = np.asarray(trajectory, np.float64) - trajectory[0]
    _, _, directions = np.linalg.svd(moved - moved.mean(0), full_matrices=False)
    return moved @ directions[:onto].T
