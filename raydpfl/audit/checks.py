"""Checks of an audit, in addition to its canaries' guesses: is what ran what was accounted for?

All that goes into an audited round but its noise is recorded, so the noise itself can be tested.
Exact checks never raise a false alarm. A statistical check, all its comparisons together, raises
one in at most `FALSE_ALARM` of sound runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import binom, chi2, kstest

from raydpfl import privacy
from raydpfl.audit.canaries import CanaryRecord, on_sums

if TYPE_CHECKING:
    from raydpfl.audit.observers import Held

FALSE_ALARM = 1e-4  # of one check on a sound run
_ROUNDING = 1e-6  # relative: what float64 and the sums' grid may differ by
_CURVE = 1e-3  # relative, of delta: what two exact computations may differ by
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def of_runs(records: Sequence[CanaryRecord]) -> list[Check]:
    """All checks that the runs allow."""
    checks: list[Callable[[Sequence[CanaryRecord]], Check | None]] = [
        ledger, cohorts, matrix, bounds, sums, grid, noise_of_sums, noise_of_updates,
        noise_of_answers, noise_of_histograms, keys, normality,
    ]  # fmt: skip
    results = [check(records) for check in checks]
    return [check for check in results if check is not None]


def ledger(records: Sequence[CanaryRecord]) -> Check:
    """Every round that was released stands in the ledger, from before its clients were asked, with
    the std that the accountants have and the epsilon that they give.
    """
    for record in records:
        wrong = _unrecorded(record) or record.late
        if wrong:
            return Check("ledger", False, wrong)
    return Check("ledger", True, recorded(sum(len(record.rounds) for record in records), "noise"))


def recorded(rounds: int, *also: str) -> str:
    """That all rounds are in the ledger, in words."""
    what = " and ".join([*(f"their {word}" for word in also), "what they spend"])
    return f"all {rounds} released rounds are recorded before they begin, with {what}"


def _unrecorded(record: CanaryRecord) -> str:
    """What a ledger lacks or has wrong, in words; empty: nothing."""
    plan = record.plan
    entries = {entry["round"]: entry for entry in record.ledger}
    missing = sorted(set(record.rounds) - entries.keys())
    if missing:
        return f"round {missing[0]} was released and is not in the ledger"
    for t, std in zip(record.rounds, record.stds, strict=True):
        written = entries[t]["std"]
        if not math.isclose(written, std, rel_tol=_ROUNDING):
            wrong = f"round {t} is recorded with noise of std {written:.6g}"
            return f"{wrong}; the accountants have {std:.6g}"
    last = entries[max(entries)]["epsilon"]
    composed = int(plan.composed_rounds[len(record.rounds) - 1])
    terms = plan.terms
    for name in plan.named:
        if plan.uncovered(name):
            continue
        truth = 0.0
        if composed:
            mechanism = on_sums(plan).asking(int(plan.surveys[len(record.rounds) - 1]))
            truth = privacy.epsilon(
                mechanism, terms.relation, terms.delta, composed, name, v=terms.v
            )
        if float(last[name]) < truth * (1 - _ROUNDING):
            spent = f"{len(record.rounds)} rounds spend {truth:.6g}"
            return f"epsilon {last[name]:.6g} is recorded ({name}) where {spent}"
    return ""


def curve(held: Sequence[Held]) -> Check | None:
    """No epsilon that is claimed is below what the accounted mechanism has, by a computation that
    asks no accountant (`raydpfl.audit.privacy_curve`). None where that knows none of the
    mechanisms.
    """
    shares = [(least / claim.delta, claim) for claim, least in held if least is not None]
    if not shares:
        return None
    share, claim = max(shares, key=lambda pair: pair[0])
    finding = f"at the epsilons that are claimed delta is at least {share:.3g} of that claimed"
    if share > 1 + _CURVE:
        least = f"delta is at least {share * claim.delta:.4g}, where {claim.delta:g} is claimed"
        finding = f"against an observer of {claim.observer} at epsilon {claim.epsilon:.4g} {least}"
    return Check("curve", share <= 1 + _CURVE, finding)


def cohorts(records: Sequence[CanaryRecord]) -> Check | None:
    """As many clients take part as the accountants believe, and none of them in more rounds than
    chance gives it. None where clients are not all alike, or take turns.
    """
    plan = records[0].plan
    sampling = on_sums(plan).sampling
    population = len(plan.population)
    if sampling.population != population or sampling.by_participation or sampling.repeats:
        return None
    sizes = np.concatenate([record.cohorts for record in records])
    wrong = sizes[sizes != sampling.size]
    if sampling.size is not None and len(wrong):
        detail = f"a cohort has {wrong[0]} clients, where the accountants have {sampling.size}"
        return Check("cohorts", False, detail)
    rounds = len(records[0].rounds)
    counts = [(times, client) for record in records for client, times in record.counts.items()]
    times, client = max(counts, default=(0, 0))
    strange = ""
    if sampling.coins is not None:  # each of the two spends half of the false alarms
        total = int(sizes.sum())
        trials = population * len(sizes)
        chance = binom(trials, sampling.coins)
        if min(chance.cdf(total), chance.sf(total - 1)) < FALSE_ALARM / 4:
            strange = f"{total} clients took part in all, where {chance.mean():.0f} "
            strange += "were to be expected"
    likely = binom.sf(times - 1, rounds, sampling.q) * population * len(records)
    if not strange and sampling.q < 1 and likely < FALSE_ALARM / 2:
        strange = (
            f"client {client} took part in {times} of {rounds} rounds, at q = {sampling.q:.4g}"
        )
    detail = "cohorts have the size that was accounted for; "
    detail += f"no client took part more often than {times} times"
    return Check("cohorts", not strange, strange or detail, FALSE_ALARM)


def matrix(records: Sequence[CanaryRecord]) -> Check | None:
    """Where noise is correlated over the rounds: what a client's participations come to in the sums
    that the noise is independent in is no longer than what is accounted for, one bound each.
    None where rounds have noise of their own.
    """
    whitening = records[0].plan.experiment.noise.whitening()
    if whitening == (1.0,):
        return None
    rounds = len(records[0].rounds)
    column = np.zeros(rounds)  # of the matrix C
    column[: len(whitening)] = whitening[:rounds]
    overlaps = np.abs(np.correlate(column, column, "full")[len(column) - 1 :])
    times = np.concatenate([record.times for record in records])[:, : len(column)].astype(float)
    squares = overlaps[0] * (times**2).sum(1)
    for lag in range(1, len(column)):
        squares += 2 * overlaps[lag] * (times[:, lag:] * times[:, :-lag]).sum(1)
    counted = times.sum(1)
    took_part = counted > 0
    longest = math.sqrt(max(squares[took_part] / counted[took_part], default=0.0))
    longest = max(longest, math.sqrt(overlaps[0]))
    finding = f"a client moves whitened sums by {longest:.6g} times what is accounted for at most"
    return Check("matrix", longest <= 1 + _ROUNDING, finding)


def bounds(records: Sequence[CanaryRecord]) -> Check:
    """No contribution is longer than the bound that was accounted for. Where clients draw noise on
    it: no canary's has more along its own direction than the bound lets it have.
    """
    measured = [(value, t, client) for record in records for t, client, value in record.along]
    noisy = records[0].by_client  # else the contribution bare, in bounds
    if noisy:
        beyond, t, client = max(measured, key=lambda row: abs(row[0]), default=(0.0, 0, 0))
        passed = abs(beyond) <= _normal_limit(len(measured))
        distance = f"{abs(beyond):.1f} stds of its noise from its bound"
    else:
        excess, t, client = max(measured, default=(-1.0, 0, 0))
        passed = excess <= _ROUNDING
        distance = f"{1 + excess:.6g} times its bound"
    finding = f"client {client} sent {distance} in round {t}"
    if passed:
        finding = f"no contribution goes further than {distance}"
    return Check("bounds", passed, finding, FALSE_ALARM if noisy else 0.0)


def sums(records: Sequence[CanaryRecord]) -> Check:
    """What the coordinator sums up is what the clients sent, all of it once."""
    error = max(record.sum_error for record in records)
    finding = f"sums differ from what the clients sent by {error:.1e} of the noise's std at most"
    return Check("sums", error <= _ROUNDING, finding)


def grid(records: Sequence[CanaryRecord]) -> Check | None:
    """Contributions are rounded to no coarser grid than `raydpfl.core.exact_sum` declares, by the
    digits of what clients send. None where nothing was sent that has random digits.
    """
    counts = [(coarser, count) for record in records for coarser, count in record.grids]
    if not counts:
        return None
    # a coordinate is a multiple of 2^k steps by chance with probability 2^-k
    beyond = [
        coarser - math.ceil(math.log2(len(counts) / FALSE_ALARM) / count)
        for coarser, count in counts
    ]
    worst = max(coarser for coarser, _ in counts)
    finding = f"contributions are rounded to at most {2.0 ** max(worst, 0.0):.4g} times the grid "
    return Check("grid", max(beyond) <= 0, finding + "that is declared", FALSE_ALARM)


def noise_of_sums(records: Sequence[CanaryRecord]) -> Check:
    """The squared norm of a round's noise is chi-squared with the std that accountants have."""
    rounds = (zip(record.rounds, record.squares, strict=True) for record in records)
    squares = [(square, f"round {t}") for pairs in rounds for t, square in pairs]
    return _chi_squared("noise of sums", records[0].plan.d, squares)


def noise_of_updates(records: Sequence[CanaryRecord]) -> Check | None:
    """The same for the noise that clients draw; None where none does."""
    if not records[0].by_client:
        return None
    updates = [update for record in records for update in record.update_squares]
    squares = [(square, f"client {client} in round {t}") for t, client, square in updates]
    return _chi_squared("noise of updates", records[0].plan.d, squares)


def noise_of_answers(records: Sequence[CanaryRecord]) -> Check | None:
    """The same for the noise on the sums of the answers to side queries, in the rounds and in more
    draws like theirs. No answer passes its bound, no two queries share their noise, and the bound
    that adapts follows from nothing else. None where nothing is asked.
    """
    name = "noise of answers"
    queries = on_sums(records[0].plan).queries[1:]
    if not queries:
        return None
    for record in records:
        if record.unanswered:
            return Check(name, False, record.unanswered)
        unasked = [query.name for query in queries if not record.answers.get(query.name)]
        if unasked and sum(record.cohorts):
            detail = f"{unasked[0]} is accounted for, and its answers were not seen"
            return Check(name, False, detail)
    longest = max((length, name) for record in records for name, length in record.longest.items())
    if longest[0] > 1 + _ROUNDING:
        detail = f"an answer to {longest[1]} is {longest[0]:.6g} times its bound"
        return Check(name, False, detail)
    drawn = {
        query.name: np.concatenate([record.answers[query.name] for record in records])
        for query in queries
    }
    for query, values in drawn.items():
        if len(np.unique(values)) < len(values):
            return Check(name, False, f"noise on {query} is drawn twice, or there is none")
    limit = _normal_limit(max(1, len(drawn) * (len(drawn) - 1) // 2))
    for (one, first), (other, second) in itertools.combinations(drawn.items(), 2):
        off = abs(float(np.corrcoef(first, second)[0, 1])) * math.sqrt(len(first))
        if off > limit:
            detail = f"the noise on {one} and {other} is correlated, by {off:.1f} standard errors"
            return Check(name, False, detail, FALSE_ALARM)
    squares = [(float(values @ values), f"the sums of {query}") for query, values in drawn.items()]
    count = len(next(iter(drawn.values())))
    check = _chi_squared(name, count, squares)
    return replace(check, finding=f"{check.finding} of {count} draws", false_alarm=2 * FALSE_ALARM)


def noise_of_histograms(records: Sequence[CanaryRecord]) -> Check | None:
    """The same for the noise on all histograms of scores together, which have few bins each, and
    more like them; and one client less moves them by 1. None where there are none.
    """
    name = "noise of histograms"
    histogram = records[0].plan.experiment.evaluate.histogram
    squares = [square for record in records for square in record.surveys]
    if histogram is None or not squares:
        return None
    moved = max(record.moved for record in records)
    if moved > 1 + _ROUNDING:
        detail = f"one client less moves the counts by {moved:.4g}, where 1 is accounted for"
        return Check(name, False, detail)
    together = (sum(squares), f"all {len(squares)}")
    return _chi_squared(name, histogram.bins * len(squares), [together])


def _chi_squared(name: str, d: int, draws: Sequence[tuple[float, str]]) -> Check:
    squares = np.array([square for square, _ in draws])
    tail = np.minimum(chi2.cdf(squares, d), chi2.sf(squares, d))
    worst = int(np.argmin(tail))
    ratio = math.sqrt(squares[worst] / d)
    passed = tail[worst] * 2 * len(draws) >= FALSE_ALARM
    overall = math.sqrt(squares.mean() / d)
    finding = f"{overall:.5f} of the std that was accounted for, over all"
    finding += "" if passed else f"; {ratio:.4g} of it for {draws[worst][1]}"
    return Check(name, passed, finding, FALSE_ALARM)


def keys(records: Sequence[CanaryRecord]) -> Check:
    """No noise is drawn twice: no two vectors of it are correlated."""
    worst = 0.0
    comparisons = 0
    where = ""
    groups = [
        ([noise for record in records for noise in record.noises], "sums"),
        ([noise for record in records for noise in record.update_noises], "updates"),
    ]
    for noises, what in groups:
        if len(noises) < 2:
            continue
        rows = np.stack(noises)
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        comparisons += len(rows) * (len(rows) - 1) // 2
        for start in range(0, len(rows), 512):
            products = np.abs(rows[start : start + 512] @ rows.T)
            products[np.arange(len(products)), start + np.arange(len(products))] = 0
            high = float(products.max()) * math.sqrt(rows.shape[1])
            if high > worst:
                first, second = np.unravel_index(int(products.argmax()), products.shape)
                worst = high
                pair = sorted((int(start + first), int(second)))
                where = f"{what} {pair[0]} and {pair[1]} (counted in order)"
    limit = _normal_limit(comparisons)
    passed = worst <= limit
    finding = f"the largest of {comparisons:,} correlations is {worst:.1f} standard errors" + (
        "" if passed else f", of the noise of {where}"
    )
    return Check("keys", passed, finding, FALSE_ALARM)


def normality(records: Sequence[CanaryRecord]) -> Check:
    """The noise on the sums is Gaussian, of the std accounted for (Kolmogorov and Smirnov)."""
    values = np.concatenate([noise for record in records for noise in record.noises])[:_MOST]
    test = kstest(values, "norm")
    off = f"{test.statistic:.2g} (p = {test.pvalue:.2g})"
    finding = f"the distribution of {len(values):,} coordinates is off by {off}"
    return Check("normality", test.pvalue >= FALSE_ALARM, finding, FALSE_ALARM)


def _normal_limit(comparisons: int) -> float:
    return -float(ndtri(FALSE_ALARM / (2 * max(1, comparisons))))
