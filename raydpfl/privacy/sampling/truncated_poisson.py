"""Poisson sampling with a cap on the cohort, as memory or a server's capacity asks for (Chua et al.
Scalable DP-SGD: shuffling vs. Poisson subsampling. NeurIPS 2024). Their bound adds to delta; that
of docs/proofs.md, which is here, does not.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raydpfl.errors import ConfigError
from raydpfl.privacy import pld, rdp
from raydpfl.privacy.sampling.base import Sampling, VaryingCohorts
from raydpfl.privacy.sampling.fixed import FixedSizeSampling


class TruncatedPoissonSampling(VaryingCohorts):
    """`cohort` clients are expected before of more than `cap` a uniform subset of `cap` is kept."""

    kind = "truncated_poisson"
    examples = (
        {"population": 100, "cohort": 10, "cap": 14},
        {"population": 20, "cohort": 9, "cap": 9},
    )

    def capped(self):
        return True

    def check(self, sampling):
        super().check(sampling)
        if sampling.cap < sampling.cohort:
            expected = f"an integer from the cohort of {sampling.cohort} on"
            raise ConfigError("cap", sampling.cap, expected)

    def everyone(self, sampling):
        """Not where a client that is added may take the place of another."""
        return sampling.cohort == sampling.population < sampling.cap

    def size_secret(self, sampling):
        return True

    def any_subset(self, sampling):
        return True

    def words(self, sampling):
        expected = f"{sampling.cohort} of {sampling.population} expected"
        return f"Poisson, {expected}, at most {sampling.cap}"

    def moved(self, sampling, relation):
        return FixedSizeSampling().moved(sampling, relation)

    def curves(self, sampling, mu, relation):
        return _mix(sampling, pld.mixture, lambda part: part.scheme.curves(part, mu, relation))

    def renyi(self, sampling, mu, relation):
        return _mix(sampling, rdp.mixture, lambda part: part.scheme.renyi(part, mu, relation))


def _mix(sampling: Sampling, mixture: Callable, cost: Callable[[Sampling], Any]) -> Any:
    """The `mixture` of what a round costs where fewer than `cap` others are drawn, and of a bound
    on that where there are more. The others are as many as the population, for one that joins.
    """
    from scipy.stats import binom

    chance = float(binom.sf((sampling.cap or 0) - 1, sampling.population, sampling.q))
    kinds = {"poisson": 1 - chance, "fixed": chance}
    parts = [(p, replace(sampling, kind=kind, cap=None)) for kind, p in kinds.items() if p]
    if len(parts) == 1:
        return cost(parts[0][1])
    return mixture([(p, cost(part)) for p, part in parts])
