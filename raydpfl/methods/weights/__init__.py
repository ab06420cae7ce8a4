"""The weights of the clients' contributions.

The server divides the sum of the contributions by the cohort's nominal size r. A member gives the
factor w_i of client i's contribution, with mean 1 over the population. The largest of them
multiplies the sensitivity.
"""

from raydpfl.config.registry import family
from raydpfl.methods.weights.base import Weights

__all__ = ["FAMILY", "Weights"]

FAMILY: dict[str, type[Weights]] = family(__name__, Weights, leading_kinds=("uniform",))
