"""What several runs on the same people spend together.

>>> from raydpfl.privacy import Query, Sampling
>>> def run(name, seed, z):
...     mechanism = Mechanism(Sampling("poisson", 1000, 100), (Query("updates", 1.0, z),), 100)
...     return RunRelease(name, mechanism, "add_remove", 100, None, seed, "")
>>> joint = together([run("a", 0, 2.6), run("b", 1, 1.3)], 1e-5, ["pld"])
>>> [(one.sampling.knows, round(one.epsilon, 2)) for one in joint.guarantees]
[('cohort hidden', 4.79), ('cohort known', 72.85)]

Each run has noise of its own, so that runs compose adaptively, whatever was seen of earlier ones.
What hides who took part composes too, if the runs draw their cohorts independently (other seeds),
or draw the same in every round (docs/proofs.md, Runs of one seed).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from raydpfl.errors import ConfigError
from raydpfl.privacy.accountants import named
from raydpfl.privacy.accountants.base import Part
from raydpfl.privacy.accounting import NOISELESS, UNREACHED, covers
from raydpfl.privacy.guarantee import Guarantee, Observer, Scope
from raydpfl.privacy.mechanism import Mechanism
from raydpfl.privacy.observers import ObserverView, views
from raydpfl.privacy.types import Relation


@dataclass(frozen=True)
class RunRelease:
    """What one run has released.

    Args:
        name: of the run, in words.
        mechanism, relation: of its sums, with the surveys that it has released.
        rounds: how many rounds of it compose.
        participations: the largest number of times that any client was drawn; None: unknown.
        seed: of the cohorts.
        cohorts: what else the cohorts are a function of.
    """

    name: str
    mechanism: Mechanism
    relation: Relation
    rounds: int
    participations: int | None
    seed: int
    cohorts: str


@dataclass(frozen=True)
class Composition:
    """What runs spend together: a guarantee for each observer and accountant, and what stands in
    the way of others, in words.
    """

    runs: tuple[RunRelease, ...]
    guarantees: tuple[Guarantee, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, for strict JSON: an infinite number is the string "infinity"."""
        return {
            "runs": [run.name for run in self.runs],
            "guarantees": [guarantee.to_dict() for guarantee in self.guarantees],
            "notes": [*self.notes],
        }


def together(
    runs: Sequence[RunRelease], delta: float, accountants: Sequence[str], adaptive: bool = True
) -> Composition:
    """What holds for one client against an observer of all the runs.

    Args:
        runs: on the same clients, no two with the same noise.
        delta: of the guarantees.
        accountants: the names of rigorous ones.
        adaptive: whether what a run does may depend on what others have released in later rounds
            than its own.

    Raises:
        ConfigError: the runs have guarantees under different relations.
    """
    relations = {run.relation for run in runs}
    if len(relations) > 1:
        expected = "one relation for all runs, as guarantees under several do not compose"
        raise ConfigError("privacy.relation", sorted(relations), expected)
    seen = [[*views(r.mechanism, r.relation, r.rounds, r.participations)] for r in runs]
    sums = [[view for view in each if view.observer == Observer.AGGREGATES] for each in seen]
    updates = [[view for view in each if view.observer == Observer.UPDATES] for each in seen]
    known = [each[-1] for each in sums]
    secret = [each[0] for each in sums]
    notes = []
    against: list[tuple[Sequence[ObserverView], Sequence[Part]]] = []
    if secret != known:
        reason = _correlated(runs, secret, adaptive)
        if reason:
            notes.append(f"no epsilon with the cohorts hidden: {reason}")
        else:
            against.append((secret, _by_seed(runs, secret)))
    against.append((known, _parts(known)))
    if all(updates):
        single = [each[-1] for each in updates]
        against.append((single, _parts(single)))
    elif any(updates):
        notes.append(
            "no epsilon against an observer of every single update: not all runs have noise on each"
        )
    guarantees = [
        _guarantee(runs, seen_by, parts, name, delta)
        for name in accountants
        for seen_by, parts in against
    ]
    return Composition(tuple(runs), tuple(guarantees), tuple(notes))


def _correlated(
    runs: Sequence[RunRelease], secret: Sequence[ObserverView], adaptive: bool
) -> str | None:
    """Why the secrecy of the cohorts is not known to compose; None: it does."""
    for seed in dict.fromkeys(run.seed for run in runs):
        same = [(r, v) for r, v in zip(runs, secret, strict=True) if r.seed == seed]
        if len(same) == 1 or not any(view.mechanism.hidden for _, view in same):
            continue
        names = " and ".join(run.name for run, _ in same[:2])
        if len({run.cohorts for run, _ in same}) > 1:
            return f"{names} draw different cohorts from the same seed {seed}, not independently"
        if adaptive and any(view.mechanism.sampling.coins is None for _, view in same):
            return (
                f"{names} have the same seed {seed}, so the same cohorts, and for runs one after "
                "another that amplifies by proof under Poisson sampling alone (other seeds, with "
                "data.seed for the same clients, compose)"
            )
    return None


def _by_seed(runs: Sequence[RunRelease], secret: Sequence[ObserverView]) -> list[Part]:
    """What composes with the cohorts hidden. Runs of one seed release, in a round, sums over the
    same cohort: one Gaussian, as long as each of them lasts.
    """
    parts: list[Part] = []
    for seed in dict.fromkeys(run.seed for run in runs):
        same = [v for r, v in zip(runs, secret, strict=True) if r.seed == seed]
        if len(same) == 1 or not any(view.mechanism.hidden for view in same):
            parts += _parts(same)
            continue
        events = [(view.mechanism.event(view.relation), view.rounds) for view in same]
        once = math.hypot(*(event.once for event, _ in events))
        before = 0
        for last in sorted({rounds for _, rounds in events}):
            mu = math.hypot(*(event.mu for event, rounds in events if rounds >= last))
            joint = replace(events[0][0], mu=mu, once=once)
            parts.append((joint, last - before))
            before, once = last, 0.0
    return parts


def _parts(seen: Sequence[ObserverView]) -> list[Part]:
    return [(view.mechanism.event(view.relation), view.rounds) for view in seen]


def _guarantee(
    runs: Sequence[RunRelease],
    seen: Sequence[ObserverView],
    parts: Sequence[Part],
    accountant: str,
    delta: float,
) -> Guarantee:
    failed = dict.fromkeys(
        reason
        for view in seen
        for reason in (_uncovered(accountant, view), view.mechanism.unproved)
        if reason
    )
    epsilon = math.inf
    if not any(_uncovered(accountant, view) for view in seen):
        epsilon = named(accountant).together([part for part in parts if part[1]], delta)
        failed |= dict.fromkeys((UNREACHED.format(accountant),) * math.isinf(epsilon))
    last = seen[-1]
    relations = {view.relation for view in seen}
    words = "; ".join(f"{run.name}: {view.scope}" for run, view in zip(runs, seen, strict=True))
    knows = next((view.scope.knows for view in seen if view.scope.knows), "")
    return Guarantee(
        "unproven" if any(view.mechanism.unproved for view in seen) else "rigorous",
        accountant, last.mechanism.unit,
        "zero_out" if "zero_out" in relations else last.relation,
        last.observer, Scope(f"{len(runs)} runs together: {words}", knows), epsilon, delta,
        tuple(dict.fromkeys(words for view in seen for words in view.mechanism.exclusions)),
        tuple(failed),
    )  # fmt: skip


def _uncovered(accountant: str, view: ObserverView) -> str | None:
    if not view.mechanism.private:
        return NOISELESS
    return covers(accountant, view.mechanism, view.relation)
