"""What an observer of a guarantee can tell about canaries, compared with what it claims.

Evidence is the log-likelihood ratio of a canary's two worlds for all of its scores, so no guesser
does better; the guesses are its signs, where it is largest. If the cohort is hidden, a round's
ratio is that of a mixture, with probability q; if not, and for single updates, only the rounds in
which the canary takes part count.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from raydpfl.audit.bounds import (
    Family,
    OneShot,
    TradeOffCurve,
    curve_bound,
    gaussian_curve,
    one_run_bound,
    one_shot,
    optimal_guess_count,
)
from raydpfl.audit.client_canaries import ClientCanaryRun, sum_mechanism
from raydpfl.audit.privacy_curve import CERTAIN, ClaimDelta, delta_lower_bound, presence
from raydpfl.config.user_classes import is_user_defined
from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.noise import whitening_matrix
from raydpfl.privacy import (
    Guarantee,
    TradeOff,
    covers,
    epsilon,
    gaussian_epsilon,
    rigorous,
    tradeoff,
)
from raydpfl.privacy.guarantee import Observer
from raydpfl.privacy.observers import ObserverView
from raydpfl.privacy.observers import views as observers
from raydpfl.simulation.plan import Plan

EXCEEDS = 4.0  # standard errors by which an estimate must pass the claim to speak against it
FALSE_ALARM = 3.2e-5  # how often chance alone takes a sound run there


@dataclass(frozen=True)
class Scores:
    """What one observer knows about m canaries: float64 [m], `inside` bool [m]."""

    inside: np.ndarray
    evidence: np.ndarray  # log-likelihood ratio, inside against outside
    statistics: np.ndarray  # N(0, 1) for a canary that is not there
    shifts: np.ndarray  # by how much one that is there should move it
    simulated_evidence: np.ndarray  # the evidence on as many canaries, simulated by the claim


def visible_scores(
    inside: np.ndarray,
    product: np.ndarray,
    power: np.ndarray,
    mirrored: bool,
    seed: int,
    initial_power: np.ndarray | None = None,
) -> Scores:
    """Where the observer knows when canaries take part: from the products of scores with what a
    canary adds to them, N(power, power), float64 [m] both. `initial_power` [m] is about the power,
    known before anything is seen, where the power itself is not.
    """
    shifts = np.sqrt(power)
    generator, signs = _worlds(seed, len(inside), mirrored)
    initial_power = power if initial_power is None else initial_power
    normals = generator.standard_normal(len(signs))
    simulated_product = np.sqrt(initial_power) * normals + signs * initial_power
    evidence, simulated_evidence = (
        2 * row if mirrored else row - shifts**2 / 2 for row in (product, simulated_product)
    )
    statistics = np.divide(product, shifts, out=np.zeros_like(product), where=shifts > 0)
    return Scores(inside, evidence, statistics, shifts, simulated_evidence)


def hidden_scores(
    inside: np.ndarray, scores: np.ndarray, a: np.ndarray, q: float, mirrored: bool, seed: int
) -> Scores:
    """Where the cohort is a secret: from the scores of rounds, N(a, 1) with probability `q` for a
    canary that is inside, float64 [m, T] both.
    """

    def evidence(scores: np.ndarray) -> np.ndarray:
        def ratio(sign: float) -> np.ndarray:
            log_ratio = sign * a * scores - a**2 / 2
            return np.logaddexp(math.log1p(-q), math.log(q) + log_ratio) if q < 1 else log_ratio

        return (ratio(1.0) - (ratio(-1.0) if mirrored else 0.0)).sum(1)

    generator, signs = _worlds(seed, len(inside), mirrored)
    simulated_presence = signs[:, None] * (generator.random(a.shape) < q)
    simulated_scores = generator.standard_normal(a.shape) + simulated_presence * a
    power = np.sqrt((a**2).sum(1))
    statistics = (a * scores).sum(1) / power
    return Scores(inside, evidence(scores), statistics, q * power, evidence(simulated_scores))


def _worlds(seed: int, m: int, mirrored: bool) -> tuple[np.random.Generator, np.ndarray]:
    """What simulates m canaries, and their signs."""
    generator = stream(seed, Purpose.CANARY, step=3)
    return generator, np.where(generator.random(m) < 0.5, 1.0, -1.0 if mirrored else 0.0)


@dataclass(frozen=True)
class ObserverAudit:
    """What is `claimed`, the bounds that the guesses prove, and an `estimate`."""

    claimed: Guarantee
    canaries: int
    guesses: int
    right: int
    lower: float  # of any mechanism: (epsilon, delta) below it is refuted
    # of the claimed trade-off curve, at any noise: those of a smaller epsilon are refuted
    lower_of_curve: float | None  # None: not looked at
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
    def proven(self) -> float:
        """The larger of both lower bounds: of any mechanism, and of the claimed curve."""
        return max(self.lower, self.lower_of_curve or 0.0)

    @property
    def refuted(self) -> bool:
        """Whether the claim is below what is proven."""
        return self.proven > self.claimed.epsilon

    @property
    def exceeded(self) -> bool:
        """Whether the estimate exceeds the claim by more than chance explains."""
        mu = max(self.estimate.mu - EXCEEDS * self.estimate.error, 0.0)
        return mu > 0 and float(gaussian_epsilon(mu, self.claimed.delta)) > self.claimed.epsilon

    def to_dict(self) -> dict[str, Any]:
        names = ("canaries", "guesses", "right", "lower", "lower_of_curve", "reach", "confidence")
        return {
            "claimed": self.claimed.to_dict(),
            **{name: getattr(self, name) for name in names},
            "estimate": {name: round(value, 6) for name, value in asdict(self.estimate).items()},
            "refuted": self.refuted,
            "exceeded": self.exceeded,
        }


def audit_observers(
    plan: Plan, runs: Sequence[ClientCanaryRun], delta: float, confidence: float
) -> list[ObserverAudit]:
    """A view for every rigorous guarantee of a run, of the smallest epsilon at `delta`."""
    names = rigorous(plan.experiment.privacy.accountants)
    relation = plan.experiment.relation
    views = []
    for case in observers(sum_mechanism(plan), relation, *_max_counts(runs)):
        # none where no accountant covers it
        epsilons = {
            name: epsilon(case.mechanism, case.relation, delta, case.rounds, name)
            for name in names
            if case.rounds and not covers(name, case.mechanism, case.relation)
        }
        if not epsilons:
            continue
        name = min(epsilons, key=epsilons.__getitem__)
        mechanism = case.mechanism
        q = mechanism.sampling.q if mechanism.sampling.hidden else None
        parts = [_scores(run, q, case.observer is Observer.UPDATES) for run in runs]
        columns = ([getattr(part, field.name) for part in parts] for field in fields(Scores))
        # by how much the client of the claim should move its statistic
        updates = mechanism.queries[0]
        # of the rounds with least noise
        factors = sorted(mechanism.factors or [1.0] * case.rounds)[: case.rounds]
        exposure = (1.0 if q is None else q) * updates.bound / updates.std
        exposure *= math.sqrt(sum(factor**-2 for factor in factors))
        scores = Scores(*map(np.concatenate, columns))
        claim = case.guarantee(name, epsilons[name], delta)
        mirrored = case.relation == "replace_one"
        views.append(view(scores, claim, exposure, mirrored, confidence, _family(case, name)))
    return views


def _family(case: ObserverView, accountant: str) -> Family:
    """The mechanism that an observer sees, at any noise."""

    def at(noise: float) -> tuple[TradeOffCurve, Callable[[float], float]]:
        mechanism = case.mechanism.with_noise(case.mechanism.noise_multiplier * noise)
        facts = (mechanism, case.relation)
        return curve_of(tradeoff(*facts, case.rounds, accountant)), lambda delta: epsilon(
            *facts, delta, case.rounds, accountant
        )

    return at


def curve_of(tradeoff: TradeOff) -> TradeOffCurve:
    """A trade-off curve, for one rate at a time."""
    if tradeoff.mu is not None:
        return gaussian_curve(tradeoff.mu)
    return lambda rate: float(tradeoff.false_negatives(rate))


def delta_lower_bounds(
    runs: Sequence[ClientCanaryRun], views: Sequence[ObserverAudit]
) -> list[ClaimDelta]:
    """What views claim of all runs, and what single runs print, with the least deltas."""
    claim_deltas = []
    printed_claims = [(list(run.printed), [run]) for run in runs]
    for claims, claim_runs in [([view.claimed for view in views], list(runs)), *printed_claims]:
        rounds, max_participations = _max_counts(claim_runs)
        for claim in smallest_claims(claims):
            times = max_participations if claim.sampling.participations else rounds
            claim_deltas.append((claim, _claim_delta_bound(claim_runs[0].plan, claim, times)))
    return claim_deltas


def _max_counts(runs: Sequence[ClientCanaryRun]) -> tuple[int, int]:
    """The most rounds that any run composes, and that any client was in."""
    rounds = max(int(run.plan.composed_rounds[len(run.rounds) - 1]) for run in runs)
    counts = [times for run in runs for times in run.state.participations.values()]
    return rounds, max(counts, default=0)


def smallest_claims(claims: Sequence[Guarantee]) -> list[Guarantee]:
    """Of claims that differ in their epsilons alone the smallest; formulas are left out."""
    unique_claims: dict[tuple, Guarantee] = {}
    for claim in sorted(claims, key=lambda claim: claim.epsilon):
        if not claim.formula and math.isfinite(claim.epsilon):
            key = (claim.observer, claim.sampling, claim.relation, claim.delta)
            unique_claims.setdefault(key, claim)
    return list(unique_claims.values())


def _claim_delta_bound(plan: Plan, claim: Guarantee, times: int) -> float | None:
    """The least delta at the epsilon of a claim about `times` rounds of a client, or all rounds;
    None where its rounds depend on each other, it may be drawn several times by a user-defined
    sampling scheme, or what is claimed is no Gaussian of the same size for all.
    """
    updates = sum_mechanism(plan)
    noise = plan.experiment.noise
    is_single = claim.observer is Observer.UPDATES
    deltas = [query.bound / query.std for query in updates.queries]
    if is_single:  # of a sum each client draws its part
        stds = [noise.client_std(query.std, plan.clients_left) for query in updates.sums]
        deltas = [query.bound / std for query, std in zip(updates.sums, stds, strict=True)]
        deltas += [query.bound / query.std for query in updates.queries if query.per_client]
    # in the round with most noise
    deltas = [sensitivity / max(updates.factors, default=1.0) for sensitivity in deltas]
    mu = (2 if claim.relation == "replace_one" else 1) * math.sqrt(sum(x * x for x in deltas))
    sampling = updates.sampling
    is_hidden = not is_single and claim.sampling.knows == "cohort hidden"
    is_truncated = sampling.size_secret and sampling.coins is None
    if (
        updates.integer
        or updates.laplace
        or plan.individual
        or (is_hidden and (updates.squares or is_truncated))
    ):
        return None
    if not is_hidden:
        amount = float(updates.event(plan.experiment.relation).effective_counts(times))
        return delta_lower_bound(claim.epsilon, mu, CERTAIN, amount)
    if sampling.coins is not None and claim.relation == "replace_one":
        mu /= 2  # by one that sends nothing: whether it is there is a coin's matter, too
    if sampling.epoch or (sampling.repeats and is_user_defined(type(sampling.scheme))):
        return None
    draw_probabilities = presence(sampling.q)
    if sampling.repeats:
        draw_probabilities = presence(1 / sampling.population, sampling.cohort)
    return delta_lower_bound(claim.epsilon, mu, draw_probabilities, times)


def view(
    scores: Scores,
    claim: Guarantee,
    worst: float,
    mirrored: bool,
    confidence: float,
    family: Family | None,
) -> ObserverAudit:
    """The finding for one observer. Raises `ConfigError` where no canary took part.

    Args:
        worst: the exposure of the canary that the claim is about.
        family: the claimed trade-off curve at any noise; None: it is not looked at.
    """
    m = len(scores.inside)
    guesses = optimal_guess_count(scores.simulated_evidence, m, claim.delta, confidence)
    order = np.argsort(-np.abs(scores.evidence), kind="stable")[:guesses]
    hits = int(((scores.evidence > 0) == scores.inside)[order].sum())
    bound_arguments = (m, guesses, hits, claim.delta, confidence)
    lower = one_run_bound(*bound_arguments)
    lower_of_curve = None if family is None else curve_bound(*bound_arguments, family, 1e-4)
    is_present = scores.shifts > 0
    if not (is_present & scores.inside).any():
        expected = "more of them, or more rounds: no canary took part in the run"
        raise ConfigError("canaries", m, expected)
    statistics = scores.statistics[is_present]
    inside = scores.inside[is_present]
    estimate = one_shot(statistics, scores.shifts[is_present], inside, mirrored, worst, claim.delta)
    return ObserverAudit(
        claim, m, guesses, hits, lower, lower_of_curve, confidence, estimate, statistics, inside
    )


def _scores(run: ClientCanaryRun, q: float | None, single: bool) -> Scores:
    """The scores of one run. `q` is the probability of being in a round's cohort; None: the
    observer knows it. `single`: it sees every single update.
    """
    canaries = run.canaries
    worlds = canaries.mirrored, canaries.seed
    if q is not None:
        # where it is public that a canary can be in the cohort
        selection = run.experiment.selection
        eligibility = [selection.open_to(canaries.clients, t) for t in run.rounds]
        a = run.amplitudes * np.stack(eligibility, axis=1)
        return hidden_scores(canaries.inside, _whiten_rows(run, run.scores, True), a, q, *worlds)
    if single:
        return visible_scores(canaries.inside, run.single, run.single_power, *worlds)
    pattern = _whiten_rows(run, run.times * run.amplitudes)
    product = (pattern * run.scores).sum(1)
    return visible_scores(canaries.inside, product, (pattern**2).sum(1), *worlds)


def _whiten_rows(run: ClientCanaryRun, rows: np.ndarray, adjoint: bool = False) -> np.ndarray:
    """C x for every row x of float64 [k, T]: what a participation adds to the whitened sums of its
    round and those after it. `adjoint`: C^T x, all that whitened sums x say about a participation.
    """
    noise = run.experiment.noise
    if not noise.correlated:
        return rows
    matrix = whitening_matrix(noise, rows.shape[1])
    return rows @ (matrix if adjoint else matrix.T)
