"""Cohorts named by a public rule, whatever the data are: only a client's own rounds count, and
nothing is amplified.
"""

from raydpfl.privacy.sampling.base import Participations, VaryingCohorts


class PublicSampling(VaryingCohorts):
    """By turns, by speed or by any public rule; groups that take turns may differ by one. The
    mechanism's `rounds` is a client's own.
    """

    kind = "public"

    def hidden(self, sampling):
        return False

    def q(self, sampling):
        return 1.0

    def everyone(self, sampling):
        return False

    def words(self, sampling):
        return f"public cohorts of {sampling.cohort} of {sampling.population}"

    def refuses(self, relation):
        if relation != "add_remove":
            return None
        reason = "public cohorts show who is there, so add_remove cannot hold"
        return f"{reason}; nearest: zero_out or replace_one"

    def participations(self, sampling, rounds, max_draws):
        times = rounds if max_draws is None else min(max_draws, rounds)
        return Participations(times, times)
