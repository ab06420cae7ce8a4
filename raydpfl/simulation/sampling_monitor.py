"""Checks, before anything is released, that cohorts follow the sampling scheme that a selection
declares, which accountants rely on:

- what the scheme never gives: a cohort of another size; a client that does not exist, is in a
  cohort twice, or takes part (or is asked for its loss) more often than the accountants compose;
  fewer clients than the noise of the sum needs; other clients than were drawn in advance, where the
  accountants counted those;
- where the cohort is a secret, what the scheme hardly ever gives: see
  `raydpfl.simulation.sampling_bets`.

>>> from raydpfl.methods.selection.uniform import Uniform
>>> member, clients = Uniform(cohort=90), Population.balanced(900)
>>> monitor = SamplingMonitor(member, clients, np.arange(1, 101), 90, secret=True)
>>> monitor.check(0, member.draw(0, 0, clients), {})
>>> monitor.check(1, Cohort.of(np.arange(89)), {})
Traceback (most recent call last):
raydpfl.errors.RunError: selection.kind uniform drew 89 clients in round 1, where its sampling \
(fixed size 90 of 900) gives 90: no accountant covers what it does

A sound member fails with probability at most `FALSE_ALARM` in a whole run, however long. Draws that
follow the scheme but are no secret (they can be predicted) pass: no sequence of draws shows that.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import NoReturn

import numpy as np

from raydpfl.config.registry import iter_members
from raydpfl.errors import ConfigError, RunError
from raydpfl.methods.selection.base import Cohort, Population, Selection
from raydpfl.simulation.plan import Plan, fingerprint
from raydpfl.simulation.sampling_bets import Bets, DrawnCohort

_FACTS = ("population", "cohort", "p_max", "rule", "epoch", "per_epoch")
FALSE_ALARM = 1e-6  # of a whole run with a sound selection
WORDS = {  # what a bet that has won says of the draws
    "counts": "drew some clients again and again more often than others",
    "client": "drew one client too often or too seldom",
    "sizes": "drew cohorts of sizes",
    "overlap": "drew numbers of clients in common with the cohort before",
    "pairs": "drew some clients together too often",
    "repeats": "drew clients several times a round, more often",
    "epochs": "allocated clients to rounds of an epoch",
}


class SamplingMonitor:
    """Checks every cohort of a run.

    Args:
        selection, population: the member, and the public facts about the clients.
        composed_rounds: int64 [rounds], how many of the first t + 1 rounds the accountants compose.
        min_clients: the fewest clients that the noise of a round needs.
        secret: whether an accountant relies on the cohort being a secret.
        separation: the fewest rounds between a client's participations that the noise counts on.
        planned_draws: by round, the `fingerprint` of a draw accounted for in advance; None: none.
        pairs: whether to look for pairs of clients that come together.
        false_alarm: the probability that a sound member fails by chance.
    """

    def __init__(
        self,
        selection: Selection,
        population: Population,
        composed_rounds: np.ndarray,
        min_clients: int,
        secret: bool,
        separation: int = 1,
        planned_draws: Mapping[int, bytes] | None = None,
        pairs: bool = False,
        false_alarm: float = FALSE_ALARM,
    ):
        self._kind = selection.kind
        self._sampling = selection.sampling(population)
        self._count = len(population)
        self._composed_rounds = composed_rounds
        self._min_clients = min_clients
        hidden = secret and self._sampling.hidden
        self._bets = Bets(self._sampling, self._count, pairs) if hidden else None
        self._max_log_wealth = -math.log(false_alarm)
        self._separation = separation
        self._last_rounds: dict[int, int] = {}  # by client, where these count
        self._planned_draws = planned_draws or {}
        self._candidate_counts = Counter[int]()
        self._candidates: np.ndarray | None = None  # who was asked in this round

    def check_candidates(self, t: int, clients: np.ndarray) -> None:
        """As `check`, of the clients int64 [k] that are about to be asked for their losses."""
        if self._candidates is not None:
            self._refuse(f"asked for losses twice in round {t}")
        candidates = Cohort.of(clients)
        if not np.array_equal(candidates.clients, clients):
            self._refuse(f"asked clients in round {t} that are not ascending")
        self._check_format(t, candidates)
        self._check_plan(t, clients)
        counts = self._candidate_counts
        counts.update(clients.tolist())
        limit = int(self._composed_rounds[t])
        client, times = counts.most_common(1)[0] if counts else (0, 0)
        if times > limit and not self._sampling.repeats:
            fault = f"asked client {client} in {times} of {t + 1} rounds"
            self._refuse(f"{fault}, where at most {limit} are accounted for")
        self._candidates = clients

    def check(self, t: int, cohort: Cohort, participations: Mapping[int, int]) -> None:
        """Raises `RunError` where the declared sampling does not give such a cohort in round `t`,
        chosen among those who were asked, if any. `participations`: by client, earlier draws.
        """
        candidates, self._candidates = self._candidates, None
        self._check_format(t, cohort)
        clients = cohort.clients
        if candidates is None:
            self._check_plan(t, clients)
        elif not np.isin(clients, candidates).all():
            self._refuse(f"chose clients in round {t} that are no candidates")
        self._check_size(t, cohort)
        sampling = self._sampling
        draw_counts = self._draw_counts(cohort, participations)
        limit = int(self._composed_rounds[t])
        if draw_counts.max(initial=-1) >= limit and not sampling.repeats:
            place = int(draw_counts.argmax())
            fault = f"took client {clients[place]} in {draw_counts[place] + 1} of {t + 1} rounds"
            self._refuse(f"{fault}, where at most {limit} are accounted for")
        for client in clients.tolist() if self._last_rounds else ():
            if t - self._last_rounds.get(client, -self._separation) < self._separation:
                gap = f"{self._separation} rounds between them, which the noise counts on"
                self._refuse(f"took client {client} in round {t} again, less than {gap}")
        self._bet(t, cohort, draw_counts)
        self._record_participations(t, clients)

    def _record_participations(self, t: int, clients: np.ndarray) -> None:
        if self._separation > 1:
            self._last_rounds.update(zip(clients.tolist(), repeat(t)))

    def resume(self, first_round: int, exposed_clients: Sequence[np.ndarray], asks: bool) -> None:
        """Takes up the rounds of a resumed run from round `first_round` on: the clients int64 [k]
        that each exposed, as candidates if the selection `asks` them.
        """
        for t, clients in enumerate(exposed_clients, first_round):
            self._record_participations(t, clients)
            self._candidate_counts.update(clients.tolist() if asks else ())

    def replay(self, cohorts: Iterable[Cohort], first_round: int = 0) -> None:
        """Bets on the cohorts of a resumed run, round by round from `first_round` on; no more on
        any where one cannot be drawn once more. Raises `RunError` as `check` does.
        """
        participations = Counter[int]()
        try:
            for t, cohort in enumerate(cohorts, first_round):
                self._bet(t, cohort, self._draw_counts(cohort, participations))
                participations.update(cohort.clients.tolist())
        except ConfigError:  # a selection that needs losses cannot draw it a second time
            self._bets = None

    def _draw_counts(self, cohort: Cohort, participations: Mapping[int, int]) -> np.ndarray:
        """How often the clients were drawn before this draw, int64 [r], dropouts left out."""
        counts = list(map(participations.get, cohort.clients.tolist(), repeat(0)))
        return np.array(counts, np.int64) + Cohort.of(cohort.clients).draws

    def _refuse(self, fault: str) -> NoReturn:
        """Raises `RunError` for what a selection does, in words."""
        message = f"selection.kind {self._kind} {fault}"
        raise RunError(f"{message}: no accountant covers what it does")

    def _check_size(self, t: int, cohort: Cohort) -> None:
        sampling = self._sampling
        size = len(cohort) + cohort.lost
        fault = f"drew {size} clients in round {t}, where its sampling"
        if sampling.size not in (None, size):
            self._refuse(f"{fault} ({sampling}) gives {sampling.size}")
        if sampling.cap is not None and size > sampling.cap:
            self._refuse(f"{fault} has {sampling.cap} at most")
        if len(cohort) < self._min_clients:
            fault = f"left {len(cohort)} clients in round {t}"
            self._refuse(f"{fault}, where the noise counts on {self._min_clients}")

    def _check_format(self, t: int, cohort: Cohort) -> None:
        clients = np.asarray(cohort.clients)
        if clients.ndim != 1 or clients.dtype.kind != "i" or cohort.draws.shape != clients.shape:
            self._refuse(f"gave no array of whole numbers in round {t}")
        steps = np.diff(clients, prepend=0, append=self._count - 1)
        if (steps < 0).any():
            ids = f"that are not ascending from 0 to {self._count - 1}"
            self._refuse(f"gave clients in round {t} {ids}")
        repeat_mask = steps[1:-1] == 0
        # of distinct clients every draw is the first; of several draws some may have dropped out
        draws = Cohort.of(clients).draws if repeat_mask.any() else np.zeros(len(clients))
        if cohort.lost > 0:
            wrong = (cohort.draws < draws).any() or (np.diff(cohort.draws)[repeat_mask] <= 0).any()
        else:
            wrong = not np.array_equal(draws, cohort.draws)
        if wrong:
            self._refuse(f"counted a client's draws wrongly in round {t}")
        if not cohort.lost >= 0:
            self._refuse(f"lost {cohort.lost} clients in round {t}")
        if cohort.draws.any() and not self._sampling.repeats:
            self._refuse(f"drew client {clients[cohort.draws > 0][0]} twice in round {t}")

    def _check_plan(self, t: int, clients: np.ndarray) -> None:
        if t in self._planned_draws and fingerprint(clients) != self._planned_draws[t]:
            fault = f"drew other clients in round {t}"
            self._refuse(f"{fault} than those that were accounted for before the run")

    def _bet(self, t: int, cohort: Cohort, draw_counts: np.ndarray) -> None:
        if self._bets is None:
            return
        size = len(cohort) + cohort.lost
        limit = int(self._composed_rounds[t])
        bet, wealth = self._bets.see(DrawnCohort(t, cohort.clients, draw_counts, size, limit))
        if wealth >= self._max_log_wealth:
            scheme = f"which its sampling ({self._sampling}) hardly ever gives"
            self._refuse(f"{WORDS[bet]} by round {t}, {scheme}")


def of_run(plan: Plan, t: int, draws: list[np.ndarray] | None) -> SamplingMonitor:
    """The monitor of a run that has done `t` rounds. `draws` are the clients of all releases, where
    the accountants counted these. Raises `RunError` as `check_scheme` does.
    """
    selection = plan.experiment.selection
    noise = plan.experiment.noise
    population = plan.population
    check_scheme(plan)
    secret = plan.mechanism is not None and not plan.mechanism.by_draws
    secret = secret and selection.sampling(population).hidden
    separation = selection.separation if noise.correlated else 1
    planned_draws = None
    if draws is not None:
        present = draws[len(draws) - (plan.experiment.rounds - plan.first) :]
        planned_draws = {t: fingerprint(clients) for t, clients in enumerate(present, plan.first)}
    monitor = SamplingMonitor(
        selection,
        population,
        plan.composed_rounds + max(plan.extra_composed_rounds, 0),
        plan.clients_left if noise.drawn_by() == "client" else 0,
        secret,
        separation,
        planned_draws,
        pairs=any(member.is_user_defined for _, member in iter_members(selection, "selection")),
    )
    seed = plan.cohort_seed()
    first_round = 0 if selection.asks else max(0, t - separation + 1)
    exposed_clients = [selection.exposed(seed, past, population) for past in range(first_round, t)]
    monitor.resume(first_round, exposed_clients, selection.asks)

    def redraw(past: int) -> Cohort:
        """The latest release of a round."""
        restarts = [segment.restart for segment in plan.history if segment.first <= past]
        seed = plan.cohort_seed(restarts[-1] if past < plan.first else None)
        return selection.draw(seed, past, population)

    # an epoch whose rounds are of two segments is none that the scheme gives
    first_round = plan.first if selection.sampling(population).epoch else 0
    monitor.replay(map(redraw, range(first_round, t if secret else 0)), first_round)
    return monitor


def check_scheme(plan: Plan) -> None:
    """Raises `RunError` for another sampling scheme than was accounted for."""
    plan_sampling = plan.mechanism.cohorts if plan.mechanism else None
    if plan_sampling is None:
        return
    selection = plan.experiment.selection
    sampling = selection.sampling(plan.population)
    if plan.experiment.noise.stands_for is not None:  # the clients that run stand for others
        population, cohort = plan_sampling.population, plan_sampling.cohort
        sampling = replace(sampling, population=population, cohort=cohort)
    facts = [
        (type(value.scheme), *(getattr(value, name) for name in _FACTS))
        for value in (plan_sampling, sampling)
    ]
    if facts[0] != facts[1]:
        raise RunError(
            f"selection.kind {selection.kind} declares {sampling}, and declared {plan_sampling} "
            "when that was accounted for: no accountant covers what it does"
        )
