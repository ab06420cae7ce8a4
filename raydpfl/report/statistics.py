"""Means of several runs, their spread over seeds, and differences between runs of one seed.

>>> spread = over_seeds({1: 0.7, 2: 0.8, 3: 0.9})
>>> spread.count, round(spread.mean, 6), round(spread.std, 6)
(3, 0.8, 0.1)
>>> gain = paired({1: 0.71, 2: 0.82, 3: 0.93}, {1: 0.7, 2: 0.8, 3: 0.9, 4: 0.1})
>>> gain.count, round(gain.mean, 6), round(gain.std, 6)
(3, 0.02, 0.01)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SeedSpread:
    """The mean (NaN of none) and the sample standard deviation (n - 1; NaN below two) of `count`
    numbers, in their units.
    """

    count: int
    mean: float
    std: float


def over_seeds(values: Mapping[int, float | None]) -> SeedSpread:
    """The spread of a number by seed; None and NaN stand for a run without it."""
    numbers = np.array([values[seed] for seed in sorted(values)], np.float64)  # None is NaN
    numbers = numbers[~np.isnan(numbers)]
    mean = float(np.mean(numbers)) if len(numbers) else math.nan
    std = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else math.nan
    return SeedSpread(len(numbers), mean, std)


def paired(values: Mapping[int, float | None], against: Mapping[int, float | None]) -> SeedSpread:
    """The spread of `values` - `against`, seed by seed, over the seeds that both have.

    What the runs of one seed share (the data, the split, the cohorts) is no part of it, so that it
    is often much narrower than the spreads of the two.
    """
    pairs = {seed: (values[seed], against[seed]) for seed in values.keys() & against.keys()}
    gains = {seed: a - b for seed, (a, b) in pairs.items() if a is not None and b is not None}
    return over_seeds(gains)
