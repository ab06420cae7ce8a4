"""Whole numbers in proportion.

>>> apportion(10, np.array([1.0, 1.0, 2.0])).tolist()
[3, 2, 5]
"""

import numpy as np


def apportion(total: int, weights: np.ndarray, most: np.ndarray | None = None) -> np.ndarray:
    """`total` in whole parts [n] in proportion to `weights` (largest remainders, ties to the
    first), none above `most`.
    """
    parts = np.zeros(len(weights), np.int64)
    free = np.ones(len(weights), bool)
    while True:
        rest = total - parts[~free].sum()
        share = np.where(free, weights, 0.0) * (rest / weights[free].sum() if free.any() else 0.0)
        parts = np.where(free, np.floor(share), parts).astype(np.int64)
        parts[np.argsort(parts - share, kind="stable")[: total - parts.sum()]] += 1
        if most is None:
            return parts
        over = free & (parts > most)
        if not over.any():
            return parts
        parts[over] = most[over]
        free &= ~over
