"""Draws with replacement: r draws of one client, uniform or with no client likelier than
`p_max` (PRIVACY.md sec. 2).
"""

from raydpfl.errors import ConfigError
from raydpfl.privacy import pld
from raydpfl.privacy.sampling.base import Participations, SamplingScheme


class SamplingWithReplacement(SamplingScheme):
    """`cohort` draws; a client drawn k times counts k times. Covered under replace-one, by pld."""

    kind = "with_replacement"
    examples = ({"population": 100, "cohort": 10}, {"population": 20, "cohort": 4, "p_max": 0.2})

    def repeats(self):
        return True

    def as_in_the_papers(self, sampling):
        return False

    def plural(self):
        return "draws with replacement"

    def check(self, sampling):
        p = sampling.p_max
        min_p = 1 / sampling.population
        if p is not None and not min_p <= p * (1 + 1e-9) <= 1 + 1e-9:
            expected = f"a number from 1/{sampling.population} to 1, for draws with replacement"
            raise ConfigError("p_max", p, expected)

    def everyone(self, sampling):
        return False

    def words(self, sampling):
        words = f"{sampling.cohort} draws with replacement from {sampling.population}"
        limit = sampling.p_max
        return words if limit is None else f"{words}, no client likelier than {limit:.3g}"

    def refuses(self, relation):
        if relation == "replace_one":
            return None
        coverage = "draws with replacement are covered under replace_one only"
        return f"{coverage}; nearest: replace_one, by pld"

    def moved(self, sampling, relation):
        return float(sampling.cohort)

    def curves(self, sampling, mu, relation):
        return self.group_curves(sampling, mu, 1, relation)

    def group_curves(self, sampling, mu, group, relation):
        """As of one client so many times as likely."""
        chance = min(group * self._likeliest(sampling), 1.0)
        curve = pld.with_replacement_curve(chance, sampling.cohort, mu)
        return ((curve, curve),)

    def _likeliest(self, sampling):
        """The largest probability of any client at one draw."""
        return sampling.p_max or 1 / sampling.population

    def participations(self, sampling, rounds, max_draws):
        """A client drawn m times in a round moves the sum m times as far, which costs as much as
        m^2 Gaussians; over the rounds, sum of m^2 <= (largest m) (sum of m).
        """
        draws = rounds * sampling.cohort
        times = draws if max_draws is None else min(max_draws, draws)
        return Participations(times, times * min(sampling.cohort, times), repeats=True)

    def most(self, sampling, rounds, composed_rounds):
        return rounds * sampling.cohort, self._likeliest(sampling)
