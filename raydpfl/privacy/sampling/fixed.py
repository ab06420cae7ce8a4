"""A uniform subset of fixed size, without replacement: the papers' sampling, q = r / N (PRIVACY.md
sec. 2; zero_out and add_remove: docs/proofs.md).
"""

from __future__ import annotations

from raydpfl.privacy import pld, rdp
from raydpfl.privacy.sampling.base import SamplingScheme
from raydpfl.privacy.sampling.poisson import poisson_renyi


class FixedSizeSampling(SamplingScheme):
    """`cohort` of the population, all subsets equally likely. The place of a client that is not
    drawn is another's: a client that may be absent moves the sum by two bounds too.
    """

    kind = "fixed"

    def words(self, sampling):
        return f"fixed size {sampling.cohort} of {sampling.population}"

    def convex(self, relation):
        return relation == "replace_one"

    def curves(self, sampling, mu, relation):
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
        places of those that are absent; a group that sends zeros has been replaced.
        """
        from scipy.stats import hypergeom

        counts = range(min(group, sampling.cohort) + 1)
        weights = hypergeom.pmf(counts, sampling.population, group, sampling.cohort)
        if relation == "add_remove":
            return pld.group_removed_curves(weights, 2 * mu)
        curve = pld.group_replaced_curve(weights, mu if relation == "replace_one" else 2 * mu)
        return ((curve, curve),)

    def renyi(self, sampling, mu, relation):
        """Under zero_out that of replace_one, of which it is a case."""
        if relation == "add_remove":
            return poisson_renyi(sampling.q, 2 * mu)
        return rdp.fixed_size(sampling.q, mu if relation == "replace_one" else 2 * mu)

    def amplified(self, sampling, renyi):
        return rdp.fixed_size_of(sampling.q, renyi)
