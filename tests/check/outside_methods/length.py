"""Clipping at a multiple of the mean length of updates, itself estimated under noise."""

import math
from typing import ClassVar

import numpy as np
from pydantic import Field

from raydpfl.methods.bounding import Bounding, BoundingQuery


class Length(Bounding):
    """C <- C (2 m)^rate, m being the noised mean of min(norm / (2 C), 1) over the cohort.

    At rest the mean of the norms, cut at 2 C, is C. An answer is min(norm / (2 C), 1) - 1/2.
    """

    examples: ClassVar = ({"bound": 0.2}, {"bound": 1.0, "rate": 1.0, "share": 0.3})
    bound: float = Field(gt=0)
    rate: float = Field(default=0.5, gt=0, le=1)
    share: float = Field(default=0.1, gt=0, lt=1)

    def factor(self, norm, bound):
        return min(1.0, bound / norm) if norm > 0 else 1.0

    def queries(self):
        return (BoundingQuery("length", bound=0.5, share=self.share),)

    def answers(self, columns, bound):
        return {"length": np.minimum(columns["norm"] / (2 * bound), 1.0) - 0.5}

    def adapt(self, bound, sums, clients, state):
        mean = min(max(sums["length"] / clients + 0.5, 0.05), 1.0)
        return min(max(bound * math.pow(2 * mean, self.rate), 1e-12), 1e12)
