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
_SEARCHED = 1 << 22  # clients of past cohorts that pairs are searched in
_COMPARED = 1 << 23  # of these that one search compares
_LOGS = np.array([0.05, 0.1, 0.2, 0.4, 0.7, 1, 1.5, 2.2, 3, 5])
_LOGS = np.concatenate([-_LOGS[::-1], [0.0], _LOGS])  # log odds of a client over those declared
_ODDS = np.exp(_LOGS)
_ABOVE = _LOGS > 0
_WIDTHS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def _priors() -> np.ndarray:
    """Priors over `_LOGS`, float64 [strategies, odds]: bells of `_WIDTHS`, then those by which a
    share of the clients have one value and the others 0.
    """
    gaps = np.gradient(_LOGS)
    bells = [gaps * np.exp(-((_LOGS / width) ** 2) / 2) for width in _WIDTHS]
    shares = [
        np.where(_LOGS == 0, 1 - share, np.where(log == _LOGS, share, 0))
        for log in (0.2, 0.4, 0.7, 1.5)
        for share in (0.001, 0.01, 0.1, 0.5)
    ]
    priors = np.array(bells + shares)
    return priors / priors.sum(1, keepdims=True)


_PRIORS = _priors()
_MEANS = _PRIORS * _ODDS


@dataclass(frozen=True)
class DrawnCohort:
    """The cohort of round `t`."""

    t: int
    clients: np.ndarray  # int64 [r], ascending, one drawn twice listed twice
    before: np.ndarray  # int64 [r]: how often each was drawn in earlier rounds
    size: int  # of the cohort before anyone dropped out
    composed: int  # rounds that the accountants compose after this one


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

    def see(self, drawn: DrawnCohort) -> tuple[str, float]:
        """Bets on the next cohort; returns the name of the richest bet, and the logarithm of the
        mean wealth of all. No name and 0 where bets are not paid (one round of 64 at the end of a
        run at most), or where `before` is not of the earlier cohorts.
        """
        if self._counts is not None and self._counts.after(drawn).min() < 0:
            return "", 0.0
        for bet in self._bets.values():
            bet.see(drawn)
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

    def see(self, drawn: DrawnCohort) -> None:
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

    def after(self, drawn: DrawnCohort) -> np.ndarray:
        """`clients` after this cohort; negative where `before` is not of the earlier ones."""
        moved = np.append(np.bincount(drawn.before, minlength=len(self.clients)), 0)
        clients = np.append(self.clients, np.zeros(len(moved) - len(self.clients), np.int64))
        return clients - moved + np.roll(moved, 1)

    def see(self, drawn: DrawnCohort) -> None:
        self.clients = self.after(drawn)
        self._rounds += 1
        if self._subset:
            self._scale += np.log1p((_ODDS - 1) * (len(drawn.clients) / self.count))
        else:
            sampling = self._sampling
            trials, chance = sampling.scheme.most(sampling, self._rounds, drawn.composed)
            self._scale = trials * np.log1p((_ODDS - 1) * min(chance, 1.0))

    def ratios(self, counts: np.ndarray) -> np.ndarray:
        """The logarithms of the likelihood ratios of these counts, float64 [odds, k]."""
        return _LOGS[:, None] * counts - self._scale[:, None]

    def settle(self) -> float:
        held = np.flatnonzero(self.clients > 0)
        logs = self.ratios(held) + np.log(self.clients[held] / self.count)
        return _log_mean(np.logaddexp.reduce(logs if self._subset else logs[_ABOVE], 1))


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
        self._most = counts.count if sampling.p_max is None else 1 / sampling.p_max  # clients
        self._order = np.random.default_rng(0)
        self._low = 0  # the smallest count that any client had when bets were paid
        self._odds = np.ones((len(_PRIORS) + len(_WIDTHS), 1))  # by count from `_low` on
        self._wealth = np.zeros(len(self._odds))

    def see(self, drawn: DrawnCohort) -> None:
        odds = self._odds
        width = odds.shape[1]
        held = self._counts.clients[self._low :].astype(np.float64)
        held[width - 1 :] = held[width - 1 :].sum()
        held = np.append(held, np.zeros(width))[:width]
        before = drawn.before
        if self._repeats:  # as they were before the round
            before = before[np.searchsorted(drawn.clients, drawn.clients)]
        before = np.clip(before - self._low, 0, width - 1)
        if self._repeats:
            won = np.log(odds) @ np.bincount(before, minlength=width)
            self._wealth += won - len(before) * np.log(self._largest(held))
            return
        part = self._order.integers(_PARTS, size=len(before))
        parts = np.bincount(part * width + before, minlength=_PARTS * width)
        parts = parts.reshape(_PARTS, width)
        left = held - np.cumsum(parts, 0) + parts  # clients that are in no part before
        means = odds @ (left / np.maximum(left.sum(1, keepdims=True), 1)).T
        sizes = parts.sum(1)
        self._wealth += np.log(odds) @ parts.sum(0) - np.log(np.where(sizes, means, 1)) @ sizes

    def _largest(self, held: np.ndarray) -> np.ndarray:
        """The mean of the largest odds, of `_most` clients: float64 [strategies]."""
        order = np.argsort(-self._odds, 1)
        clients = held[order]
        clients = np.clip(self._most - np.cumsum(clients, 1) + clients, 0, clients)
        return (np.take_along_axis(self._odds, order, 1) * clients).sum(1) / self._most

    def settle(self) -> float:
        held = np.flatnonzero(self._counts.clients > 0)
        self._low = int(held[0])
        high = int(held[-1])
        ratios = self._counts.ratios(np.arange(self._low, high + 8 + (high - self._low) // 4))
        ratios = np.exp(ratios - ratios.max(0))
        odds = (_MEANS @ ratios) / (_PRIORS @ ratios)
        self._odds = np.concatenate([odds, 1 / odds[: len(_WIDTHS)]])
        return _log_mean(self._wealth)


class _Numbers(Bet):
    """Numbers of density f: each strategy bets on one proportional to f(x)^v e^(h x), which is
    more varied (v < 1), less varied (v > 1), or has another mean.
    """

    _VARIED = np.array([0.2, 0.4, 0.6, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4] + 8 * [1])
    _MEAN = np.array(10 * [0] + [-2, -0.7, -0.2, -0.07, 0.07, 0.2, 0.7, 2])  # stds

    def __init__(self) -> None:
        self._wealth = np.zeros(len(self._MEAN))

    def declare(self, values: np.ndarray, logs: np.ndarray) -> None:
        """The next numbers are among these, float64 [k], one after another, with the logarithms of
        their probabilities, up to a constant.
        """
        logs = logs - np.logaddexp.reduce(logs)
        std = math.sqrt(max(np.exp(logs) @ values**2 - (np.exp(logs) @ values) ** 2, 1e-9))
        tilt = (self._MEAN / std)[:, None] * (values - values.mean())
        bets = self._VARIED[:, None] * logs + tilt
        # of the factors' logarithms
        self._table = bets - np.logaddexp.reduce(bets, 1, keepdims=True) - logs
        self._first = int(values[0])

    def pay(self, number: int) -> None:
        """Wins or loses by the number."""
        place = min(max(number - self._first, 0), self._table.shape[1] - 1)
        self._wealth += self._table[:, place]


class _Sizes(_Numbers):
    """The size of a cohort is Bin(N, q)."""

    def __init__(self, count: int, chance: float):
        super().__init__()
        self.declare(*_binomial(count, chance))

    def see(self, drawn: DrawnCohort) -> None:
        self.pay(drawn.size)


class _Overlap(_Numbers):
    """The number of clients that are in the cohort before too is hypergeometric, given both sizes,
    and independent of earlier rounds.
    """

    def __init__(self, count: int):
        super().__init__()
        self._count = count
        self._before = np.zeros(0, np.int64)
        self._sizes: tuple[int, int] | None = None

    def see(self, drawn: DrawnCohort) -> None:
        n, m = sizes = (len(self._before), len(drawn.clients))
        if sizes != self._sizes:
            self._sizes = sizes
            self.declare(*_hypergeometric(n, m, self._count))
        both = np.sort(np.concatenate([self._before, drawn.clients]))
        self.pay(int((both[1:] == both[:-1]).sum()))
        self._before = drawn.clients


class _Epochs(Bet):
    """Of the clients that were c times in the earlier rounds of an epoch of T, each is in its round
    t, from 0, with chance (k - c) / (T - t), independently of the others: the size of the cohort is
    a sum of binomial numbers. Of the clients that were in none until then, those in the cohort are
    a uniform subset, given their number: how many of them were in the same round of the epoch
    before is hypergeometric.
    """

    def __init__(self, sampling: Sampling, count: int):
        assert sampling.epoch is not None and sampling.per_epoch is not None
        self._rounds, self._most = sampling.epoch, sampling.per_epoch
        self._count = count
        self._sizes, self._overlap = _Numbers(), _Numbers()
        self._before: list[np.ndarray] = []  # the cohorts of the epoch before
        self._cohorts: list[np.ndarray] = []  # of this epoch, if its first one was seen
        self._clients: np.ndarray | None = None  # by how often an epoch drew them; None: unknown

    def see(self, drawn: DrawnCohort) -> None:
        t = drawn.t % self._rounds
        if t == 0:
            self._before, self._cohorts = self._cohorts, []
            self._times = np.zeros(self._count, np.int32)
            self._free = self._count  # clients that were in none of its rounds
            self._clients = np.append(self._count, np.zeros(self._most, np.int64))
        if len(self._cohorts) != t:  # it was not seen from its first round on
            return
        if self._clients is not None:
            chances = (self._most - np.arange(self._most + 1)) / (self._rounds - t)
            self._sizes.declare(*_binomial_sum(self._clients, chances))
            self._sizes.pay(drawn.size)
        self._pay_overlap(drawn.clients, t)
        self._add(drawn)

    def _pay_overlap(self, clients: np.ndarray, t: int) -> None:
        before = self._before[t] if t < len(self._before) else np.zeros(0, np.int64)
        before, clients = (some[self._times[some] == 0] for some in (before, clients))
        n, m, free = len(before), len(clients), self._free
        if 0 < n < free and 0 < m < free:
            self._overlap.declare(*_hypergeometric(n, m, free))
            self._overlap.pay(len(np.intersect1d(before, clients)))

    def _add(self, drawn: DrawnCohort) -> None:
        clients = drawn.clients
        times = self._times[clients]
        self._times[clients] += 1
        self._free -= int((times == 0).sum())
        self._cohorts.append(clients)
        if self._clients is not None:
            if self._most == 1:
                self._clients += drawn.size * np.array([-1, 1])
            elif drawn.size == len(clients):
                counts = np.bincount(np.minimum(times, self._most), minlength=self._most + 1)
                self._clients += np.append(0, counts[:-1]) - counts
            else:  # who dropped out is not known
                self._clients = None
        self.impossible |= bool(times.max(initial=0) >= self._most)
        if self._clients is not None:
            ends = len(self._cohorts) == self._rounds
            self.impossible |= bool(self._clients.min() < 0)
            self.impossible |= ends and int(self._clients[-1]) != self._count

    def settle(self) -> float:
        both = [bet.settle() for bet in (self._sizes, self._overlap)]
        return math.inf if self.impossible else _log_mean(both)


class _Pairs(Bet):
    """Pairs of clients that came together more often than by chance, every client in one pair.

    The first of every pair are revealed first. Given these, the others are a uniform subset of the
    remaining clients, so that the second of a pair takes part with chance q', and whether the
    second ones do is negatively associated: prod o^x has at most the expectation
    (1 - q' + o q')^n, for o >= 1 and n pairs whose first takes part. Bets are on the first 1, 4, 16
    ... pairs, the strongest first. After every search they begin again, with a part of the wealth.
    """

    _ODDS = np.array([2.0, 5.0, 20.0, 100.0, 2000.0])
    _FIRST = 4 ** np.arange(6)

    def __init__(self, count: int, sampling: Sampling):
        self._count = count
        self._repeats = sampling.repeats
        self._largest = sampling.p_max or 1 / count  # chance of a client at one draw
        self._rounds = 0
        self._due = 12  # the round after which to search
        self._searches = 0
        self._seen: list[np.ndarray] = []
        self._searchable = 0  # clients in all of them
        self._pairs = np.zeros((2, 0), np.int64)
        self._wealth = np.zeros((len(self._ODDS), len(self._FIRST)))
        self._paid = -math.inf  # what earlier bets came to

    def see(self, drawn: DrawnCohort) -> None:
        clients = np.unique(drawn.clients) if self._repeats else drawn.clients
        if self._pairs.size:
            first, second = np.isin(self._pairs, clients)
            left = len(drawn.clients) - int(np.isin(drawn.clients, self._pairs[0]).sum())
            chance = self._chance(left)
            places = np.minimum(self._FIRST, len(first)) - 1
            tried = np.cumsum(first)[places]
            both = np.cumsum(first & second)[places]
            self._wealth += np.log(self._ODDS)[:, None] * both
            self._wealth -= np.log1p((self._ODDS - 1) * chance)[:, None] * tried
        self._searchable += len(clients)
        self._rounds += 1
        if self._searchable <= _SEARCHED:
            self._seen.append(clients)
            if self._rounds >= self._due:
                self._due = self._rounds + self._rounds // 2
                if self._pairs.size:
                    self._paid = self.settle()
                    self._searches += 1
                self._wealth = np.zeros_like(self._wealth)
                self._pairs = together(self._seen, self._FIRST[-1])

    def _chance(self, left: int) -> float:
        """The largest chance of the second of a pair among the `left` that are no first ones."""
        firsts = self._pairs.shape[1]
        if not self._repeats:
            return left / (self._count - firsts)
        largest = min(self._largest / max(1 - firsts * self._largest, self._largest), 1 - 1e-9)
        return -math.expm1(left * math.log1p(-largest))

    def settle(self) -> float:
        share = (self._searches + 1) * (self._searches + 2)
        return float(np.logaddexp(self._paid, _log_mean(self._wealth) - math.log(share)))


def together(cohorts: Sequence[np.ndarray], most: int) -> np.ndarray:
    """The pairs of clients that came together most improbably often, int64 [2, k <= most], the most
    improbable first, every client in one pair at most.

    Of a few clients that were drawn most often, the companions are counted, so that the work does
    not exceed `_COMPARED`.
    """
    from scipy.sparse import csr_array

    clients, column = np.unique(np.concatenate(cohorts), return_inverse=True)
    sizes = np.array([len(cohort) for cohort in cohorts])
    row = np.repeat(np.arange(len(cohorts)), sizes)
    taken = csr_array((np.ones(len(row), np.int32), (row, column)))
    counts = np.bincount(column)
    often = np.argsort(-counts, kind="stable")
    work = np.cumsum(counts[often]) * sizes.mean()
    often = often[: max(1, int(np.searchsorted(work, _COMPARED)))]
    pairs = (taken[:, often].T @ taken).tocoo()
    repeated = (often[pairs.row] != pairs.col) & (pairs.data > 1)
    first = often[pairs.row[repeated]]
    second = pairs.col[repeated]
    both = pairs.data[repeated]
    usual = counts[first] * counts[second] / len(cohorts)
    score = both * np.log(both / usual) - both + usual  # of independent Poisson numbers
    score[both <= usual] = 0
    order = np.argsort(-score, kind="stable")[: 8 * most]
    best: list[tuple[int, int]] = []
    chosen: set[int] = set()
    for pair in zip(first[order].tolist(), second[order].tolist(), strict=True):
        if chosen.isdisjoint(pair) and len(best) < most:
            best.append(pair)
            chosen.update(pair)
    return clients[np.array(best, np.int64).reshape(-1, 2).T]


class _Repeats(Bet):
    """Of draws with replacement in random order, the i-th is of an earlier client with chance
    (i - 1) p_max at most.
    """

    _ODDS = np.array([1.3, 2.0, 4.0, 16.0, 256.0])

    def __init__(self, count: int, sampling: Sampling):
        self._chance = sampling.p_max or 1 / count
        self._wealth = np.zeros(len(self._ODDS))
        self._loss = np.zeros((len(self._ODDS), 0))  # over so many draws

    def see(self, drawn: DrawnCohort) -> None:
        draws = len(drawn.clients)
        if draws > self._loss.shape[1]:
            chances = np.minimum(np.arange(draws) * self._chance, 1)
            self._loss = np.cumsum(np.log1p((self._ODDS - 1)[:, None] * chances), 1)
        again = int((drawn.clients[1:] == drawn.clients[:-1]).sum())
        if draws:
            self._wealth += np.log(self._ODDS) * again - self._loss[:, draws - 1]


def _window(mean: float, variance: float, least: int, most: int) -> np.ndarray:
    """The whole numbers within about 12 stds of the mean, float64 [k]."""
    reach = 12 * math.sqrt(variance) + 30
    first = max(least, math.floor(mean - reach))
    return np.arange(first, min(most, math.ceil(mean + reach)) + 1, dtype=np.float64)


def _binomial(n: int, chance: float) -> tuple[np.ndarray, np.ndarray]:
    """Values, float64 [k], of Bin(n, chance), and the logarithms of their probabilities."""
    values = _window(n * chance, n * chance * (1 - chance), 0, n)
    logs = values * math.log(chance) + (n - values) * math.log1p(-chance)
    return values, _choose(n, values) + logs


def _hypergeometric(n: int, m: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """How many of n clients are among m of `count`: values, float64 [k], and the logarithms of
    their probabilities, up to a constant.
    """
    share = n / count
    values = _window(m * share, m * share * (1 - share), max(0, n + m - count), min(n, m))
    return values, _choose(n, values) + _choose(count - n, m - values)


def _binomial_sum(counts: np.ndarray, chances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values, float64 [k], of a sum of binomial numbers of so many trials and these chances, and
    the logarithms of their probabilities.
    """
    masses, first = np.ones(1), 0.0
    for n, chance in zip(counts.tolist(), chances.tolist(), strict=True):
        if chance >= 1:
            first += n
        elif n and chance:
            values, logs = _binomial(n, chance)
            masses = np.convolve(masses, np.exp(logs))
            first += values[0]
    return first + np.arange(len(masses)), np.log(np.maximum(masses, 1e-300))


def _choose(n: int, k: np.ndarray) -> np.ndarray:
    """The logarithm of n over k."""
    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)


def _log_mean(logs: ArrayLike) -> float:
    return float(np.logaddexp.reduce(logs, None)) - math.log(np.size(logs))
