"""Random allocation: each client takes part in exactly k of the T rounds of an epoch, all k-subsets
equally likely, drawn afresh for every epoch and independently of the others (Feldman and Shenfeld
2025, 2026); with k = 1 balls-in-bins sampling (Chua et al. 2025). The size of a cohort is a secret
too. See `raydpfl.privacy.random_allocation`.
"""

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.privacy import random_allocation
from raydpfl.privacy.sampling.base import Participations, VaryingCohorts
from raydpfl.privacy.types import is_count

_EPOCH = "T, the rounds of an epoch: an integer, at least 1"


class RandomAllocationSampling(VaryingCohorts):
    """`cohort` clients are expected, rounded; covered where a client may be absent."""

    kind = "random_allocation"
    examples = (
        {"population": 100, "cohort": 10, "epoch": 10, "per_epoch": 1},
        {"population": 100, "cohort": 43, "epoch": 7, "per_epoch": 3},
    )

    def check(self, sampling):
        k, rounds = sampling.per_epoch, sampling.epoch
        if not (is_count(rounds) and rounds >= 1):
            raise ConfigError("epoch", rounds, _EPOCH)
        if not (is_count(k) and 1 <= k <= rounds):
            expected = f"k, rounds of each client: an integer from 1 to the {rounds} of an epoch"
            raise ConfigError("per_epoch", k, expected)
        mean = self.default(sampling.population, rounds, k)
        if sampling.cohort != mean:
            expected = f"{mean}, the clients expected in {k} of {rounds} rounds"
            raise ConfigError("cohort", sampling.cohort, expected)

    def default(self, population, epoch=None, per_epoch=None):
        if not epoch or not per_epoch:
            raise ConfigError("epoch", epoch, _EPOCH)
        return max(1, round(population * per_epoch / epoch))

    def q(self, sampling):
        return sampling.per_epoch / sampling.epoch

    def everyone(self, sampling):
        return sampling.per_epoch == sampling.epoch

    def coins(self, sampling):
        return self.q(sampling)

    def in_epochs(self):
        return True

    def words(self, sampling):
        rule = f"each in {sampling.per_epoch} of the {sampling.epoch} rounds or steps of an epoch"
        return f"random allocation, {rule}, {sampling.cohort} of {sampling.population} expected"

    def refuses(self, relation):
        if relation != "replace_one":
            return None
        coverage = "random allocation is covered under add_remove and zero_out only"
        return f"{coverage}; nearest: add_remove, or selection uniform with replace_one"

    def charged(self, sampling, rounds):
        """Whole epochs from their first round on. Of the first one, where k is 1, the next of
        T / 2^j rounds: their curves take one mean each.
        """
        whole = sampling.epoch
        parts = np.full_like(rounds, whole)
        for j in range(1, whole.bit_length() if sampling.per_epoch == 1 else 1):
            part = -(-whole // 2**j)
            parts = np.where(rounds <= part, part, parts)
        return -(-rounds // whole), np.where(parts < whole, parts, 0)

    def moved(self, sampling, relation):
        return 1.0

    def curves(self, sampling, mu, relation):
        pair = random_allocation.curves(mu, sampling.epoch, sampling.per_epoch)
        return pair, pair[::-1]

    def part_curves(self, sampling, mu, relation, rounds):
        """With probability rounds / T a client takes part in one of the rounds, and else in none,
        where k is 1.
        """
        pair = random_allocation.curves(mu, rounds, 1, rounds / sampling.epoch)
        return pair, pair[::-1]

    def participations(self, sampling, rounds, max_draws):
        times = min(rounds, sampling.per_epoch * -(-rounds // sampling.epoch))
        times = times if max_draws is None else min(max_draws, times)
        return Participations(times, times, rounds)
