"""What a mechanism costs, by every accountant, and what it guarantees against whom.

`pld` (privacy loss distributions) and `rdp` (Renyi, by dp-accounting) are rigorous; `paper` is
Theorem 3.2 of 000 as printed, which is Theorem 1 of 001. Each reads a `Mechanism` and nothing else,
and refuses one that it does not cover.

>>> from raydpfl.privacy.mechanism import Query
>>> from raydpfl.privacy.sampling import Sampling
>>> query = Query("update", bound=1.0, std=4.0)
>>> mechanism = Mechanism(Sampling("fixed", 1920, 80), (query,), rounds=100)
>>> [round(epsilon(mechanism, "replace_one", 1e-5, accountant=name), 3) for name in ("pld", "rdp")]
[0.984, 2.044]
>>> print(covers("rdp", mechanism, "add_remove"))  # doctest: +NORMALIZE_WHITESPACE
a cohort of fixed size is covered under replace_one only;
nearest: selection poisson with add_remove

Design note: what is secret. Sampling amplifies privacy only against an observer who does not see
who was sampled, so `guarantees` reports a hidden cohort and a known one separately. With the cohort
known, a client spends only in the rounds that it takes part in, and these compose without
amplification. Their number is `participations`, the largest of any client as it occurred; without
it every round counts, since a server that picks cohorts could always pick the same client. Where a
public rule names the cohorts there is nothing else, and `rounds` is a client's participations. The
expected number T r / N bounds no client: at N = 1920, r = 80, T = 100, calibrated to 1.5 with the
cohort hidden, it would give 6.2 (and 124 when updates are seen), where all 100 rounds give 49.4
(and 2006).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.privacy import paper_formulas
from raydpfl.privacy.accountants import ACCOUNTANTS, named
from raydpfl.privacy.guarantee import Guarantee, Observer, Scope, column
from raydpfl.privacy.mechanism import Mechanism
from raydpfl.privacy.observers import ObserverView, views
from raydpfl.privacy.types import Relation, one_of

NOISELESS = "no noise is added, so nothing is private"
UNREACHED = "delta is too small for {} to tell an epsilon in double precision"


def covers(accountant: str, mechanism: Mechanism, relation: Relation) -> str | None:
    """Why an accountant does not cover a mechanism under a relation, with the nearest that is; or
    None.

    Args:
        accountant, mechanism, relation: as of `epsilon`.
    """
    one_of("relation", relation, Relation)
    return named(accountant).covers(mechanism, relation)


def rigorous(accountants: Iterable[str]) -> tuple[str, ...]:
    """Those of these accountants whose epsilons are guarantees, in the same order."""
    return tuple(name for name in accountants if (ACCOUNTANTS.get(name) or named(name)).rigorous)


# The columns of tables that hold epsilons which are guarantees.
RIGOROUS = tuple(column(name) for name, member in ACCOUNTANTS.items() if member.rigorous)


def epsilon(
    mechanism: Mechanism,
    relation: Relation,
    delta: float,
    rounds: int | None = None,
    accountant: str = "pld",
    v: float = 4.0,
) -> float:
    """Epsilon of a mechanism after some rounds; infinite without noise.

    Args:
        mechanism: what runs.
        relation: the neighbouring relation: `add_remove`, `zero_out` or `replace_one`.
        delta: between 0 and 1, both excluded.
        rounds: how many, at least 1; None: the mechanism's own.
        accountant: `pld`, `rdp`, `paper` or the import path of a user-defined one.
        v: the constant that 000 Theorem 3.2 leaves open; only `paper` reads it.

    Raises:
        ConfigError: the accountant does not cover the mechanism under this relation, or an argument
            is out of range.
    """
    rounds = mechanism.rounds if rounds is None else rounds
    return float(_epsilons(mechanism, relation, delta, rounds, rounds, accountant, v)[0])


def epsilon_curve(
    mechanism: Mechanism,
    relation: Relation,
    delta: float,
    rounds: int | None = None,
    accountant: str = "pld",
    v: float = 4.0,
    first: int = 1,
) -> np.ndarray:
    """Epsilon after `first`, ..., `rounds` rounds, float64 [rounds - first + 1]. The composition is
    that of `epsilon`: the two agree to about 1e-9, and neither is below the truth.

    Args:
        first: at least 1. The others, and the errors, are those of `epsilon`.
    """
    last = mechanism.rounds if rounds is None else rounds
    return _epsilons(mechanism, relation, delta, first, last, accountant, v)


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
        epsilon: finite, at least 0. The others, and the errors, are those of the function
            `epsilon`.
    """
    if not (0 <= epsilon < math.inf):
        raise ConfigError("epsilon", epsilon, "a finite number, zero or above")
    rounds = mechanism.rounds if rounds is None else rounds
    _check(mechanism, relation, 0.5, rounds, accountant)
    if not mechanism.private:
        return 1.0
    return named(accountant).delta(mechanism, relation, epsilon, rounds, v)


def guarantees(
    mechanism: Mechanism,
    relation: Relation,
    delta: float,
    rounds: int | None = None,
    accountants: Sequence[str] = ("pld", "rdp", "paper"),
    participations: int | None = None,
    v: float = 4.0,
) -> list[Guarantee]:
    """What holds after some rounds, by every accountant and against every observer that differs: of
    every aggregate, with the cohort hidden or known (see the module); where clients draw the noise,
    of every single update too, at std / sqrt(r) in the client's own rounds. Where an accountant
    does not cover the mechanism, epsilon is infinite and the guarantee says why.

    Args:
        accountants: their names.
        participations: the largest number of times that any client was drawn; None: unknown, so
            that every round counts against an observer who knows the cohorts. The others are those
            of `epsilon`.
    """
    rounds = mechanism.rounds if rounds is None else rounds
    claims = []
    for name in accountants:
        if named(name).rigorous:
            seen = views(mechanism, relation, rounds, participations)
            claims += [_rigorous(view, delta, name) for view in seen]
        else:
            claims.append(_as_printed(mechanism, delta, rounds, v))
    return claims


def _rigorous(view: ObserverView, delta: float, name: str) -> Guarantee:
    reason: str | None = NOISELESS
    if view.mechanism.private:
        reason = covers(name, view.mechanism, view.relation)
    if reason:
        return view.guarantee(name, math.inf, delta, (reason,))
    survey = view.mechanism.survey
    if not view.rounds and not (survey and survey.times):
        return view.guarantee(name, 0.0, delta)
    spent = epsilon(view.mechanism, view.relation, delta, max(view.rounds, 1), name)
    return view.guarantee(name, spent, delta, (UNREACHED.format(name),) * math.isinf(spent))


def _as_printed(mechanism: Mechanism, delta: float, rounds: int, v: float) -> Guarantee:
    printed = paper_formulas.client_epsilon(
        mechanism.noise_multiplier, mechanism.sampling, rounds, delta, v
    )
    failed = printed.conditions_failed if mechanism.noise_multiplier else (NOISELESS,)
    others = [f"the {query.name} of clients" for query in mechanism.queries if query.per_client]
    others += [str(mechanism.survey)] if mechanism.survey else []
    if others:
        failed += (f"nothing is released next to the sum (here too: {', '.join(others)})",)
    return Guarantee(
        "paper", "paper", mechanism.unit, "unstated", Observer.AGGREGATES,
        Scope.of_cohorts(mechanism.sampling), printed.value, delta, mechanism.exclusions, failed,
    )  # fmt: skip


def _epsilons(
    mechanism: Mechanism,
    relation: Relation,
    delta: float,
    first: int,
    last: int,
    accountant: str,
    v: float,
) -> np.ndarray:
    _check(mechanism, relation, delta, last, accountant)
    if not mechanism.private:
        return np.full(last - first + 1, math.inf)
    return named(accountant).epsilons(mechanism, relation, delta, first, last, v)


def _check(
    mechanism: Mechanism, relation: Relation, delta: float, rounds: int, accountant: str
) -> None:
    reason = covers(accountant, mechanism, relation)
    if reason:
        raise ConfigError("accountant", accountant, f"one that covers it: {reason}")
    if not (0 < delta < 1):
        raise ConfigError("delta", delta, "a number between 0 and 1, both excluded")
    if not (isinstance(rounds, int) and rounds >= 1):
        raise ConfigError("rounds", rounds, "an integer, at least 1")
