"""The base of the family, and whole numbers in proportion."""

import numpy as np

from raydpfl.config.registry import Member
from raydpfl.errors import ConfigError


class Sizes(Member):
    """Base of the family: how many samples each client holds."""

    def weights(self, clients: int, generator: np.random.Generator) -> np.ndarray:
        """Float64 [clients], positive: the sizes up to a common factor."""
        raise NotImplementedError

    def even(self) -> bool:
        """Whether clients have as many, to within one sample: the default of all data."""
        return False

    def counts(self, total: int, clients: int, generator: np.random.Generator) -> np.ndarray:
        """Int64 [clients], of sum `total`, by the weights, at least 1. Raises `ConfigError`."""
        if clients > total:
            expected = f"at most the {total} training samples, so that each client has one"
            raise ConfigError("data.clients", clients, expected)
        weights = np.asarray(self.weights(clients, generator), np.float64)
        is_sound = weights.shape == (clients,) and weights.min() >= 0 and 0 < weights.sum() < np.inf
        if not is_sound:
            expected = f"one whose weights are {clients} numbers, none below 0 and not all 0"
            raise ConfigError("data.sizes.kind", self.kind, expected)
        shares = np.maximum(weights * (total / weights.sum()) - 1, 1e-12)
        return 1 + apportion(total - clients, shares)


def apportion(total: int, weights: np.ndarray, limits: np.ndarray | None = None) -> np.ndarray:
    """`total` in whole parts [n] in proportion to `weights` (largest remainders, ties to the
    first), none above its entry of `limits`.

    >>> apportion(10, np.array([1.0, 1.0, 2.0])).tolist()
    [3, 2, 5]
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
