"""Several units of a population protected together: the samples of a person.

A person's `group` samples come into batches k at a time, so that a batch is a mixture over k of
Gaussians moved k times as far ([1], Theorem 1). `group_sampling` says so as a sampling, which
accountants read like any other, and gives the factor on a sample's sensitivity:

>>> from raydpfl.privacy.sampling import Sampling
>>> sampling, factor = group_sampling(Sampling("poisson", 10_000, 100), group=5)
>>> print(sampling, factor)
Poisson, 100 of 10000 expected (5 of them of one person) 1
>>> print(*group_sampling(Sampling("fixed", 600, 10), group=600))  # every batch is all hers
all 600 (all of one person) 10

[1] Charles, Ganesh, McKenna, McMahan, Mitchell, Pillutla, Rush. Fine-tuning large language models
    with user-level differential privacy. 2024.
[2] Mironov. Renyi differential privacy. CSF 2017. Proposition 11.
[3] Vadhan. The complexity of differential privacy. 2017. Lemma 2.2.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from raydpfl.privacy import rdp
from raydpfl.privacy.sampling import Sampling, SamplingScheme


@dataclass(frozen=True)
class GroupSampling(SamplingScheme):
    """A hidden scheme for `group` units together: by its own `group_curves`, or else by group
    privacy from one, in curves ([3]) or Renyi divergences ([2]).
    """

    scheme: SamplingScheme
    group: int

    def gives(self, method):
        alone = method == "curves" or not self.scheme.gives("group_curves")
        return alone and self.scheme.gives(method)

    def by_group_privacy(self, method):
        return not self.scheme.gives("group_curves")

    def check(self, sampling):
        """Nothing: that of the scheme has passed."""

    def everyone(self, sampling):
        return False

    def plural(self):
        return "samples of one person together"

    def words(self, sampling):
        return self.scheme.words(self._base_sampling(sampling))

    def refuses(self, relation):
        return self.scheme.refuses(relation)

    def moved(self, sampling, relation):
        return self.group * self.scheme.moved(self._base_sampling(sampling), relation)

    def curves(self, sampling, mu, relation):
        return self.scheme.group_curves(self._base_sampling(sampling), mu, self.group, relation)

    def renyi(self, sampling, mu, relation):
        """Of up to 2^c units at order a >= 2 it is 3^c times that of one at 2^c a."""
        doublings = math.ceil(math.log2(self.group))
        one = self.scheme.renyi(self._base_sampling(sampling), mu, relation)
        order_index = np.searchsorted(rdp.ORDERS, 2**doublings * np.maximum(rdp.ORDERS, 2.0))
        return 3**doublings * np.append(one, np.inf)[order_index]

    def _base_sampling(self, sampling: Sampling) -> Sampling:
        return replace(sampling, kind=self.scheme)


def group_sampling(sampling: Sampling, group: int) -> tuple[Sampling, int]:
    """The sampling for `group` units of the population, from 1 to all, and the factor on the
    sensitivity of one: `group` where all are in every batch, and the size of a batch where a batch
    of fixed size has no others.
    """
    group_text = "all" if group == sampling.population else f"{group} of them"
    rule = ", ".join(filter(None, (sampling.rule, f"{group_text} of one person")))
    if group < sampling.population or sampling.size is None:
        if not sampling.hidden:
            return replace(sampling, rule=rule), group
        return replace(sampling, kind=GroupSampling(sampling.scheme, group), rule=rule), 1
    everyone = Sampling("full", sampling.population, sampling.population, rule=rule)
    return everyone, sampling.size
