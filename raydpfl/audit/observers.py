"""What an observer of a guarantee can tell about canaries, compared with what it claims.

Evidence is the log-likelihood ratio of a canary's two worlds for all of its scores, so no guesser
does better; the guesses are its signs, where it is largest. If the cohort is hidden, a round's
ratio is that of a mixture, with probability q; if not, and for single updates, only the rounds in
which the canary takes part count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

import numpy as np

from raydpfl.audit.bounds import OneShot, guesses_for, one_run_bound, one_shot
from raydpfl.audit.canaries import CanaryRecord, on_sums
from raydpfl.audit.privacy_curve import CERTAIN, least_delta, presence
from raydpfl.config.user_classes import is_user_defined
from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.privacy import Guarantee, covers, epsilon, gaussian_epsilon, rigorous
from raydpfl.privacy.guarantee import Observer
from raydpfl.privacy.mechanism import Mechanism
from raydpfl.privacy.observers import ObserverView
from raydpfl.privacy.observers import views as observers
from raydpfl.simulation.plan import Plan

# a claim, and the least delta that the mechanism has at its epsilon; None: unknown
Held: TypeAlias = tuple[Guarantee, float | None]

EXCEEDS = 4.0  # standard errors by which an estimate must pass the claim to speak against it
FALSE_ALARM = 3.2e-5  # how often chance alone takes a sound run there


@dataclass(frozen=True)
class Scores:
    """What one observer knows about m canaries over all runs: float64 [m], `inside` bool [m]."""

    inside: np.ndarray
    evidence: np.ndarray  # log-likelihood ratio, inside against outside
    statistics: np.ndarray  # N(0, 1) for a canary that is not there
    shifts: np.ndarray  # by how much one that is there should move it


@dataclass(frozen=True)
class ObserverAudit:
    """What is `claimed`, the bound `lower` that the guesses prove, and an `estimate`."""

    claimed: Guarantee
    canaries: int
    guesses: int
    right: int
    lower: float
    confidence: float
    estimate: OneShot
    statistics: np.ndarray  # as in `Scores`, for the figure
    inside: np.ndarray

    @property
    def reach(self) -> float:
        """The largest lower bound of so many guesses, if all are right."""
        return one_run_bound(
            self.canaries, self.guesses, self.guesses, self.claimed.delta, self.confidence
        )

    @property
    def refuted(self) -> bool:
        """Whether the claim is below what is proven."""
        return self.lower > self.claimed.epsilon

    @property
    def exceeded(self) -> bool:
        """Whether the estimate exceeds the claim by more than chance explains."""
        mu = max(self.estimate.mu - EXCEEDS * self.estimate.error, 0.0)
        return mu > 0 and float(gaussian_epsilon(mu, self.claimed.delta)) > self.claimed.epsilon

    def to_dict(self) -> dict[str, Any]:
        names = ("canaries", "guesses", "right", "lower", "reach", "confidence")
        return {
            "claimed": self.claimed.to_dict(),
            **{name: getattr(self, name) for name in names},
            "estimate": {name: round(value, 6) for name, value in asdict(self.estimate).items()},
            "refuted": self.refuted,
            "exceeded": self.exceeded,
        }


def of_runs(
    plan: Plan, records: Sequence[CanaryRecord], delta: float, confidence: float
) -> list[ObserverAudit]:
    """A view for every rigorous guarantee of a run, of the smallest epsilon at `delta`."""
    e = plan.experiment
    names = rigorous(e.privacy.accountants)
    rounds = max(int(record.plan.composed_rounds[-1]) for record in records)
    most = max((times for record in records for times in record.counts.values()), default=0)
    views = []
    for seen in observers(on_sums(plan), e.relation, rounds, most):
        claimed = _claimed(seen, names, delta)
        if claimed is None:
            continue
        mechanism = seen.mechanism
        q = mechanism.sampling.q if mechanism.sampling.hidden else None
        single = seen.observer is Observer.UPDATES
        parts, imagined = zip(*(_scores(record, q, single) for record in records), strict=True)
        columns = ([getattr(part, field.name) for part in parts] for field in fields(Scores))
        scores = Scores(*map(np.concatenate, columns))
        worst = _worst(mechanism, seen.rounds)
        mirrored = seen.relation == "replace_one"
        everything = np.concatenate(imagined)
        views.append(view(scores, everything, claimed, worst, mirrored, confidence))
    return views


def least_deltas(records: Sequence[CanaryRecord], views: Sequence[ObserverAudit]) -> list[Held]:
    """What views claim of all runs, and what single runs print, with the least deltas."""
    claimed = [view.claimed for view in views]
    held = []
    printed = [(list(record.printed), [record]) for record in records]
    for claims, runs in [(claimed, list(records)), *printed]:
        most = max((times for run in runs for times in run.counts.values()), default=0)
        rounds = max(int(run.plan.composed_rounds[-1]) for run in runs)
        for claim in smallest(claims):
            times = most if claim.sampling.participations else rounds
            held.append((claim, _least(runs[0].plan, claim, times)))
    return held


def smallest(claims: Sequence[Guarantee]) -> list[Guarantee]:
    """Of claims that differ in their epsilons alone the smallest; formulas are left out."""
    alike: dict[tuple, Guarantee] = {}
    for claim in claims:
        key = (claim.observer, claim.sampling, claim.relation, claim.delta)
        before = alike.setdefault(key, claim)
        if not claim.formula and (before.formula or claim.epsilon < before.epsilon):
            alike[key] = claim
    return [one for one in alike.values() if not one.formula and math.isfinite(one.epsilon)]


def _least(plan: Plan, claimed: Guarantee, times: int) -> float | None:
    """The least delta at the epsilon of a claim about `times` rounds of a client, or all rounds;
    None where it may be drawn several times by a user-defined sampling scheme.
    """
    updates = on_sums(plan)
    noise = plan.experiment.noise
    single = claimed.observer is Observer.UPDATES
    deltas = [
        query.bound / (noise.client_std(query.std, plan.clients_left) if single else query.std)
        for query in updates.queries
    ]
    mu = (2 if claimed.relation == "replace_one" else 1) * math.sqrt(sum(x * x for x in deltas))
    sampling = updates.sampling
    drawn = CERTAIN
    if not single and claimed.sampling.knows == "cohort hidden":
        if sampling.repeats and is_user_defined(type(sampling.scheme)):
            return None
        drawn = presence(sampling.q)
        if sampling.repeats:
            drawn = presence(1 / sampling.population, sampling.cohort)
    return least_delta(claimed.epsilon, mu, drawn, times)


def _claimed(seen: ObserverView, names: Sequence[str], delta: float) -> Guarantee | None:
    """The smallest epsilon guaranteed against an observer; None: no accountant covers it."""
    if not seen.rounds:
        return None
    spent = {
        name: epsilon(seen.mechanism, seen.relation, delta, seen.rounds, name)
        for name in names
        if not covers(name, seen.mechanism, seen.relation)
    }
    if not spent:
        return None
    name = min(spent, key=spent.__getitem__)
    return seen.guarantee(name, spent[name], delta)


def view(
    scores: Scores,
    imagined: np.ndarray,
    claimed: Guarantee,
    worst: float,
    mirrored: bool,
    confidence: float,
) -> ObserverAudit:
    """The finding for one observer. `imagined` is the evidence on simulated canaries, `worst` the
    exposure of the canary that the claim is about.
    """
    m = len(scores.inside)
    guesses = guesses_for(imagined, m, claimed.delta, confidence)
    order = np.argsort(-np.abs(scores.evidence), kind="stable")[:guesses]
    right = int(((scores.evidence > 0) == scores.inside)[order].sum())
    lower = one_run_bound(m, guesses, right, claimed.delta, confidence)
    there = scores.shifts > 0
    if not (there & scores.inside).any():
        expected = "more of them, or more rounds: no canary took part in the run"
        raise ConfigError("canaries", m, expected)
    statistics = scores.statistics[there]
    inside = scores.inside[there]
    estimate = one_shot(statistics, scores.shifts[there], inside, mirrored, worst, claimed.delta)
    return ObserverAudit(
        claimed, m, guesses, right, lower, confidence, estimate, statistics, inside
    )


def _worst(mechanism: Mechanism, times: int) -> float:
    """By how much the client of the claim should move its statistic: q sqrt(rounds) c / std."""
    updates = mechanism.queries[0]
    share = mechanism.sampling.q if mechanism.sampling.hidden else 1.0
    return share * math.sqrt(times) * updates.bound / updates.std


def _scores(record: CanaryRecord, q: float | None, single: bool) -> tuple[Scores, np.ndarray]:
    """The scores of one run, and the evidence on as many canaries simulated by the claim, float64
    [k].

    `q` is the probability of being in a round's cohort; None: the observer knows it.
    """
    canaries = record.canaries
    made_up = stream(canaries.seed, Purpose.CANARY, step=3)
    signs = np.where(
        made_up.random(len(canaries.clients)) < 0.5, 1.0, -1.0 if canaries.mirrored else 0.0
    )
    if q is not None:
        a = record.amplitudes * _available(record)
        there = signs[:, None] * (made_up.random(a.shape) < q)
        return _hidden(record, _whitened(record, record.scores, adjoint=True), a, q), _hidden(
            record, made_up.standard_normal(a.shape) + there * a, a, q
        ).evidence
    if single:
        product = record.single
        power = record.single_power
    else:
        pattern = _whitened(record, record.times * record.amplitudes)
        product = (pattern * record.scores).sum(1)
        power = (pattern**2).sum(1)
    shifts = np.sqrt(power)
    imagined = shifts * made_up.standard_normal(len(signs)) + signs * power
    return _visible(record, product, shifts), _visible(record, imagined, shifts).evidence


def _visible(record: CanaryRecord, product: np.ndarray, shifts: np.ndarray) -> Scores:
    """From the products of scores with what a canary adds to them: N(shifts^2, shifts^2)."""
    evidence = 2 * product if record.canaries.mirrored else product - shifts**2 / 2
    return Scores(
        record.canaries.inside,
        evidence,
        np.divide(product, shifts, out=np.zeros_like(product), where=shifts > 0),
        shifts,
    )


def _hidden(record: CanaryRecord, scores: np.ndarray, a: np.ndarray, q: float) -> Scores:
    """From the scores of rounds, N(a, 1) with probability `q` for a canary that is inside."""

    def ratio(sign: float) -> np.ndarray:
        there = sign * a * scores - a**2 / 2
        return np.logaddexp(math.log1p(-q), math.log(q) + there) if q < 1 else there

    evidence = (ratio(1.0) - (ratio(-1.0) if record.canaries.mirrored else 0.0)).sum(1)
    power = np.sqrt((a**2).sum(1))
    return Scores(record.canaries.inside, evidence, (a * scores).sum(1) / power, q * power)


def _available(record: CanaryRecord) -> np.ndarray:
    """Bool [k, T]: the rounds in which it is public that a canary can be in the cohort."""
    e = record.plan.experiment
    clients = record.canaries.clients
    return np.stack([e.selection.open_to(clients, t) for t in range(e.rounds)], axis=1)


def _whitened(record: CanaryRecord, rows: np.ndarray, adjoint: bool = False) -> np.ndarray:
    """C x for every row x of float64 [k, T]: what a participation adds to the whitened sums of its
    round and those after it. `adjoint`: C^T x, all that whitened sums x say about a participation.
    """
    rounds = rows.shape[1]
    total = np.zeros_like(rows)
    for j, c in enumerate(record.plan.experiment.noise.whitening()):
        if adjoint:
            total = total + c * np.pad(rows, ((0, 0), (0, j)))[:, j : j + rounds]
        else:
            total = total + c * np.pad(rows, ((0, 0), (j, 0)))[:, :rounds]
    return total
