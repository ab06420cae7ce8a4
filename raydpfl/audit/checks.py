"""Checks of an audit, in addition to its canaries' guesses: is what ran what was accounted for?

All that goes into an audited round but its noise is recorded, so the noise itself can be tested.
Exact checks never raise a false alarm. A statistical check, all its comparisons together, raises
one in at most `alarm` of sound runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.stats import binom, kstest

from raydpfl.audit.canaries import ROUNDING, CanaryRun
from raydpfl.audit.client_canaries import ClientCanaryRun, sum_mechanism
from raydpfl.audit.privacy_curve import ClaimDelta
from raydpfl.check.contract import largest_correlation, normal_limit
from raydpfl.methods.noise import Whitening, whitening_matrix
from raydpfl.methods.selection import Cohort
from raydpfl.simulation.noise_monitor import tail
from raydpfl.simulation.plan import Plan
from raydpfl.training.backends.base import StepNoise

FALSE_ALARM = 1e-4  # of one check on a sound run
_CURVE = 1e-3  # relative, of delta: what two exact computations may differ by
# parameters, rounds, clients of a round, and steps that noise is drawn for by itself
WIDE, DRAWN_ROUNDS, DRAWN_CLIENTS, DRAWN_STEPS = 8192, 200, 5, 6
_MOST = 2_000_000  # numbers that the test of normality looks at


@dataclass(frozen=True)
class Check:
    """One check; `false_alarm` bounds the probability that a sound run fails it."""

    name: str
    passed: bool
    finding: str
    false_alarm: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "passed", bool(self.passed))

    def line(self) -> str:
        """Its outcome, for a terminal."""
        return f"{'passed' if self.passed else 'FAILED'}  {self.name}: {self.finding}"


def check_runs(runs: Sequence[ClientCanaryRun], alarm: float = FALSE_ALARM) -> list[Check]:
    """All checks that the runs allow, each with this probability of a false alarm at most."""
    results = [ledger(runs), cohorts(runs, alarm), matrix(runs)]
    if runs[0].plan.lattice is not None:  # the runs of a replay, which sees integers exactly
        noise_check = noise_of_sums if runs[0].squares else noise_of_updates
        results += [sums(runs), noise_check(runs, alarm)]
    else:
        results += [bounds(runs, alarm), sums(runs)]
        noise_checks = (noise_of_sums, noise_of_updates, noise_of_answers, noise_of_histograms)
        results += [check(runs, alarm) for check in (grid, *noise_checks, keys, normality)]
    return [check for check in results if check is not None]


def ledger(runs: Sequence[CanaryRun]) -> Check:
    """Every round that was released stands in the ledger, from before its clients were asked, with
    the std that the accountants have, if any, and the epsilon that they give.
    """
    fault = next((run.ledger_fault for run in runs if run.ledger_fault), "")
    rounds = sum(len(run.rounds) for run in runs)
    noise = "their noise and " if runs[0].accounted_stds() else ""
    finding = f"all {rounds} released rounds are recorded before they begin, with {noise}what they"
    return Check("ledger", not fault, fault or f"{finding} spend")


def curve(claim_deltas: Sequence[ClaimDelta]) -> Check | None:
    """No epsilon that is claimed is below what the accounted mechanism has, by a computation that
    asks no accountant (`raydpfl.audit.privacy_curve`). None where that knows none of the
    mechanisms.
    """
    shares = [(bound / claim.delta, claim) for claim, bound in claim_deltas if bound is not None]
    if not shares:
        return None
    share, claim = max(shares, key=lambda pair: pair[0])
    finding = f"at the epsilons that are claimed delta is at least {share:.3g} of that claimed"
    if share > 1 + _CURVE:
        text = f"delta is at least {share * claim.delta:.4g}, where {claim.delta:g} is claimed"
        finding = f"against an observer of {claim.observer} at epsilon {claim.epsilon:.4g} {text}"
    return Check("curve", share <= 1 + _CURVE, finding)


def cohorts(runs: Sequence[ClientCanaryRun], alarm: float = FALSE_ALARM) -> Check | None:
    """As many clients take part as the accountants believe, and none of them in more rounds than
    chance gives it. None where clients are not all alike, or take turns.
    """
    plan = runs[0].plan
    sampling = sum_mechanism(plan).sampling
    population = len(plan.population)
    is_homogeneous = sampling.population == population and plan.experiment.noise.stands_for is None
    if not is_homogeneous or sampling.by_participation or sampling.repeats:
        return None
    sizes = np.concatenate([run.cohorts for run in runs])
    misfits = sizes[sizes != sampling.size]
    if sampling.size is not None and len(misfits):
        finding = f"a cohort has {misfits[0]} clients, where the accountants have {sampling.size}"
        return Check("cohorts", False, finding)
    rounds = len(runs[0].rounds)
    counts = [(times, client) for run in runs for client, times in run.state.participations.items()]
    times, client = max(counts, default=(0, 0))
    anomaly = ""
    # each of the two spends half of the false alarms
    if sampling.q < 1:
        p_value = binom.sf(times - 1, rounds, sampling.q) * population * len(runs)
        text = f"client {client} took part in {times} of {rounds} rounds, at q = {sampling.q:.4g}"
        anomaly = text if p_value < alarm / 2 else ""
    if sampling.coins is not None:
        total = int(sizes.sum())
        chance = binom(population * len(sizes), sampling.coins)
        if min(chance.cdf(total), chance.sf(total - 1)) < alarm / 4:
            expectation = f"{chance.mean():.0f} were to be expected"
            anomaly = f"{total} clients took part in all, where {expectation}"
    finding = f"no client took part more often than {times} times"
    finding = anomaly or f"cohorts have the size that was accounted for; {finding}"
    return Check("cohorts", not anomaly, finding, alarm)


def matrix(runs: Sequence[ClientCanaryRun]) -> Check | None:
    """Where noise is correlated over the rounds: what a client's participations come to in the sums
    that the noise is independent in is no longer than what is accounted for.
    None where rounds have noise of their own, or draw a client several times.
    """
    plan = runs[0].plan
    if not plan.experiment.noise.correlated or sum_mechanism(plan).sampling.repeats:
        return None
    times = np.concatenate([run.times for run in runs])[:, : len(runs[0].rounds)]
    matrix = whitening_matrix(plan.experiment.noise, times.shape[1])
    overlaps = np.abs(matrix.T @ matrix)
    patterns = np.concatenate([times, np.eye(times.shape[1])])  # each round by itself, too
    squares = ((patterns @ overlaps) * patterns).sum(1)
    limits = np.array((0.0, *sum_mechanism(plan).squares))  # by participations, up to the most
    participations = np.minimum(patterns.sum(1).astype(np.int64), len(limits) - 1)
    row_limits = limits[participations]
    shares = np.divide(squares, row_limits, out=np.zeros_like(squares), where=participations > 0)
    max_ratio = math.sqrt(shares.max())
    finding = f"a client moves whitened sums by {max_ratio:.6g} times what is accounted for at most"
    return Check("matrix", max_ratio <= 1 + ROUNDING, finding)


def bounds(runs: Sequence[ClientCanaryRun], alarm: float = FALSE_ALARM) -> Check:
    """No contribution is longer than the bound that was accounted for. Where clients draw noise on
    it: no canary's has more along its own direction than the bound lets it have.
    """
    measurements = [(value, t, client) for run in runs for t, client, value in run.along]
    has_client_noise = runs[0].by_client  # else the contribution bare, in bounds
    if has_client_noise:
        deviation, t, client = max(measurements, key=lambda row: abs(row[0]), default=(0.0, 0, 0))
        is_bounded = abs(deviation) <= normal_limit(len(measurements), alarm)
        distance = f"{abs(deviation):.1f} stds of its noise from its bound"
    else:
        excess, t, client = max(measurements, default=(-1.0, 0, 0))
        is_bounded = excess <= ROUNDING
        distance = f"{1 + excess:.6g} times its bound"
    finding = f"client {client} sent {distance} in round {t}"
    if is_bounded:
        finding = f"no contribution goes further than {distance}"
    return Check("bounds", is_bounded, finding, alarm if has_client_noise else 0.0)


def sums(runs: Sequence[ClientCanaryRun]) -> Check:
    """What the coordinator sums up is what the clients sent, all of it once."""
    error = max(run.sum_error for run in runs)
    finding = f"sums differ from what the clients sent by {error:.1e} of the noise's std at most"
    return Check("sums", error <= ROUNDING, finding)


def grid(runs: Sequence[ClientCanaryRun], alarm: float = FALSE_ALARM) -> Check | None:
    """Contributions are rounded to no coarser grid than `raydpfl.core.exact_sum` declares, by the
    digits of what clients send. None where nothing was sent that has random digits.
    """
    counts = [(log_ratio, count) for run in runs for log_ratio, count in run.grids]
    if not counts:
        return None
    # a coordinate is a multiple of 2^k steps by chance with probability 2^-k
    excess_bits = [
        log_ratio - math.ceil(math.log2(len(counts) / alarm) / count) for log_ratio, count in counts
    ]
    peak = max(log_ratio for log_ratio, _ in counts)
    finding = f"contributions are rounded to at most {2.0 ** max(peak, 0.0):.4g} times the grid "
    return Check("grid", max(excess_bits) <= 0, finding + "that is declared", alarm)


def noise_of_sums(runs: Sequence[ClientCanaryRun], alarm: float = FALSE_ALARM) -> Check:
    """The squared norm of a round's noise is chi-squared with the std that accountants have."""
    rounds = (zip(run.rounds, run.squares, strict=True) for run in runs)
    squares = [(square, f"round {t}") for pairs in rounds for t, square in pairs]
    return _check_chi_square("noise of sums", runs[0].plan.d, squares, alarm)


def noise_of_draws(plan: Plan, cohorts: Sequence[Cohort], alarm: float = FALSE_ALARM) -> Check:
    """What the noise member draws in rounds of these cohorts for a model of `WIDE` parameters, as
    few rounds of a smaller one show little of its std: on their sums, or of each client.
    """
    noise = plan.experiment.noise
    d = WIDE
    server_noise, whiten = noise.on_server(plan.noise_seed, d), Whitening(noise)
    std = 1.0 if plan.lattice is None else plan.lattice.std  # of the sum; in steps
    client_std = noise.client_std(std, 1)
    squares = []
    for t, cohort in enumerate(cohorts[:DRAWN_ROUNDS]):
        client_draws = cohort.clients[:DRAWN_CLIENTS], cohort.draws[:DRAWN_CLIENTS]
        sum_noise = server_noise.on_sum(t, std)
        rows = [] if sum_noise is None else [whiten(noise.scores(sum_noise, std))]
        if client_std:
            client_noise = noise.on_clients(plan.noise_seed, t, *client_draws, client_std, d)
            rows += [] if client_noise is None else list(noise.scores(client_noise, client_std))
        squares += [(float(row @ row), f"a draw of round {t}") for row in rows]
    if not squares:
        return Check("noise of draws", False, "none is drawn")
    return _check_chi_square("noise of draws", d, squares, alarm)


def noise_of_steps(plan: Plan, alarm: float = FALSE_ALARM) -> list[Check]:
    """What local steps draw of their keys, for a model of `WIDE` parameters: it has the std asked
    for, and no two steps, clients or rounds share it.
    """
    count = min(DRAWN_STEPS, len(plan.population))
    clients = np.arange(count)
    steps = plan.experiment.local.step_counts(plan.population.sizes[clients])
    rows, names = [], []
    for t in range(min(DRAWN_STEPS, plan.experiment.rounds)):
        key = plan.noise_seed, t, clients, np.zeros(count, np.int64), np.ones(count)
        noise = StepNoise(*key, WIDE, torch.device("cpu"))
        for step in range(min(DRAWN_STEPS, int(steps.max(initial=0)))):
            rows.append(noise(list(range(count)), step).double().numpy())
            names += [f"step {step} of client {client} in round {t}" for client in clients]
    if not rows:
        return []
    draws = np.concatenate(rows)
    squares = zip(np.square(draws).sum(1).tolist(), names, strict=True)
    check = _check_chi_square("noise of steps", WIDE, list(squares), alarm)
    peak, first_draw, later_draw = largest_correlation(draws)
    is_uncorrelated = peak <= normal_limit(math.comb(len(draws), 2), alarm)
    finding = f"the largest correlation of {len(draws)} draws is {peak:.1f} standard errors"
    finding += "" if is_uncorrelated else f", of {names[first_draw]} and {names[later_draw]}"
    return [check, Check("keys of steps", is_uncorrelated, finding, alarm)]


def noise_of_updates(runs: Sequence[ClientCanaryRun], alarm: float = FALSE_ALARM) -> Check | None:
    """The same for the noise that clients draw; None where none does."""
    if not runs[0].by_client:
        return None
    updates = [update for run in runs for update in run.update_squares]
    squares = [(square, f"client {client} in round {t}") for t, client, square in updates]
    return _check_chi_square("noise of updates", runs[0].plan.d, squares, alarm)


def noise_of_answers(runs: Sequence[ClientCanaryRun], alarm: float = FALSE_ALARM) -> Check | None:
    """The same for the noise on the sums of the answers to side queries, in the rounds and in more
    draws like theirs. No answer passes its bound, no two queries share their noise, and the bound
    that adapts follows from nothing else. None where nothing is asked.
    """
    name = "noise of answers"
    queries = sum_mechanism(runs[0].plan).sums[1:]
    if not queries:
        return None
    for run in runs:
        if run.bound_fault:
            return Check(name, False, run.bound_fault)
        unanswered_queries = [query.name for query in queries if not run.answers.get(query.name)]
        if unanswered_queries and sum(run.cohorts):
            detail = f"{unanswered_queries[0]} is accounted for, and its answers were not seen"
            return Check(name, False, detail)
    longest = max((length, name) for run in runs for name, length in run.longest.items())
    if longest[0] > 1 + ROUNDING:
        detail = f"an answer to {longest[1]} is {longest[0]:.6g} times its bound"
        return Check(name, False, detail)
    draws = {
        query.name: np.concatenate([run.answers[query.name] for run in runs]) for query in queries
    }
    noise_fault = _find_noise_fault(draws, alarm)
    if noise_fault:
        return Check(name, False, noise_fault, alarm)
    peak, first, second = largest_correlation(np.stack([*draws.values()]))
    if peak > normal_limit(math.comb(len(draws), 2), alarm):
        pair = " and ".join([*draws][place] for place in (first, second))
        detail = f"the noise on {pair} is correlated, by {peak:.1f} standard errors"
        return Check(name, False, detail, alarm)
    squares = [(float(values @ values), f"the sums of {query}") for query, values in draws.items()]
    count = len(next(iter(draws.values())))
    check = _check_chi_square(name, count, squares, alarm)
    return replace(check, finding=f"{check.finding} of {count} draws", false_alarm=3 * alarm)


def _find_noise_fault(draws: Mapping[str, np.ndarray], alarm: float) -> str:
    """A draw that repeats another, or that has next to no noise, which is lost among many others,
    in words; empty: none.
    """
    for query, values in draws.items():
        if len(np.unique(values)) < len(values):
            return f"noise on {query} is drawn twice, or there is none"
        if not len(values):
            continue
        place = int(np.abs(values).argmin())
        min_magnitude = float(abs(values[place]))
        if math.erf(min_magnitude / math.sqrt(2)) * len(values) * len(draws) < alarm:
            return f"the sum of {query} has {min_magnitude:.2g} stds of noise in draw {place}"
    return ""


def noise_of_histograms(
    runs: Sequence[ClientCanaryRun], alarm: float = FALSE_ALARM
) -> Check | None:
    """The same for the noise on all histograms of scores together, which have few bins each, and
    more like them; and one client less moves them by 1. None where there are none.
    """
    name = "noise of histograms"
    histogram = runs[0].plan.experiment.evaluate.histogram
    squares = [square for run in runs for square in run.surveys]
    if histogram is None or not squares:
        return None
    max_shift = max(run.max_histogram_shift for run in runs)
    if max_shift > 1 + ROUNDING:
        detail = f"one client less moves the counts by {max_shift:.4g}, where 1 is accounted for"
        return Check(name, False, detail)
    pooled_draw = (sum(squares), f"all {len(squares)}")
    return _check_chi_square(name, histogram.bins * len(squares), [pooled_draw], alarm)


def _check_chi_square(name: str, d: int, draws: Sequence[tuple[float, str]], alarm: float) -> Check:
    """Each of the draws by itself, and all together: half of the false alarms are for either."""
    if not draws:
        return Check(name, True, "no client was there to draw any")
    squares = np.array([square for square, _ in draws])
    tails = tail(squares, d)
    worst = int(np.argmin(tails))
    ratio = math.sqrt(squares[worst] / d)
    no_outlier = tails[worst] * 4 * len(draws) >= alarm
    is_consistent = no_outlier and float(tail(squares.sum(), d * len(draws))) * 4 >= alarm
    finding = f"{math.sqrt(squares.mean() / d):.5f} of the std that was accounted for, over all"
    finding += "" if no_outlier else f"; {ratio:.4g} of it for {draws[worst][1]}"
    return Check(name, is_consistent, finding, alarm)


def keys(runs: Sequence[ClientCanaryRun], alarm: float = FALSE_ALARM) -> Check:
    """No noise is drawn twice: no two vectors of it are correlated."""
    worst = (0.0, "")
    comparisons = 0
    groups = {
        "sums": [noise for run in runs for noise in run.noises],
        "updates": [noise for run in runs for noise in run.update_noises],
    }
    for group, noises in groups.items():
        rows = np.stack(noises) if noises else np.zeros((0, 1))
        rows = rows[rows.any(axis=1)]  # other checks notice a sum without noise
        comparisons += math.comb(len(rows), 2)
        peak, first_row, later_row = largest_correlation(rows)
        worst = max(worst, (peak, f"{group} {first_row} and {later_row} (counted in order)"))
    is_uncorrelated = worst[0] <= normal_limit(comparisons, alarm)
    finding = f"the largest of {comparisons:,} correlations is {worst[0]:.1f} standard errors"
    finding += "" if is_uncorrelated else f", of the noise of {worst[1]}"
    return Check("keys", is_uncorrelated, finding, alarm)


def normality(runs: Sequence[ClientCanaryRun], alarm: float = FALSE_ALARM) -> Check:
    """The noise on the sums is Gaussian, of the std accounted for (Kolmogorov and Smirnov)."""
    values = np.concatenate([noise for run in runs for noise in run.noises])[:_MOST]
    test = kstest(values, "norm")
    distance = f"{test.statistic:.2g} (p = {test.pvalue:.2g})"
    finding = f"the distribution of {len(values):,} coordinates is off by {distance}"
    return Check("normality", test.pvalue >= alarm, finding, alarm)
