"""An accountant for sums over everyone: many Gaussians are one."""

import numpy as np

from raydpfl.privacy import gaussian_delta, gaussian_epsilon
from raydpfl.privacy.accountants import Accountant


class Exact(Accountant):
    """The curve of Balle and Wang (2018) at mu sqrt(rounds); a hidden cohort is not covered."""

    def covers(self, mechanism, relation):
        if mechanism.sampling.hidden:
            return "a hidden cohort is not covered by exact; nearest: pld"
        return super().covers(mechanism, relation)

    def curve(self, event, delta, counts):
        return gaussian_epsilon(event.unamplified(counts), delta)

    def delta_of(self, event, epsilon, count):
        return float(gaussian_delta(epsilon, np.array(event.unamplified(count))))


class Half(Exact):
    """Claims half of what holds."""

    def curve(self, event, delta, counts):
        return super().curve(event, delta, counts) / 2

    def delta_of(self, event, epsilon, count):
        return super().delta_of(event, 2 * epsilon, count)


class Once(Exact):
    """Claims what holds for one round, of any number."""

    def curve(self, event, delta, counts):
        return super().curve(event, delta, np.ones_like(counts))

    def delta_of(self, event, epsilon, count):
        return super().delta_of(event, epsilon, 1)


class Empty(Accountant):
    """Has no curve."""


class Wrong(Exact):
    """Gives what is no epsilon."""

    found: object = np.nan

    def curve(self, event, delta, counts):
        return self.found if isinstance(self.found, list) else np.full(len(counts), self.found)


class Whole(Accountant):
    """One that is no composition of events, and names nothing that it accounts by."""

    def epsilons(self, mechanism, relation, delta, first, last, v):
        return np.arange(first, last + 1) / 2

    def delta(self, mechanism, relation, epsilon, rounds, v):
        return 1.0
