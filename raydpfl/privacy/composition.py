"""What several runs on the same people spend together, or a search among runs.

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

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.privacy import accounting
from raydpfl.privacy.accountants import accountant_of
from raydpfl.privacy.accountants.base import Part
from raydpfl.privacy.accounting import NOISELESS, UNREACHED_DELTA
from raydpfl.privacy.guarantee import HIDDEN_BATCH, Guarantee, Observer, Scope, tightest_guarantees
from raydpfl.privacy.local_steps import LocalSteps
from raydpfl.privacy.mechanism import Mechanism
from raydpfl.privacy.observers import ObserverView
from raydpfl.privacy.repetition import Repetition
from raydpfl.privacy.sampling import Sampling
from raydpfl.privacy.types import Relation


@dataclass(frozen=True)
class RunRelease:
    """What one run has released."""

    name: str  # in words
    mechanism: Mechanism  # of its sums, with the surveys that it has released
    relation: Relation
    rounds: int  # that compose
    participations: int | None  # the most times that any client was drawn; None: unknown
    seed: int  # of the cohorts
    cohorts: str  # what else these are a function of

    def __str__(self) -> str:
        noise = f"noise multiplier {self.mechanism.noise_multiplier:.4g}"
        return f"{self.rounds} rounds, {self.mechanism.sampling}, seed {self.seed}, {noise}"


@dataclass(frozen=True, eq=False)
class StepsRelease:
    """What one run with noise at local steps has released."""

    name: str  # in words
    release: LocalSteps
    participations: np.ndarray  # of each client, int64 [N]
    seed: int  # of cohorts and batches
    cohorts: tuple[str, ...]  # a digest of the clients of each round
    rows: str  # what batches are drawn among, and how, in words

    def __str__(self) -> str:
        participations_text = f"up to {int(self.participations.max())} participations of a client"
        return f"noise at local steps, {participations_text}, seed {self.seed}"

    def has_same_batches(self, other: StepsRelease) -> bool:
        """Whether, by their one seed, their batches are the same as long as both last."""
        numbers = [
            (one.samples, one.batches, one.client_steps) for one in (self.release, other.release)
        ]
        return (
            self.rows == other.rows
            and all(map(np.array_equal, *numbers))
            and all(map(str.__eq__, self.cohorts, other.cohorts))
        )


@dataclass(frozen=True)
class Composition:
    """What runs spend together: a guarantee for each observer and accountant, and what stands in
    the way of others, in words.
    """

    runs: tuple[RunRelease | StepsRelease, ...] = ()
    guarantees: tuple[Guarantee, ...] = ()
    notes: tuple[str, ...] = ()
    subject: str = ""  # what spends it, in words; empty: all runs together

    @property
    def epsilon(self) -> Guarantee | None:
        """That which holds against the observer who sees least; None: none does."""
        return next(iter(tightest_guarantees(self.guarantees)), None)

    def words(self, subject: str) -> str:
        """What `subject` spends, as a sentence."""
        claim = self.epsilon
        if claim is None:
            reasons = [*self.notes, *(w for one in self.guarantees for w in one.conditions_failed)]
            return f"No epsilon covers {subject}: {'; '.join(dict.fromkeys(reasons))}."
        cost_text = f"{claim.epsilon:.4g} at delta {claim.delta:g} (by {claim.accountant}, of"
        observer = ", ".join(filter(None, (claim.observer.value, claim.sampling.knows)))
        text = f"Epsilon of {subject}: {cost_text} {observer})"
        return "; ".join([text, *self.notes]) + "."

    def to_dict(self, runs: bool = True) -> dict[str, Any]:
        """Everything, or all but the `runs`, for strict JSON: "infinity" for infinite numbers."""
        return ({"runs": [run.name for run in self.runs]} if runs else {}) | {
            "guarantees": [claim.to_dict() for claim in self.guarantees],
            "notes": [*self.notes],
        }


def together(
    runs: Sequence[RunRelease], delta: float, accountants: Sequence[str], adaptive: bool = True
) -> Composition:
    """What holds for one client against an observer of all the runs.

    Args:
        runs: on the same clients, no two with the same noise.
        delta, accountants: of the guarantees, which are of rigorous ones.
        adaptive: whether a run may depend on what others have released in later rounds than its
            own.

    Raises:
        ConfigError: the runs have guarantees under different relations.
    """
    views_by_observer = _views_by_observer(runs)
    parts_by_observer = [(views, _parts(views)) for views in views_by_observer]
    notes = []
    if any(view.mechanism.hidden for view in views_by_observer[0]):
        reason = _secrecy_refusal(runs, views_by_observer[0], adaptive)
        if reason:
            notes.append(f"no epsilon with the cohorts hidden: {reason}")
            del parts_by_observer[0]
        else:
            parts_by_observer[0] = views_by_observer[0], _hidden_parts(runs, views_by_observer[0])
    guarantees = []
    for name in accountants:
        for group, parts in parts_by_observer:
            scopes = dict.fromkeys(str(view.scope) for view in group)
            words = f"{len(runs)} runs together: {'; '.join(scopes)}"
            one = _guarantee(group, words, accountant_of(name).together, name, delta, parts)
            guarantees.append(one)
    return Composition(tuple(runs), tuple(guarantees), tuple(notes))


def _secrecy_refusal(
    runs: Sequence[RunRelease], secret: Sequence[ObserverView], adaptive: bool
) -> str | None:
    """Why the secrecy of the cohorts is not known to compose; None: it does."""
    for seed in dict.fromkeys(run.seed for run in runs):
        seed_pairs = [(r, v) for r, v in zip(runs, secret, strict=True) if r.seed == seed]
        if len(seed_pairs) == 1 or not any(view.mechanism.hidden for _, view in seed_pairs):
            continue
        names = " and ".join(run.name for run, _ in seed_pairs[:2])
        if len({run.cohorts for run, _ in seed_pairs}) > 1:
            return f"{names} draw different cohorts from the same seed {seed}, not independently"
        events = [view.mechanism.event(view.relation) for _, view in seed_pairs]
        if len({(str(event.sampling), *astuple(event.sampling)[1:]) for event in events}) > 1:
            return f"{names} have the same seed {seed}, and are accounted for by other samplings"
        if any(event.skellam or event.squares for event in events):
            noise = "Skellam, or correlated over the rounds, of which no amplification of both"
            return f"{names} have the same seed {seed}, and noise that is {noise} is proved"
        if any(view.mechanism.laplace for _, view in seed_pairs):
            return f"{names} have the same seed {seed}, and noise that is Laplace"
        absent = all(view.relation != "replace_one" for _, view in seed_pairs)
        coins = all(view.mechanism.sampling.coins is not None for _, view in seed_pairs)
        if adaptive and not (coins and absent):
            return (
                f"{names} have the same seed {seed}, so the same cohorts, and for runs one after "
                "another that amplifies by proof where a client may be absent and clients are "
                "independent (other seeds, with data.seed for the same clients, compose)"
            )
    return None


def _hidden_parts(runs: Sequence[RunRelease], secret: Sequence[ObserverView]) -> list[Part]:
    """What composes with the cohorts hidden, which runs of one seed share round by round."""
    parts: list[Part] = []
    for seed in dict.fromkeys(run.seed for run in runs):
        seed_views = [v for r, v in zip(runs, secret, strict=True) if r.seed == seed]
        if len(seed_views) == 1 or not any(view.mechanism.hidden for view in seed_views):
            parts += _parts(seed_views)
            continue
        events = _parts(seed_views)
        if any(view.mechanism.turns for view in seed_views):  # of which each may be any round
            events = [(replace(event, mus=()), rounds) for event, rounds in events]
        if events[0][0].sampling.epoch:  # whose rounds depend on each other
            max_rounds = max(rounds for _, rounds in events)
            events = [(event, max_rounds) for event, _ in events]
        if any(event.mus for event, _ in events):
            once_mu = math.hypot(*(event.once for event, _ in events))
            squares = np.zeros(max(rounds for _, rounds in events))
            for event, rounds in events:
                squares[:rounds] += event.first(rounds) ** 2
            mus = tuple(np.sqrt(squares).tolist())
            joint = replace(events[0][0], mu=max(mus, default=0.0), mus=mus, once=once_mu)
            parts.append((joint, len(mus)))
            continue
        parts += _shared_sample_parts(events)
    return parts


def _shared_sample_parts(events: Sequence[Part]) -> list[Part]:
    """What composes of releases over the same hidden samples: one Gaussian for all that last."""
    parts: list[Part] = []
    once_mu = math.hypot(*(event.once for event, _ in events))
    start = 0
    for last in sorted({count for _, count in events}):
        longer = [event for event, count in events if count >= last]
        mu = math.hypot(*(event.mu for event in longer))
        extra_mu = math.hypot(*(event.also for event in longer))
        parts.append((replace(longer[0], mu=mu, also=extra_mu, once=once_mu), last - start))
        start, once_mu = last, 0.0
    return parts


def _parts(views: Sequence[ObserverView]) -> list[Part]:
    return [(view.mechanism.event(view.relation), view.rounds) for view in views]


def best_of(
    repetition: Repetition, runs: Sequence[RunRelease], delta: float, accountants: Sequence[str]
) -> Composition:
    """What holds for one client against an observer of the best of a random number of runs.

    Args:
        repetition: the distribution of that number.
        runs: each is drawn at random among these, with cohorts and noise of its own.
        delta, accountants: as, and the errors are, those of `together`.
    """
    guarantees = []
    subject = f"the best run alone, of {repetition}"
    for name in accountants:
        for observer_views in _views_by_observer(runs):
            scopes = dict.fromkeys(str(view.scope) for view in observer_views)
            words = f"{subject}: {' or '.join(scopes)}"
            search_epsilon = functools.partial(accountant_of(name).best_of, repetition)
            parts = _parts(observer_views)
            one = _guarantee(observer_views, words, search_epsilon, name, delta, parts)
            guarantees.append(one)
    return Composition(tuple(runs), tuple(guarantees), (), subject)


def _views_by_observer(runs: Sequence[RunRelease]) -> list[list[ObserverView]]:
    """What each observer sees of every run: of sums, not knowing the cohorts and (where that
    differs) knowing them; of single updates, where all have noise; of what colluders know, where
    all have colluders.
    """
    relations = {run.relation for run in runs}
    if len(relations) > 1:
        expected = "one relation for all runs, as guarantees under several do not compose"
        raise ConfigError("privacy.relation", sorted(relations), expected)
    rows = [[*accounting.views(r.mechanism, r.relation, r.rounds, r.participations)] for r in runs]
    sums = [[view for view in row if view.observer == Observer.AGGREGATES] for row in rows]
    first_views = [row[0] for row in sums]
    by_observer = [first_views, [row[-1] for row in sums]]
    if not any(view.mechanism.hidden for view in first_views):
        del by_observer[0]
    for observer in (Observer.UPDATES, Observer.COLLUDERS):
        of_observer = [[view for view in row if view.observer == observer] for row in rows]
        if all(of_observer):
            by_observer.append([views[-1] for views in of_observer])
    return by_observer


def _guarantee(
    views: Sequence[ObserverView],
    words: str,
    epsilon_of: Callable[[Sequence[Part], float], float],
    accountant: str,
    delta: float,
    parts: Sequence[Part],
) -> Guarantee:
    """The guarantee against an observer of all of this; `epsilon_of` is of `parts` and delta."""
    reasons = [reason for view in views if (reason := accounting.refusal_reason(accountant, view))]
    gaps = [view.mechanism.proof_gap for view in views if view.mechanism.proof_gap]
    epsilon = math.inf
    unreached_reasons: tuple[str, ...] = ()
    if not reasons:
        releases = [part for part in parts if part[1]]
        epsilon = epsilon_of(releases, delta) if releases else 0.0
        unreached_reasons = (UNREACHED_DELTA.format(accountant),) * math.isinf(epsilon)
    last = views[-1]
    relations = {view.relation for view in views}
    knows = next((view.scope.knows for view in views if view.scope.knows), "")
    return Guarantee(
        "unproven" if gaps else "rigorous", accountant, last.mechanism.unit,
        "zero_out" if "zero_out" in relations else last.relation,
        last.observer, Scope(words, knows), epsilon, delta,
        tuple(dict.fromkeys(words for view in views for words in view.mechanism.exclusions)),
        tuple(dict.fromkeys([*reasons, *gaps, *unreached_reasons])),
    )  # fmt: skip


def compose_step_runs(
    runs: Sequence[StepsRelease], delta: float, accountants: Sequence[str], adaptive: bool = True
) -> Composition:
    """What holds for one sample of the client that spends most, against an observer of every update
    of all the runs. Runs with batches of their own (other seeds) compose adaptively. Runs of one
    seed have the same batches: if none depends on another, they release at every step one Gaussian
    over one batch; else these amplify nothing by proof (docs/proofs.md, Runs of one seed).

    Args:
        runs: on the same clients, no two with the same noise.
        delta, accountants, adaptive: as of `together`.

    >>> def run(name, seed, std):
    ...     release = LocalSteps([600], batch=10, steps=20, bound=1.0, delta=1e-3, stds=std)
    ...     return StepsRelease(name, release, np.array([3]), seed, (), "")
    >>> joint = compose_step_runs([run("a", 0, 0.4), run("b", 1, 0.3)], 1e-3, ["pld"])
    >>> round(joint.guarantees[0].epsilon, 2)
    0.31
    """
    reason = _batch_secrecy_refusal(runs, adaptive)
    counts = np.array([run.participations for run in runs])  # [runs, N]
    public = ((counts > 0) & [run.release.public for run in runs]).any(axis=0)
    exposed_mask = counts.any(axis=0) & (runs[0].release.samples > 0)
    clients = np.flatnonzero(exposed_mask & ~public).tolist()
    parts_of = _step_parts if reason is None else _open_step_parts
    noisy = np.all([(run.release.stds > 0) | (run.participations == 0) for run in runs], axis=0)
    parts = {k: parts_of(runs, k) for k in clients if noisy[k]}
    exclusions = [words for run in runs for words in run.release.exclusions]
    if (exposed_mask & public).any():
        words = "clients who are public in one of the runs, where they have an infinite budget"
        exclusions.append(f"{(exposed_mask & public).sum()} {words}")
    guarantees = []
    for name in accountants:
        epsilon, worst = _worst(name, parts, delta)
        failed_conditions = (UNREACHED_DELTA.format(name),) * math.isinf(epsilon)
        words = f"client {worst}, the worst of {len(clients)}"
        if len(parts) < len(clients) or (exposed_mask.any() and not clients):
            epsilon, failed_conditions = math.inf, (NOISELESS,)
            words = "clients without noise"
        elif not clients:
            words = "no client took part"
        is_hidden = any(event.sampling.hidden for event, _ in parts.get(worst, ()))
        scope = Scope(
            f"{len(runs)} runs together, noise at local steps; {words}",
            HIDDEN_BATCH if is_hidden else "",
            client=worst if math.isfinite(epsilon) and clients else None,
        )
        one = Guarantee(
            "rigorous", name, "sample", "replace_one", Observer.UPDATES, scope, epsilon, delta,
            tuple(dict.fromkeys(exclusions)), failed_conditions,
        )  # fmt: skip
        guarantees.append(one)
    notes = () if reason is None else (f"no epsilon with the batches hidden: {reason}",)
    return Composition(tuple(runs), tuple(guarantees), notes)


def _batch_secrecy_refusal(runs: Sequence[StepsRelease], adaptive: bool) -> str | None:
    """Why the secrecy of the batches is not known to compose; None: it does."""
    for seed in dict.fromkeys(run.seed for run in runs):
        seed_runs = [run for run in runs if run.seed == seed]
        if len(seed_runs) == 1 or not any(run.release.amplified.any() for run in seed_runs):
            continue
        names = " and ".join(run.name for run in seed_runs[:2])
        if not all(run.has_same_batches(seed_runs[0]) for run in seed_runs[1:]):
            return f"{names} draw different batches from the same seed {seed}, not independently"
        if adaptive:
            return (
                f"{names} have the same seed {seed}, so the same batches, which amplify by proof "
                "only where runs do not depend on each other (other seeds, with data.seed for the "
                "same clients, compose)"
            )
    return None


def _step_parts(runs: Sequence[StepsRelease], k: int) -> list[Part]:
    """What composes of client k: at each step runs of one seed have the same hidden batch."""
    parts: list[Part] = []
    for seed in dict.fromkeys(run.seed for run in runs):
        seed_runs = [run for run in runs if run.seed == seed and run.participations[k]]
        events = [(run.release.event(k), int(run.participations[k])) for run in seed_runs]
        is_shared = len(events) > 1 and events[0][0].sampling.hidden
        parts += _shared_sample_parts(events) if is_shared else events
    return parts


def _open_step_parts(runs: Sequence[StepsRelease], k: int) -> list[Part]:
    """The same against an observer who knows the batches: a sample may be in every one."""
    n = int(runs[0].release.samples[k])
    everyone = Sampling("full", n, n)
    return [
        (replace(run.release.event(k), sampling=everyone), int(run.participations[k]))
        for run in runs
        if run.participations[k]
    ]


def _worst(accountant: str, parts: dict[int, list[Part]], delta: float) -> tuple[float, int]:
    """The largest epsilon of any client, and which has it (-1: none). No epsilon exceeds that by
    rdp, which says who cannot be the worst.
    """
    client_by_parts = {tuple(part): k for k, part in reversed(parts.items())}
    rdp = {part: accountant_of("rdp").together(part, delta) for part in client_by_parts}
    largest, worst = 0.0, -1
    for part in sorted(client_by_parts, key=lambda part: -rdp[part]):
        if worst >= 0 and rdp[part] <= largest:
            break
        epsilon = accountant_of(accountant).together(part, delta)
        if worst < 0 or epsilon > largest:
            largest, worst = epsilon, client_by_parts[part]
    return largest, worst
