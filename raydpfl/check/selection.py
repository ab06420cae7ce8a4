"""What a selection promises: see `raydpfl.selection`."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
from scipy.stats import binom

from raydpfl.check import laws
from raydpfl.check.cases import Case
from raydpfl.check.promise import FALSE_ALARM, Look, hold, made_up
from raydpfl.parts import composed
from raydpfl.selection import Cohort, Population, Selection
from raydpfl.selection.witness import Witness

ROUNDS = 400


def _ask(clients: np.ndarray) -> np.ndarray:
    """Losses of these clients."""
    return np.abs(made_up(1 + int(clients.max()))[clients])


def _draw(member: Selection, seed: int, t: int, population: Population) -> Cohort:
    return member.draw(seed, t, population, _ask)


def cohorts(case: Case) -> str:
    """A cohort is of clients of the population, a function of seed and round alone."""
    member = case.plan.experiment.selection
    population = case.plan.population
    first = [_draw(member, 1, t, population) for t in range(6)]
    again = pickle.loads(pickle.dumps(member))
    fresh = pickle.loads(pickle.dumps(population))
    for t in reversed(range(6)):
        clients = np.asarray(first[t].clients)
        hold(clients.dtype.kind == "i" and clients.ndim == 1, f"clients are {clients.dtype}")
        inside = (clients >= 0) & (clients < len(population))
        hold(inside.all(), f"round {t} has client {clients[~inside][:1]} of {len(population)}")
        for who, among in ((member, population), (again, fresh)):
            other = _draw(who, 1, t, among).clients
            hold(np.array_equal(clients, other), f"drawn again, round {t} has other clients")
        exposed = member.exposed(1, t, population)
        hold(np.isin(clients, exposed).all(), f"round {t} takes clients that are not exposed")
    others = [_draw(member, 2, t, population).clients for t in range(6)]
    same = all(map(np.array_equal, [each.clients for each in first], others))
    secret = member.sampling(population).hidden
    hold(not (secret and same), "a secret cohort is the same for every seed")
    return f"{len(first[0])} clients in round 0"


def law(case: Case) -> str:
    """Draws follow the law that it declares."""
    member = case.plan.experiment.selection
    population = case.plan.population
    declared = member.sampling(population)
    exposures = composed(member, 1, ROUNDS, population)
    least = member.survivors(1, ROUNDS, population)
    if declared.coins is not None or declared.size is None:
        least = 0
    witness = Witness(member, population, exposures, least, secret=True)
    seen: Counter[int] = Counter()
    for t in range(ROUNDS):
        cohort = _draw(member, 1, t, population)
        if member.asks:
            witness.asks(t, member.exposed(1, t, population))
        witness.see(t, cohort, seen)
        seen.update(cohort.clients.tolist())
    if declared.hidden and not declared.repeats and not declared.rule:
        counts = np.array([seen[client] for client in range(len(population))])
        q = declared.q * (1 - member.dropout)
        chance = float(binom.cdf(counts.min(), ROUNDS, q)) * len(population)
        rare = f"client {counts.argmin()} is drawn {counts.min()} times in {ROUNDS} rounds"
        hold(chance >= FALSE_ALARM, f"{rare}, where {declared} gives {ROUNDS * q:.0f}")
    return f"{declared}, {ROUNDS} rounds"


def exposures(case: Case) -> str:
    """The rounds that accountants compose over never fall, and hold all that a client is in."""
    member = case.plan.experiment.selection
    population = case.plan.population
    found = composed(member, 1, 50, population)
    seen: Counter[int] = Counter()
    for t in range(50):
        seen.update(member.exposed(1, t, population).tolist())
        most = max(seen.values(), default=0)
        repeated = member.sampling(population).repeats
        enough = found[t] >= most or repeated
        hold(enough, f"a client is in {most} of {t + 1} rounds, and {found[t]} are composed")
    return f"{found[-1]} of 50 rounds"


def numbers(case: Case) -> str:
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


def accounted(case: Case) -> str:
    """The law that it declares is sound."""
    sampling = case.plan.experiment.selection.sampling(case.plan.population)
    return "; ".join(promise(laws.LawCase(sampling)) for promise in laws.PROMISES)


PROMISES: tuple[Look, ...] = (cohorts, law, exposures, numbers, accounted)
