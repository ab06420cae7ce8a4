"""How much noise budgets of clients need at local steps (002, 003).

>>> # 002 on MNIST (PRIVACY.md sec. 4): one client takes part once, another four times
>>> steps = calibrate_local_steps(
...     samples=[600, 600, 600], batch=10, steps=300, bound=1.0, participations=[1, 4, 0],
...     budgets=[0.3, 0.3, 0.3], delta=1e-2)
>>> steps.stds.round(2)  # of the noise on the mean gradient; none where there is nothing to hide
array([0.34, 0.61, 0.  ])

Clients of the same size, batches, steps and budget are calibrated once. The search for a client's
noise starts from the central limit theorem [1], corrected by what the most similar client needed,
so that two or three evaluations suffice.

[1] Bu, Dong, Long, Su. Deep learning with Gaussian differential privacy. HDSR 2020. Section 3.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from raydpfl.errors import ConfigError
from raydpfl.privacy import pld
from raydpfl.privacy.accountants import ACCOUNTANTS, FORMULAS, Accountant, Formula, accountant_of
from raydpfl.privacy.accounting import UNREACHED_DELTA, rigorous
from raydpfl.privacy.calibration import cached_multipliers
from raydpfl.privacy.local_steps import Calibration, LocalSteps, Method, Participations, client_list
from raydpfl.privacy.mechanism import Event, Query
from raydpfl.privacy.sampling import Sampling
from raydpfl.privacy.search import bisect_brackets, near_guess
from raydpfl.privacy.types import one_of

_TOLERANCE = 5e-4  # of log z: calibrated noise is at most 1e-3 above the smallest that is enough
_LARGEST_SIDE_SHARE = 0.99  # of a budget, that the side query may spend
_MARGIN = 1e-6  # relative, below the budget


def calibrate_local_steps(
    *,
    participations: Participations,
    budgets: ArrayLike,
    calibration: Method = "rigorous",
    accountant: str = "pld",
    **release: Any,
) -> LocalSteps:
    """The noise with which clients spend their budgets over the whole run; none for public clients
    and those that never take part.

    Args:
        participations: how often clients take part, by id or int64 [N].
        budgets: epsilons, one or [N].
        calibration: `rigorous` is at most 1e-3 above the smallest noise that is enough; `paper` is
            sigma_k of 003 eq. 6; `tcdp` the usable form of 002 Theorem 5 (PRIVACY.md sec. 4), and
            the rigorous noise for the clients for whom a condition of it fails.
        accountant: pld or rdp, for `rigorous`.
        release: the other fields of `LocalSteps`.

    Raises:
        ConfigError: no noise reaches some budget, or the `side_query` leaves less than 1 % to the
            steps.
    """
    one_of("calibration", calibration, Method)
    claims = np.asarray(budgets, np.float64)
    silent = LocalSteps(
        **release, stds=np.zeros(()), claims=claims, calibration=Calibration(calibration)
    )
    counts = silent.counts(participations)
    budgets = cast(np.ndarray, silent.claims)
    clients = np.flatnonzero((counts > 0) & (silent.samples > 0) & np.isfinite(budgets))
    stds = np.zeros(len(counts))
    unfit: dict[int, tuple[str, ...]] = {}
    if calibration != "rigorous":
        formula = formula_of(calibration)
        for k in clients.tolist():
            arguments = silent.formula_arguments(k, int(counts[k]))
            noise = formula.noise(float(budgets[k]), silent.delta, **arguments)
            stds[k] = noise.value
            reasons = formula.refused(noise.conditions_failed + silent.unmet_conditions())
            if reasons:
                unfit[k] = reasons
        clients = np.array(list(unfit), np.int64)
    if len(clients):
        stds[clients] = _rigorous_stds(silent, clients, budgets[clients], counts, accountant)
    noise_accountant = accountant if calibration == "rigorous" or unfit else None
    return replace(silent, stds=stds, calibration=Calibration(calibration, noise_accountant, unfit))


def formula_of(method: str) -> Formula:
    """The paper's formula for this method of calibration; 003's for `rigorous`."""
    method = "paper" if method == "rigorous" else method
    return next(member for member in FORMULAS.values() if member.calibration == method)


def _rigorous_stds(
    release: LocalSteps, clients: np.ndarray, budgets: np.ndarray, counts: np.ndarray, name: str
) -> np.ndarray:
    """Stds of these clients by an accountant, float64 [k]."""
    accountant = accountant_of(name)
    if not accountant.rigorous:
        raise ConfigError("accountant", name, f"one of {', '.join(rigorous(ACCOUNTANTS))}")
    delta = release.delta
    b = release.batches[clients]
    q = np.where(release.amplified[clients], b / release.samples[clients], 1.0)
    gaussians = release.compositions[clients]
    with np.errstate(divide="ignore"):
        usage = -np.expm1(gaussians * counts[clients] * np.log1p(-q))
    idle = clients[usage <= delta]
    if len(idle):
        expected = f"below {usage.min():.3g}, the chance that a sample of client {idle[0]} is used "
        expected += f"at all: at this delta no noise is called for by {len(idle)} clients"
        raise ConfigError("delta", delta, f"{expected} ({client_list(idle.tolist())})")
    columns = [q, gaussians, counts[clients], budgets, release.side_mu[clients]]
    kinds, first_index, member = np.unique(
        np.stack(columns, 1), axis=0, return_index=True, return_inverse=True
    )
    if release.side_query:
        _check_side_query(release, clients[first_index], kinds, accountant)
    samplings = [release.batch_sampling(k) for k in clients[first_index].tolist()]

    def solve() -> list[float]:
        return _noise_multipliers(samplings, kinds, delta, accountant).tolist()

    z = cached_multipliers(["local steps", kinds.tolist(), delta, name], solve, accountant)
    return np.array(z)[member.reshape(-1)] * release.bound / b


def _check_side_query(
    release: LocalSteps, clients: np.ndarray, kinds: np.ndarray, accountant: Accountant
) -> None:
    """Raises `ConfigError` where the side query takes nearly all of a client's budget."""
    query = cast(Query, release.side_query)
    everyone = Sampling("full", 1, 1)
    query_epsilons = np.array(
        [
            accountant.curve(Event(everyone, mu), release.delta, np.array([int(count)]))[0]
            for _, _, count, _, mu in kinds.tolist()
        ]
    )
    budgets = kinds[:, 3]
    if (query_epsilons <= _LARGEST_SIDE_SHARE * budgets).all():
        return
    worst = int(np.argmax(query_epsilons / budgets))
    k = clients[worst]
    expected = f"more, as the {query.name} of client {k}, with {release.samples[k]} samples, spend "
    expected += f"epsilon {query_epsilons[worst]:.4g} of its {budgets[worst]:.4g} in "
    expected += f"{kinds[worst, 2]:.0f} rounds, by {accountant.name} (99% at most, which leaves "
    raise ConfigError("side_query", query.std, f"{expected}some to its steps)")


def _noise_multipliers(
    samplings: Sequence[Sampling], kinds: np.ndarray, delta: float, accountant: Accountant
) -> np.ndarray:
    """z = std of the sum / bound with which clients spend at most their targets, float64 [k]; at
    most 1e-3 (relative) above the smallest. `kinds` float64 [k, 5]: the fraction q of a batch, a
    participation's Gaussians, participations, targets, and mu of a participation's side query.
    """
    q, gaussians, counts, targets, side = kinds.T
    times = gaussians * counts
    side_mus = side * np.sqrt(counts)
    mu = _central_limit_mu(q, times, targets, side_mus, delta)
    features = np.log(np.stack([mu, targets, q, times]))
    log_z = np.log(2 / mu)
    offsets = np.zeros(len(q))
    order = np.argsort(log_z, kind="stable")
    for place, k in enumerate(order.tolist()):
        solved_indices = order[:place]
        if place:  # what the approximation was off by for the client most like this one
            distances = np.abs(features[:, solved_indices] - features[:, [k]]).sum(axis=0)
            offsets[k] = offsets[solved_indices[np.argmin(distances)]]
        start = log_z[k] + offsets[k]
        event = Event(samplings[k], 0.0, int(gaussians[k]), float(side[k]))
        excess = _excess(accountant, event, int(counts[k]), float(targets[k]), delta, start)
        slope = -_steepness(mu[k] * math.exp(-offsets[k]), q[k], times[k], side_mus[k], delta)
        safe_log_z = near_guess(excess, start, slope, _TOLERANCE)
        if safe_log_z is None:
            expected = "an epsilon that some noise reaches at this delta"
            raise ConfigError("budgets", float(targets[k]), expected)
        offsets[k] += safe_log_z - start
    return np.exp(log_z + offsets)


def _excess(
    accountant: Accountant, event: Event, count: int, target: float, delta: float, start: float
) -> Callable[[float], float]:
    """A function of log z: log(epsilon / target), from -20 to 20, or `ConfigError`."""
    aim = target * (1 - _MARGIN)

    def excess(x: float) -> float:
        epsilon = accountant.curve(replace(event, mu=2 * math.exp(-x)), delta, np.array([count]))[0]
        # so much more noise than expected changes nothing any more
        if math.isinf(epsilon) and x > start + 5:
            expected = f"more: {UNREACHED_DELTA.format(accountant.name)}"
            raise ConfigError("delta", delta, f"{expected} after {event.gaussians * count} steps")
        return min(max(math.log(max(epsilon, 1e-9 * aim) / aim), -20.0), 20.0)

    return excess


def _total_mu(mu: np.ndarray, q: np.ndarray, times: np.ndarray) -> np.ndarray:
    """mu of the Gaussian that `times` subsampled ones approach ([1]); exact at q = 1."""
    from scipy.special import ndtr

    # e^(mu^2) must not overflow; any epsilon below 300 needs more noise than this mu has
    mu = np.minimum(mu, 26.0)
    spread = np.exp(mu**2) * ndtr(1.5 * mu) + 3 * ndtr(-mu / 2) - 2
    spread = np.where(mu < 1e-3, mu**2 / 2, spread)  # cancellation would spoil it
    return np.where(q == 1, mu * np.sqrt(times), q * np.sqrt(2 * times * spread))


def _central_limit_mu(
    q: np.ndarray, times: np.ndarray, targets: np.ndarray, sides: np.ndarray, delta: float
) -> np.ndarray:
    """The mu at which `_total_mu` and a Gaussian of mu `sides` have the epsilons `targets`."""

    def bisect_mu(unsafe: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        # of -log mu, which falls as the noise grows
        low = np.full(len(q), -math.log(1e3))
        high = np.full(len(q), -math.log(1e-9))
        return np.exp(-bisect_brackets(lambda x: unsafe(np.exp(-x)), low, high, times=50))

    total = bisect_mu(lambda mu: pld.gaussian_delta(targets, mu) > delta)
    total = np.where(sides > 0, np.sqrt(np.maximum(total**2 - sides**2, 1e-3 * total**2)), total)
    return bisect_mu(lambda mu: _total_mu(mu, q, times) > total)


def _steepness(mu: float, q: float, times: float, side_mu: float, delta: float) -> float:
    """-d log epsilon / d log z by the central limit theorem, within bounds."""
    mus = _total_mu(mu * np.exp([0.01, -0.01]), np.full(2, q), np.full(2, times))
    upper, lower = np.log(np.maximum(pld.gaussian_epsilon(np.hypot(mus, side_mu), delta), 1e-12))
    return float(np.clip((upper - lower) / 0.02, 0.03 if side_mu else 0.3, 20.0))
