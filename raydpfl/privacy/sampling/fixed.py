"""A uniform subset of fixed size, without replacement: the papers' sampling, q = r / N (PRIVACY.md
sec. 2; zero_out and add_remove: docs/proofs.md).
"""

import math
from dataclasses import replace

import numpy as np

from raydpfl.privacy import pld, rdp
from raydpfl.privacy.sampling.base import Sampling, SamplingScheme

_UNLIKELY_CHANCE = 1e-12


class FixedSizeSampling(SamplingScheme):
    """`cohort` of the population, all subsets equally likely. The place of a client that is not
    drawn is another's: a client that may be absent moves the sum by two bounds too. A cohort of the
    whole population is everyone, also where a client is added.
    """

    kind = "fixed"

    def words(self, sampling):
        return f"fixed size {sampling.cohort} of {sampling.population}"

    def convex(self, relation):
        return relation == "replace_one"

    def against(self, sampling, colluders):
        return replace(sampling, colluders=colluders)

    def moved(self, sampling, relation):
        """Under add_remove another takes the place of a client that is absent."""
        cohort = sampling.cohort
        colluders = min(sampling.colluders or 0, cohort - 1)
        return (2 if relation == "add_remove" else 1) * math.sqrt(cohort / (cohort - colluders))

    def curves(self, sampling, mu, relation):
        if sampling.colluders:
            parts = _colluder_parts(sampling)
            return pld.mixture(
                [(p, self.curves(rest, mu * std_ratio, relation)) for p, rest, std_ratio in parts]
            )
        q = sampling.q
        if relation == "add_remove":
            return pld.poisson_curves(q, 2 * mu)
        curve = pld.fixed_size_curve(q, mu)
        if relation == "replace_one":
            return ((curve, curve),)
        without = pld.three_gaussians_curve(q, absent=2 * mu, other=mu)
        return (without, curve), (curve, without)

    def group_curves(self, sampling, mu, group, relation):
        """Of the samples `cohort` are in a batch: hypergeometric (docs/proofs.md). Others take the
        places of those that are absent.
        """
        from scipy.stats import hypergeom

        counts = range(min(group, sampling.cohort) + 1)
        weights = hypergeom.pmf(counts, sampling.population, group, sampling.cohort)
        if relation == "add_remove":
            return pld.group_removed_curves(weights, 2 * mu)
        curve = pld.group_replaced_curve(weights, absent=mu, other=mu)
        if relation == "replace_one":
            return ((curve, curve),)
        without = pld.group_replaced_curve(weights, absent=2 * mu, other=mu)
        return (without, curve), (curve, without)

    def renyi(self, sampling, mu, relation):
        """Under zero_out that of replace_one, of which it is a case; with the cohorts known, and so
        without too, no more than that of everyone.
        """
        if sampling.colluders:
            parts = _colluder_parts(sampling)
            return rdp.mixture(
                [(p, self.renyi(rest, mu * std_ratio, relation)) for p, rest, std_ratio in parts]
            )
        if relation == "add_remove":
            return rdp.poisson(sampling.q, 2 * mu)
        bound = rdp.fixed_size(sampling.q, mu if relation == "replace_one" else 2 * mu)
        return np.minimum(bound, rdp.gaussian(mu))

    def amplified(self, sampling, renyi):
        return rdp.fixed_size_of(sampling.q, renyi)


def _colluder_parts(sampling: Sampling) -> list[tuple[float, Sampling, float]]:
    """By the number of colluders in a cohort: its probability, the sampling of the other clients,
    and how much larger the std of the sum's noise is than that of theirs. Numbers that are unlikely
    together (1e-12) count as one that is worse than each: the least of them for the chances of
    others, the most for the noise.
    """
    from scipy.stats import hypergeom

    population, cohort, k = sampling.population, sampling.cohort, sampling.colluders or 0
    other_count = population - k
    counts = np.arange(max(0, cohort - other_count), min(k, cohort - 1) + 1)
    chances = hypergeom.pmf(counts, population, k, cohort)
    # but for cohorts of colluders alone, which show nothing
    tails = hypergeom.sf(counts - 1, population, k, cohort) - hypergeom.pmf(
        cohort, population, k, cohort
    )
    parts = []
    for m, chance, tail in zip(counts.tolist(), chances.tolist(), tails.tolist(), strict=True):
        last = tail < _UNLIKELY_CHANCE or m == counts[-1]
        count = int(counts[-1]) if last else m
        rest = Sampling("fixed", other_count, cohort - m)
        parts.append(
            (max(tail, 1e-300) if last else chance, rest, math.sqrt(cohort / (cohort - count)))
        )
        if last:
            break
    return parts
