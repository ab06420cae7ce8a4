"""Theorem 3.2 of 000 as printed, which is Theorem 1 of 001 (PRIVACY.md sec. 3)."""

from __future__ import annotations

import numpy as np

from raydpfl.privacy import paper_formulas
from raydpfl.privacy.accountants.base import Accountant


class Paper(Accountant):
    """The formula for noise on clients' updates; the papers leave its constant `v` open. At local
    steps it stands for the formulas of 002 and 003 (`raydpfl.privacy.accountants.resolved`).
    """

    name = "paper"
    label = "Zhang, Das 2021"
    rigorous = False

    def covers(self, mechanism, relation):
        """None: a formula can always be printed, with the conditions that fail."""

    def epsilons(self, mechanism, relation, delta, first, last, v):
        z = mechanism.noise_multiplier
        sampling = mechanism.sampling
        return np.array(
            [
                paper_formulas.client_epsilon(z, sampling, t, delta, v).value
                for t in range(first, last + 1)
            ]
        )

    def delta(self, mechanism, relation, epsilon, rounds, v):
        return paper_formulas.client_delta(
            mechanism.noise_multiplier, mechanism.sampling, rounds, epsilon, v
        )
