"""How many samples each client holds: `data.sizes`.

A member's weights are positive and a function of (its fields, the generator) alone; the base rounds
them to whole samples, at least one each.

>>> import numpy as np
>>> FAMILY["balanced"]().counts(10, 4, np.random.default_rng(0))
array([3, 3, 2, 2])
"""

from raydpfl.config.registry import family
from raydpfl.data.sizes.base import Sizes, apportion
from raydpfl.data.sizes.distributions import Balanced, PowerLaw

__all__ = ["FAMILY", "Balanced", "PowerLaw", "Sizes", "apportion"]

FAMILY: dict[str, type[Sizes]] = family(__name__, Sizes, ("balanced", "power-law", "spread"))
