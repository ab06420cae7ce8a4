"""Whole numbers in proportion.

>>> apportion(10, np.array([1.0, 1.0, 2.0])).tolist()
[3, 2, 5]
"""

import numpy as np


def apportion(total: int, weights: np.ndarray, limits: np.ndarray | None = None) -> np.ndarray:
    """`total` in whole parts [n] in proportion to `weights` (largest remainders, ties to the
    first), none above its entry of `limits`.
    """
    parts = np.zeros(len(weights), np.int64)
    free_mask = np.ones(len(weights), bool)
    while True:
        rest = total - parts[~free_mask].sum()
        scale = rest / weights[free_mask].sum() if free_mask.any() else 0.0
        share = np.where(free_mask, weights, 0.0) * scale
        parts = np.where(free_mask, np.floor(share), parts).astype(np.int64)
        parts[np.argsort(parts - share, kind="stable")[: total - parts.sum()]] += 1
        if limits is None:
            return parts
        excess_mask = free_mask & (parts > limits)
        if not excess_mask.any():
            return parts
        parts[excess_mask] = limits[excess_mask]
        free_mask &= ~excess_mask
