"""The weights of the clients' contributions.

The server divides the sum of the contributions by the cohort's nominal size r. A member gives the
factor w_i of client i's contribution, with mean 1 over the population. The largest of them
multiplies the sensitivity.

A user-defined member is a class of `Weights` with `of`, named in the config by import path:

>>> import numpy as np
>>> class Capped(Weights):
...     most: int = 100
...     def of(self, sizes, samples, population):
...         return np.minimum(sizes, self.most) / np.minimum(sizes, self.most).mean()
>>> Capped(most=20).of(np.array([10, 20, 60]), samples=90, population=3)
array([0.6, 1.2, 1.2])
"""

from __future__ import annotations

from raydpfl.config.registry import family
from raydpfl.methods.weights.base import Weights

__all__ = ["FAMILY", "Weights"]

FAMILY: dict[str, type[Weights]] = family(__name__, Weights, first=("uniform",))
