"""Clients independently with probability q = cohort / population (PRIVACY.md sec. 2). The size
of a cohort is a secret too (replace_one: docs/proofs.md).
"""

import numpy as np

from raydpfl.privacy import pld
from raydpfl.privacy import rdp as renyi
from raydpfl.privacy.sampling.base import VaryingCohorts


class PoissonSampling(VaryingCohorts):
    """`cohort` clients are expected."""

    kind = "poisson"

    def coins(self, sampling):
        return sampling.q

    def any_subset(self, sampling):
        return True

    def words(self, sampling):
        return f"Poisson, {sampling.cohort} of {sampling.population} expected"

    def convex(self, relation):
        return relation != "replace_one"

    def moved(self, sampling, relation):
        return 1.0

    def curves(self, sampling, mu, relation):
        if relation != "replace_one":
            return pld.poisson_curves(sampling.q, mu)
        curve = pld.three_gaussians_curve(sampling.q, absent=mu / 2, other=mu)
        return ((curve, curve),)

    def group_curves(self, sampling, mu, group, relation):
        """A mixture of Gaussians with binomial weights (docs/proofs.md)."""
        from scipy.stats import binom

        weights = binom.pmf(range(group + 1), group, sampling.q)
        if relation != "replace_one":
            return pld.group_removed_curves(weights, mu)
        curve = pld.group_replaced_curve(weights, absent=mu / 2, other=mu)
        return ((curve, curve),)

    def renyi(self, sampling, mu, relation):
        """Under replace_one that of a cohort of fixed size, whose Gaussians are further apart; no
        more than that of everyone.
        """
        bound = renyi.fixed_size if relation == "replace_one" else renyi.poisson
        return np.minimum(bound(sampling.q, mu), renyi.gaussian(mu))
