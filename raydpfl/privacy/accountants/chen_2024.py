"""The formulas of 002: tCDP in its usable form, by Lemmas 1 to 4, and Theorem 5 as printed, one
forced point, whose delta is its own (PRIVACY.md sec. 4).
"""

import math

from raydpfl.errors import ConfigError
from raydpfl.privacy.accountants.base import Formula, FormulaValue
from raydpfl.privacy.papers import PAPERS


class Tcdp(Formula):
    """Truncated concentrated DP per client, replace-one of one sample:

    epsilon = rho + 2 sqrt(rho ln(1/delta)) where delta >= e^(-(omega-1)^2 rho) (Lemma 2), else
    rho omega + ln(1/delta) / (omega - 1). By the former sigma^2 = 26 K_i Q G^2 / (n_i^2 rho) with
    rho = (sqrt(ln(1/delta) + eps) - sqrt(ln(1/delta)))^2; refused where a condition fails.
    """

    name = f"{PAPERS['002']} tCDP"
    calibration = "tcdp"

    def refused(self, failures):
        return failures

    def printed(self, std, delta, **client):
        surprise = math.log(1 / delta)
        rho, omega, failures = tcdp(std, **client)
        if not omega > 1:
            return FormulaValue(math.inf, (*failures, f"omega = {omega:.4g} > 1")), delta
        if delta >= min_delta(rho, omega):
            return FormulaValue(rho + 2 * math.sqrt(rho * surprise), failures), delta
        return FormulaValue(rho * omega + surprise / (omega - 1), failures), delta

    def noise(self, epsilon, delta, **client):
        if not (0 < epsilon < math.inf):
            raise ConfigError("epsilon", epsilon, "a positive finite number")
        surprise = math.log(1 / delta)
        # of rho, without cancellation
        root = epsilon / (math.sqrt(surprise + epsilon) + math.sqrt(surprise))
        std = client["bound"] / client["samples"] * math.sqrt(26 * client["steps"]) / root
        rho, omega, failures = tcdp(std, **client)
        limit = min_delta(rho, omega) if omega > 1 else 1.0
        if delta < limit:
            failures += (f"delta = {delta:.4g} >= e^(-(omega-1)^2 rho) = {limit:.4g}",)
        return FormulaValue(std, failures)


class Theorem5(Formula):
    """epsilon = rho (2 omega - 1) at delta = e^(-rho (omega - 1)^2), the single pair at a noise.
    Epsilon *grows* with the noise; with too little it is below 0, and infinite here.
    """

    name = f"{PAPERS['002']} Theorem 5"

    def has_own_delta(self):
        return True

    def printed(self, std, delta, **client):
        rho, omega, failures = tcdp(std, **client)
        value = _limit(**client) - rho
        failures += () if omega > 1 else (f"omega = {omega:.4g} > 1",)
        return FormulaValue(value if value >= 0 else math.inf, failures), min_delta(rho, omega)

    def noise(self, epsilon, delta, **client):
        """By rho = 2 rho omega - epsilon; or infinite."""
        epsilon_limit = _limit(**client)
        if epsilon >= epsilon_limit:
            limit = f"{epsilon_limit:.4g}, which the formula approaches as the noise grows"
            return FormulaValue(math.inf, (f"epsilon {epsilon:.4g} < {limit}",))
        root = math.sqrt(26 * client["steps"] / (epsilon_limit - epsilon))
        std = client["bound"] / client["samples"] * root
        return FormulaValue(std, self.printed(std, delta, **client)[0].conditions_failed)


def tcdp(
    std: float, *, bound: float, batch: int, samples: int, steps: int
) -> tuple[float, float, tuple[str, ...]]:
    """rho = 26 K_i Q G^2 / (n_i^2 sigma^2) and omega = B^2 sigma^2 ln(n_i/B) / (8 G^2) of a
    client's subsampled steps (002 Lemmas 1, 3 and 4), and the conditions that fail; (infinity, 0)
    without noise. The arguments are those of `Formula`.
    """
    q = batch / samples
    z = batch * std / bound
    rho1 = 2 / z / z if z else math.inf
    amplification = math.log(1 / q)
    order = 3 * rho1 * (2 - math.log2(rho1)) if 0 < rho1 < math.inf else 0.0
    omega = z * amplification * z / 8 if amplification else 0.0
    conditions = {
        f"rho1 = {rho1:.4g} <= 0.1": rho1 <= 0.1,
        f"q = {q:.4g} <= 0.1": q <= 0.1,
        f"ln(1/q) = {amplification:.4g} >= 3 rho1 (2 + log2(1/rho1))": amplification >= order,
        f"ln(1/q) / (2 rho1) = {2 * omega:.4g} >= 3": 2 * omega >= 3,
    }
    failures = tuple(text for text, holds in conditions.items() if not holds)
    return 13 * q * q * steps * rho1, omega, failures


def min_delta(rho: float, omega: float) -> float:
    """e^(-(omega-1)^2 rho), down to which 002 Lemma 2 converts."""
    return math.exp(-((omega - 1) * rho * (omega - 1))) if rho else 0.0


def _limit(*, bound: float, batch: int, samples: int, steps: int) -> float:
    """2 rho omega, which does not depend on the noise."""
    return 6.5 * steps * (batch / samples) ** 2 * math.log(samples / batch)
