"""The path of the model, and several paths on axes that they share (001 Fig. 3).

>>> turn = np.array([[3.0, 0.0], [3.0, 2.0], [0.0, 2.0]])
>>> straight = np.array([[3.0, 0.0], [0.0, 0.0]])
>>> (one, other), marks = project_paths([turn, straight], marks=np.zeros((1, 2)))
>>> one.shape, other.shape, marks.shape
((3, 2), (2, 2), (1, 2))
>>> bool(np.allclose(np.linalg.norm(one[2] - other[1]), 2))  # two dimensions lose nothing here
True
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from raydpfl.methods.probes.base import Probe
from raydpfl.storage.run_files import Trajectory

BLOCK = 1 << 22  # numbers that are in memory at once


class TrajectoryProbe(Probe):
    """The model before the first round and after every `every`-th, in trajectory.bin: float32 [d],
    one after another (001 Fig. 3).
    """

    examples = ({}, {"every": 3})
    kind: str = "trajectory"
    every: int = Field(default=1, ge=1, description="rounds from one model to the next")

    def follow(self, out: Path, d: int, t: int) -> Callable[[int, np.ndarray], None] | None:
        trajectory = Trajectory(out / "trajectory.bin", d, -(-t // self.every))

        def write(t: int, model: np.ndarray) -> None:
            if t % self.every == 0:
                trajectory.write(t // self.every, model)

        return write


def project_paths(
    paths: Sequence[np.ndarray], marks: np.ndarray | None = None
) -> tuple[list[np.ndarray], np.ndarray]:
    """Several paths on the two principal directions of all their models together (001 Fig. 3).

    The axes follow from the inner products of all models in float64, summed over blocks of
    parameters: paths may be mapped files, larger than memory. The larger coordinates of each axis
    are positive. A model with NaN (lost by a run) has no part in the axes.

    Args:
        paths: of models, float [T_i, d].
        marks: other points to project, as an optimum, float [m, d]; None: none.

    Returns:
        The paths, float64 [T_i, 2], and the marks, float64 [m, 2], less the first mark or, without
        marks, the first model of the first path.
    """
    d = paths[0].shape[1]
    extra = np.zeros((0, d)) if marks is None else np.asarray(marks)
    lengths = [len(path) for path in paths]
    nan_mask = np.concatenate([np.isnan(path).any(axis=1) for path in paths])
    origin = extra[0] if len(extra) else paths[0][0]
    count = sum(lengths) + len(extra)
    products = np.zeros((count, count))
    width = max(1, BLOCK // count)
    for start in range(0, d, width):
        part = slice(start, start + width)
        rows = [np.asarray(points[:, part], np.float64) for points in (*paths, extra)]
        block = np.concatenate(rows) - np.asarray(origin[part], np.float64)
        block[: len(nan_mask)][nan_mask] = 0.0
        products += block @ block.T
    axes = np.concatenate([~nan_mask, np.zeros(len(extra), bool)])
    coordinates = _principal_coordinates(products, axes)
    coordinates[: len(nan_mask)][nan_mask] = np.nan
    *projected_paths, projected_marks = np.split(coordinates, np.cumsum(lengths))
    return projected_paths, projected_marks


def _principal_coordinates(products: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """The coordinates float64 [n, 2] of n points with these inner products, [n, n], on the two
    principal directions of those that `axes`, bool [n], picks; 0 on directions that they lack.
    """
    centred_products = products[:, axes] - products[:, axes].mean(axis=1, keepdims=True)
    spread = centred_products[axes] - centred_products[axes].mean(axis=0, keepdims=True)
    values, vectors = np.linalg.eigh(spread)
    values, vectors = values[:-3:-1], vectors[:, :-3:-1]
    mask = values > 1e-12 * values.max(initial=np.finfo(float).tiny)
    coordinates = np.zeros((len(products), 2))
    coordinates[:, : mask.sum()] = centred_products @ vectors[:, mask] / np.sqrt(values[mask])
    signs = np.sign(coordinates[np.abs(coordinates).argmax(axis=0), np.arange(2)])
    return coordinates * np.where(signs < 0, -1.0, 1.0)
