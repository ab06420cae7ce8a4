"""Banded noise: the optimal strategy, its sensitivity, the recurrence that draws it, and what is
refused.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from scipy.linalg import toeplitz
from scipy.optimize import minimize

from raydpfl.config.registry import choose
from raydpfl.errors import ConfigError
from raydpfl.methods import noise
from raydpfl.methods.noise.banded_gaussian import BandedGaussian, Correlated
from raydpfl.methods.noise.keyed_noise import server_noise
from raydpfl.privacy import Sampling
from raydpfl.privacy.factorization import banded_toeplitz, check, error, sensitivity


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


def _root(bands: int) -> np.ndarray:
    """The first diagonals of the square root of the lower triangle of ones: binomial(2k, k)
    / 4^k.
    """
    return np.array([math.comb(2 * k, k) / 4**k for k in range(bands)])


@pytest.mark.parametrize(
    "bands, rounds, momentum", [(1, 5, 0.0), (2, 9, 0.0), (4, 12, 0.9), (7, 7, 0.0), (7, 40, 0.5)]
)
def test_the_error_is_that_of_its_definition_at_any_scale(bands, rounds, momentum):
    c = _root(bands) * 3.0
    assert error(c, rounds, momentum) == pytest.approx(_error(c, rounds, momentum), rel=1e-12)
    assert error(c / 7, rounds, momentum) == pytest.approx(error(c, rounds, momentum), rel=1e-12)


def test_one_band_is_independent_noise():
    assert banded_toeplitz(1, 50).tolist() == [1.0]
    # the sum of t normals, over t = 1 .. 50
    assert error([1.0], 50) == pytest.approx(math.sqrt(51 / 2))
    drawn = Correlated(3, (1.0,), 100)
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


@pytest.mark.parametrize(
    "bands, rounds, separation",
    [(1, 6, 1), (2, 6, 2), (2, 7, 2), (3, 9, 3), (3, 8, 3), (2, 9, 3), (4, 10, 5), (8, 8, 8)],
)
def test_no_pattern_of_participations_passes_the_sensitivity_and_one_attains_it(
    bands, rounds, separation
):
    """Brute force over all sets of rounds at least `separation` apart and all signs of the updates,
    which attain the most where columns overlap.
    """
    c = banded_toeplitz(bands, rounds)
    dense = _matrix(c, rounds)
    most = 0.0
    sets = itertools.chain.from_iterable(
        itertools.combinations(range(rounds), size) for size in range(1, rounds + 1)
    )
    for pattern in sets:
        if all(later - earlier >= separation for earlier, later in itertools.pairwise(pattern)):
            for signs in itertools.product((-1, 1), repeat=len(pattern) - 1):
                moved = dense[:, pattern] @ np.array([1, *signs])
                most = max(most, float(np.linalg.norm(moved)))
    claimed = sensitivity(c, rounds, separation)
    assert most <= claimed * (1 + 1e-12)
    if rounds % separation == 0:
        assert most == pytest.approx(claimed, rel=1e-12)


def test_participations_nearer_than_the_bands_would_pass_the_sensitivity_and_are_refused():
    c = banded_toeplitz(3, 8)
    columns = _matrix(c, 8)[:, [0, 2, 4]]  # two rounds apart
    assert np.linalg.norm(columns.sum(1)) > 1.05 * math.sqrt(3)
    with pytest.raises(ConfigError, match=r"^bands = 3: expected at most the 2 rounds"):
        sensitivity(c, 8, 2)


@pytest.mark.parametrize("bands, rounds", [(1, 6), (2, 6), (3, 10), (10, 10)])
def test_the_recurrence_is_the_dense_inverse(bands, rounds):
    c = banded_toeplitz(bands, rounds)
    inverse = np.linalg.inv(_matrix(c, rounds))
    assert np.allclose(_matrix(c, rounds) @ inverse, np.eye(rounds), atol=1e-12)
    z = np.stack([server_noise(5, t, 1.0, 30) for t in range(rounds)])
    # an adaptive bound scales each round's release
    correlated = Correlated(5, c, 30)
    stds = np.linspace(0.5, 3, rounds)
    drawn = np.stack([correlated.on_sum(t, stds[t]) for t in range(rounds)])
    assert drawn == pytest.approx(stds[:, None] * (inverse @ z), rel=1e-10, abs=1e-12)


def test_the_noise_of_a_round_has_the_same_bits_in_whatever_order_rounds_are_asked_for():
    c = banded_toeplitz(4, 12)
    straight = Correlated(6, c, 50)
    through = [straight.on_sum(t, 2.0) for t in range(12)]
    assert np.array_equal(Correlated(6, c, 50).on_sum(7, 2.0), through[7])  # after a resume
    jumping = Correlated(6, c, 50)
    for t in (0, 1, 2, 2, 3, 1, 11, 5, 6, 7):
        assert np.array_equal(jumping.on_sum(t, 2.0), through[t])
    assert not np.array_equal(Correlated(7, c, 50).on_sum(7, 2.0), through[7])


def test_the_drawn_noise_has_the_covariance_of_the_theory():
    """Sample covariance of 200,000 coordinates over 6 rounds against sigma^2 C^-1 C^-T, each entry
    by its own std; false-alarm rate 1e-5.
    """
    rounds = 6
    d = 200_000
    sigma = 1.7
    c = banded_toeplitz(3, rounds)
    correlated = Correlated(8, c, d)
    drawn = np.stack([correlated.on_sum(t, sigma) for t in range(rounds)])
    inverse = np.linalg.inv(_matrix(c, rounds))
    truth = sigma**2 * inverse @ inverse.T
    spread = np.sqrt((np.outer(np.diag(truth), np.diag(truth)) + truth**2) / d)
    scores = np.abs((drawn @ drawn.T / d - truth) / spread)[np.triu_indices(rounds)]
    assert scores.max() < stats.norm.isf(1e-5 / 2 / len(scores))


def banded(**fields) -> BandedGaussian:
    section = {"kind": "banded_gaussian", "bands": 4, "multiplier": 1.0} | fields
    return choose("noise", section, noise.FAMILY, noise.Noise)


def test_the_member_resolves_to_the_best_coefficients_or_to_its_own_scaled_to_norm_one():
    assert banded().placement == "server" and banded().coefficients is None
    assert np.array_equal(banded().fitted(20, 0.8).coefficients, banded_toeplitz(4, 20, 0.8))
    own = banded(coefficients=[2, 1, 0, 2]).fitted(20).coefficients
    assert own == pytest.approx((2 / 3, 1 / 3, 0, 2 / 3))
    for bands in range(1, 21):  # as written into a run's config and read again, to the last bit
        resolved = banded(bands=bands).fitted(20)
        assert banded(**resolved.model_dump()).fitted(20) == resolved
    with pytest.raises(ConfigError, match=r"^bands = 4"):
        banded(coefficients=(1, 0, 0, 0)).fitted(3)


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
    with pytest.raises(ConfigError) as caught:
        banded(**change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "kind, covered, refused",
    [
        ("full", (5, 8), (4, 1)),
        ("poisson", (5, 8), (4,)),
        ("public", (5, 8), (4,)),
        ("fixed", (), (1, 5)),
        ("with_replacement", (), (5,)),
    ],
)
def test_bands_are_covered_only_by_turns_with_all_or_a_poisson_sample_of_a_group(
    kind, covered, refused
):
    """Five bands, at so many rounds from one turn of a group to its next."""
    sampling = Sampling(kind, 10, 10 if kind == "full" else 4)
    check(1, sampling, 1)
    for separation in covered:
        check(5, sampling, separation)
    for separation in refused:
        with pytest.raises(ConfigError, match=r"^bands = 5"):
            check(5, sampling, separation)


@pytest.mark.parametrize(
    "bands, rounds, momentum, field",
    [(0, 5, 0.0, "bands"), (6, 5, 0.0, "bands"), (2, 5, 1.0, "momentum")],
)
def test_a_factorisation_that_does_not_exist_is_refused(bands, rounds, momentum, field):
    with pytest.raises(ConfigError) as caught:
        banded_toeplitz(bands, rounds, momentum)
    assert caught.value.field == field
    with pytest.raises(ConfigError):
        error([1.0] * bands, rounds, momentum)
