"""A score of every client as a histogram over the clients, and what follows from one with noise
(`evaluate.histogram`).

>>> histogram = Histogram(std=5.0, bins=4)
>>> histogram.counts(np.array([0.1, 0.6, 0.6, 1.0, 1.5, np.nan]))  # clipped; NaN is in no bin
array([1., 0., 2., 2.])
>>> histogram.shares(np.array([1.0, -0.5, 2.0, 2.5])).round(2)  # at most 0.25, 0.5, 0.75 and 1
array([0.15, 0.15, 0.5 , 1.  ])
>>> found = histogram.statistics(np.array([1.0, 0.0, 2.0, 2.0]), worse=-1)
>>> {name: round(value, 3) for name, value in found.items()}  # doctest: +NORMALIZE_WHITESPACE
{'mean': 0.625, 'std': 0.274, 'p10': 0.125, 'p50': 0.688, 'p90': 0.938, 'worst_tenth': 0.062}

Design note. Noisy counts fall below 0, and their sums need not rise. The share of clients at or
below an edge is taken as the mean of the largest share up to it and the smallest from it on, so
that shares rise, and a count that noise has moved bears on its neighbours alone. All statistics
follow from these shares, as if clients were spread evenly within a bin.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from raydpfl.config.registry import Section
from raydpfl.errors import ConfigError

_POINTS = 201  # of the trapezoidal rule over the worst tenth


class Histogram(Section):
    """How a score of every client is released: as counts over equal bins, with Gaussian noise."""

    std: float = Field(ge=1e-9, le=1e15, description="of the noise on each count, in clients")
    bins: int = Field(default=10, ge=2, le=1000, description="as wide as each other")
    low: float = Field(default=0.0, description="of the first bin, which lower scores are in too")
    high: float = Field(default=1.0, description="of the last one")

    @model_validator(mode="after")
    def _check_range(self) -> Histogram:
        if not self.low < self.high:
            expected = f"above evaluate.histogram.low, {self.low:g}"
            raise ConfigError("evaluate.histogram.high", self.high, expected)
        return self

    @property
    def edges(self) -> np.ndarray:
        """Where bins begin and end, float64 [bins + 1]."""
        return np.linspace(self.low, self.high, self.bins + 1)

    def counts(self, values: np.ndarray) -> np.ndarray:
        """How many clients are in each bin, float64 [bins], of their scores, float64 [clients]; one
        without a score (NaN) is in none.
        """
        finite_values = np.clip(values[~np.isnan(values)], self.low, self.high)
        return np.histogram(finite_values, self.edges)[0].astype(np.float64)

    def shares(self, counts: np.ndarray) -> np.ndarray | None:
        """The shares of clients at or below the upper edges, float64 [bins], which rise to 1, from
        counts that may have noise; None where these do not add up to anything.
        """
        total = counts.sum()
        if not total > 0:
            return None
        cumulative_shares = np.clip(np.cumsum(counts) / total, 0.0, 1.0)
        cumulative_shares[-1] = 1.0
        running_max = np.maximum.accumulate(cumulative_shares)
        running_min = np.minimum.accumulate(cumulative_shares[::-1])[::-1]
        return (running_max + running_min) / 2

    def statistics(self, counts: np.ndarray, worse: int) -> dict[str, float] | None:
        """Mean, standard deviation, quantiles and the mean of the worst tenth, by the names of
        `raydpfl.models.metric_columns.STATISTICS`; None where the counts do not add up to anything.

        Args:
            counts: float64 [bins], with noise or without.
            worse: -1: small scores are the worst; else large ones.
        """
        shares = self.shares(counts)
        if shares is None:
            return None
        edges = self.edges
        middles = (edges[1:] + edges[:-1]) / 2
        bins = np.diff(shares, prepend=0.0)
        mean = float(bins @ middles)
        levels = np.linspace(0.0, 0.1, _POINTS) if worse < 0 else np.linspace(0.9, 1.0, _POINTS)
        p10, p50, p90 = _quantiles(shares, edges, np.array([0.1, 0.5, 0.9])).tolist()
        tail_scores = _quantiles(shares, edges, levels)
        return {
            "mean": mean,
            "std": float(np.sqrt(bins @ (middles - mean) ** 2)),
            "p10": p10,
            "p50": p50,
            "p90": p90,
            "worst_tenth": float(((tail_scores[1:] + tail_scores[:-1]) / 2).mean()),
        }


def _quantiles(shares: np.ndarray, edges: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Where these shares, float64 [n], of clients are below: float64 [n]."""
    cumulative_shares = np.concatenate([[0.0], shares])
    # of edges with one share the last before it rises, and the first of those at its end
    place = np.clip(np.searchsorted(cumulative_shares, levels, side="left"), 1, len(shares))
    low = cumulative_shares[place - 1]
    high = cumulative_shares[place]
    fractions = np.where(high > low, (levels - low) / np.where(high > low, high - low, 1.0), 0.0)
    return edges[place - 1] + fractions * (edges[place] - edges[place - 1])
