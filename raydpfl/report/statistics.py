"""Means of several runs, their spread over seeds, and differences between runs of one seed.

>>> spread = SeedValues({1: 0.7, 2: 0.8, 3: 0.9}).spread()
>>> spread.count, round(spread.mean, 6), round(spread.std, 6)
(3, 0.8, 0.1)
>>> a, b = SeedValues({1: 0.71, 2: 0.82, 3: 0.93}), SeedValues({1: 0.7, 2: 0.8, 3: 0.9, 4: 0.1})
>>> gain = total([(1, a), (-1, b)]).spread()
>>> gain.count, round(gain.mean, 6), round(gain.std, 6), round(gain.half_width(), 6)
(3, 0.02, 0.01, 0.024841)
>>> SeedValues({1: 0.5, 2: 0.5, 3: 0.5}).spread().error  # rounding
5.960464477539063e-08
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import stdtrit

_RESOLUTION = float(np.finfo(np.float32).eps)  # of what runs end at: their models are float32
Resample = tuple[int, ...]  # places of seeds, drawn with replacement as many as there are


@dataclass(frozen=True)
class SeedSpread:
    """The mean (NaN of none) and the sample standard deviation (n - 1; NaN below two) of `count`
    numbers, in their units; `error`: the standard error of the mean, NaN where it is not known, and
    its degrees of `freedom`.
    """

    count: int
    mean: float
    std: float
    error: float = math.nan
    freedom: float = 1.0

    def half_width(self, level: float = 0.95) -> float:
        """Half of the interval in which the true mean lies: `error` times the quantile of Student's
        t; NaN below two numbers.
        """
        return float(stdtrit(self.freedom, (1 + level) / 2)) * self.error

    def repetition(self) -> float:
        """Half of the interval for the mean of as many other seeds: both means have the error."""
        return math.sqrt(2) * self.half_width()


@dataclass(frozen=True)
class SeedValues:
    """A number by seed; None and NaN stand for a run without it. `resamples`: the number by seed of
    the setting that each resample of the tuning seeds chooses, where settings were chosen.
    `rounding`: the least standard error of the mean; default: what float32 resolves of the numbers.
    """

    values: Mapping[int, float | None]
    resamples: Mapping[Resample, Mapping[int, float | None]] = field(default_factory=dict)
    rounding: float | None = None

    def spread(self) -> SeedSpread:
        """Over the seeds. The standard error of the mean is that of a bootstrap that draws tuning
        seeds, chooses again and draws final seeds (Efron and Tibshirani 1993, sec. 6), in closed
        form, as infinitely many draws give it:

            error^2 = mean over resamples of std^2 / n + K / (K - 1) variance of their means,

        K the number of tuning seeds; both variances are made unbiased. Their degrees of freedom,
        n - 1 and K - 1, are combined by Satterthwaite's formula. Seeds that all end in one place
        end there to `rounding` alone. Where a resample lacks a number the error is NaN.
        """
        numbers = _numbers(self.values)
        count, mean = len(numbers), float(np.mean(numbers)) if len(numbers) else math.nan
        std = float(np.std(numbers, ddof=1)) if count > 1 else math.nan
        error = std / math.sqrt(count) if count > 1 else math.nan
        freedom = float(max(count - 1, 1))
        choices = {resample: _numbers(values) for resample, values in self.resamples.items()}
        if any(len(resample_numbers) < count for resample_numbers in choices.values()):
            error = math.nan
        elif choices and count > 1:
            shares = np.array([chance(resample) for resample in choices])
            shares = shares / shares.sum()
            means = np.array([values.mean() for values in choices.values()])
            inner = np.array([values.var(ddof=1) / len(values) for values in choices.values()])
            final, degrees = float(shares @ inner), max(len(next(iter(choices))) - 1, 1)
            tuning = float(shares @ (means - shares @ means) ** 2) * (degrees + 1) / degrees
            error = math.sqrt(final + tuning)
            if error:
                freedom = error**4 / (final**2 / freedom + tuning**2 / degrees)
        return SeedSpread(count, mean, std, max(error, self._rounding_error), freedom)

    @property
    def _rounding_error(self) -> float:
        if self.rounding is not None:
            return self.rounding
        return _RESOLUTION * float(np.abs(_numbers(self.values)).max(initial=0.0))


def _numbers(values: Mapping[int, float | None]) -> np.ndarray:
    """Those that there are, in the order of the seeds, float64 [n]."""
    numbers = np.array([values[seed] for seed in sorted(values)], np.float64)  # None is NaN
    return numbers[~np.isnan(numbers)]


def chance(resample: Resample) -> float:
    """The probability of a multiset of as many draws with replacement as there are seeds.

    >>> chance((0, 0)), chance((0, 1))
    (0.25, 0.5)
    """
    count = len(resample)
    orders = math.factorial(count)
    for times in Counter(resample).values():
        orders //= math.factorial(times)
    return float(orders / count**count)


def total(terms: Sequence[tuple[float, SeedValues]]) -> SeedValues:
    """The sum of numbers, each times its factor, seed by seed over the seeds that all have.

    What the runs of one seed share (the data, the split, the cohorts, the tuning seeds) is no part
    of the spread of a difference, so that it is often much narrower than those of the two.
    """
    resamples = dict.fromkeys(key for _, term in terms for key in term.resamples)
    return SeedValues(
        _total([(factor, term.values) for factor, term in terms]),
        {
            key: _total([(factor, term.resamples.get(key, term.values)) for factor, term in terms])
            for key in resamples
        },
        sum(abs(factor) * term._rounding_error for factor, term in terms),
    )


def _total(terms: Sequence[tuple[float, Mapping[int, float | None]]]) -> dict[int, float | None]:
    seeds = set.intersection(*({*values} for _, values in terms)) if terms else set()
    sums: dict[int, float | None] = {}
    for seed in seeds:
        numbers = [(factor, values[seed]) for factor, values in terms]
        products = [factor * value for factor, value in numbers if value is not None]
        sums[seed] = sum(products) if len(products) == len(numbers) else None
    return sums
