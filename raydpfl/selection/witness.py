"""Checks, during a run, that cohorts follow the law that a selection declares.

Accountants believe `Selection.sampling`. If a member's draws followed another law, its epsilon
would not hold. So every cohort is checked before anything is released from it:

- for what the law never gives: a cohort of another size; a client that does not exist, is in a
  cohort twice, or takes part (or is asked for its loss) more often than the accountants compose;
  fewer clients than the noise of the sum needs; other clients than were drawn in advance, where the
  accountants counted those;
- where the cohort is a secret, for what the law hardly ever gives: a client drawn too often;
  Poisson cohorts that are too large or too small over all rounds; too many or too few clients in
  common with the cohort before; and sizes of Poisson cohorts, or numbers in common, that vary too
  much from round to round (clients that come in groups, not independently) or too little.

>>> from raydpfl.selection.base import Cohort, Population
>>> from raydpfl.selection.uniform import Uniform
>>> member, clients = Uniform(cohort=90), Population.balanced(900)
>>> witness = Witness(member, clients, exposures=np.arange(1, 101), least=90, secret=True)
>>> for t in range(100):
...     witness.see(t, member.draw(0, t, clients), Counter())
>>> witness.see(0, Cohort.of(np.arange(89)), Counter())
Traceback (most recent call last):
raydpfl.errors.RunError: selection.kind uniform drew 89 clients in round 0, where its law \
(fixed size 90 of 900) gives 90: no accountant covers what it does

A sound member fails with probability at most `FALSE_ALARM` in a whole run, however long: each of
the seven statistical checks spends FALSE_ALARM / (7 (t + 1) (t + 2)) in round t. Tails are exact
binomial ones. For clients in common it is Chernoff's bound, since their number is hypergeometric
and so less spread than a binomial one (Hoeffding 1963, Theorem 4). How much numbers vary is judged
by the exact probabilities of being as far from the mean, and as near, in each round, combined as
Fisher does: minus the sum of their logarithms is at most a Gamma variable with as many degrees of
freedom as there were rounds. Draws that follow the law but are no secret (they can be predicted)
pass: no sequence of draws shows that.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Mapping
from itertools import repeat

import numpy as np

from raydpfl.errors import RunError
from raydpfl.selection.base import Cohort, Population, Selection

FALSE_ALARM = 1e-6  # of a whole run with a sound selection


class Witness:
    """Checks every cohort of a run.

    Args:
        selection: the member.
        population: the public facts about the clients.
        exposures: int64 [rounds], how many of the first t + 1 rounds the accountants compose.
        least: the fewest clients that the noise of a round needs.
        secret: whether an accountant relies on the cohort being a secret.
        apart: the fewest rounds from one participation of a client to its next that the noise needs
            (it does where it is correlated over the rounds).
        planned: by round, the `fingerprint` of the draw that was accounted for in advance; None:
            accountants do not count draws.
    """

    def __init__(
        self,
        selection: Selection,
        population: Population,
        exposures: np.ndarray,
        least: int,
        secret: bool,
        apart: int = 1,
        planned: Mapping[int, bytes] | None = None,
    ):
        self._kind = selection.kind
        self._law = selection.sampling(population)
        self._count = len(population)
        self._exposures = exposures
        self._least = least
        self._secret = secret and self._law.hidden
        self._selected = 0  # over all rounds seen
        self._rounds = 0
        self._apart = apart
        self._recent: deque[np.ndarray] = deque(maxlen=apart - 1)
        self._before: np.ndarray | None = None  # the clients of the last cohort
        self._common = 0
        self._trials = 0
        self._expected = 0.0
        self._planned = planned or {}
        self._asked = Counter[int]()
        self._candidates: np.ndarray | None = None  # who was asked in this round
        self._sizes = _Variation()
        self._overlaps = _Variation()

    def asks(self, t: int, clients: np.ndarray) -> None:
        """Checks the clients int64 [k] that are about to be asked for their losses in round `t`.
        Raises `RunError` as `see` does.
        """
        if self._candidates is not None:
            raise self._wrong(f"asked for losses twice in round {t}")
        candidates = Cohort.of(clients)
        if not np.array_equal(candidates.clients, clients):
            raise self._wrong(f"asked clients in round {t} that are not ascending")
        self._members(t, candidates, None)
        self._as_planned(t, clients)
        self._candidates = clients
        self._asked.update(clients.tolist())
        most = int(self._exposures[t])
        client, times = self._asked.most_common(1)[0] if self._asked else (0, 0)
        if times > most and not self._law.repeats:
            raise self._wrong(
                f"asked client {client} in {times} of {t + 1} rounds, where at most {most} are "
                "accounted for"
            )

    def asked(self, clients: np.ndarray) -> None:
        """Notes clients int64 [k] that were asked in a round before this process began."""
        self._asked.update(clients.tolist())

    def took(self, clients: np.ndarray) -> None:
        """Notes the clients int64 [r] of a round before this process began; called for the latest
        rounds, the oldest first.
        """
        self._recent.append(clients)

    def see(
        self,
        t: int,
        cohort: Cohort,
        participations: Mapping[int, int],
    ) -> None:
        """Checks the cohort of round `t`.

        Args:
            t: the round.
            cohort: chosen among those who were asked in the round, if any were.
            participations: how often each client took part in earlier rounds.

        Raises:
            RunError: the declared law does not give such a cohort.
        """
        candidates = self._candidates
        self._candidates = None
        self._members(t, cohort, candidates)
        self._size(t, cohort)
        if candidates is None:
            self._as_planned(t, cohort.clients)
        clients = cohort.clients
        before = list(map(participations.get, clients.tolist(), repeat(0)))
        # the last draw of a client drawn twice has them all
        counts = np.array(before, np.int64) + cohort.draws + 1
        self._exposed(t, clients, counts)
        self._separate(t, clients)
        if self._secret:
            limit = FALSE_ALARM / (7 * (t + 1) * (t + 2))
            self._often(t, clients, counts, limit)
            self._total(t, cohort, limit)
            self._in_common(t, clients, limit)

    def _members(self, t: int, cohort: Cohort, candidates: np.ndarray | None) -> None:
        clients = np.asarray(cohort.clients)
        if clients.ndim != 1 or clients.dtype.kind != "i" or cohort.draws.shape != clients.shape:
            raise self._wrong(f"gave no array of whole numbers in round {t}")
        steps = np.diff(clients)
        if len(clients) and not (
            clients[0] >= 0 and clients[-1] < self._count and (steps >= 0).all()
        ):
            raise self._wrong(
                f"gave clients in round {t} that are not ascending from 0 to {self._count - 1}"
            )
        # of distinct clients each draw is the first
        draws = np.zeros(len(clients)) if (steps > 0).all() else Cohort.of(clients).draws
        if not np.array_equal(draws, cohort.draws):
            raise self._wrong(f"counted a client's draws wrongly in round {t}")
        if not cohort.lost >= 0:
            raise self._wrong(f"lost {cohort.lost} clients in round {t}")
        if cohort.draws.any() and not self._law.repeats:
            twice = int(clients[cohort.draws > 0][0])
            raise self._wrong(f"drew client {twice} twice in round {t}")
        if candidates is not None and not np.isin(clients, candidates).all():
            raise self._wrong(f"chose clients in round {t} that are no candidates")

    def _as_planned(self, t: int, clients: np.ndarray) -> None:
        if t in self._planned and fingerprint(clients) != self._planned[t]:
            raise self._wrong(
                f"drew other clients in round {t} than those that were accounted for before the run"
            )

    def _size(self, t: int, cohort: Cohort) -> None:
        size = len(cohort) + cohort.lost
        law = self._law
        if law.size not in (None, size):
            raise self._wrong(
                f"drew {size} clients in round {t}, where its law ({law}) gives {law.size}"
            )
        if len(cohort) < self._least:
            raise self._wrong(
                f"left {len(cohort)} clients in round {t}, where the noise counts on {self._least}"
            )

    def _exposed(self, t: int, clients: np.ndarray, counts: np.ndarray) -> None:
        most = int(self._exposures[t])
        if counts.max(initial=0) > most and not self._law.repeats:
            worst = int(counts.argmax())
            times = f"{counts[worst]} of {t + 1} rounds, where at most {most} are accounted for"
            raise self._wrong(f"took client {clients[worst]} in {times}")

    def _separate(self, t: int, clients: np.ndarray) -> None:
        for recent in self._recent:
            both = np.intersect1d(clients, recent)
            if len(both):
                least = f"{self._apart} rounds apart, which the noise counts on"
                raise self._wrong(f"took client {both[0]} in round {t} again, less than {least}")
        self._recent.append(clients)

    def _often(self, t: int, clients: np.ndarray, counts: np.ndarray, limit: float) -> None:
        """The largest count of any client, by a binomial law and a union bound over the clients."""
        if not len(counts):
            return
        law = self._law
        worst = int(counts.argmax())
        trials, chance, others = law.law.most(law, t + 1, int(self._exposures[t]))
        if (
            max(others, self._count if law.rule else 0) * _tail(int(counts[worst]), trials, chance)
            < limit
        ):
            times = f"{counts[worst]} times in {t + 1} rounds"
            raise self._wrong(
                f"drew client {clients[worst]} {times}, which its law ({law}) hardly ever gives"
            )

    def _total(self, t: int, cohort: Cohort, limit: float) -> None:
        """The sizes of Poisson cohorts, over all rounds."""
        self._selected += len(cohort) + cohort.lost
        self._rounds += 1
        if self._law.coins is None or self._law.rule:
            return
        trials = self._rounds * self._count
        total = self._selected
        low = _tail(trials - total, trials, 1 - self._law.q)
        high = _tail(total, trials, self._law.q)
        if 2 * min(low, high) < limit:
            expected = trials * self._law.q
            raise self._wrong(
                f"drew {total} clients by round {t}, where its law ({self._law}) gives "
                f"{expected:.0f}"
            )
        self._sizes.add(len(cohort) + cohort.lost, *_binomial(self._count, self._law.q))
        self._varies(t, self._sizes, "sizes of cohorts", limit)

    def _in_common(self, t: int, clients: np.ndarray, limit: float) -> None:
        """The clients that cohorts share with the one before, over all rounds.

        Given the two sizes their number is hypergeometric and independent of earlier draws.
        """
        law = self._law
        before = self._before
        self._before = clients
        if before is None or law.repeats or law.rule or not law.law.any_subset(law):
            return
        self._common += _shared(clients, before)
        self._trials += len(clients)
        self._expected += len(clients) * len(before) / self._count
        if not 0 < self._expected < self._trials:
            return
        if 2 * _chernoff(self._common, self._trials, self._expected / self._trials) < limit:
            common = f"{self._common} clients in common with the one before, in all"
            expected = f"its law ({law}) gives {self._expected:.3g}"
            raise self._wrong(f"gave cohorts by round {t} that have {common}, where {expected}")
        shared = _shared(clients, before)
        self._overlaps.add(shared, *_hypergeometric(self._count, len(before), len(clients)))
        self._varies(
            t, self._overlaps, "numbers of clients in common with the cohort before", limit
        )

    def _varies(self, t: int, seen: _Variation, what: str, limit: float) -> None:
        for how, chance in (("more", seen.more), ("less", seen.less)):
            if chance() < limit:
                raise self._wrong(
                    f"gave {what} by round {t} that vary {how} than its law ({self._law}) lets them"
                )

    def _wrong(self, what: str) -> RunError:
        return RunError(f"selection.kind {self._kind} {what}: no accountant covers what it does")


class _Variation:
    """How far numbers of independent rounds are from their means, over all rounds, by the law of
    each.
    """

    def __init__(self) -> None:
        self._rounds = 0
        self._far = 0.0
        self._near = 0.0

    def add(self, found: int, values: np.ndarray, chances: np.ndarray, mean: float) -> None:
        """One round's number. Its law has `values` float64 [k] with probabilities `chances` float64
        [k].
        """
        if len(values) < 2:
            return
        away = np.abs(values - mean)
        off = abs(found - mean)
        self._rounds += 1
        self._far -= math.log(min(max(float(chances[away >= off - 1e-9].sum()), 1e-300), 1.0))
        self._near -= math.log(min(max(float(chances[away <= off + 1e-9].sum()), 1e-300), 1.0))

    def more(self) -> float:
        """A bound on the probability that numbers by these laws vary as much."""
        return self._tail(self._far)

    def less(self) -> float:
        """A bound on the probability that they vary as little."""
        return self._tail(self._near)

    def _tail(self, total: float) -> float:
        from scipy.special import gammaincc

        return float(gammaincc(self._rounds, total)) if self._rounds else 1.0


def fingerprint(clients: np.ndarray) -> bytes:
    """16 bytes that tell the clients of one round, int64 [r] in order, from any others."""
    return hashlib.sha256(np.ascontiguousarray(clients, np.int64).tobytes()).digest()[:16]


def _binomial(trials: int, chance: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Bin(trials, chance): its values within about 40 stds of the mean, their probabilities, and
    the mean.
    """
    mean = trials * chance
    k = _window(mean, mean * (1 - chance), 0, trials)
    logs = _choose(trials, k) + k * math.log(chance) + (trials - k) * math.log1p(-chance)
    return k, _normalized(logs), mean


def _hypergeometric(count: int, marked: int, drawn: int) -> tuple[np.ndarray, np.ndarray, float]:
    """The same for the number of `marked` clients among `drawn` of `count`."""
    share = marked / count
    mean = drawn * share
    k = _window(mean, mean * (1 - share), max(0, marked + drawn - count), min(marked, drawn))
    return k, _normalized(_choose(marked, k) + _choose(count - marked, drawn - k)), mean


def _window(mean: float, variance: float, least: int, most: int) -> np.ndarray:
    reach = 40 * math.sqrt(variance) + 40
    return np.arange(
        max(least, math.floor(mean - reach)),
        min(most, math.ceil(mean + reach)) + 1,
        dtype=np.float64,
    )


def _choose(n: int, k: np.ndarray) -> np.ndarray:
    """The logarithm of n over k."""
    from scipy.special import gammaln

    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)


def _normalized(logs: np.ndarray) -> np.ndarray:
    chances = np.exp(logs - logs.max())
    return chances / chances.sum()


def _shared(first: np.ndarray, second: np.ndarray) -> int:
    """How many clients two cohorts share, each without repeats."""
    both = np.sort(np.concatenate([first, second]))
    return int((both[1:] == both[:-1]).sum())


def _tail(least: int, trials: int, chance: float) -> float:
    """P[Bin(trials, chance) >= least]."""
    from scipy.special import betainc

    if least <= 0:
        return 1.0
    return float(betainc(least, trials - least + 1, chance)) if least <= trials else 0.0


def _chernoff(count: int, trials: int, chance: float) -> float:
    """A bound on the probability of being as far from the mean as `count`, on the same side."""
    share = count / trials

    def part(a: float, b: float) -> float:
        return a * math.log(a / b) if a > 0 else 0.0

    if share > 1:
        return 0.0
    return math.exp(-trials * (part(share, chance) + part(1 - share, 1 - chance)))
