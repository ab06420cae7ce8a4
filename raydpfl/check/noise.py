"""The contract of noise: see `raydpfl.methods.noise`."""

import math
from dataclasses import replace
from itertools import combinations
from typing import cast

import numpy as np
from scipy.stats import kstest

from raydpfl.check.contract import FALSE_ALARM, hold, largest_correlation, normal_limit
from raydpfl.check.example import Example
from raydpfl.methods.noise import SideQuery, Whitening, whitening_matrix
from raydpfl.privacy import Event, Mechanism
from raydpfl.simulation.noise_monitor import products, tail

D = 2000
ROUNDS = 5
COORDINATES = 16  # of a sum, next to side queries
CLIENTS = np.array([0, 3, 4, 11, 700_000])
STD = 1.7


def _client_noise(case: Example, t: int = 0, seed: int = 3) -> np.ndarray | None:
    return case.plan.experiment.noise.on_clients(seed, t, CLIENTS, np.zeros_like(CLIENTS), STD, D)


def _server_scores(case: Example, seed: int = 3) -> list[np.ndarray]:
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
    draws = _client_noise(case)
    if draws is None:
        return "clients draw none on what they send"
    hold(draws.shape == (len(CLIENTS), D), f"{len(CLIENTS)} clients draw {list(draws.shape)}")
    hold(draws.dtype == np.float64, f"it is {draws.dtype}, not float64")
    for place, client in enumerate(CLIENTS.tolist() if noise.repeatable else ()):
        draw = noise.on_clients(3, 0, np.array([client]), np.array([0]), STD, D)
        assert draw is not None
        hold(np.array_equal(draw[0], draws[place]), f"client {client} alone draws another")
    repeats = noise.on_clients(3, 0, np.array([7, 7]), np.array([0, 1]), STD, D)
    assert repeats is not None
    hold(not np.array_equal(repeats[0], repeats[1]), "a client's second draw is its first")
    return "the same alone and together" if noise.repeatable else "not repeatable, as it says"


def on_sums(case: Example) -> str:
    """The server's noise is a function of the seed and the round: a fresh source gives the same."""
    noise = case.plan.experiment.noise
    if not noise.repeatable:
        return "not repeatable, as it says"
    source = noise.on_server(3, D)
    for t in range(ROUNDS):
        draw = source.on_sum(t, STD)
        fresh_draw = noise.on_server(3, D).on_sum(t, STD)
        if draw is None:
            hold(fresh_draw is None, f"a fresh source draws in round {t}")
            return "the server draws none"
        assert fresh_draw is not None
        hold(draw.shape == (D,) and draw.dtype == np.float64, f"it is {draw.dtype} {draw.shape}")
        hold(np.array_equal(draw, fresh_draw), f"a fresh source gives other noise in round {t}")
        repeat = source.on_sum(t, STD)
        assert repeat is not None
        hold(np.array_equal(repeat, draw), f"asked twice for round {t}, another")
    return f"the same from a fresh source, {ROUNDS} rounds"


def _noise_scores(case: Example) -> list[np.ndarray]:
    """All noise of some clients and rounds, as standard normals, float64 [d] each."""
    return [*_server_scores(case), *(row for t in range(ROUNDS) for row in _client_scores(case, t))]


def _client_scores(case: Example, t: int = 0, seed: int = 3) -> list[np.ndarray]:
    """The noise of some clients as standard normals, float64 [d] each; empty: they draw none."""
    client_noise = _client_noise(case, t, seed)
    scores = case.plan.experiment.noise.scores
    return [] if client_noise is None else [scores(row, STD) for row in client_noise]


def std(case: Example) -> str:
    """Noise has the std that it is asked for."""
    scores = _noise_scores(case)
    if not scores:
        return "none is drawn on sums or on what clients send"
    squares = np.array([float(draw @ draw) for draw in scores])
    tails = tail(squares, D)
    overall = math.sqrt(squares.mean() / D)
    message = f"it has {overall:.4g} of its std, over all"
    hold(tails.min() * 2 * len(tails) >= FALSE_ALARM, message)
    return f"{overall:.4f} of it, over {len(scores)} vectors"


def gaussian(case: Example) -> str:
    """Noise has the distribution that is accounted for: Gaussian, or that of its `scores`."""
    scores = _noise_scores(case)
    if not scores:
        return "none is drawn on sums or on what clients send"
    test = kstest(np.concatenate(scores), "norm")
    hold(test.pvalue >= FALSE_ALARM, f"p = {test.pvalue:.2g} by Kolmogorov and Smirnov")
    return f"p = {test.pvalue:.2g} by Kolmogorov and Smirnov"


def independent(case: Example) -> str:
    """No noise is drawn twice: that of clients, of rounds and of runs is independent."""
    scores = _noise_scores(case)
    scores += [*_server_scores(case, seed=4), *_client_scores(case, seed=4)]
    if not scores:
        return "none is drawn on sums or on what clients send"
    pairs = math.comb(len(scores), 2)
    largest, *_ = largest_correlation(np.stack(scores))
    limit = normal_limit(pairs, FALSE_ALARM)
    hold(largest <= limit, f"two vectors are correlated by {largest:.1f} standard errors")
    return f"the largest of {pairs:,} correlations is {largest:.1f} standard errors"


# of runs of many rounds: seed, std, parameters, rounds
RUNS = ((0, 1e-6, 50, 2000), (2**63 + 5, 1.7, 2, 2000), (3, 1e3, 1, 2000), (11, 3.0, 20_000, 40))
BLOCK_ROUNDS = 32  # rounds whose noise is looked at as one


def late_rounds(case: Example) -> str:
    """Noise has its distribution in late rounds too, whatever the seed, the std and the model."""
    noise = case.plan.experiment.noise
    clients, zeros = CLIENTS[:1], np.zeros(1, np.int64)
    min_p = 1.0
    for seed, size, d, rounds in RUNS:
        source = noise.on_server(seed, d)
        whiten = Whitening(noise)
        server_draws = [source.on_sum(t, size) for t in range(rounds)]
        client_draws = [noise.on_clients(seed, t, clients, zeros, size, d) for t in range(rounds)]
        for draws, party in ((server_draws, "the server"), (client_draws, "a client")):
            rows = [noise.scores(np.ravel(draw), size) for draw in draws if draw is not None]
            if not rows:
                continue
            hold(len(rows) == rounds, f"{party} draws none in some of {rounds} rounds")
            z = np.stack([whiten(row) for row in rows] if party == "the server" else rows)
            squares = (z * z).sum(1)
            sums = np.add.reduceat(squares, np.arange(0, rounds, BLOCK_ROUNDS))
            dof = d * np.diff([*range(0, rounds, BLOCK_ROUNDS), rounds])
            for statistic, degrees in ((squares, np.full(rounds, d)), (sums, dof)):
                tails = tail(statistic, degrees)
                t = int(tails.argmin()) * (rounds // len(statistic))
                share = math.sqrt(statistic[tails.argmin()] / degrees[tails.argmin()])
                p = 2 * len(statistic) * float(tails.min())
                min_p = min(min_p, p)
                hold(p >= FALSE_ALARM, f"{party} draws {share:.4g} of its std from round {t} on")
            parts = z[:, 0], z[:, -1], z[::7].ravel()[:50_000]
            p = min(float(kstest(z.ravel(), "norm").pvalue), *map(products, parts))
            min_p = min(min_p, p)
            hold(p >= FALSE_ALARM, f"{party} draws no independent normals in {rounds} rounds")
    return f"p = {min(1.0, min_p):.2g} over up to {max(rounds for *_, rounds in RUNS)} rounds"


def as_accounted(case: Example) -> str:
    """The sum of a round carries as much noise as the accountants count on."""
    plan = case.plan
    noise = plan.experiment.noise
    total = plan.drawn_std(0, plan.experiment.bounding.initial_bound)
    if not total:
        return "none is accounted for on sums"
    min_clients = plan.clients_left
    variance = 0.0
    if _client_noise(case) is not None:
        variance += min_clients * noise.client_std(total, min_clients) ** 2
    if _server_scores(case):
        variance += total**2
    share = math.sqrt(variance) / total
    hold(share >= 1 - 1e-9, f"the sum of {min_clients} clients carries {share:.4g} of its std")
    return f"{share:.4g} of it, with {min_clients} clients"


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
    max_participations = plan.experiment.selection.most_participations(rounds)
    separation = plan.experiment.selection.separation
    patterns = [
        list(pattern)
        for count in range(1, max_participations + 1)
        for pattern in combinations(range(rounds), count)
        if (np.diff(pattern) >= separation).all()
    ]
    for pattern in patterns:
        shift = float(np.linalg.norm(np.abs(matrix[:, pattern]).sum(1)))
        limit = math.sqrt(event.effective_counts(len(pattern)))
        message = f"rounds {pattern} move them by {shift:.6g}, where {limit:.6g} is accounted for"
        hold(shift <= limit * (1 + 1e-9), message)
    return f"{len(patterns)} sets of rounds, at most as much as is accounted for"


def _side_query(case: Example) -> SideQuery:
    """One of the first round, which all clients answer."""
    clients = np.arange(case.plan.clients_left)
    return SideQuery("count", 3, 0, STD, clients, np.zeros_like(clients), len(clients))


def on_queries(case: Example) -> str:
    """The noise on side queries has the std that it is asked for."""
    plan = case.plan
    noise = plan.experiment.noise
    if plan.mechanism is None or not plan.ratio:
        return "none is accounted for"
    query = _side_query(case)
    query_noise = [noise.on_query(replace(query, t=t)) for t in range(D)]
    repeat_noise = noise.on_query(query)
    hold(repeat_noise == query_noise[0], "asked twice, it is another")
    square = float(np.sum(np.square(query_noise))) / STD**2
    hold(2 * tail(square, D) >= FALSE_ALARM, f"it has {math.sqrt(square / D):.4g} of its std")
    return f"{math.sqrt(square / D):.4f} of it"


def independent_queries(case: Example) -> str:
    """The noise on a side query is that of no other query, no sum and no client."""
    plan = case.plan
    noise = plan.experiment.noise
    if plan.mechanism is None or not plan.ratio:
        return "none is accounted for"
    first = _side_query(case)
    rows = [
        np.array([noise.on_query(replace(query, t=t)) for t in range(D)])
        for query in (first, replace(first, name="length"), replace(first, seed=4))
    ]
    source = noise.on_server(first.seed, COORDINATES)
    whiten = Whitening(noise)
    sums = [source.on_sum(t, STD) for t in range(D)]
    scores = [whiten(noise.scores(draw, STD)) for draw in sums if draw is not None]
    one, zero = first.clients[:1], first.draws[:1]
    sent = [noise.on_clients(first.seed, t, one, zero, STD, COORDINATES) for t in range(D)]
    client_scores = [noise.scores(draw[0], STD) for draw in sent if draw is not None]
    rows += [column for part in (scores, client_scores) if part for column in np.stack(part, 1)]
    largest, *_ = largest_correlation(np.stack(rows))
    pairs = math.comb(len(rows), 2)
    message = f"the noise of {D} rounds is correlated by {largest:.1f} standard errors"
    hold(largest <= normal_limit(pairs, FALSE_ALARM), message)
    return f"the largest of {pairs} correlations over {D} rounds is {largest:.1f} standard errors"
