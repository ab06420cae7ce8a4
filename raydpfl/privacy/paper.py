"""The papers' formulas as printed, each with the conditions under which its paper claims it.

These are not guarantees of what ran: `raydpfl.privacy.epsilon` is. Every function returns `Printed(value, conditions_failed)`.

>>> from raydpfl.privacy.mechanism import Sampling
>>> noise = client_noise(1.5, Sampling("fixed", 1920, 80), rounds=100, delta=1e-5, bound=1.0)
>>> round(noise.value, 4), noise.conditions_failed
(0.2108, ('epsilon 1.5 <= u q^2 T = 0.1736 (u = 1; the paper leaves u open)',))

Units (000, 001). In 000 Algorithm 3 each client of the cohort adds N(0, sigma^2 I) to its clipped update and the server
averages, so sigma of Theorem 3.2 is the std of one client's noise (000 eq. 12 has sigma^2 d / P for the average). In 001
Algorithm 1 each client adds N(0, r sigma^2 I), so sigma of Theorem 1 is the std of the noise on the mean. With
sigma_001 = sigma_000 / sqrt(r) they are one mechanism: the sum carries sqrt(r) sigma_000 = r sigma_001, and std of the
sum / bound is z = (r/N) sqrt(v T ln(1/delta)) / epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from raydpfl.errors import ConfigError
from raydpfl.privacy.mechanism import Sampling


@dataclass(frozen=True)
class Printed:
    """What a formula gives, and which of its paper's conditions do not hold, in words."""

    value: float
    conditions_failed: tuple[str, ...] = ()


# 000 Theorem 3.2, 001 Theorem 1: client-level, Gaussian (PRIVACY.md sec. 3).


def paper_multiplier(epsilon: float, sampling: Sampling, rounds: int, delta: float, v: float = 4.0) -> float:
    """z = std of the noise on the sum / bound, at which the theorem claims (epsilon, delta)."""
    for field, value in (("noise.epsilon", epsilon), ("noise.v", v)):
        if not (0 < value < math.inf):
            raise ConfigError(field, value, "a positive finite number")
    return sampling.q * math.sqrt(v * rounds * math.log(1 / delta)) / epsilon


def client_noise(epsilon: float, sampling: Sampling, rounds: int, delta: float, bound: float, v: float = 4.0) -> Printed:
    """sigma of 000 Theorem 3.2: the std of one client's noise, in the units of `bound`; sigma^2 = v c^2 r T ln(1/delta) / (N^2 eps^2)."""
    z = paper_multiplier(epsilon, sampling, rounds, delta, v)
    return Printed(z * bound / math.sqrt(sampling.cohort), _conditions(epsilon, sampling, rounds))


def client_epsilon(z: float, sampling: Sampling, rounds: int, delta: float, v: float = 4.0) -> Printed:
    """The epsilon that the theorem claims at `z` = std of the noise on the sum / bound; infinite at z = 0."""
    epsilon = paper_multiplier(1.0, sampling, rounds, delta, v) / z if z else math.inf
    return Printed(epsilon, _conditions(epsilon, sampling, rounds))


def client_delta(z: float, sampling: Sampling, rounds: int, epsilon: float, v: float = 4.0) -> float:
    """The delta that the theorem claims at `z` = std of the noise on the sum / bound."""
    return math.exp(-((epsilon * z / sampling.q) ** 2) / (v * rounds))


def _conditions(epsilon: float, sampling: Sampling, rounds: int) -> tuple[str, ...]:
    failed = []
    limit = sampling.q**2 * rounds
    if not epsilon <= limit:
        failed.append(f"epsilon {epsilon:.4g} <= u q^2 T = {limit:.4g} (u = 1; the paper leaves u open)")
    if sampling.kind not in ("fixed", "full"):
        failed.append(f"cohorts of one fixed size, drawn without replacement (here: {sampling})")
    return tuple(failed)


# 002: truncated concentrated DP per client, every update seen, replace-one of one sample (PRIVACY.md sec. 4).
# `std` is that of the noise on the mean gradient of a batch, `bound` the per-sample clip norm G, `steps` the client's
# realised number of local steps.


def tcdp(std: float, *, bound: float, batch: int, samples: int, steps: int) -> tuple[float, float, tuple[str, ...]]:
    """(rho, omega, conditions_failed) of a client's `steps` subsampled steps: 002 Lemmas 1, 3 and 4."""
    q, rho1 = batch / samples, 2 * (bound / (batch * std)) ** 2
    amplification = math.log(1 / q)
    conditions = {
        f"rho1 = {rho1:.4g} <= 0.1": rho1 <= 0.1,
        f"q = {q:.4g} <= 0.1": q <= 0.1,
        f"ln(1/q) = {amplification:.4g} >= 3 rho1 (2 + log2(1/rho1))": amplification >= 3 * rho1 * (2 + math.log2(1 / rho1)),
        f"ln(1/q) / (2 rho1) = {amplification / (2 * rho1):.4g} >= 3": amplification / (2 * rho1) >= 3,
    }
    omega = (batch * std / bound) ** 2 * amplification / 8
    return 26 * steps * (bound / (samples * std)) ** 2, omega, tuple(text for text, holds in conditions.items() if not holds)


def tcdp_epsilon(std: float, *, bound: float, batch: int, samples: int, steps: int, delta: float) -> Printed:
    """Epsilon at `delta` by tCDP (002 Lemma 2 where its condition holds, else the general conversion)."""
    rho, omega, failed = tcdp(std, bound=bound, batch=batch, samples=samples, steps=steps)
    if omega <= 1:
        return Printed(math.inf, (*failed, f"omega = {omega:.4g} > 1"))
    if delta >= math.exp(-((omega - 1) ** 2) * rho):
        return Printed(rho + 2 * math.sqrt(rho * math.log(1 / delta)), failed)
    return Printed(rho * omega + math.log(1 / delta) / (omega - 1), failed)


def tcdp_noise(epsilon: float, *, bound: float, batch: int, samples: int, steps: int, delta: float) -> Printed:
    """The std at which tCDP claims (epsilon, delta), every condition checked: rho = (sqrt(ln(1/delta) + eps) - sqrt(ln(1/delta)))^2."""
    if not (0 < epsilon < math.inf):
        raise ConfigError("noise.epsilon", epsilon, "a positive finite number")
    surprise = math.log(1 / delta)
    rho = (math.sqrt(surprise + epsilon) - math.sqrt(surprise)) ** 2
    std = bound / samples * math.sqrt(26 * steps / rho)
    _, omega, failed = tcdp(std, bound=bound, batch=batch, samples=samples, steps=steps)
    limit = math.exp(-((omega - 1) ** 2) * rho) if omega > 1 else 1.0
    if delta < limit:
        failed += (f"delta = {delta:.4g} >= e^(-(omega-1)^2 rho) = {limit:.4g}",)
    return Printed(std, failed)


def tcdp_theorem5(std: float, *, bound: float, batch: int, samples: int, steps: int) -> tuple[Printed, float]:
    """002 Theorem 5 as printed: the single pair (epsilon, delta) that it gives at `std`; its epsilon *grows* with std."""
    rho, omega, failed = tcdp(std, bound=bound, batch=batch, samples=samples, steps=steps)
    return Printed(rho * (2 * omega - 1), failed), math.exp(-rho * (omega - 1) ** 2)


# 003: personal budgets (PRIVACY.md sec. 5). `samples` n_k, `batch` B; std is that of the noise on the mean gradient of a batch.


def unamplified_budget(epsilon: float, *, batch: int, samples: int) -> float:
    """eps' = ln(1 + (e^eps - 1) / r), r = B / n_k: what 003 lets the composition spend before sampling."""
    r = batch / samples
    if epsilon > 30:  # e^epsilon is best left out
        return epsilon - math.log(r) + math.log1p((r - 1) * math.exp(-epsilon))
    return math.log1p(math.expm1(epsilon) / r)


def budget_variance(epsilon: float, delta: float, *, batch: int, samples: int) -> float:
    """V_k = 8 ln(e + r eps' / delta) / (n_k r eps')^2: noise variance per step and squared bound; 0 at infinite epsilon (public)."""
    if epsilon == math.inf:
        return 0.0
    if not epsilon > 0:
        raise ConfigError("noise.epsilon", epsilon, "a positive number, or infinity for a public client")
    r, inner = batch / samples, unamplified_budget(epsilon, batch=batch, samples=samples)
    return 8 * math.log(math.e + r * inner / delta) / (samples * r * inner) ** 2


def budget_noise(epsilon: float, delta: float, *, batch: int, samples: int, steps: int, bound: float) -> Printed:
    """sigma_k = c sqrt(V_k T_k T_l), `steps` = T_k T_l; compare with `epsilon(Mechanism.of_local_steps(...))`, which is the truth."""
    failed = (f"eps_k = {epsilon:.4g} <= 169 (Lemma 2, at delta 1e-5)",) if 169 < epsilon < math.inf else ()
    return Printed(bound * math.sqrt(budget_variance(epsilon, delta, batch=batch, samples=samples) * steps), failed)
