"""Clients independently with probability q = cohort / population (PRIVACY.md sec. 2). The size
of a cohort is a secret too.
"""

from __future__ import annotations

import logging

import numpy as np

from raydpfl.privacy import pld
from raydpfl.privacy import rdp as renyi
from raydpfl.privacy.sampling.base import SamplingScheme


class PoissonSampling(SamplingScheme):
    """`cohort` clients are expected; covered where a client may be absent."""

    kind = "poisson"

    def size(self, sampling):
        return None

    def coins(self, sampling):
        return sampling.q

    def as_in_the_papers(self, sampling):
        return False

    def any_subset(self, sampling):
        return True

    def words(self, sampling):
        return f"Poisson, {sampling.cohort} of {sampling.population} expected"

    def refuses(self, relation):
        if relation != "replace_one":
            return None
        covered = "Poisson sampling is covered under add_remove and zero_out only"
        return f"{covered}; nearest: add_remove, or selection uniform with replace_one"

    def curves(self, sampling, mu):
        return pld.poisson_curves(sampling.q, mu)

    def group_curves(self, sampling, mu, group):
        """Exact: a mixture of Gaussians with binomial weights (docs/proofs.md)."""
        from scipy.stats import binom

        return pld.group_removed_curves(binom.pmf(range(group + 1), group, sampling.q), mu)

    def renyi(self, sampling, mu):
        """By dp-accounting, whose noise multiplier is std / sensitivity under every relation."""
        from dp_accounting import dp_event, rdp

        event = dp_event.PoissonSampledDpEvent(sampling.q, dp_event.GaussianDpEvent(1 / mu))
        logger = logging.getLogger("absl")
        # an order that does not converge is infinite, with a warning
        level = logger.level
        logger.level = logging.ERROR
        try:
            return np.asarray(rdp.RdpAccountant(renyi.ORDERS.tolist()).compose(event).rdp)
        finally:
            logger.level = level
