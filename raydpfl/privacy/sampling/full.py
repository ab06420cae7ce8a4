"""Everyone in every round: nothing is secret, and nothing amplified."""

from raydpfl.errors import ConfigError
from raydpfl.privacy.sampling.base import SamplingScheme


class FullSampling(SamplingScheme):
    """The cohort is the population."""

    kind = "full"
    examples = ({"population": 20, "cohort": 20},)

    def check(self, sampling):
        if sampling.cohort != sampling.population:
            expected = f"the whole population of {sampling.population} under full participation"
            raise ConfigError("cohort", sampling.cohort, expected)

    def default(self, population, epoch=None, per_epoch=None):
        return population

    def words(self, sampling):
        return f"all {sampling.population}"
