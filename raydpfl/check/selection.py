"""The contract of a selection: see `raydpfl.methods.selection`."""

import pickle
import time
from collections import Counter
from typing import Any

import numpy as np

from raydpfl.check import claims
from raydpfl.check import sampling as schemes
from raydpfl.check.claims import Claims
from raydpfl.check.contract import FALSE_ALARM, clauses_of, hold, made_up
from raydpfl.check.example import Example
from raydpfl.errors import RAISED
from raydpfl.methods.population import composed
from raydpfl.methods.selection import Cohort, Population, Selection
from raydpfl.simulation.sampling_monitor import SamplingMonitor

ROUNDS = 400
DRAWS = 100_000  # of a user-defined selection
SECONDS = 24  # in which as many of them are drawn as can be
SEEDS = (2, 3, 4, 5)
MOST = 100_000  # clients to draw among


def _ask(clients: np.ndarray) -> np.ndarray:
    """Losses of these clients."""
    return np.abs(made_up(1 + int(clients.max()))[clients])


def _draw(member: Selection, seed: int, t: int, population: Population) -> Cohort:
    return member.draw(seed, t, population, _ask)


def cohorts(case: Example) -> str:
    """A cohort is of clients of the population, a function of seed and round alone."""
    member = case.plan.experiment.selection
    population = case.plan.population
    first = [_draw(member, 1, t, population) for t in range(6)]
    second = pickle.loads(pickle.dumps(member))
    fresh = pickle.loads(pickle.dumps(population))
    for t in reversed(range(6)):
        clients = np.asarray(first[t].clients)
        hold(clients.dtype.kind == "i" and clients.ndim == 1, f"clients are {clients.dtype}")
        inside = (clients >= 0) & (clients < len(population))
        hold(inside.all(), f"round {t} has client {clients[~inside][:1]} of {len(population)}")
        for who, among in ((member, population), (second, fresh)):
            other = _draw(who, 1, t, among).clients
            hold(np.array_equal(clients, other), f"drawn twice, round {t} has other clients")
        exposed = member.exposed(1, t, population)
        hold(np.isin(clients, exposed).all(), f"round {t} takes clients that are not exposed")
    others = [_draw(member, 2, t, population).clients for t in range(6)]
    same = all(map(np.array_equal, [draw.clients for draw in first], others))
    secret = member.sampling(population).hidden
    hold(not (secret and same), "a secret cohort is the same for every seed")
    return f"{len(first[0])} clients in round 0"


def follows_sampling(case: Example) -> str:
    """Draws follow the sampling scheme that it declares."""
    member = case.plan.experiment.selection
    population = case.plan.population
    declared = member.sampling(population)
    composed_rounds = composed(member, 1, ROUNDS, population)
    least = member.clients_left(1, ROUNDS, population)
    if declared.coins is not None or declared.size is None:
        least = 0
    rate = FALSE_ALARM / (len(SEEDS) + 1)
    pairs = member.is_user_defined
    monitor = SamplingMonitor(
        member, population, composed_rounds, least, True, pairs=pairs, false_alarm=rate
    )
    seen: Counter[int] = Counter()
    for t in range(ROUNDS):
        cohort = _draw(member, 1, t, population)
        if member.asks:
            monitor.check_candidates(t, member.exposed(1, t, population))
        monitor.check(t, cohort, seen)
        seen.update(cohort.clients.tolist())
    detail = f"{declared}, {ROUNDS} rounds"
    if member.is_user_defined and not member.asks:
        populations = [population] if declared.hidden else []
        populations += _suited(member)
        detail += _many(member, populations, rate) if populations else ""
    return detail


def _many(member: Selection, populations: list[Population], rate: float) -> str:
    """Holds many cohorts against the sampling scheme."""
    drawn = 0
    start = time.monotonic()
    for number, seed in enumerate(SEEDS, 1):
        population = populations[min(number, len(populations)) - 1]
        until = start + SECONDS * number / len(SEEDS)
        rounds = DRAWS // len(SEEDS)
        composed_rounds = composed(member, seed, rounds, population)
        monitor = SamplingMonitor(
            member, population, composed_rounds, 0, True, pairs=True, false_alarm=rate
        )
        seen: Counter[int] = Counter()
        for t in range(rounds):
            cohort = member.draw(seed, t, population)
            monitor.check(t, cohort, seen)
            seen.update(cohort.clients.tolist())
            if time.monotonic() > until:
                break
        drawn += t + 1
    fewer = "" if drawn >= DRAWS else f" (as many as {SECONDS} s allow, of {DRAWS:,})"
    return f"; {drawn:,} cohorts, among up to {len(populations[-1])} clients{fewer}"


def _suited(member: Selection) -> list[Population]:
    """Up to three populations that suit the numbers in the fields of a member, of as many clients
    as a field says or ten times as many, four times as many as the ids in a list need, or 1,000,
    and that it draws secret cohorts from, the largest last.
    """
    fields = member.model_dump().values()
    counts = {times * value for value in fields if type(value) is int for times in (1, 10)}
    counts.add(1000)
    counts.add(4 * (1 + max((number for value in fields for number in _listed(value)), default=0)))
    suited: list[Population] = []
    for count in sorted(counts, reverse=True):
        if not 1 < count <= MOST or len(suited) == 3:
            continue
        population = Population(1 + np.arange(count) % 50)
        try:
            member.fits(count)
            member.draw(1, 0, population)
            hidden = member.sampling(population).hidden
        except RAISED:  # a user's code may raise anything
            continue
        if hidden:
            suited.append(population)
    return suited[::-1]


def _listed(value: Any) -> list[int]:
    """The whole numbers in a list or mapping, and in those within it."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if not isinstance(value, (list, tuple, set, frozenset)):
        return []
    inner = [number for item in value for number in _listed(item)]
    return inner + [item for item in value if type(item) is int]


def composed_rounds(case: Example) -> str:
    """The rounds that accountants compose over never fall, and hold all that a client is in."""
    member = case.plan.experiment.selection
    population = case.plan.population
    rounds = composed(member, 1, 50, population)
    seen: Counter[int] = Counter()
    for t in range(50):
        seen.update(member.exposed(1, t, population).tolist())
        most = max(seen.values(), default=0)
        repeated = member.sampling(population).repeats
        enough = rounds[t] >= most or repeated
        hold(enough, f"a client is in {most} of {t + 1} rounds, and {rounds[t]} are composed")
    return f"{rounds[-1]} of 50 rounds"


def numbers(case: Example) -> str:
    """What it says of the sum, its divisor and its corrections, are finite numbers."""
    member = case.plan.experiment.selection
    population = case.plan.population
    divisor = member.divisor(population)
    hold(np.isfinite(divisor) and divisor > 0, f"the divisor is {divisor}")
    factors = member.corrections(population)
    if factors is not None:
        hold(factors.shape == (len(population),), f"corrections are {list(factors.shape)}")
        hold(np.isfinite(factors).all(), "a correction is not finite")
    declared = member.sampling(population)
    secret = declared.coins is None or member.hides_size()
    hold(secret, "each client has a coin of its own: hides_size is to be True")
    return f"divided by {divisor:g}"


def accounted(case: Example) -> str:
    """The sampling scheme that it declares is sound."""
    sampling = case.plan.experiment.selection.sampling(case.plan.population)
    return "; ".join(clause(Claims((sampling,))) for clause in clauses_of(schemes, claims))
