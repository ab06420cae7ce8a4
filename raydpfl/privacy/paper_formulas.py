"""The papers' formulas as printed, with the conditions under which they are claimed.

These are not guarantees of what ran; `raydpfl.privacy.epsilon` is. Most functions return
`FormulaValue(value, conditions_failed)`.

>>> noise = client_noise(1.5, Sampling("fixed", 1920, 80), rounds=100, delta=1e-5, bound=1.0)
>>> round(noise.value, 4), noise.conditions_failed
(0.2108, ('epsilon 1.5 <= u q^2 T = 0.1736 (u = 1; the paper leaves u open)',))

Units (000, 001). In 000 Algorithm 3 every client of the cohort adds N(0, sigma^2 I) to its clipped
update and the server averages, so sigma of Theorem 3.2 is the std of one client's noise (000 eq. 12
has sigma^2 d / P for the average). In 001 Algorithm 1 every client adds N(0, r sigma^2 I), so sigma
of Theorem 1 is the std of the noise on the mean. With sigma_001 = sigma_000 / sqrt(r) they are one
mechanism. The noise on the sum has std sqrt(r) sigma_000 = r sigma_001, and its std / bound is

    z = (r/N) sqrt(v T ln(1/delta)) / epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from raydpfl.errors import ConfigError
from raydpfl.privacy.pld import gaussian_delta
from raydpfl.privacy.sampling import Sampling
from raydpfl.privacy.search import halved, safe_end


@dataclass(frozen=True)
class FormulaValue:
    """What a formula gives, and the conditions of its paper that do not hold, in words."""

    value: float
    conditions_failed: tuple[str, ...] = ()


# 000 Theorem 3.2, 001 Theorem 1: client-level, Gaussian (PRIVACY.md sec. 3).


def paper_multiplier(
    epsilon: float, sampling: Sampling, rounds: int, delta: float, v: float = 4.0
) -> float:
    """The noise multiplier z = std of the noise on the sum / bound of 000 Theorem 3.2 and 001
    Theorem 1,

        z = (r/N) sqrt(v T ln(1/delta)) / epsilon.

    Args:
        epsilon, delta: that are claimed; epsilon positive and finite, else `ConfigError`.
        sampling: who takes part; only q = r/N is read.
        rounds: T.
        v: the constant that the papers leave open (PRIVACY.md sec. 3), positive and finite.
    """
    for field, value in (("epsilon", epsilon), ("v", v)):
        if not (0 < value < math.inf):
            raise ConfigError(field, value, "a positive finite number")
    return sampling.q * math.sqrt(v * rounds * math.log(1 / delta)) / epsilon


def client_noise(
    epsilon: float, sampling: Sampling, rounds: int, delta: float, bound: float, v: float = 4.0
) -> FormulaValue:
    """sigma of 000 Theorem 3.2, sigma^2 = v c^2 r T ln(1/delta) / (N^2 eps^2): the std of one
    client's noise, in the units of `bound` (c). Other arguments as for `paper_multiplier`.
    """
    z = paper_multiplier(epsilon, sampling, rounds, delta, v)
    return FormulaValue(
        z * bound / math.sqrt(sampling.cohort), _conditions(epsilon, sampling, rounds)
    )


def client_epsilon(
    z: float, sampling: Sampling, rounds: int, delta: float, v: float = 4.0
) -> FormulaValue:
    """The epsilon that the theorem claims at `z`, std of the noise on the sum / bound."""
    epsilon = paper_multiplier(1.0, sampling, rounds, delta, v) / z if z else math.inf
    return FormulaValue(epsilon, _conditions(epsilon, sampling, rounds))


def client_delta(
    z: float, sampling: Sampling, rounds: int, epsilon: float, v: float = 4.0
) -> float:
    """The delta that the theorem claims at `z`, std of the noise on the sum / bound."""
    return math.exp(-((epsilon * z / sampling.q) ** 2) / (v * rounds))


def _conditions(epsilon: float, sampling: Sampling, rounds: int) -> tuple[str, ...]:
    failed = []
    limit = sampling.q**2 * rounds
    if not epsilon <= limit:
        failed.append(
            f"epsilon {epsilon:.4g} <= u q^2 T = {limit:.4g} (u = 1; the paper leaves u open)"
        )
    if not sampling.scheme.as_in_the_papers(sampling):
        failed.append(f"cohorts of one fixed size, drawn without replacement (here: {sampling})")
    return tuple(failed)


# 002: truncated concentrated DP per client, every update seen, replace-one of one sample
# (PRIVACY.md sec. 4). In all functions `std` (sigma) is that of the noise on the mean gradient of a
# batch. A `client` has `bound`, the per-sample clip norm G, `batch` B, `samples` n_i, and `steps`,
# its realised number of local steps K_i Q.


def tcdp(
    std: float, *, bound: float, batch: int, samples: int, steps: int
) -> tuple[float, float, tuple[str, ...]]:
    """tCDP of a client's subsampled steps (002 Lemmas 1, 3 and 4; PRIVACY.md sec. 4).

    Returns:
        rho = 26 K_i Q G^2 / (n_i^2 sigma^2), omega = B^2 sigma^2 ln(n_i/B) / (8 G^2), and the
        conditions that fail; (infinity, 0) without noise.
    """
    _check_client(batch, samples, steps)
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
    return (
        13 * q * q * steps * rho1,
        omega,
        tuple(text for text, holds in conditions.items() if not holds),
    )


def tcdp_epsilon(std: float, *, delta: float, **client: Any) -> FormulaValue:
    """Epsilon: rho + 2 sqrt(rho ln(1/delta)) where the condition of 002 Lemma 2 holds,
    delta >= e^(-(omega-1)^2 rho), else rho omega + ln(1/delta) / (omega - 1); infinite where
    omega <= 1.
    """
    surprise = math.log(1 / _delta(delta))
    rho, omega, failed = tcdp(std, **client)
    if not omega > 1:
        return FormulaValue(math.inf, (*failed, f"omega = {omega:.4g} > 1"))
    if delta >= _least_delta(rho, omega):
        return FormulaValue(rho + 2 * math.sqrt(rho * surprise), failed)
    return FormulaValue(rho * omega + surprise / (omega - 1), failed)


def tcdp_noise(epsilon: float, *, delta: float, **client: Any) -> FormulaValue:
    """The std at which tCDP claims (epsilon, delta), every condition checked:

    sigma^2 = 26 K_i Q G^2 / (n_i^2 rho),
    rho = (sqrt(ln(1/delta) + eps) - sqrt(ln(1/delta)))^2.
    """
    if not (0 < epsilon < math.inf):
        raise ConfigError("epsilon", epsilon, "a positive finite number")
    surprise = math.log(1 / _delta(delta))
    # of rho, without cancellation
    root = epsilon / (math.sqrt(surprise + epsilon) + math.sqrt(surprise))
    std = client["bound"] / client["samples"] * math.sqrt(26 * client["steps"]) / root
    rho, omega, failed = tcdp(std, **client)
    limit = _least_delta(rho, omega) if omega > 1 else 1.0
    if delta < limit:
        failed += (f"delta = {delta:.4g} >= e^(-(omega-1)^2 rho) = {limit:.4g}",)
    return FormulaValue(std, failed)


def tcdp_theorem5(std: float, **client: Any) -> tuple[FormulaValue, float]:
    """002 Theorem 5 as printed: the single pair that it gives at `std`,

        epsilon = rho (2 omega - 1), delta = e^(-rho (omega - 1)^2).

    Its epsilon *grows* with std. With too little noise it is below 0, and infinite here.
    """
    rho, omega, failed = tcdp(std, **client)
    value = _theorem5_limit(**client) - rho
    failed += () if omega > 1 else (f"omega = {omega:.4g} > 1",)
    return FormulaValue(value if value >= 0 else math.inf, failed), _least_delta(rho, omega)


def tcdp_theorem5_noise(epsilon: float, **client: Any) -> FormulaValue:
    """002 Theorem 5 solved for the std, by rho = 2 rho omega - epsilon; or infinite."""
    most = _theorem5_limit(**client)
    if epsilon >= most:
        limit = f"{most:.4g}, which the formula approaches as the noise grows"
        return FormulaValue(math.inf, (f"epsilon {epsilon:.4g} < {limit}",))
    std = client["bound"] / client["samples"] * math.sqrt(26 * client["steps"] / (most - epsilon))
    return FormulaValue(std, tcdp_theorem5(std, **client)[0].conditions_failed)


def _theorem5_limit(*, bound: float, batch: int, samples: int, steps: int) -> float:
    """2 rho omega, which does not depend on the noise."""
    return 6.5 * steps * (batch / samples) ** 2 * math.log(samples / batch)


def _least_delta(rho: float, omega: float) -> float:
    """e^(-(omega-1)^2 rho), down to which 002 Lemma 2 converts."""
    return math.exp(-((omega - 1) * rho * (omega - 1))) if rho else 0.0


# 003: personal budgets (PRIVACY.md sec. 5). `samples` is n_k, `batch` B, and `std` that of the
# noise on the mean gradient of a batch. Where they are ArrayLike, epsilons, deltas, batches and
# samples may be numbers or arrays of one shape, which the result has too.


def unamplified_budget(epsilon: ArrayLike, *, batch: ArrayLike, samples: ArrayLike) -> Any:
    """eps' = ln(1 + (e^eps - 1) / r), r = B / n_k: what 003 lets the composition spend before
    amplification (Lemma 1), float64 [...].
    """
    epsilon = np.asarray(epsilon, float)
    r = np.asarray(batch, float) / np.asarray(samples, float)
    small = np.log1p(np.expm1(np.minimum(epsilon, 30.0)) / r)
    # without e^epsilon, which would overflow
    return np.where(
        epsilon > 30, epsilon - np.log(r) + np.log1p((r - 1) * np.exp(-epsilon)), small
    )[()]


def budget_variance(
    epsilon: ArrayLike, delta: ArrayLike, *, batch: ArrayLike, samples: ArrayLike
) -> Any:
    """V_k = 8 ln(e + r eps' / delta) / (n_k r eps')^2, with r = B / n_k (003 eq. 7): the noise
    variance for one local step and a bound of 1, float64 [...]; 0 for a public client, whose
    epsilon is infinite. Raises `ConfigError` if an argument is out of range.
    """
    if not np.all(np.asarray(epsilon, float) > 0):
        raise ConfigError("epsilon", epsilon, "a positive number, or infinity for a public client")
    _delta(delta)
    _check_client(batch, samples)
    if np.any(np.asarray(batch) > np.asarray(samples)):
        raise ConfigError("batch", batch, f"at most the client's samples ({samples!s})")
    inner = unamplified_budget(epsilon, batch=batch, samples=samples)
    r = np.asarray(batch, float) / np.asarray(samples, float)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        # ln(e + r eps' / delta), whose argument may overflow
        surprise = np.logaddexp(1.0, np.log(r) + np.log(inner) - np.log(delta))
        variance = np.square(np.sqrt(8 * surprise) / inner / np.asarray(batch, float))
    return np.where(np.isinf(epsilon), 0.0, variance)[()]


def budget_noise(
    epsilon: float, delta: float, *, batch: int, samples: int, steps: int, bound: float
) -> FormulaValue:
    """sigma_k = c sqrt(V_k T_k T_l) (003 eq. 6), with `steps` = T_k T_l and `bound` = c.

    What it truly gives is `epsilon(Mechanism.of_local_steps(...))`.
    """
    _check_client(batch, samples, steps)
    std = bound * math.sqrt(budget_variance(epsilon, delta, batch=batch, samples=samples) * steps)
    return FormulaValue(std, lemma2(epsilon, delta, batch=batch, samples=samples))


def budget_epsilon(
    std: float, delta: float, *, batch: int, samples: int, steps: int, bound: float
) -> FormulaValue:
    """The epsilon that 003 claims at `std`, the inverse of `budget_noise`."""
    _check_client(batch, samples, steps)
    root = std / (bound * math.sqrt(steps))
    epsilon = float(budget_epsilons(root, delta, batch=batch, samples=samples))
    return FormulaValue(epsilon, lemma2(epsilon, delta, batch=batch, samples=samples))


def budget_epsilons(
    root: ArrayLike, delta: ArrayLike, *, batch: ArrayLike, samples: ArrayLike
) -> Any:
    """The epsilon at which `budget_variance` is root^2, float64 [...], to a relative 1e-13."""
    root, delta, batch, samples = np.broadcast_arrays(
        *(np.asarray(value, float) for value in (root, delta, batch, samples))
    )

    def asks(log_epsilon: np.ndarray) -> np.ndarray:
        asked = budget_variance(np.exp(log_epsilon), delta, batch=batch, samples=samples)
        return np.sqrt(asked) > root

    log_epsilon = halved(asks, np.full(root.shape, -500.0), np.full(root.shape, 500.0), times=60)
    return np.where(root > 0, np.exp(log_epsilon), math.inf)[()]


def lemma2(epsilon: float, delta: float, *, batch: int, samples: int) -> tuple[str, ...]:
    """The condition that fails, in words, if 003 Lemma 2 does not hold where it is used, at eps'
    and delta / r, by the exact Gaussian curve. It gives large budgets too little noise, at r = 1
    and delta 1e-5 those above 169.
    """
    r = batch / samples

    def excess(inner: float) -> float:
        surprise = np.logaddexp(1.0, math.log(inner) - math.log(delta / r))
        return float(gaussian_delta(inner, inner / math.sqrt(8 * surprise)) - delta / r)

    inner = float(unamplified_budget(epsilon, batch=batch, samples=samples))
    if math.isinf(epsilon) or inner < 10 or excess(inner) <= 0:
        return ()
    most = safe_end(excess, 10.0, inner, xtol=0.0, rtol=1e-6)
    return (f"eps' = {inner:.4g} <= {most:.4g} (Lemma 2, at delta / r = {delta / r:.3g})",)


def _delta(delta: Any) -> Any:
    if not (np.all(np.asarray(delta, float) > 0) and np.all(np.asarray(delta, float) < 1)):
        raise ConfigError("delta", delta, "a number between 0 and 1, both excluded")
    return delta


def _check_client(batch: Any, samples: Any, steps: int = 1) -> None:
    for field, value in (("batch", batch), ("samples", samples), ("steps", steps)):
        if not np.all(np.asarray(value) >= 1):
            raise ConfigError(field, value, "at least 1")
