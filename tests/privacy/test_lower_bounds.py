"""What accountants claim, against neighbouring worlds: never less than an observer can tell."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import log_ndtr, logsumexp
from scipy.stats import binom, norm

from raydpfl.core.prng import Purpose, stream
from raydpfl.privacy import Mechanism, Query, Sampling, delta, epsilon
from raydpfl.privacy.guarantee import Observer
from raydpfl.privacy.observers import views

RELATIONS = ("replace_one", "zero_out", "add_remove")
OTHERS = {"replace_one": (-1.0,), "zero_out": (0.0,), "add_remove": (None,)}
CAPPED = Sampling("truncated_poisson", 4, 1, cap=2)
SAMPLINGS = (Sampling("fixed", 4, 2), Sampling("poisson", 4, 1))
X = np.linspace(-22, 22, 4001)


def cohorts(sampling, clients):
    """Every cohort of these clients, and its probability."""
    if sampling.kind == "fixed":
        subsets = list(itertools.combinations(clients, sampling.cohort))
        return [(subset, 1 / len(subsets)) for subset in subsets]
    q = sampling.q
    drawn = []
    for k in range(len(clients) + 1):
        for subset in itertools.combinations(clients, k):
            chance = q**k * (1 - q) ** (len(clients) - k)
            kept = list(itertools.combinations(subset, min(k, sampling.cap or k)))
            drawn += [(part, chance / len(kept)) for part in kept]
    return drawn


def density(sampling, values, std):
    """Of the noised sum on a line, where client k gives `values[k]`; None: it is not there."""
    present = [k for k, value in enumerate(values) if value is not None]
    chances = dict.fromkeys(range(-9, 10), 0.0)
    for cohort, chance in cohorts(sampling, present):
        chances[int(sum(values[k] for k in cohort))] += chance
    return sum(chance * norm.pdf(X, total, std) for total, chance in chances.items())


@pytest.mark.parametrize("std", [0.7, 2.0])
def test_one_round_is_the_worst_of_all_worlds_on_a_line(std):
    """Client 0 sends 1, or nothing, -1 or is absent; the others send -1, 0 or 1."""
    for sampling, relation in itertools.product(SAMPLINGS, RELATIONS):
        hold_the_worst_world(sampling, relation, std)


@pytest.mark.slow
def test_one_round_is_below_the_claim_in_all_worlds_on_a_line():
    """Of capped cohorts, whose claim is for an observer who is told how many others there were. It
    is between those of no cap and of cohorts that have their size, which it has at the ends.
    """
    for relation in RELATIONS:
        hold_the_worst_world(CAPPED, relation, 1.0, exact=False)
        deltas = [
            delta(Mechanism(sampling, (Query("updates", 1.0, 1.0),), 3), relation, 0.5)
            for sampling in (
                Sampling("poisson", 40, 10),
                *(Sampling("truncated_poisson", 40, 10, cap=cap) for cap in (40, 18, 12, 10)),
                Sampling("fixed", 40, 10),
            )
        ]
        assert deltas[0] == pytest.approx(deltas[1]) and (np.diff(deltas) >= -1e-12).all()
        assert deltas[4] > deltas[2] * 1.05


def test_who_joins_a_cohort_that_is_full_takes_the_place_of_another():
    """20 clients that send -1, and with the one that joins any 20 of the 21."""
    full = Sampling("truncated_poisson", 20, 20, cap=20)
    here = norm.pdf(X, -18, 1) * 20 / 21 + norm.pdf(X, -20, 1) / 21
    there = norm.pdf(X, -20, 1)
    run = Mechanism(full, (Query("updates", 1.0, 1.0),), 1)
    for eps in (1.0, 4.0, 9.0):
        exact = float(np.maximum(here - math.exp(eps) * there, 0).sum() * (X[1] - X[0]))
        assert delta(run, "add_remove", eps) >= exact * (1 - 1e-4) > 0


def hold_the_worst_world(sampling, relation, std, exact=True):
    mechanism = Mechanism(sampling, (Query("updates", 1.0, std),), 1)
    worst = dict.fromkeys((0.0, 0.3, 2.0), 0.0)
    for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), 3):
        here, there = (
            density(sampling, (value, *others), std) for value in (1.0, *OTHERS[relation])
        )
        for eps in worst:
            for p, q in ((here, there), (there, here)):
                told = float(np.maximum(p - math.exp(eps) * q, 0).sum() * (X[1] - X[0]))
                worst[eps] = max(worst[eps], told)
    for eps, told in worst.items():
        claimed = delta(mechanism, relation, eps)
        assert claimed >= told * (1 - 1e-4)
        assert not exact or claimed == pytest.approx(told, rel=2e-3, abs=1e-9)


# --- colluders ---


def seen_by_colluders(values, std, told):
    """By how many of the last `told` of the clients are in a cohort of 3, the density of the rest
    of the sum, its noise among it, times the probability.
    """
    seen = dict.fromkeys(range(4), np.zeros(len(X)))
    subsets = list(itertools.combinations(range(len(values)), 3))
    for cohort in subsets:
        rest = [values[k] for k in cohort if k < len(values) - told]
        if rest:
            m = 3 - len(rest)
            spread = std * math.sqrt(len(rest) / 3)
            seen[m] = seen[m] + norm.pdf(X, sum(rest), spread) / len(subsets)
    return seen


@pytest.mark.parametrize("told", [2, 4])
def test_colluders_see_no_more_than_is_claimed(told):
    query = Query("updates", 1.0, 1.5)
    mechanism = Mechanism(Sampling("fixed", 6, 3), (query,), 1, placement="client", colluders=told)
    everyone = Mechanism(Sampling("full", 6, 6), (query,), 1, placement="client", colluders=told)
    for relation in ("replace_one", "zero_out"):
        *_, hidden, known = views(mechanism, relation, 1, None)
        worst = dict.fromkeys((0.0, 0.5, 2.0), 0.0)
        for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), 5 - told):
            here, there = (
                seen_by_colluders((value, *others, *[0.0] * told), 1.5, told)
                for value in (1.0, *OTHERS[relation])
            )
            for eps, (p, q) in itertools.product(worst, ((here, there), (there, here))):
                terms = [np.maximum(p[m] - math.exp(eps) * q[m], 0).sum() for m in p]
                worst[eps] = max(worst[eps], sum(terms) * (X[1] - X[0]))
        for eps, told_delta in worst.items():
            claimed = delta(hidden.mechanism, relation, eps)
            assert claimed == pytest.approx(told_delta, rel=2e-3, abs=1e-9)
            assert claimed >= told_delta * (1 - 1e-4)
        left = math.sqrt((3 - min(told, 2)) / 3)
        assert known.mechanism.mu(relation) == pytest.approx(mechanism.mu(relation) / left)
        assert hidden.observer is known.observer is Observer.COLLUDERS
        (*_, seen) = views(everyone, relation, 1, None)
        left = math.sqrt((6 - told) / 6)
        assert seen.mechanism.mu(relation) == pytest.approx(everyone.mu(relation) / left)


# --- random settings ---

# by scheme and relation two worlds on a line: the client's mean where it is drawn, in each of them,
# and that of the sum where it is not
WORLDS = {
    ("fixed", "replace_one"): ((1.0, -1.0, -1.0),),
    ("fixed", "zero_out"): ((1.0, 0.0, -1.0), (1.0, 0.0, 1.0)),
    ("fixed", "add_remove"): ((1.0, -1.0, -1.0),),
    ("poisson", "replace_one"): ((1.0, -1.0, 0.0),),
    ("poisson", "zero_out"): ((1.0, 0.0, 0.0),),
    ("poisson", "add_remove"): ((1.0, 0.0, 0.0),),
    # without a cap
    ("truncated_poisson", "replace_one"): ((1.0, -1.0, 0.0),),
    ("truncated_poisson", "add_remove"): ((1.0, 0.0, 0.0),),
}


def attacked(world, q, z, rounds, target):
    """What epsilon is at least at `target`: the sum of all rounds is held against thresholds."""
    one, other, absent = world
    times = np.arange(rounds + 1)
    times = times[binom.pmf(times, rounds, q) > 1e-40]
    log_chances = binom.logpmf(times, rounds, q)
    spread = z * math.sqrt(rounds)
    ends = rounds * abs(absent) + times[-1] * 2 + 12 * spread
    thresholds = np.linspace(-ends, ends, 301)[:, None]

    def log_tail(move, sign):
        means = rounds * absent + times * (move - absent)
        return logsumexp(log_chances + log_ndtr(sign * (means - thresholds) / spread), axis=1)

    least = 0.0
    for sign, (first, second) in itertools.product((1, -1), ((one, other), (other, one))):
        # what is left out of the sums may not make it stronger
        p, q_tail = log_tail(first, sign), np.logaddexp(log_tail(second, sign), math.log(1e-36))
        above = p > math.log(target) + 1e-6
        if above.any():
            told = p[above] + np.log(-np.expm1(math.log(target) - p[above])) - q_tail[above]
            least = max(least, float(told.max()))
    return least


def hold_a_random_setting(draw):
    random = stream(0, Purpose.DATA, draw=draw)
    kind, relation = list(WORLDS)[draw % len(WORLDS)]
    population = int(10 ** random.uniform(1, 6))
    cohort = max(1, min(population - 1, round(population * 10 ** random.uniform(-6, 0))))
    rounds = int(10 ** random.uniform(0, 3))
    target = float(10 ** random.uniform(-18, -2))
    z = float(10 ** random.uniform(-0.5, 1.5))
    cap = round(cohort * random.uniform(2, 3)) + 9 if kind == "truncated_poisson" else None
    sampling = Sampling(kind, population, cohort, cap=cap)
    mechanism = Mechanism(sampling, (Query("updates", 1.0, z),), rounds)
    pld, rdp = (epsilon(mechanism, relation, target, accountant=name) for name in ("pld", "rdp"))
    setting = f"{mechanism.sampling}, {relation}, z {z}, {rounds} rounds, delta {target}"
    assert pld <= rdp, f"{setting}: pld {pld}, rdp {rdp}"
    for world in WORLDS[kind, relation]:
        q = cohort / population
        if cap:  # of the client's coin, and at most cap - 1 others
            q *= float(binom.cdf(cap - 1, population - 1, q))
        least = attacked(world, q, z, rounds, target)
        assert pld >= least * (1 - 1e-9), f"{setting}: pld {pld}, an attack {least}"


@pytest.mark.slow
def test_pld_is_between_an_attack_and_rdp_in_500_settings():
    for draw in range(500):
        hold_a_random_setting(draw)
