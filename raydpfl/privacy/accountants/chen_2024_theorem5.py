"""Theorem 5 of 002 as printed: one forced point, whose delta is its own (PRIVACY.md sec. 4)."""

from __future__ import annotations

from raydpfl.privacy import paper_formulas
from raydpfl.privacy.accountants.base import Formula
from raydpfl.privacy.papers import PAPERS


class Theorem5(Formula):
    """epsilon = rho (2 omega - 1) at delta = exp(-rho (omega - 1)^2)."""

    name = f"{PAPERS['002']} Theorem 5"

    def own_delta(self):
        return True

    def printed(self, std, delta, **client):
        return paper_formulas.tcdp_theorem5(std, **client)

    def noise(self, epsilon, delta, **client):
        return paper_formulas.tcdp_theorem5_noise(epsilon, **client)
