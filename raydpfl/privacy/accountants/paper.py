"""Theorem 3.2 of 000 as printed, which is Theorem 1 of 001 (PRIVACY.md sec. 3):

    sigma^2 = v c^2 r T ln(1/delta) / (N^2 eps^2)  for eps <= u (r/N)^2 T.

In 000 Algorithm 3 every client of the cohort adds N(0, sigma^2 I) to its clipped update and the
server averages, so sigma is the std of one client's noise (000 eq. 12 has sigma^2 d / P for the
average). In 001 Algorithm 1 every client adds N(0, r sigma^2 I), so sigma is the std of the noise
on the mean. With sigma_001 = sigma_000 / sqrt(r) they are one mechanism, whose noise on the sum has
std sqrt(r) sigma_000 = r sigma_001.
"""

import math
from typing import Any

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.privacy.accountants.base import Accountant, FormulaValue
from raydpfl.privacy.sampling import Sampling


class Paper(Accountant):
    """The formula for noise on clients' updates; the papers leave its constant `v` open. At local
    steps it stands for the formulas of 002 and 003 (`resolve_accountants`).
    """

    name = "paper"
    label = "Zhang, Das 2021"
    rigorous = False

    def covers(self, mechanism, relation):
        """None: a formula can always be printed, with the conditions that fail."""

    def epsilons(self, mechanism, relation, delta, first, last, v):
        rounds = np.arange(first, last + 1)
        return _scale(mechanism.sampling, rounds, delta, v) / mechanism.min_multiplier

    def delta(self, mechanism, relation, epsilon, rounds, v):
        z = mechanism.min_multiplier
        return math.exp(-((epsilon * z / mechanism.sampling.q) ** 2) / (v * rounds))


def paper_multiplier(
    epsilon: float, sampling: Sampling, rounds: int, delta: float, v: float = 4.0
) -> float:
    """The noise multiplier z = std of the noise on the sum / bound of 000 Theorem 3.2 and 001
    Theorem 1, (r/N) sqrt(v T ln(1/delta)) / epsilon.

    Args:
        epsilon, delta: that are claimed; epsilon positive and finite, else `ConfigError`.
        sampling: who takes part; only q = r/N is read.
        rounds: T.
        v: the constant that the papers leave open (PRIVACY.md sec. 3), positive and finite.
    """
    for field, value in (("epsilon", epsilon), ("v", v)):
        if not (0 < value < math.inf):
            raise ConfigError(field, value, "a positive finite number")
    return float(_scale(sampling, rounds, delta, v)) / epsilon


def paper_epsilon(
    z: float, sampling: Sampling, rounds: int, delta: float, v: float = 4.0
) -> FormulaValue:
    """The epsilon claimed at `z`, std of the noise on the sum / bound, and conditions that fail."""
    epsilon = paper_multiplier(1.0, sampling, rounds, delta, v) / z if z else math.inf
    limit = sampling.q**2 * rounds
    bound = f"epsilon {epsilon:.4g} <= u q^2 T = {limit:.4g} (u = 1; the paper leaves u open)"
    rule = f"cohorts of one fixed size, drawn without replacement (here: {sampling})"
    conditions = {bound: epsilon <= limit, rule: sampling.scheme.as_in_the_papers(sampling)}
    return FormulaValue(epsilon, tuple(words for words, holds in conditions.items() if not holds))


def _scale(sampling: Sampling, rounds: Any, delta: float, v: float) -> Any:
    """z times epsilon, float64 [...] for `rounds` [...]."""
    return sampling.q * np.sqrt(v * rounds * math.log(1 / delta))
