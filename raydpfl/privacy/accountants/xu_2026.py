"""Personal budgets of 003: sigma_k of eq. 6 and its inverse (PRIVACY.md sec. 5)."""

from __future__ import annotations

import numpy as np

from raydpfl.privacy import paper_formulas
from raydpfl.privacy.accountants.base import Formula
from raydpfl.privacy.papers import PAPERS


class PersonalBudgets(Formula):
    """sigma_k = c sqrt(V_k T_k T_l) (003 eq. 6). The formula amplifies the composition instead of
    the steps, and leaves the neighbouring relation open.
    """

    name = PAPERS["003"]
    relation = "unstated"
    calibration = "paper"

    def printed(self, std, delta, **client):
        return paper_formulas.budget_epsilon(std, delta, **client), delta

    def noise(self, epsilon, delta, **client):
        return paper_formulas.budget_noise(epsilon, delta, **client)

    def claims(self, std, delta, counts, *, bound, batch, samples, steps):
        root = std / (bound * np.sqrt(steps * counts))
        return paper_formulas.budget_epsilons(root, delta, batch=batch, samples=samples)

    def conditions(self, epsilon, std, delta, *, bound, batch, samples, steps):
        return delta, paper_formulas.lemma2(epsilon, delta, batch=batch, samples=samples)
