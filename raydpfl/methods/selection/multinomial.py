"""Draws in proportion to the clients' data."""

from __future__ import annotations

import numpy as np

from raydpfl.methods.selection.base import Population
from raydpfl.methods.selection.with_replacement import WithReplacement


class Multinomial(WithReplacement):
    """p = p^u, p^u_k = n_k / sum n: MD sampling (002 sec. IV), the unbiased selection of 003 sec.
    III-C2.

    The mean of the cohort's updates is unbiased for sum p^u_k Delta_k, so the weights are uniform.
    """

    examples = ({"cohort": 6},)
    kind: str = "multinomial"

    def draw_probabilities(self, population: Population) -> np.ndarray:
        return population.shares
