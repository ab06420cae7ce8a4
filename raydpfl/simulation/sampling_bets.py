"""Bets against a sampling scheme: how much the cohorts of a run speak against the declared one.

Each bet starts with wealth 1 and multiplies it in every round by a factor that depends on the
cohort. Under the declared scheme the factor's expectation, given all earlier rounds, is at most 1:
the wealth is a nonnegative supermartingale. So is the mean over all bets, and the probability that
it ever reaches 1 / a is at most a (Ville's inequality; Shafer 2021, Testing by betting). No union
over rounds or clients is needed, and a run may be looked at after any round.

| bet       | what it bets on                                                        |
| --------- | ---------------------------------------------------------------------- |
| `counts`  | those who were drawn often (or seldom) until now are drawn often again |
| `client`  | one client is drawn too often, or too seldom                           |
| `sizes`   | of cohorts where every client takes part independently                  |
| `overlap` | clients of the cohort before: too many, too varied a number, too even  |
| `pairs`   | clients that came together too often come together again               |
| `repeats` | draws of a client that the same round has drawn already                |
| `epochs`  | of random allocation: sizes of cohorts; clients that were in the same  |
|           | round of the epoch before; and no client is drawn too often in one     |

A round costs in proportion to its cohort. `pairs` is for user-defined selections: whenever the
rounds have grown by half, it searches the cohorts until then.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln

from raydpfl.privacy import Sampling

_PERIOD = 64  # bets are paid when the rounds have grown by this fraction
_PARTS = 8  # in which a cohort is revealed
_MAX_SEARCHED = 1 << 22  # clients of past cohorts that pairs are searched in
_MAX_COMPARED = 1 << 23  # of these that one search compares
_LOGS = np.array([0.05, 0.1, 0.2, 0.4, 0.7, 1, 1.5, 2.2, 3, 5])
_LOGS = np.concatenate([-_LOGS[::-1], [0.0], _LOGS])  # log odds of a client over those declared
_ODDS = np.exp(_LOGS)
_POSITIVE_MASK = _LOGS > 0
_WIDTHS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
# priors over `_LOGS`, float64 [strategies, odds]: bells of `_WIDTHS`, then those by which a share
# of the clients have one value and the others 0
_BELLS = [np.gradient(_LOGS) * np.exp(-((_LOGS / width) ** 2) / 2) for width in _WIDTHS]
_SHARES = [
    np.where(_LOGS == 0, 1 - share, np.where(log == _LOGS, share, 0))
    for log in (0.2, 0.4, 0.7, 1.5)
    for share in (0.001, 0.01, 0.1, 0.5)
]
_PRIORS = np.array(_BELLS + _SHARES)
_PRIORS /= _PRIORS.sum(1, keepdims=True)
_MEANS = _PRIORS * _ODDS


@dataclass(frozen=True)
class DrawnCohort:
    """The cohort of round `t`."""

    t: int
    clients: np.ndarray  # int64 [r], ascending, one drawn twice listed twice
    before: np.ndarray  # int64 [r]: how often each was drawn in earlier rounds
    size: int  # of the cohort before anyone dropped out
    composed_rounds: int  # rounds that the accountants compose after this one


class Bets:
    """All bets against the declared `sampling` of `count` clients in one run; `pairs`: whether to
    look for pairs of clients.
    """

    def __init__(self, sampling: Sampling, count: int, pairs: bool = False):
        subset = not (sampling.rule or sampling.repeats) and sampling.scheme.any_subset(sampling)
        repeats = sampling.repeats and not sampling.rule
        coins = None if sampling.rule else sampling.coins
        counts = _Counts(sampling, count, subset)
        bets: dict[str, Bet | None] = {
            "counts": _Memory(counts, sampling) if subset or repeats else None,
            "overlap": _Overlap(count) if subset else None,
            "sizes": _Sizes(count, coins) if coins and coins < 1 else None,
            "pairs": _Pairs(count, sampling) if pairs and (subset or repeats) else None,
            "repeats": _Repeats(count, sampling) if repeats else None,
            "client": counts,  # the last: others read the counts before the round
        }
        self._counts = None if sampling.epoch else counts
        if self._counts is None:  # rounds depend on each other
            bets = {"epochs": _Epochs(sampling, count)}
        self._bets = {name: bet for name, bet in bets.items() if bet is not None}
        self._rounds = 0
        self._due = 1

    def see(self, cohort: DrawnCohort) -> tuple[str, float]:
        """Bets on the next cohort; returns the name of the richest bet, and the logarithm of the
        mean wealth of all. No name and 0 where bets are not paid (one round of 64 at the end of a
        run at most), or where `before` is not of the earlier cohorts.
        """
        if self._counts is not None and self._counts.after(cohort).min() < 0:
            return "", 0.0
        for bet in self._bets.values():
            bet.see(cohort)
        self._rounds += 1
        if self._rounds < self._due and not any(bet.impossible for bet in self._bets.values()):
            return "", 0.0
        self._due = self._rounds + 1 + self._rounds // _PERIOD
        wealth = {name: bet.settle() for name, bet in self._bets.items()}
        return max(wealth, key=lambda name: wealth[name]), _log_mean([*wealth.values()])


class Bet:
    """A bet on the cohorts of a run."""

    _wealth: np.ndarray  # logarithms, by strategy
    impossible = False  # whether a cohort was one that the scheme never gives

    def see(self, cohort: DrawnCohort) -> None:
        """Wins or loses by the cohort of a round."""
        raise NotImplementedError

    def settle(self) -> float:
        """The logarithm of the wealth. What later rounds are bet on may change now."""
        return _log_mean(self._wealth)


class _Counts(Bet):
    """How many clients were drawn how often; a bet on one client.

    If the odds of a client are o times the declared ones, the likelihood ratio of its c draws is
    o^c / prod_t (1 - q_t + o q_t), with q_t the declared chance in round t. The wealth is the mean
    ratio over the clients. Where q_t is the largest possible chance only, o is above 1.
    """

    def __init__(self, sampling: Sampling, count: int, subset: bool):
        self._sampling = sampling
        self._subset = subset
        self.count = count
        self.clients = np.array([count], np.int64)  # by how often they were drawn
        self._rounds = 0
        self._scale = np.zeros(len(_LOGS))

    def after(self, cohort: DrawnCohort) -> np.ndarray:
        """`clients` after this cohort; negative where `before` is not of the earlier ones."""
        drawn_counts = np.append(np.bincount(cohort.before, minlength=len(self.clients)), 0)
        clients = np.append(self.clients, np.zeros(len(drawn_counts) - len(self.clients), np.int64))
        return clients - drawn_counts + np.roll(drawn_counts, 1)

    def see(self, cohort: DrawnCohort) -> None:
        self.clients = self.after(cohort)
        self._rounds += 1
        if self._subset:
            self._scale += np.log1p((_ODDS - 1) * (len(cohort.clients) / self.count))
        else:
            sampling = self._sampling
            trials, chance = sampling.scheme.most(sampling, self._rounds, cohort.composed_rounds)
            self._scale = trials * np.log1p((_ODDS - 1) * min(chance, 1.0))

    def ratios(self, counts: np.ndarray) -> np.ndarray:
        """The logarithms of the likelihood ratios of these counts, float64 [odds, k]."""
        return _LOGS[:, None] * counts - self._scale[:, None]

    def settle(self) -> float:
        draw_counts = np.flatnonzero(self.clients > 0)
        logs = self.ratios(draw_counts) + np.log(self.clients[draw_counts] / self.count)
        return _log_mean(np.logaddexp.reduce(logs if self._subset else logs[_POSITIVE_MASK], 1))


class _Memory(Bet):
    """Each strategy is a prior over a client's odds, and bets on its posterior mean o_k given the
    client's count. Some also bet on 1 / o_k: that who was drawn rests.

    A part of the cohort, random and of size m, is a uniform subset of the clients that were not in
    the parts before. There prod o_k has at most the expectation (mean o)^m (Maclaurin's inequality
    for elementary symmetric polynomials). Draws with replacement are independent, and the mean of o
    is at most that over the 1 / p_max clients with the largest o.
    """

    def __init__(self, counts: _Counts, sampling: Sampling):
        self._counts = counts
        self._repeats = sampling.repeats
        self._top_count = counts.count if sampling.p_max is None else 1 / sampling.p_max
        self._order = np.random.default_rng(0)
        self._low = 0  # the smallest count that any client had when bets were paid
        self._odds = np.ones((len(_PRIORS) + len(_WIDTHS), 1))  # by count from `_low` on
        self._wealth = np.zeros(len(self._odds))

    def see(self, cohort: DrawnCohort) -> None:
        odds = self._odds
        width = odds.shape[1]
        clients = self._counts.clients[self._low :].astype(np.float64)
        clients[width - 1 :] = clients[width - 1 :].sum()
        clients = np.append(clients, np.zeros(width))[:width]
        past_counts = cohort.before
        if self._repeats:  # as they were before the round
            past_counts = past_counts[np.searchsorted(cohort.clients, cohort.clients)]
        past_counts = np.clip(past_counts - self._low, 0, width - 1)
        if self._repeats:
            log_gain = np.log(odds) @ np.bincount(past_counts, minlength=width)
            self._wealth += log_gain - len(past_counts) * np.log(self._largest_mean(clients))
            return
        part = self._order.integers(_PARTS, size=len(past_counts))
        parts = np.bincount(part * width + past_counts, minlength=_PARTS * width)
        parts = parts.reshape(_PARTS, width)
        rest = clients - np.cumsum(parts, 0) + parts  # clients that are in no part before
        means = odds @ (rest / np.maximum(rest.sum(1, keepdims=True), 1)).T
        sizes = parts.sum(1)
        self._wealth += np.log(odds) @ parts.sum(0) - np.log(np.where(sizes, means, 1)) @ sizes

    def _largest_mean(self, clients_by_count: np.ndarray) -> np.ndarray:
        """The mean of the largest odds, of `_top_count` clients: float64 [strategies]."""
        order = np.argsort(-self._odds, 1)
        clients = clients_by_count[order]
        clients = np.clip(self._top_count - np.cumsum(clients, 1) + clients, 0, clients)
        return (np.take_along_axis(self._odds, order, 1) * clients).sum(1) / self._top_count

    def settle(self) -> float:
        draw_counts = np.flatnonzero(self._counts.clients > 0)
        self._low = int(draw_counts[0])
        high = int(draw_counts[-1])
        ratios = self._counts.ratios(np.arange(self._low, high + 8 + (high - self._low) // 4))
        ratios = np.exp(ratios - ratios.max(0))
        odds = (_MEANS @ ratios) / (_PRIORS @ ratios)
        self._odds = np.concatenate([odds, 1 / odds[: len(_WIDTHS)]])
        return _log_mean(self._wealth)


class _Numbers(Bet):
    """Numbers of density f: each strategy bets on one proportional to f(x)^v e^(h x), which is
    more varied (v < 1), less varied (v > 1), or has another mean.
    """

    _EXPONENTS = np.array([0.2, 0.4, 0.6, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4] + 8 * [1])
    _MEAN_SHIFTS = np.array(10 * [0] + [-2, -0.7, -0.2, -0.07, 0.07, 0.2, 0.7, 2])  # stds

    def __init__(self) -> None:
        self._wealth = np.zeros(len(self._MEAN_SHIFTS))

    def declare(self, values: np.ndarray, logs: np.ndarray) -> None:
        """The next numbers are among these, float64 [k], one after another, with the logarithms of
        their probabilities, up to a constant.
        """
        logs = logs - np.logaddexp.reduce(logs)
        std = math.sqrt(max(np.exp(logs) @ values**2 - (np.exp(logs) @ values) ** 2, 1e-9))
        tilt = (self._MEAN_SHIFTS / std)[:, None] * (values - values.mean())
        bets = self._EXPONENTS[:, None] * logs + tilt
        # of the factors' logarithms
        self._table = bets - np.logaddexp.reduce(bets, 1, keepdims=True) - logs
        self._first_value = int(values[0])

    def pay(self, number: int) -> None:
        """Wins or loses by the number."""
        place = min(max(number - self._first_value, 0), self._table.shape[1] - 1)
        self._wealth += self._table[:, place]


class _Sizes(_Numbers):
    """The size of a cohort is Bin(N, q)."""

    def __init__(self, count: int, chance: float):
        super().__init__()
        self.declare(*_binomial(count, chance))

    def see(self, cohort: DrawnCohort) -> None:
        self.pay(cohort.size)


class _Overlap(_Numbers):
    """The number of clients that are in the cohort before too is hypergeometric, given both sizes,
    and independent of earlier rounds.
    """

    def __init__(self, count: int):
        super().__init__()
        self._count = count
        self._previous_cohort = np.zeros(0, np.int64)
        self._sizes: tuple[int, int] | None = None

    def see(self, cohort: DrawnCohort) -> None:
        n, m = sizes = (len(self._previous_cohort), len(cohort.clients))
        if sizes != self._sizes:
            self._sizes = sizes
            self.declare(*_hypergeometric(n, m, self._count))
        merged_clients = np.sort(np.concatenate([self._previous_cohort, cohort.clients]))
        self.pay(int((merged_clients[1:] == merged_clients[:-1]).sum()))
        self._previous_cohort = cohort.clients


class _Epochs(Bet):
    """Of the clients that were c times in the earlier rounds of an epoch of T, each is in its round
    t, from 0, with chance (k - c) / (T - t), independently of the others: the size of the cohort is
    a sum of binomial numbers. Of the clients that were in none until then, those in the cohort are
    a uniform subset, given their number: how many of them were in the same round of the epoch
    before is hypergeometric.
    """

    def __init__(self, sampling: Sampling, count: int):
        assert sampling.epoch is not None and sampling.per_epoch is not None
        self._rounds, self._max_draws = sampling.epoch, sampling.per_epoch
        self._count = count
        self._sizes, self._overlap = _Numbers(), _Numbers()
        self._past_cohorts: list[np.ndarray] = []  # the cohorts of the epoch before
        self._cohorts: list[np.ndarray] = []  # of this epoch, if its first one was seen
        self._clients: np.ndarray | None = None  # by how often an epoch drew them; None: unknown

    def see(self, cohort: DrawnCohort) -> None:
        t = cohort.t % self._rounds
        if t == 0:
            self._past_cohorts, self._cohorts = self._cohorts, []
            self._times = np.zeros(self._count, np.int32)
            self._undrawn_count = self._count  # clients that were in none of its rounds
            self._clients = np.append(self._count, np.zeros(self._max_draws, np.int64))
        if len(self._cohorts) != t:  # it was not seen from its first round on
            return
        if self._clients is not None:
            chances = (self._max_draws - np.arange(self._max_draws + 1)) / (self._rounds - t)
            self._sizes.declare(*_binomial_sum(self._clients, chances))
            self._sizes.pay(cohort.size)
        self._pay_overlap(cohort.clients, t)
        self._add(cohort)

    def _pay_overlap(self, clients: np.ndarray, t: int) -> None:
        past = self._past_cohorts[t] if t < len(self._past_cohorts) else np.zeros(0, np.int64)
        past, clients = (group[self._times[group] == 0] for group in (past, clients))
        n, m, count = len(past), len(clients), self._undrawn_count
        if 0 < n < count and 0 < m < count:
            self._overlap.declare(*_hypergeometric(n, m, count))
            self._overlap.pay(len(np.intersect1d(past, clients)))

    def _add(self, cohort: DrawnCohort) -> None:
        clients = cohort.clients
        times = self._times[clients]
        self._times[clients] += 1
        self._undrawn_count -= int((times == 0).sum())
        self._cohorts.append(clients)
        if self._clients is not None:
            if self._max_draws == 1:
                self._clients += cohort.size * np.array([-1, 1])
            elif cohort.size == len(clients):
                draws = np.minimum(times, self._max_draws)
                counts = np.bincount(draws, minlength=self._max_draws + 1)
                self._clients += np.append(0, counts[:-1]) - counts
            else:  # who dropped out is not known
                self._clients = None
        self.impossible |= bool(times.max(initial=0) >= self._max_draws)
        if self._clients is not None:
            ends = len(self._cohorts) == self._rounds
            self.impossible |= bool(self._clients.min() < 0)
            self.impossible |= ends and int(self._clients[-1]) != self._count

    def settle(self) -> float:
        wealths = [bet.settle() for bet in (self._sizes, self._overlap)]
        return math.inf if self.impossible else _log_mean(wealths)


class _Pairs(Bet):
    """Pairs of clients that came together more often than by chance, every client in one pair.

    The first of every pair are revealed first. Given these, the others are a uniform subset of the
    remaining clients, so that the second of a pair takes part with chance q', and whether the
    second ones do is negatively associated: prod o^x has at most the expectation
    (1 - q' + o q')^n, for o >= 1 and n pairs whose first takes part. Bets are on the first 1, 4, 16
    ... pairs, the strongest first. After every search they begin again, with a part of the wealth.
    """

    _ODDS = np.array([2.0, 5.0, 20.0, 100.0, 2000.0])
    _PAIR_COUNTS = 4 ** np.arange(6)

    def __init__(self, count: int, sampling: Sampling):
        self._count = count
        self._repeats = sampling.repeats
        self._max_chance = sampling.p_max or 1 / count  # chance of a client at one draw
        self._rounds = 0
        self._due = 12  # the round after which to search
        self._searches = 0
        self._past_cohorts: list[np.ndarray] = []
        self._searchable_clients = 0  # clients in all of them
        self._pairs = np.zeros((2, 0), np.int64)
        self._wealth = np.zeros((len(self._ODDS), len(self._PAIR_COUNTS)))
        self._past_wealth = -math.inf  # what earlier bets came to

    def see(self, cohort: DrawnCohort) -> None:
        clients = np.unique(cohort.clients) if self._repeats else cohort.clients
        if self._pairs.size:
            first_drawn, second_drawn = np.isin(self._pairs, clients)
            draws = len(cohort.clients) - int(np.isin(cohort.clients, self._pairs[0]).sum())
            chance = self._chance(draws)
            places = np.minimum(self._PAIR_COUNTS, len(first_drawn)) - 1
            trials = np.cumsum(first_drawn)[places]
            joint_draws = np.cumsum(first_drawn & second_drawn)[places]
            self._wealth += np.log(self._ODDS)[:, None] * joint_draws
            self._wealth -= np.log1p((self._ODDS - 1) * chance)[:, None] * trials
        self._searchable_clients += len(clients)
        self._rounds += 1
        if self._searchable_clients <= _MAX_SEARCHED:
            self._past_cohorts.append(clients)
            if self._rounds >= self._due:
                self._due = self._rounds + self._rounds // 2
                if self._pairs.size:
                    self._past_wealth = self.settle()
                    self._searches += 1
                self._wealth = np.zeros_like(self._wealth)
                self._pairs = improbable_pairs(self._past_cohorts, self._PAIR_COUNTS[-1])

    def _chance(self, draws: int) -> float:
        """The largest chance of the second of a pair among the `draws` of no first one."""
        firsts = self._pairs.shape[1]
        if not self._repeats:
            return draws / (self._count - firsts)
        chance = self._max_chance
        chance = min(chance / max(1 - firsts * chance, chance), 1 - 1e-9)
        return -math.expm1(draws * math.log1p(-chance))

    def settle(self) -> float:
        share = (self._searches + 1) * (self._searches + 2)
        return float(np.logaddexp(self._past_wealth, _log_mean(self._wealth) - math.log(share)))


def improbable_pairs(cohorts: Sequence[np.ndarray], max_pairs: int) -> np.ndarray:
    """The pairs of clients that came together most improbably often, int64 [2, k <= max_pairs],
    the most improbable first, every client in one pair at most.

    Of a few clients that were drawn most often, the companions are counted, so that the work does
    not exceed `_MAX_COMPARED`.
    """
    from scipy.sparse import csr_array

    clients, column = np.unique(np.concatenate(cohorts), return_inverse=True)
    sizes = np.array([len(cohort) for cohort in cohorts])
    row = np.repeat(np.arange(len(cohorts)), sizes)
    membership = csr_array((np.ones(len(row), np.int32), (row, column)))
    counts = np.bincount(column)
    frequent_columns = np.argsort(-counts, kind="stable")
    work = np.cumsum(counts[frequent_columns]) * sizes.mean()
    frequent_columns = frequent_columns[: max(1, int(np.searchsorted(work, _MAX_COMPARED)))]
    pairs = (membership[:, frequent_columns].T @ membership).tocoo()
    pair_mask = (frequent_columns[pairs.row] != pairs.col) & (pairs.data > 1)
    first_clients = frequent_columns[pairs.row[pair_mask]]
    second_clients = pairs.col[pair_mask]
    times = pairs.data[pair_mask]
    means = counts[first_clients] * counts[second_clients] / len(cohorts)
    score = times * np.log(times / means) - times + means  # of independent Poisson numbers
    score[times <= means] = 0
    order = np.argsort(-score, kind="stable")[: 8 * max_pairs]
    best_pairs: list[tuple[int, int]] = []
    paired_clients: set[int] = set()
    for pair in zip(first_clients[order].tolist(), second_clients[order].tolist(), strict=True):
        if paired_clients.isdisjoint(pair) and len(best_pairs) < max_pairs:
            best_pairs.append(pair)
            paired_clients.update(pair)
    return clients[np.array(best_pairs, np.int64).reshape(-1, 2).T]


class _Repeats(Bet):
    """Of draws with replacement in random order, the i-th is of an earlier client with chance
    (i - 1) p_max at most.
    """

    _ODDS = np.array([1.3, 2.0, 4.0, 16.0, 256.0])

    def __init__(self, count: int, sampling: Sampling):
        self._chance = sampling.p_max or 1 / count
        self._wealth = np.zeros(len(self._ODDS))

    def see(self, cohort: DrawnCohort) -> None:
        repeat_count = int((cohort.clients[1:] == cohort.clients[:-1]).sum())
        chances = np.minimum(np.arange(len(cohort.clients)) * self._chance, 1)
        losses = np.log1p((self._ODDS - 1)[:, None] * chances)
        self._wealth += np.log(self._ODDS) * repeat_count - losses.sum(1)


def _window(mean: float, variance: float, min_value: int, max_value: int) -> np.ndarray:
    """The whole numbers within about 12 stds of the mean, float64 [k]."""
    reach = 12 * math.sqrt(variance) + 30
    start = max(min_value, math.floor(mean - reach))
    return np.arange(start, min(max_value, math.ceil(mean + reach)) + 1, dtype=np.float64)


def _binomial(n: int, chance: float) -> tuple[np.ndarray, np.ndarray]:
    """Values, float64 [k], of Bin(n, chance), and the logarithms of their probabilities."""
    values = _window(n * chance, n * chance * (1 - chance), 0, n)
    logs = values * math.log(chance) + (n - values) * math.log1p(-chance)
    return values, _log_binomial(n, values) + logs


def _hypergeometric(n: int, m: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """How many of n clients are among m of `count`: values, float64 [k], and the logarithms of
    their probabilities, up to a constant.
    """
    share = n / count
    values = _window(m * share, m * share * (1 - share), max(0, n + m - count), min(n, m))
    return values, _log_binomial(n, values) + _log_binomial(count - n, m - values)


def _binomial_sum(counts: np.ndarray, chances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values, float64 [k], of a sum of binomial numbers of so many trials and these chances, and
    the logarithms of their probabilities.
    """
    masses, offset = np.ones(1), 0.0
    for n, chance in zip(counts.tolist(), chances.tolist(), strict=True):
        if chance >= 1:
            offset += n
        elif n and chance:
            values, logs = _binomial(n, chance)
            masses = np.convolve(masses, np.exp(logs))
            offset += values[0]
    return offset + np.arange(len(masses)), np.log(np.maximum(masses, 1e-300))


def _log_binomial(n: int, k: np.ndarray) -> np.ndarray:
    """The logarithm of n over k."""
    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)


def _log_mean(logs: ArrayLike) -> float:
    return float(np.logaddexp.reduce(logs, None)) - math.log(np.size(logs))
