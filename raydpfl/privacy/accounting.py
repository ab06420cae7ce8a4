"""What a mechanism costs, by every accountant, and what it guarantees against whom.

Sampling amplifies privacy only against an observer who does not see who was sampled. With the
cohort known, a client spends in the rounds that it takes part in, and these compose without
amplification: the largest number of any client as it occurred, or every round, since a server that
picks cohorts could always pick the same client. T r / N bounds no client (PRIVACY.md sec. 2).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.privacy.accountants import ACCOUNTANTS, accountant_of
from raydpfl.privacy.accountants.paper import paper_epsilon
from raydpfl.privacy.guarantee import GROUP, Guarantee, Observer, Scope, column
from raydpfl.privacy.mechanism import Mechanism
from raydpfl.privacy.observers import ObserverView, views
from raydpfl.privacy.tradeoff import TradeOff
from raydpfl.privacy.types import LEAST_DELTA, Relation, one_of

NOISELESS = "no noise is added, so nothing is private"
FEW_STEPS = (
    "noise of so few steps of the integers has no guarantee; more noise.bits make more steps"
)
UNREACHED_DELTA = "delta is too small for {} to tell an epsilon in double precision"
MAX_ROUNDS = 1 << 22  # with secret cohorts; their losses may take 4 GB


def covers(accountant: str, mechanism: Mechanism, relation: Relation) -> str | None:
    """Why an accountant does not cover a mechanism under a relation, with the nearest that is; or
    None.

    Args:
        accountant, mechanism, relation: as of `epsilon`.
    """
    one_of("relation", relation, Relation)
    return accountant_of(accountant).covers(mechanism, relation)


def rigorous(accountants: Iterable[str]) -> tuple[str, ...]:
    """Those of these accountants whose epsilons are guarantees, in the same order."""
    return tuple(
        name for name in accountants if (ACCOUNTANTS.get(name) or accountant_of(name)).rigorous
    )


# The columns of tables that hold epsilons which are guarantees.
RIGOROUS = tuple(map(column, rigorous(ACCOUNTANTS)))


def epsilon(
    mechanism: Mechanism,
    relation: Relation,
    delta: float,
    rounds: int | None = None,
    accountant: str = "pld",
    v: float = 4.0,
) -> float:
    """Epsilon of a mechanism after some rounds; infinite without noise. Raises `ConfigError` if the
    accountant does not cover the mechanism under this relation, or an argument is out of range.

    Args:
        mechanism: what runs.
        relation: the neighbouring relation: `add_remove`, `zero_out` or `replace_one`.
        delta: from 1e-300, and below 1.
        rounds: how many, at least 1; None: the mechanism's own.
        accountant: `pld`, `rdp`, `paper` or the import path of a user-defined one.
        v: the constant that 000 Theorem 3.2 leaves open; only `paper` reads it.
    """
    rounds = mechanism.rounds if rounds is None else rounds
    return float(epsilon_curve(mechanism, relation, delta, rounds, accountant, v, rounds)[0])


def epsilon_curve(
    mechanism: Mechanism,
    relation: Relation,
    delta: float,
    rounds: int | None = None,
    accountant: str = "pld",
    v: float = 4.0,
    first: int = 1,
) -> np.ndarray:
    """Epsilon after `first`, ..., `rounds` rounds, float64 [rounds - first + 1]; it agrees with
    `epsilon` to about 1e-9, and neither is below the truth.

    Args:
        first: at least 1. The others, and the errors, are those of `epsilon`.
    """
    last = _check_rounds(mechanism, relation, delta, rounds, accountant)
    if not mechanism.private:
        return np.full(last - first + 1, math.inf)
    return accountant_of(accountant).epsilons(mechanism, relation, delta, first, last, v)


def delta(
    mechanism: Mechanism,
    relation: Relation,
    epsilon: float,
    rounds: int | None = None,
    accountant: str = "pld",
    v: float = 4.0,
) -> float:
    """Delta of a mechanism after some rounds; 1 without noise.

    Args:
        epsilon: finite, at least 0. The others, and the errors, are those of `epsilon` above.
    """
    if not (0 <= epsilon < math.inf):
        raise ConfigError("epsilon", epsilon, "a finite number, zero or above")
    rounds = _check_rounds(mechanism, relation, 0.5, rounds, accountant)
    if not mechanism.private:
        return 1.0
    return accountant_of(accountant).delta(mechanism, relation, epsilon, rounds, v)


def tradeoff(
    mechanism: Mechanism,
    relation: Relation,
    rounds: int | None = None,
    accountant: str = "pld",
    v: float = 4.0,
) -> TradeOff:
    """The trade-off curve f of a mechanism after some rounds, by an accountant: of a rigorous one
    never above the truth; without noise 0.

    Args:
        mechanism, relation, rounds, accountant, v: as, and the errors are, those of `epsilon`.
    """
    rounds = _check_rounds(mechanism, relation, 0.5, rounds, accountant)
    if not mechanism.private:
        return TradeOff(np.array([0.0, 1.0]), np.ones((1, 2)))
    return accountant_of(accountant).tradeoff(mechanism, relation, rounds, v)


def guarantees(
    mechanism: Mechanism,
    relation: Relation,
    delta: float,
    rounds: int | None = None,
    accountants: Sequence[str] = ("pld", "rdp", "paper"),
    participations: int | None = None,
    v: float = 4.0,
) -> list[Guarantee]:
    """What holds after some rounds, by every accountant and against every observer that differs
    (`raydpfl.privacy.observers.views`). Where an accountant does not cover the mechanism, epsilon
    is infinite and the guarantee says why.

    Args:
        accountants: their names. The others are those of `epsilon`.
        participations: the most times that any client was drawn; None: every round may count.
    """
    rounds = mechanism.rounds if rounds is None else rounds
    claims = []
    for name in accountants:
        if accountant_of(name).rigorous:
            observer_views = views(mechanism, relation, rounds, participations)
            claims += [guarantee_against(view, name, delta) for view in observer_views]
        else:
            claims.append(_paper_guarantee(mechanism, delta, rounds, v))
    return claims


def guarantee_against(view: ObserverView, accountant: str, delta: float) -> Guarantee:
    """What a rigorous accountant guarantees against one observer."""
    reason = refusal_reason(accountant, view)
    if reason:
        return view.guarantee(accountant, math.inf, delta, (reason,))
    scheme = view.mechanism.sampling.scheme
    is_group_bound = scheme.by_group_privacy(accountant_of(accountant).needs)
    view = replace(view, scope=view.scope.add_words(GROUP * is_group_bound))
    survey = view.mechanism.survey
    if not view.rounds and not (survey and survey.times):
        return view.guarantee(accountant, 0.0, delta)
    view_epsilon = epsilon(view.mechanism, view.relation, delta, max(view.rounds, 1), accountant)
    unreached_reasons = (UNREACHED_DELTA.format(accountant),) * math.isinf(view_epsilon)
    tradeoff_arguments = (view.mechanism, view.relation, max(view.rounds, 1), accountant)
    guarantee = view.guarantee(accountant, view_epsilon, delta, unreached_reasons)
    rho = None
    if not view.mechanism.sampling.hidden and guarantee.kind == "rigorous":
        event = view.mechanism.event(view.relation)
        if not (event.skellam or view.mechanism.laplace):
            rho = float(event.unamplified(view.rounds)) ** 2 / 2
    return replace(guarantee, curve=partial(tradeoff, *tradeoff_arguments), rho=rho)


def refusal_reason(accountant: str, view: ObserverView) -> str | None:
    """Why an accountant says nothing of what an observer sees, in words; None: it does."""
    mechanism = view.mechanism
    if not mechanism.private:
        return FEW_STEPS if mechanism.integer and mechanism.noise_multiplier else NOISELESS
    return covers(accountant, mechanism, view.relation)


def _paper_guarantee(mechanism: Mechanism, delta: float, rounds: int, v: float) -> Guarantee:
    z = mechanism.min_multiplier
    claim = paper_epsilon(z, mechanism.sampling, rounds, delta, v)
    failures = claim.conditions_failed if z else (NOISELESS,)
    releases = [f"the {query.name} of clients" for query in mechanism.queries if query.per_client]
    releases += [str(mechanism.survey)] if mechanism.survey else []
    if releases:
        failures += (f"nothing is released next to the sum (here too: {', '.join(releases)})",)
    if mechanism.laplace:
        failures += ("Gaussian noise on sums bounded in L2 (here: Laplace noise)",)
    if mechanism.factors:
        failures += ("noise of one std in all rounds (here: that with the least in all of them)",)
    return Guarantee(
        "paper", "paper", mechanism.unit, "unstated", Observer.AGGREGATES,
        Scope.from_cohorts(mechanism.sampling), claim.value, delta, mechanism.exclusions, failures,
    )  # fmt: skip


def _check_rounds(
    mechanism: Mechanism, relation: Relation, delta: float, rounds: int | None, accountant: str
) -> int:
    """The rounds, by default those of the mechanism. Raises `ConfigError` as `epsilon`."""
    rounds = mechanism.rounds if rounds is None else rounds
    reason = covers(accountant, mechanism, relation)
    if reason:
        raise ConfigError("accountant", accountant, f"one that covers it: {reason}")
    if not LEAST_DELTA <= delta < 1:
        raise ConfigError("delta", delta, "a number between 0 and 1, from 1e-300 on")
    if not (isinstance(rounds, int) and rounds >= 1):
        raise ConfigError("rounds", rounds, "an integer, at least 1")
    if mechanism.hidden and rounds > MAX_ROUNDS:
        expected = f"at most {MAX_ROUNDS:,}, local steps included, where a cohort is a secret"
        raise ConfigError("rounds", rounds, expected)
    return rounds
