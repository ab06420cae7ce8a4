"""The base of the family: how many samples each client holds."""

import numpy as np

from raydpfl.config.registry import Member
from raydpfl.data.rounding import apportion
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
        weights = self.weights(clients, generator)
        shares = np.maximum(weights * (total / weights.sum()) - 1, 1e-12)
        return 1 + apportion(total - clients, shares)
