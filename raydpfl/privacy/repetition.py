"""A random number of runs of which the best alone is released: an epsilon for a whole search.

>>> runs = Repetition("geometric", mean=10)
>>> one_run = rdp.gaussian(1.0)  # Renyi divergences of one run, here a Gaussian
>>> float(rdp.epsilons(runs.renyi(one_run), delta=1e-5, counts=1).round(3))
8.514
>>> from raydpfl.privacy import pld
>>> def epsilon(delta): return float(pld.gaussian_epsilon(1.0, delta))
>>> def delta(epsilon): return float(pld.gaussian_delta(epsilon, 1.0))
>>> round(runs.epsilon(1e-5, epsilon, delta), 3)  # by the privacy profile of one run
6.618

A run draws its values at random and then trains, every time anew and independently of the others;
the best is that with the largest score, a function of what the run releases and of public rows.
Neither the number of runs nor the others are released.

[1] Liu, Talwar. Private selection from private candidates. STOC 2019.
[2] Papernot, Steinke. Hyperparameter tuning with Renyi differential privacy. ICLR 2022. Definition
    1 (truncated negative binomial), Theorem 2, and Theorem 6 (Poisson).
[3] Koskela, Redberg, Wang. Privacy profiles for private selection. ICML 2024.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.privacy import rdp
from raydpfl.privacy.search import bisect_brackets, safe_end
from raydpfl.privacy.types import one_of

Kind = Literal["geometric", "poisson", "logarithmic", "negative_binomial"]
_SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
_TOLERANCE = 1e-7  # of an epsilon
_ATTEMPTS = 1000  # draws of a negative binomial, of which the first above 0 counts
_NEGLIGIBLE = 1e-30  # probability of a number of runs


@dataclass(frozen=True)
class Repetition:
    """The distribution of the number of runs. Raises `ConfigError` for a field out of range."""

    runs: Kind  # poisson may be 0; the others are truncated negative binomials [2], at least 1
    mean: float  # of the number of runs, from 1 to 10,000
    shape: float | None = None  # of negative_binomial, above 0, in which 1 is geometric

    def __post_init__(self) -> None:
        one_of("runs", self.runs, Kind)
        if not 1 <= self.mean <= 10_000:
            raise ConfigError("mean", self.mean, "a number of runs from 1 to 10,000")
        if self.runs in _SHAPES and self.shape is not None:
            raise ConfigError("shape", self.shape, "none unless runs is negative_binomial")
        if self.runs not in _SHAPES and not 0 < (self.shape or 0) <= 1000:
            raise ConfigError("shape", self.shape, "a number above 0, at most 1000")

    @property
    def eta(self) -> float:
        """The shape of the truncated negative binomial [2]; infinite for Poisson."""
        return _SHAPES.get(self.runs, self.shape or 0.0)

    @cached_property
    def gamma(self) -> float:
        """Of the truncated negative binomial [2], such that its mean is at most `mean`."""

        def unsafe(gamma: np.ndarray) -> np.ndarray:  # the mean falls as gamma grows
            tail = -np.expm1(self.eta * np.log(gamma)) / self.eta if self.eta else -np.log(gamma)
            return (1 / gamma - 1) / tail > self.mean

        if self.eta == 1 or self.mean == 1:
            return 1 / self.mean
        low, high = np.array(1e-12), np.array(1 - 1e-12)
        return float(bisect_brackets(unsafe, low, high, times=100))

    def draw(self, generator: np.random.Generator) -> int:
        """How many runs there are."""
        from scipy.special import exprel

        if self.runs == "poisson":
            return int(generator.poisson(self.mean))
        if self.mean == 1:
            return 1
        if self.eta == 0:
            return int(generator.logseries(1 - self.gamma))
        counts = generator.negative_binomial(self.eta, self.gamma, _ATTEMPTS)
        if counts.any():
            return int(counts[counts > 0][0])
        # few are above 0, as of a small shape or a mean near 1: inverts the distribution function
        rest, logarithm = generator.random(), -math.log(self.gamma)
        probability = (1 - self.gamma) / (logarithm * float(exprel(self.eta * logarithm)))
        run_count = 1
        while rest >= probability > _NEGLIGIBLE:
            rest -= probability
            probability *= (1 - self.gamma) * (run_count + self.eta) / (run_count + 1)
            run_count += 1
        return run_count

    def renyi(self, one_run: np.ndarray) -> np.ndarray:
        """Renyi divergences of the whole search at `rdp.ORDERS`, float64 [orders], by [2]."""
        from dp_accounting import dp_event
        from dp_accounting import rdp as library

        class Run(dp_event.DpEvent):
            """One run, known by its divergences."""

        class Accountant(library.RdpAccountant):
            def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
                if not isinstance(event, Run):
                    return super()._maybe_compose(event, count, do_compose)
                if do_compose:
                    self._rdp += count * one_run
                return None

        if self.mean == 1 and self.runs != "poisson":
            return one_run
        search = dp_event.RepeatAndSelectDpEvent(Run(), self.mean, self.eta)
        return np.asarray(Accountant(rdp.ORDERS.tolist()).compose(search).rdp)

    def epsilon(
        self,
        delta: float,
        epsilon_of: Callable[[float], float],
        delta_of: Callable[[float], float],
    ) -> float:
        """Epsilon of the whole search at `delta`, from the privacy profile of one run, is
        c + epsilon_of(delta / mean), with

            c = mean delta_of(0)                                            (Poisson)
            c = (eta + 1) e, where delta_of(e) = (exp(e) - 1) gamma / (1 - gamma)   (else).

        After [3], with the free epsilon of the bound at the best value (docs/proofs.md, A search).
        """
        return self._shift(delta_of) + epsilon_of(delta / self.mean)

    def _shift(self, delta_of: Callable[[float], float]) -> float:
        if self.runs == "poisson":
            return self.mean * delta_of(0.0)
        if self.mean == 1:
            return 0.0
        odds = self.gamma / (1 - self.gamma)

        def excess(x: float) -> float:
            return delta_of(x) - math.expm1(x) * odds

        if excess(0.0) <= 0:
            return 0.0
        # at the far end the right side is 1
        far = -math.log(self.gamma) * (1 + 1e-9)
        return (self.eta + 1) * safe_end(excess, 0.0, far, _TOLERANCE)

    def __str__(self) -> str:
        shape = f" of shape {self.shape:g}" if self.shape is not None else ""
        name = {"poisson": "Poisson"}.get(self.runs, self.runs.replace("_", " "))
        return f"a {name} number of runs{shape} with mean {self.mean:g}"
