"""The contract of a selection: see `raydpfl.methods.selection`."""

import math
import pickle
import time
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
from scipy.stats import kstest

from raydpfl.check import claims
from raydpfl.check import sampling as schemes
from raydpfl.check.claims import Claims
from raydpfl.check.contract import (
    FALSE_ALARM,
    clauses_of,
    hold,
    largest_correlation,
    normal_limit,
    normals,
)
from raydpfl.check.example import Example
from raydpfl.errors import USER_EXCEPTIONS
from raydpfl.methods.population import check_composed_rounds
from raydpfl.methods.selection import Ask, Population, Selection
from raydpfl.simulation.noise_monitor import tail
from raydpfl.simulation.sampling_monitor import SamplingMonitor

ROUNDS = 400
DRAWS = 100_000  # of a user-defined selection
SECONDS = 24  # in which as many of them are drawn as can be
SEEDS = (2, 3, 4, 5)
MAX_CLIENTS = 100_000  # clients to draw among


def _ask(clients: np.ndarray) -> np.ndarray:
    """Losses of these clients."""
    return np.abs(normals(1 + int(clients.max()))[clients])


def cohorts(case: Example) -> str:
    """A cohort is of clients of the population, a function of seed and round alone."""
    member = case.plan.experiment.selection
    population = case.plan.population
    first_cohorts = [member.draw(1, t, population, _ask) for t in range(6)]
    member_copy = pickle.loads(pickle.dumps(member))
    population_copy = pickle.loads(pickle.dumps(population))
    for t in reversed(range(6)):
        clients = np.asarray(first_cohorts[t].clients)
        hold(clients.dtype.kind == "i" and clients.ndim == 1, f"clients are {clients.dtype}")
        mask = (clients >= 0) & (clients < len(population))
        hold(mask.all(), f"round {t} has client {clients[~mask][:1]} of {len(population)}")
        for sampler, pool in ((member, population), (member_copy, population_copy)):
            repeat = sampler.draw(1, t, pool, _ask).clients
            hold(np.array_equal(clients, repeat), f"drawn twice, round {t} has other clients")
        candidates = member.exposed(1, t, population)
        hold(np.isin(clients, candidates).all(), f"round {t} takes clients that are not exposed")
    seed_clients = [member.draw(2, t, population, _ask).clients for t in range(6)]
    is_seedless = all(map(np.array_equal, [draw.clients for draw in first_cohorts], seed_clients))
    is_secret = member.sampling(population).hidden
    hold(not (is_secret and is_seedless), "a secret cohort is the same for every seed")
    return f"{len(first_cohorts[0])} clients in round 0"


def follows_sampling(case: Example) -> str:
    """Draws follow the sampling scheme that it declares."""
    member = case.plan.experiment.selection
    population = case.plan.population
    declared_sampling = member.sampling(population)
    min_clients = member.clients_left(1, ROUNDS, population)
    if declared_sampling.coins is not None or declared_sampling.size is None:
        min_clients = 0
    _check_cohorts(member, 1, ROUNDS, population, _ask, min_clients)
    detail = f"{declared_sampling}, {ROUNDS} rounds"
    if member.is_user_defined and not member.asks:
        populations = [population] if declared_sampling.hidden else []
        populations += _secret_populations(member)
        detail += _check_many_cohorts(member, populations) if populations else ""
    return detail


def _check_many_cohorts(member: Selection, populations: list[Population]) -> str:
    """Holds many cohorts against the sampling scheme."""
    cohort_count = 0
    start = time.monotonic()
    for number, seed in enumerate(SEEDS, 1):
        population = populations[min(number, len(populations)) - 1]
        deadline = start + SECONDS * number / len(SEEDS)
        rounds = DRAWS // len(SEEDS)
        cohort_count += _check_cohorts(member, seed, rounds, population, deadline=deadline)
    note = "" if cohort_count >= DRAWS else f" (as many as {SECONDS} s allow, of {DRAWS:,})"
    return f"; {cohort_count:,} cohorts, among up to {len(populations[-1])} clients{note}"


def _check_cohorts(
    member: Selection,
    seed: int,
    rounds: int,
    population: Population,
    ask: Ask | None = None,
    min_clients: int = 0,
    deadline: float = math.inf,
) -> int:
    """Holds cohorts of so many rounds, up to a deadline, against the scheme; how many they were."""
    composed_rounds = check_composed_rounds(member, seed, rounds, population)
    rate = FALSE_ALARM / (len(SEEDS) + 1)
    pairs = member.is_user_defined
    monitor = SamplingMonitor(
        member, population, composed_rounds, min_clients, True, pairs=pairs, false_alarm=rate
    )
    participation_counts: Counter[int] = Counter()
    for t in range(rounds):
        cohort = member.draw(seed, t, population, ask)
        if member.asks:
            monitor.check_candidates(t, member.exposed(seed, t, population))
        monitor.check(t, cohort, participation_counts)
        participation_counts.update(cohort.clients.tolist())
        if time.monotonic() > deadline:
            break
    return t + 1


def _secret_populations(member: Selection) -> list[Population]:
    """Up to three populations that suit the numbers in the fields of a member, of as many clients
    as a field says or ten times as many, four times as many as the ids in a list need, or 1,000,
    and that it draws secret cohorts from, the largest last.
    """
    fields = member.model_dump().values()
    counts = {times * value for value in fields if type(value) is int for times in (1, 10)}
    counts.add(1000)
    largest = max((number for value in fields for number in _nested_integers(value)), default=0)
    counts.add(4 * (1 + largest))
    populations: list[Population] = []
    for count in sorted(counts, reverse=True):
        if not 1 < count <= MAX_CLIENTS or len(populations) == 3:
            continue
        population = Population(1 + np.arange(count) % 50)
        try:
            member.fits(count)
            member.draw(1, 0, population)
            is_hidden = member.sampling(population).hidden
        except USER_EXCEPTIONS:  # a user's code may raise anything
            continue
        if is_hidden:
            populations.append(population)
    return populations[::-1]


def _nested_integers(value: Any) -> list[int]:
    """The whole numbers in a list or mapping, and in those within it."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if not isinstance(value, (list, tuple, set, frozenset)):
        return []
    nested_numbers = [number for item in value for number in _nested_integers(item)]
    return nested_numbers + [item for item in value if type(item) is int]


def composed_rounds(case: Example) -> str:
    """The rounds that accountants compose over never fall, and hold all that a client is in."""
    member = case.plan.experiment.selection
    population = case.plan.population
    rounds = check_composed_rounds(member, 1, 50, population)
    participation_counts: Counter[int] = Counter()
    for t in range(50):
        participation_counts.update(member.exposed(1, t, population).tolist())
        count = max(participation_counts.values(), default=0)
        has_repeats = member.sampling(population).repeats
        is_covered = rounds[t] >= count or has_repeats
        hold(is_covered, f"a client is in {count} of {t + 1} rounds, and {rounds[t]} are composed")
    return f"{rounds[-1]} of 50 rounds"


def answers(case: Example) -> str:
    """Answers about losses have the noise and the range that its `loss_query` declares."""
    member = case.plan.experiment.selection
    query = member.loss_query
    if query is None:
        return "no accountant counts any"
    losses = np.abs(normals(10))
    keys = list(product((1, 2), range(40), range(25)))  # seed, round and client
    noise = np.array([member.answer(losses.copy(), *key) for key in keys])
    again = np.array([member.answer(losses.copy(), *key) for key in keys])
    hold(np.array_equal(noise, again), "asked twice, a client answers something else")
    hold(len(np.unique(noise)) == len(keys), "two keys have the same noise")
    scores = (noise - noise.mean()) / query.std
    square = float(scores @ scores)
    share = math.sqrt(square / (len(keys) - 1))
    message = f"the noise has {share:.4g} of its std, {query.std:g}"
    hold(2 * tail(square, len(keys) - 1) >= FALSE_ALARM, message)
    test = kstest(scores, "norm")
    hold(test.pvalue >= FALSE_ALARM, f"no Gaussian: p = {test.pvalue:.2g}")
    table = scores.reshape(80, 25)  # of all rounds, those of another seed last, and clients
    correlations = [(largest_correlation(rows)[0], len(rows)) for rows in (table, table.T)]
    correlations.append((largest_correlation(scores.reshape(2, -1))[0], 2))
    for largest, count in correlations:
        limit = normal_limit(math.comb(count, 2), FALSE_ALARM)
        hold(largest <= limit, f"the noise is correlated by {largest:.1f} standard errors")
    for size in (0.0, 1e-3, 1.0, 30.0, 1e30, np.inf, np.nan, -1.0, -1e30):
        change = abs(member.answer(size * losses, *keys[0]) - noise[0])
        message = f"other losses move an answer by {change:g}, and the range is {2 * query.bound:g}"
        hold(change <= 2 * query.bound + 1e-9 * (query.bound + query.std), message)
    return f"{share:.4f} of the std over {len(keys)} answers, p = {test.pvalue:.2g}"


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
    declared_sampling = member.sampling(population)
    is_consistent = declared_sampling.coins is None or member.hides_size()
    hold(is_consistent, "each client has a coin of its own: hides_size is to be True")
    return f"divided by {divisor:g}"


def accounted(case: Example) -> str:
    """The sampling scheme that it declares is sound."""
    sampling = case.plan.experiment.selection.sampling(case.plan.population)
    return "; ".join(clause(Claims((sampling,))) for clause in clauses_of(schemes, claims))
