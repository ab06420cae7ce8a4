"""Poisson sampling with a cap on the cohort, as memory or a server's capacity asks for (Chua et al.
Scalable DP-SGD: shuffling vs. Poisson subsampling. NeurIPS 2024). Their bound adds to delta; that
of docs/proofs.md, which is here, does not.
"""

from dataclasses import replace

from raydpfl.errors import ConfigError
from raydpfl.privacy import pld, rdp
from raydpfl.privacy.sampling.base import Sampling, SamplingScheme
from raydpfl.privacy.sampling.fixed import FixedSizeSampling
from raydpfl.privacy.sampling.poisson import PoissonSampling


class TruncatedPoissonSampling(SamplingScheme):
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

    def size(self, sampling):
        return None

    def size_secret(self, sampling):
        return True

    def any_subset(self, sampling):
        return True

    def as_in_the_papers(self, sampling):
        return False

    def words(self, sampling):
        expected = f"{sampling.cohort} of {sampling.population} expected"
        return f"Poisson, {expected}, at most {sampling.cap}"

    def moved(self, sampling, relation):
        return FixedSizeSampling().moved(sampling, relation)

    def curves(self, sampling, mu, relation):
        below, at_cap, chance = _parts(sampling)
        drawn = PoissonSampling().curves(below, mu, relation)
        if not chance:
            return drawn
        full = FixedSizeSampling().curves(at_cap, mu, relation)
        return pld.mixture([(1 - chance, drawn), (chance, full)])

    def renyi(self, sampling, mu, relation):
        below, at_cap, chance = _parts(sampling)
        drawn = PoissonSampling().renyi(below, mu, relation)
        if not chance:
            return drawn
        full = FixedSizeSampling().renyi(at_cap, mu, relation)
        return rdp.mixture([(1 - chance, drawn), (chance, full)])


def _parts(sampling: Sampling) -> tuple[Sampling, Sampling, float]:
    """What the cohort is where fewer than `cap` others are drawn, a bound on it where there are
    more, and the probability of that. The others are as many as the population, for one that joins.
    """
    from scipy.stats import binom

    most = (sampling.cap or 0) - 1
    chance = float(binom.sf(most, sampling.population, sampling.q))
    plain = replace(sampling, kind="poisson", cap=None)
    return plain, replace(plain, kind="fixed"), chance
