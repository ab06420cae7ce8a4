"""Personal budgets of 003: sigma_k of eq. 6 and its inverse (PRIVACY.md sec. 5). Budgets, deltas,
batches B and samples n_k may be numbers or arrays of one shape, which the results have too.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from raydpfl.errors import ConfigError
from raydpfl.privacy.accountants.base import Formula, FormulaValue
from raydpfl.privacy.papers import PAPERS
from raydpfl.privacy.pld import gaussian_delta
from raydpfl.privacy.search import bisect_brackets, safe_end


class PersonalBudgets(Formula):
    """sigma_k = c sqrt(V_k T_k T_l) (003 eq. 6). The formula amplifies the composition instead of
    the steps, and leaves the neighbouring relation open.
    """

    name = PAPERS["003"]
    relation = "unstated"
    calibration = "paper"

    def printed(self, std, delta, **client):
        epsilon = float(self.claims(std, delta, 1, **client))
        return FormulaValue(epsilon, self.conditions(epsilon, std, delta, **client)[1]), delta

    def noise(self, epsilon, delta, *, bound, batch, samples, steps):
        variance = budget_variance(epsilon, delta, batch=batch, samples=samples)
        failures = _lemma2(epsilon, delta, batch, samples)
        return FormulaValue(bound * math.sqrt(variance * steps), failures)

    def claims(self, std, delta, counts, *, bound, batch, samples, steps):
        """By bisection, to a relative 1e-13."""
        root, batch, samples = np.broadcast_arrays(
            std / (bound * np.sqrt(steps * counts)), np.asarray(batch), np.asarray(samples)
        )

        def unsafe(log_epsilon: np.ndarray) -> np.ndarray:
            variance = budget_variance(np.exp(log_epsilon), delta, batch=batch, samples=samples)
            return np.sqrt(variance) > root

        low, high = np.full(root.shape, -500.0), np.full(root.shape, 500.0)
        logs = bisect_brackets(unsafe, low, high, times=60)
        return np.where(root > 0, np.exp(logs), math.inf)[()]

    def conditions(self, epsilon, std, delta, *, bound, batch, samples, steps):
        return delta, _lemma2(epsilon, delta, batch, samples)


def unamplified_budget(epsilon: ArrayLike, *, batch: ArrayLike, samples: ArrayLike) -> Any:
    """eps' = ln(1 + (e^eps - 1) / r), r = B / n_k: before amplification (003 Lemma 1), float64."""
    epsilon = np.asarray(epsilon, float)
    r = np.asarray(batch, float) / np.asarray(samples, float)
    small = np.log1p(np.expm1(np.minimum(epsilon, 30.0)) / r)
    # without e^epsilon, which would overflow
    large = epsilon - np.log(r) + np.log1p((r - 1) * np.exp(-epsilon))
    return np.where(epsilon > 30, large, small)[()]


def budget_variance(
    epsilon: ArrayLike, delta: ArrayLike, *, batch: ArrayLike, samples: ArrayLike
) -> Any:
    """V_k = 8 ln(e + r eps' / delta) / (n_k r eps')^2, r = B / n_k (003 eq. 7): the noise variance
    for one local step and a bound of 1, float64 [...].

    Args:
        epsilon: above 0; infinite for a public client, whose variance is 0.
        delta: between 0 and 1.
        batch, samples: B, from 1 to n_k, and n_k.

    Raises:
        ConfigError: an argument is out of range.
    """
    b, n, deltas = (np.asarray(value, float) for value in (batch, samples, delta))
    for field, value, fits, expected in (
        ("epsilon", epsilon, np.asarray(epsilon) > 0, "a positive number, inf for a public client"),
        ("delta", delta, (deltas > 0) & (deltas < 1), "a number between 0 and 1, both excluded"),
        ("batch", batch, (b >= 1) & (b <= n), "from 1 to the client's samples ({})"),
    ):
        if not np.all(fits):
            raise ConfigError(field, value, expected.format(samples))
    inner = unamplified_budget(epsilon, batch=b, samples=n)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        # ln(e + r eps' / delta), whose argument may overflow
        surprise = np.logaddexp(1.0, np.log(b / n) + np.log(inner) - np.log(delta))
        variance = np.square(np.sqrt(8 * surprise) / inner / b)
    return np.where(np.isinf(epsilon), 0.0, variance)[()]


def _lemma2(epsilon: float, delta: float, batch: int, samples: int) -> tuple[str, ...]:
    """The condition that fails, in words, where 003 Lemma 2 does not hold at eps' and delta / r, by
    the exact Gaussian curve: at r = 1 and delta 1e-5 for budgets above 169.
    """
    r = batch / samples

    def excess(inner: float) -> float:
        surprise = np.logaddexp(1.0, math.log(inner) - math.log(delta / r))
        return float(gaussian_delta(inner, inner / math.sqrt(8 * surprise)) - delta / r)

    inner = float(unamplified_budget(epsilon, batch=batch, samples=samples))
    if math.isinf(epsilon) or inner < 10 or excess(inner) <= 0:
        return ()
    inner_limit = safe_end(excess, 10.0, inner, xtol=0.0, rtol=1e-6)
    return (f"eps' = {inner:.4g} <= {inner_limit:.4g} (Lemma 2, at delta / r = {delta / r:.3g})",)
