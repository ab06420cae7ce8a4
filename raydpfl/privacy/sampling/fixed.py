"""A uniform subset of fixed size, without replacement: the papers' sampling, q = r / N (PRIVACY.md
sec. 2).
"""

from __future__ import annotations

from raydpfl.privacy import pld, rdp
from raydpfl.privacy.sampling.base import SamplingScheme


class FixedSizeSampling(SamplingScheme):
    """`cohort` of the population, all subsets equally likely; under replace-one."""

    kind = "fixed"

    def words(self, sampling):
        return f"fixed size {sampling.cohort} of {sampling.population}"

    def refuses(self, relation):
        if relation == "replace_one":
            return None
        covered = "a cohort of fixed size is covered under replace_one only"
        return f"{covered}; nearest: selection poisson with {relation}"

    def curves(self, sampling, mu):
        curve = pld.fixed_size_curve(sampling.q, mu)
        return ((curve, curve),)

    def group_curves(self, sampling, mu, group):
        """Of the samples `cohort` are in a batch: hypergeometric (docs/proofs.md)."""
        from scipy.stats import hypergeom

        counts = range(min(group, sampling.cohort) + 1)
        weights = hypergeom.pmf(counts, sampling.population, group, sampling.cohort)
        curve = pld.group_replaced_curve(weights, mu)
        return ((curve, curve),)

    def renyi(self, sampling, mu):
        return rdp.fixed_size(sampling.q, mu)
