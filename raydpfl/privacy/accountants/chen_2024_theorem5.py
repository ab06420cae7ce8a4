"""Theorem 5 of 002 as printed: one forced point, whose delta is its own (PRIVACY.md sec. 4)."""

import math

from raydpfl.privacy.accountants.base import Formula, FormulaValue
from raydpfl.privacy.accountants.chen_2024_tcdp import least_delta, tcdp
from raydpfl.privacy.papers import PAPERS


class Theorem5(Formula):
    """epsilon = rho (2 omega - 1) at delta = e^(-rho (omega - 1)^2), the single pair at a noise.
    Epsilon *grows* with the noise; with too little it is below 0, and infinite here.
    """

    name = f"{PAPERS['002']} Theorem 5"

    def own_delta(self):
        return True

    def printed(self, std, delta, **client):
        rho, omega, failed = tcdp(std, **client)
        value = _limit(**client) - rho
        failed += () if omega > 1 else (f"omega = {omega:.4g} > 1",)
        return FormulaValue(value if value >= 0 else math.inf, failed), least_delta(rho, omega)

    def noise(self, epsilon, delta, **client):
        """By rho = 2 rho omega - epsilon; or infinite."""
        most = _limit(**client)
        if epsilon >= most:
            limit = f"{most:.4g}, which the formula approaches as the noise grows"
            return FormulaValue(math.inf, (f"epsilon {epsilon:.4g} < {limit}",))
        root = math.sqrt(26 * client["steps"] / (most - epsilon))
        std = client["bound"] / client["samples"] * root
        return FormulaValue(std, self.printed(std, delta, **client)[0].conditions_failed)


def _limit(*, bound: float, batch: int, samples: int, steps: int) -> float:
    """2 rho omega, which does not depend on the noise."""
    return 6.5 * steps * (batch / samples) ** 2 * math.log(samples / batch)
