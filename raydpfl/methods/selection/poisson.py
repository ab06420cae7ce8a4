from raydpfl.core.prng import Purpose, stream
from raydpfl.methods.selection.base import Ask, Cohort, Population
from raydpfl.methods.selection.uniform import Sized, distinct
from raydpfl.privacy import Sampling


class Poisson(Sized):
    """Each client independently with probability cohort / population. The divisor is always
    `cohort`, so it reveals nothing.
    """

    examples = ({"cohort": 6},)
    kind: str = "poisson"

    def hides_size(self) -> bool:
        return True

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        generator = stream(seed, Purpose.COHORT, t=t)
        count = len(population)
        # a binomial size, then a uniform subset of that size: the same distribution, in O(cohort)
        size = int(generator.binomial(count, self.cohort / count))
        return Cohort.of(distinct(generator, count, size))

    def sampling(self, population: Population) -> Sampling:
        return Sampling("poisson", len(population), self.cohort)
