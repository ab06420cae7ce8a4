"""tCDP of 002 in its usable form: Lemmas 1 to 4, conditions checked (PRIVACY.md sec. 4)."""

from __future__ import annotations

from raydpfl.privacy import paper_formulas
from raydpfl.privacy.accountants.base import Formula
from raydpfl.privacy.papers import PAPERS


class Tcdp(Formula):
    """Truncated concentrated DP per client, replace-one of one sample."""

    name = f"{PAPERS['002']} tCDP"
    calibration = "tcdp"

    def refused(self, failed):
        return failed

    def printed(self, std, delta, **client):
        return paper_formulas.tcdp_epsilon(std, delta=delta, **client), delta

    def noise(self, epsilon, delta, **client):
        return paper_formulas.tcdp_noise(epsilon, delta=delta, **client)
