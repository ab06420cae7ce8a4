"""The contract of noise: see `raydpfl.methods.noise`."""

import math
from dataclasses import replace
from itertools import combinations
from typing import cast

import numpy as np
from scipy.stats import kstest

from raydpfl.check.contract import FALSE_ALARM, hold, largest_correlation, normal_limit, tail
from raydpfl.check.example import Example
from raydpfl.methods.noise import SideQuery, Whitening, whitening_matrix
from raydpfl.privacy import Event, Mechanism
from raydpfl.simulation.noise_monitor import products

D = 2000
ROUNDS = 5
WHO = np.array([0, 3, 4, 11, 700_000])
STD = 1.7


def _of_clients(case: Example, t: int = 0, seed: int = 3) -> np.ndarray | None:
    return case.plan.experiment.noise.on_clients(seed, t, WHO, np.zeros_like(WHO), STD, D)


def _on_sums(case: Example, seed: int = 3) -> list[np.ndarray]:
    """The server's noise of the first rounds as standard normals, of which the part that later ones
    take back is left out, float64 [d] each; empty where it draws none.
    """
    noise = case.plan.experiment.noise
    source = noise.on_server(seed, D)
    whiten = Whitening(noise)
    draws = [source.on_sum(t, STD) for t in range(ROUNDS)]
    return [whiten(noise.scores(draw, STD)) for draw in draws if draw is not None]


def on_clients(case: Example) -> str:
    """What a client draws is a function of its own key: the same alone and among others."""
    noise = case.plan.experiment.noise
    together = _of_clients(case)
    if together is None:
        return "clients draw none on what they send"
    hold(together.shape == (len(WHO), D), f"{len(WHO)} clients draw {list(together.shape)}")
    hold(together.dtype == np.float64, f"it is {together.dtype}, not float64")
    for place, client in enumerate(WHO.tolist() if noise.repeatable else ()):
        alone = noise.on_clients(3, 0, np.array([client]), np.array([0]), STD, D)
        assert alone is not None
        hold(np.array_equal(alone[0], together[place]), f"client {client} alone draws another")
    twice = noise.on_clients(3, 0, np.array([7, 7]), np.array([0, 1]), STD, D)
    assert twice is not None
    hold(not np.array_equal(twice[0], twice[1]), "a client's second draw is its first")
    return "the same alone and together" if noise.repeatable else "not repeatable, as it says"


def on_sums(case: Example) -> str:
    """The server's noise is a function of the seed and the round: a fresh source gives the same."""
    noise = case.plan.experiment.noise
    if not noise.repeatable:
        return "not repeatable, as it says"
    source = noise.on_server(3, D)
    for t in range(ROUNDS):
        mine = source.on_sum(t, STD)
        fresh = noise.on_server(3, D).on_sum(t, STD)
        if mine is None:
            hold(fresh is None, f"a fresh source draws in round {t}")
            return "the server draws none"
        assert fresh is not None
        hold(mine.shape == (D,) and mine.dtype == np.float64, f"it is {mine.dtype} {mine.shape}")
        hold(np.array_equal(mine, fresh), f"a fresh source gives other noise in round {t}")
        second = source.on_sum(t, STD)
        assert second is not None
        hold(np.array_equal(second, mine), f"asked twice for round {t}, another")
    return f"the same from a fresh source, {ROUNDS} rounds"


def _drawn(case: Example) -> list[np.ndarray]:
    """All noise of some clients and rounds, as standard normals, float64 [d] each."""
    return [*_on_sums(case), *(row for t in range(ROUNDS) for row in _client_scores(case, t))]


def _client_scores(case: Example, t: int = 0, seed: int = 3) -> list[np.ndarray]:
    """The noise of some clients as standard normals, float64 [d] each; empty: they draw none."""
    drawn = _of_clients(case, t, seed)
    scores = case.plan.experiment.noise.scores
    return [] if drawn is None else [scores(row, STD) for row in drawn]


def std(case: Example) -> str:
    """Noise has the std that it is asked for."""
    drawn = _drawn(case)
    if not drawn:
        return "none is drawn on sums or on what clients send"
    squares = np.array([float(draw @ draw) for draw in drawn])
    tails = tail(squares, D)
    overall = math.sqrt(squares.mean() / D)
    wrong = f"it has {overall:.4g} of its std, over all"
    hold(tails.min() * 2 * len(tails) >= FALSE_ALARM, wrong)
    return f"{overall:.4f} of it, over {len(drawn)} vectors"


def gaussian(case: Example) -> str:
    """Noise has the distribution that is accounted for: Gaussian, or that of its `scores`."""
    drawn = _drawn(case)
    if not drawn:
        return "none is drawn on sums or on what clients send"
    test = kstest(np.concatenate(drawn), "norm")
    hold(test.pvalue >= FALSE_ALARM, f"p = {test.pvalue:.2g} by Kolmogorov and Smirnov")
    return f"p = {test.pvalue:.2g} by Kolmogorov and Smirnov"


def independent(case: Example) -> str:
    """No noise is drawn twice: that of clients, of rounds and of runs is independent."""
    drawn = _drawn(case)
    drawn += [*_on_sums(case, seed=4), *_client_scores(case, seed=4)]
    if not drawn:
        return "none is drawn on sums or on what clients send"
    pairs = math.comb(len(drawn), 2)
    worst, *_ = largest_correlation(np.stack(drawn))
    limit = normal_limit(pairs, FALSE_ALARM)
    hold(worst <= limit, f"two vectors are correlated by {worst:.1f} standard errors")
    return f"the largest of {pairs:,} correlations is {worst:.1f} standard errors"


# of runs of many rounds: seed, std, parameters, rounds
MANY = ((0, 1e-6, 50, 2000), (2**63 + 5, 1.7, 2, 2000), (3, 1e3, 1, 2000), (11, 3.0, 20_000, 40))
TOGETHER = 32  # rounds whose noise is looked at as one


def late_rounds(case: Example) -> str:
    """Noise has its distribution in late rounds too, whatever the seed, the std and the model."""
    noise = case.plan.experiment.noise
    who, first = WHO[:1], np.zeros(1, np.int64)
    chance = 1.0
    for seed, size, d, rounds in MANY:
        source = noise.on_server(seed, d)
        whiten = Whitening(noise)
        of_server = [source.on_sum(t, size) for t in range(rounds)]
        of_client = [noise.on_clients(seed, t, who, first, size, d) for t in range(rounds)]
        for drawn, says in ((of_server, "the server"), (of_client, "a client")):
            rows = [noise.scores(np.ravel(draw), size) for draw in drawn if draw is not None]
            if not rows:
                continue
            hold(len(rows) == rounds, f"{says} draws none in some of {rounds} rounds")
            z = np.stack([whiten(row) for row in rows] if says == "the server" else rows)
            squares = (z * z).sum(1)
            sums = np.add.reduceat(squares, np.arange(0, rounds, TOGETHER))
            dof = d * np.diff([*range(0, rounds, TOGETHER), rounds])
            for statistic, degrees in ((squares, np.full(rounds, d)), (sums, dof)):
                tails = tail(statistic, degrees)
                t = int(tails.argmin()) * (rounds // len(statistic))
                share = math.sqrt(statistic[tails.argmin()] / degrees[tails.argmin()])
                least = 2 * len(statistic) * float(tails.min())
                chance = min(chance, least)
                hold(least >= FALSE_ALARM, f"{says} draws {share:.4g} of its std from round {t} on")
            parts = z[:, 0], z[:, -1], z[::7].ravel()[:50_000]
            least = min(float(kstest(z.ravel(), "norm").pvalue), *map(products, parts))
            chance = min(chance, least)
            hold(least >= FALSE_ALARM, f"{says} draws no independent normals in {rounds} rounds")
    return f"p = {min(1.0, chance):.2g} over up to {max(rounds for *_, rounds in MANY)} rounds"


def as_accounted(case: Example) -> str:
    """The sum of a round carries as much noise as the accountants count on."""
    plan = case.plan
    noise = plan.experiment.noise
    total = plan.drawn_std(0, plan.experiment.bounding.initial_bound)
    if not total:
        return "none is accounted for on sums"
    least = plan.clients_left
    drawn = 0.0
    if _of_clients(case) is not None:
        drawn += least * noise.client_std(total, least) ** 2
    if _on_sums(case):
        drawn += total**2
    share = math.sqrt(drawn) / total
    hold(share >= 1 - 1e-9, f"the sum of {least} clients carries {share:.4g} of its std")
    return f"{share:.4g} of it, with {least} clients"


def sensitivity(case: Example) -> str:
    """Where noise is correlated over the rounds, no participations of a client move the sums that
    it is independent in by more than is accounted for.
    """
    plan = case.plan
    noise = plan.experiment.noise
    if not noise.correlated:
        return "rounds have noise of their own"
    mechanism = cast(Mechanism, plan.mechanism)
    event = Event(mechanism.sampling, 1.0, squares=mechanism.squares)
    rounds = plan.experiment.rounds
    matrix = whitening_matrix(noise, rounds)
    most = plan.experiment.selection.most_participations(rounds)
    separation = plan.experiment.selection.separation
    patterns = [
        list(pattern)
        for count in range(1, most + 1)
        for pattern in combinations(range(rounds), count)
        if (np.diff(pattern) >= separation).all()
    ]
    for pattern in patterns:
        moved = float(np.linalg.norm(np.abs(matrix[:, pattern]).sum(1)))
        accounted = math.sqrt(event.amounting(len(pattern)))
        wrong = f"rounds {pattern} move them by {moved:.6g}, where {accounted:.6g} is accounted for"
        hold(moved <= accounted * (1 + 1e-9), wrong)
    return f"{len(patterns)} sets of rounds, at most as much as is accounted for"


def on_queries(case: Example) -> str:
    """The noise on side queries has the std that it is asked for."""
    plan = case.plan
    noise = plan.experiment.noise
    if plan.mechanism is None or not plan.ratio:
        return "none is accounted for"
    who = np.arange(plan.clients_left)
    draws = np.zeros_like(who)
    asked = SideQuery("count", 3, 0, STD, who, draws, len(who))
    found = [noise.on_query(replace(asked, t=t)) for t in range(D)]
    second = noise.on_query(asked)
    hold(second == found[0], "asked twice, it is another")
    square = float(np.sum(np.square(found))) / STD**2
    hold(2 * tail(square, D) >= FALSE_ALARM, f"it has {math.sqrt(square / D):.4g} of its std")
    return f"{math.sqrt(square / D):.4f} of it"
