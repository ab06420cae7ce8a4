"""Correlated noise: strategies, sensitivity, the recurrences that draw it, and what is refused."""

import itertools
import math
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import mechanism, refusal
from scipy import stats
from scipy.linalg import toeplitz
from scipy.optimize import minimize
from scipy.signal import lfilter

from raydpfl.config.registry import choose
from raydpfl.errors import ConfigError
from raydpfl.methods import noise
from raydpfl.methods.noise.banded_gaussian import BandedGaussian, BandedSource
from raydpfl.methods.noise.base import Whitening, whitening_matrix
from raydpfl.methods.noise.buffered_gaussian import BufferedGaussian
from raydpfl.methods.noise.keyed_noise import server_noise
from raydpfl.methods.noise.square_root_gaussian import SquareRootGaussian
from raydpfl.methods.noise.tree_gaussian import SumsOfTree, TreeGaussian
from raydpfl.privacy import Mechanism, Query, Sampling, epsilon
from raydpfl.privacy.factorization import (
    banded_toeplitz,
    buffered_column,
    buffered_toeplitz,
    separation_refusal,
    square_root,
    toeplitz_squares,
    tree_squares,
)


def _matrix(c, rounds: int) -> np.ndarray:
    """C, dense [rounds, rounds]."""
    return toeplitz(np.concatenate([c, np.zeros(rounds - len(c))]), np.zeros(rounds))


def _workload(rounds: int, momentum: float) -> np.ndarray:
    """A, dense: sums of velocities, each a sum of updates that fade by `momentum`."""
    velocity = toeplitz(momentum ** np.arange(rounds), np.zeros(rounds))
    return np.tril(np.ones((rounds, rounds))) @ velocity


def _error(c, rounds: int, momentum: float = 0.0) -> float:
    """The definition: Frobenius norm of A C^-1 over sqrt(rounds), times the largest column of C."""
    dense = _matrix(c, rounds)
    spread = np.linalg.norm(_workload(rounds, momentum) @ np.linalg.inv(dense)) / math.sqrt(rounds)
    return spread * np.linalg.norm(dense, axis=0).max()


def error(c, rounds: int, momentum: float = 0.0, separation: int = 0, participations: int = 1):
    """The same by the first column of A C^-1, and for several participations."""
    column = lfilter([1.0], c, np.cumsum(momentum ** np.arange(rounds)))
    mean = column**2 @ np.arange(rounds, 0, -1) / rounds  # entry k stands in rounds - k rows
    square = toeplitz_squares(c, rounds, separation or rounds, participations)[-1]
    return math.sqrt(mean * square)


def _root(bands: int) -> np.ndarray:
    """First diagonals of the root of the lower triangle of ones: binomial(2k, k) / 4^k."""
    return np.array([math.comb(2 * k, k) / 4**k for k in range(bands)])


@pytest.mark.slow
def test_the_errors_of_strategies_are_those_that_the_module_states():
    facts = 2000, 0.0, 484, 3
    buffers = buffered_column(*buffered_toeplitz(4, *facts), 2000)
    columns = [1.0], banded_toeplitz(484, 2000), square_root(2000), buffers
    assert [round(error(c, *facts), 1) for c in columns] == [54.8, 6.0, 6.8, 6.1]


def test_one_band_is_independent_noise():
    assert banded_toeplitz(1, 50).tolist() == [1.0]
    # the sum of t normals, over t = 1 .. 50
    assert error([1.0], 50) == pytest.approx(math.sqrt(51 / 2))
    drawn = BandedSource(3, (1.0,), 100)
    plain = [server_noise(3, t, 0.7, 100) for t in range(3)]
    assert all(np.array_equal(drawn.on_sum(t, 0.7), plain[t]) for t in range(3))


@pytest.mark.parametrize("bands, rounds", [(2, 100), (8, 1000), (32, 1000), (64, 500), (200, 200)])
@pytest.mark.parametrize("momentum", [0.0, 0.8, 0.95])
def test_the_optimum_is_a_unit_column_that_beats_no_correlation_and_the_truncated_square_root(
    bands, rounds, momentum
):
    c = banded_toeplitz(bands, rounds, momentum)
    assert np.linalg.norm(c) == pytest.approx(1, abs=1e-12)
    best = error(c, rounds, momentum)
    assert best < error([1.0], rounds, momentum)
    assert best < error(_root(bands), rounds, momentum) * 0.99


@pytest.mark.parametrize(
    "bands, rounds, momentum", [(2, 6, 0.0), (3, 6, 0.0), (6, 6, 0.0), (3, 8, 0.9), (8, 8, 0.0)]
)
def test_the_optimum_is_what_a_search_without_gradients_over_dense_matrices_finds(
    bands, rounds, momentum
):
    def objective(tail: np.ndarray) -> float:
        return _error(np.concatenate([[1.0], tail]), rounds, momentum)

    random = np.random.Generator(np.random.Philox(key=bands))
    starts = [np.zeros(bands - 1), *random.uniform(-0.5, 1.0, (2, bands - 1))]
    options = {"maxiter": 20_000, "maxfev": 20_000, "xatol": 1e-7, "fatol": 1e-10, "adaptive": True}
    search = {"method": "Nelder-Mead", "options": options}
    found = min(minimize(objective, start, **search).fun for start in starts)
    best = error(banded_toeplitz(bands, rounds, momentum), rounds, momentum)
    assert best == pytest.approx(found, rel=1e-6)


def _patterns(rounds: int, separation: int, participations: int):
    """All sets of at most so many rounds that are at least `separation` apart."""
    for size in range(1, participations + 1):
        for pattern in itertools.combinations(range(rounds), size):
            if all(later - earlier >= separation for earlier, later in itertools.pairwise(pattern)):
                yield pattern


STRATEGIES = {
    "banded": lambda rounds: banded_toeplitz(min(3, rounds), rounds),
    "square root": square_root,
    "with momentum": lambda rounds: square_root(rounds, 0.9),
    "buffered": lambda rounds: buffered_column([0.3, 0.95], [0.4, 0.3], rounds),
    "flat": np.ones,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "rounds, separation, participations",
    [(6, 1, 6), (7, 1, 2), (9, 2, 9), (10, 3, 2), (10, 3, 4), (11, 4, 3), (8, 8, 1), (6, 9, 5)],
)
def test_no_pattern_of_participations_passes_the_sensitivity_and_one_attains_it(
    strategy, rounds, separation, participations
):
    """Brute force over all sets of rounds and all signs of the updates."""
    c = STRATEGIES[strategy](rounds)
    if strategy == "banded" and separation < len(c):
        pytest.skip("its columns overlap, and its coefficients are not covered there")
    dense = _matrix(c, rounds)
    most = np.zeros(participations + 1)
    for pattern in _patterns(rounds, separation, participations):
        for signs in itertools.product((-1, 1), repeat=len(pattern) - 1):
            moved = float(np.linalg.norm(dense[:, pattern] @ np.array([1, *signs])))
            most[len(pattern)] = max(most[len(pattern)], moved)
    squares = toeplitz_squares(c, rounds, separation, participations)
    assert np.sqrt(squares) == pytest.approx(most[1 : len(squares) + 1], rel=1e-12)
    assert not most[len(squares) + 1 :].any()


@pytest.mark.parametrize("restart", [None, 1, 4, 5, 8])
@pytest.mark.parametrize(
    "rounds, separation, participations",
    [(1, 1, 1), (9, 1, 3), (13, 2, 5), (13, 3, 5), (16, 3, 5), (21, 4, 4), (16, 7, 3), (12, 20, 2)],
)
def test_no_pattern_of_participations_passes_the_squares_of_a_tree_and_one_attains_them(
    rounds, separation, participations, restart
):
    """Brute force: (participations)^2 over all complete nodes. At 16, 3, 5 the earliest rounds are
    not the worst; at 13, 3, 5 in trees of 4, five come to less than four.
    """
    block = restart or rounds
    most = np.zeros(participations + 1)
    for pattern in _patterns(rounds, separation, participations):
        total = 0
        for height in range(block.bit_length()):
            places = [(t // block, t % block >> height) for t in pattern]
            for tree, node in set(places):
                end = node + 1 << height
                if end <= block and tree * block + end <= rounds:
                    total += places.count((tree, node)) ** 2
        most[len(pattern)] = max(most[len(pattern)], total)
    squares = tree_squares(rounds, separation, participations, restart)
    most = np.maximum.accumulate(most)
    assert squares.tolist() == most[1 : len(squares) + 1].tolist()
    assert (most[len(squares) :] == most[-1]).all()


def test_the_production_statements_have_their_epsilons():
    """Xu et al. 2023, whose statements compose zCDP and convert it by Renyi divergences; the
    statements of banded noise give their multiplier over the sensitivity.
    """

    def spent(squares, z: float, accountant: str = "rdp") -> float:
        run = mechanism("public", 10**6, 6500, z, len(squares), squares=tuple(squares))
        return epsilon(run, "zero_out", 1e-10, accountant=accountant)

    tree = tree_squares(2000, 313, 6)
    assert tree[-1] == 79
    assert spent(tree, 7.0) == pytest.approx(8.90, abs=0.005)
    assert spent(tree, 7.0, "pld") == pytest.approx(8.526, abs=0.001)  # the Gaussian is exact
    for bands, most, relative, published in ((484, 3, 1.903, 3.42), (1428, 2, 6.18, 0.994)):
        squares = toeplitz_squares(banded_toeplitz(bands, 2000), 2000, bands, most)
        z = relative * math.sqrt(squares[-1])
        assert spent(squares, z) == pytest.approx(published, rel=1e-3)


def test_more_participations_than_a_run_has_cost_no_less_than_those_of_several_runs():
    """As after a restart with fresh noise: the worst split over runs is below."""
    squares = tuple(tree_squares(16, 3, 5))
    run = mechanism("full", 5, 5, 1.0, 5, squares=squares)
    event = run.event("zero_out")
    assert event.effective_counts(np.arange(6)) == pytest.approx([0, *squares])
    after = run.restarted_release(10).event("zero_out")
    for first, second in itertools.product(range(6), repeat=2):
        both = event.effective_counts(first) + event.effective_counts(second)
        assert after.effective_counts(first + second) >= both - 1e-12
    # and of one run they are bounded too, if more loosely
    fewer = replace(run, squares=squares[:2]).event("zero_out")
    assert (fewer.effective_counts(np.arange(6)) >= event.effective_counts(np.arange(6))).all()


def test_queries_with_noise_of_their_own_compose_as_such_next_to_correlated_sums():
    queries = (Query("updates", 1.0, 2.0), Query("count", 0.5, 4.0))
    run = Mechanism(Sampling("full", 5, 5), queries, 3, squares=(1.0, 2.5, 4.5))
    mu = run.event("zero_out").unamplified(np.arange(1, 4))
    alone = np.array([1.0, 2.5, 4.5]) / 4 + np.arange(1, 4) / 64
    assert mu**2 == pytest.approx(alone)


def test_coefficients_that_increase_are_refused_where_columns_overlap():
    c = [1.0, 0.2, 0.5]
    assert toeplitz_squares(c, 8, 3, 2)[-1] == pytest.approx(2 * np.dot(c, c))
    with pytest.raises(ConfigError, match=r"^coefficients = 3: .* as many as the 2 rounds"):
        toeplitz_squares(c, 8, 2, 2)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("rounds, separation, participations", [(60, 60, 1), (90, 30, 3)])
def test_buffers_come_near_to_the_best_bands_and_more_of_them_come_nearer(
    rounds, separation, participations, momentum
):
    facts = rounds, momentum, separation, participations
    errors = [
        error(buffered_column(*buffered_toeplitz(k, *facts), rounds), *facts) for k in (1, 2, 3)
    ]
    best = error(banded_toeplitz(separation, rounds, momentum), *facts)
    assert errors[0] > errors[1] * (1 - 1e-6) > errors[2] * (1 - 2e-6)
    assert errors[-1] < 1.05 * best
    assert errors[-1] < error(square_root(rounds, momentum), *facts) * 1.001


@pytest.mark.parametrize("rounds, momentum", [(1, 0.0), (7, 0.0), (30, 0.7)])
def test_the_square_root_is_one(rounds, momentum):
    root = _matrix(square_root(rounds, momentum), rounds)
    assert root @ root == pytest.approx(_workload(rounds, momentum), abs=1e-12)


@pytest.mark.parametrize("bands, rounds", [(1, 6), (2, 6), (3, 10), (10, 10)])
def test_the_recurrence_is_the_dense_inverse(bands, rounds):
    c = banded_toeplitz(bands, rounds)
    inverse = np.linalg.inv(_matrix(c, rounds))
    assert np.allclose(_matrix(c, rounds) @ inverse, np.eye(rounds), atol=1e-12)
    z = np.stack([server_noise(5, t, 1.0, 30) for t in range(rounds)])
    # an adaptive bound scales each round's release
    correlated = BandedSource(5, c, 30)
    stds = np.linspace(0.5, 3, rounds)
    drawn = np.stack([correlated.on_sum(t, stds[t]) for t in range(rounds)])
    assert drawn == pytest.approx(stds[:, None] * (inverse @ z), rel=1e-10, abs=1e-12)


FITTED = {
    "tree": TreeGaussian(multiplier=1.0),
    "trees": TreeGaussian(multiplier=1.0, restart=5),
    "square root": SquareRootGaussian(multiplier=1.0),
    "buffered": BufferedGaussian(multiplier=1.0, buffers=2),
    "banded": BandedGaussian(multiplier=1.0, bands=4),
}


def _setting(rounds: int, momentum: float = 0.0, separation: int = 100) -> SimpleNamespace:
    return SimpleNamespace(
        rounds=rounds, momentum=momentum, min_separation=separation, most_participations=2
    )


@pytest.mark.parametrize("kind", FITTED)
def test_noise_is_what_whitening_makes_independent_and_a_function_of_seed_and_round(kind):
    """Sample covariance of whitened sums against the identity, and the matrix against what a client
    may move; false-alarm rate 1e-5.
    """
    member = FITTED[kind].fit_matrix(_setting(12))
    d = 4000
    source = member.source(5, d)
    drawn = [source.on_sum(t, 2.0) for t in range(12)]
    for t in (11, 3, 4, 0):
        assert np.array_equal(member.source(5, d).on_sum(t, 2.0), drawn[t])
        assert np.array_equal(source.on_sum(t, 2.0), drawn[t])
    assert not np.array_equal(member.source(6, d).on_sum(7, 2.0), drawn[7])
    whiten = Whitening(member)
    white = np.stack([whiten(row) for row in drawn]) / 2.0
    spread = np.sqrt((1 + np.eye(12)) / d)
    scores = np.abs((white @ white.T / d - np.eye(12)) / spread)[np.triu_indices(12)]
    assert scores.max() < stats.norm.isf(1e-5 / 2 / len(scores))
    matrix = whitening_matrix(member, 12)
    assert white == pytest.approx(matrix @ np.stack(drawn) / 2.0, abs=1e-9)
    squares = member.squares(12, 4, 3)
    for pattern in _patterns(12, 4, 3):
        moved = float(np.sum(matrix[:, pattern].sum(1) ** 2))
        assert moved <= squares[len(pattern) - 1] * (1 + 1e-9)


def test_noise_in_the_sums_of_a_tree_is_that_of_nodes_estimated_from_below():
    """Variances by Honaker 2015: of a complete tree of height h 1 / (2 - 2^-h)."""
    drawn = iter(np.eye(64))
    tree = SumsOfTree()
    variances = [np.sum(tree.next_sum(lambda height: next(drawn)) ** 2) for _ in range(16)]
    node = [1 / (2 - 2.0**-height) for height in range(5)]
    bits = [[h for h in range(5) if t >> h & 1] for t in range(1, 17)]
    assert variances == pytest.approx([sum(node[h] for h in heights) for heights in bits])


@pytest.mark.parametrize("kind, models", [("tree", 12), ("buffered", 7), ("banded", 8)])
def test_the_server_keeps_a_few_models_of_whatever_many_rounds(kind, models):
    """In float64, with those that a round needs for a moment."""
    d = 50_000
    source = FITTED[kind].fit_matrix(_setting(200)).source(1, d)
    source.on_sum(0, 1.0)
    tracemalloc.start()
    try:
        for t in range(1, 130):
            source.on_sum(t, 1.0)
        assert tracemalloc.get_traced_memory()[1] < models * 8 * d
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", FITTED)
def test_resolved_noise_resolves_to_itself(kind):
    resolved = FITTED[kind].fit_matrix(_setting(20, 0.5))
    again = choose("noise", resolved.model_dump(), noise.FAMILY, noise.Noise)
    assert again.fit_matrix(_setting(20, 0.5)) == resolved == again


def banded(**fields) -> BandedGaussian:
    section = {"kind": "banded_gaussian", "bands": 4, "multiplier": 1.0} | fields
    return choose("noise", section, noise.FAMILY, noise.Noise)


def test_the_member_resolves_to_the_best_coefficients_or_to_its_own_scaled_to_norm_one():
    assert banded().placement == "server" and banded().coefficients is None
    best = banded().fit_matrix(_setting(20, 0.8)).coefficients
    assert np.array_equal(best, banded_toeplitz(4, 20, 0.8))
    own = banded(coefficients=[2, 1, 0, 2]).fit_matrix(_setting(20)).coefficients
    assert own == pytest.approx((2 / 3, 1 / 3, 0, 2 / 3))
    for bands in range(1, 21):  # as written into a run's config and read again, to the last bit
        resolved = banded(bands=bands).fit_matrix(_setting(20))
        assert banded(**resolved.model_dump()).fit_matrix(_setting(20)) == resolved
    with pytest.raises(ConfigError, match=r"^bands = 4"):
        banded(coefficients=(1, 0, 0, 0)).fit_matrix(_setting(3))
    with pytest.raises(ConfigError, match=r"^bands = 4: expected at most 3, the rounds"):
        banded().fit_matrix(_setting(20, separation=3))
    banded(coefficients=(1, 1, 0.5, 0)).fit_matrix(_setting(20, separation=3))


@pytest.mark.parametrize(
    "change, field",
    [
        ({"bands": 0}, "noise.bands"),
        ({"placement": "client"}, "noise.placement"),
        ({"coefficients": [1.0, 0.5]}, "noise.coefficients"),
        ({"coefficients": [0.0, 0.5, 0.1, 0.1]}, "noise.coefficients"),
        ({"multiplier": None, "epsilon": 1.0, "calibration": "paper"}, "noise.calibration"),
        ({"std": 1.0}, "noise"),
    ],
)
def test_the_member_refuses_what_it_cannot_be(change, field):
    with refusal(begins=f"{field}: "):
        banded(**change)


@pytest.mark.parametrize(
    "kind, bands, is_covered",
    [
        ("full", None, True),
        ("public", None, True),
        ("poisson", 5, True),
        ("poisson", 6, False),
        ("poisson", None, False),
        ("fixed", 5, False),
        ("fixed", 1, True),
        ("with_replacement", 5, False),
    ],
)
def test_secret_cohorts_are_covered_where_noise_spans_no_two_turns_of_a_poisson_sample(
    kind, bands, is_covered
):
    """With five rounds from one turn of a group to its next."""
    sampling = Sampling(kind, 10, 10 if kind == "full" else 4)
    assert (separation_refusal(sampling, 5, bands) is None) == is_covered


@pytest.mark.parametrize(
    "bands, rounds, momentum, field",
    [(0, 5, 0.0, "bands"), (6, 5, 0.0, "bands"), (2, 5, 1.0, "momentum")],
)
def test_a_factorisation_that_does_not_exist_is_refused(bands, rounds, momentum, field):
    with refusal(begins=f"{field}: "):
        banded_toeplitz(bands, rounds, momentum)
