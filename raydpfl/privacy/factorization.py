"""Correlated noise: factorisations A = B C of the sums so far, by which the noise of one round
takes back a part of the noise of the rounds before ([1]; its privacy is proved in docs/proofs.md).

With A the lower triangle of ones, A x are the sums so far of the rounds' sums x (a row each). The
server releases A x + B z = A (x + C^-1 z). C x + z is one Gaussian mechanism, and round t shows x_t
+ y_t with y = C^-1 z. C is lower-triangular Toeplitz with first column c, or the binary tree. What
a client moves C x by follows from the fewest rounds between two of its participations, and from how
many there are (`toeplitz_squares`, `tree_squares`).

The error of a strategy is the std of the noise on a coordinate of the sums so far (with momentum,
of the velocities), root mean square over the rounds, in bounds, for z of std 1 times the
sensitivity. Of 2,000 rounds, where a client is in at most 3 that are at least 484 apart, it is 54.8
for independent noise, 6.0 for the best 484 bands, 6.8 for the square root and 6.1 for 4 buffers.

[1] Denisov, McMahan, Rush, Smith, Thakurta. Improved differential privacy for SGD via optimal
private linear operators on adaptive streams. NeurIPS 2022. Theorem 2.1.
[2] McKenna. Scaling up the banded matrix factorization mechanism for large scale differentially
private ML. 2024.
[3] Kalinin, Lampert. Banded square root matrix factorization for differentially private model
training. NeurIPS 2024. Theorem 2.
[4] Dvijotham, McMahan, Pillutla, Steinke, Thakurta. Efficient and near-optimal noise generation for
streaming differential privacy. FOCS 2024.
[5] McMahan, Xu, Zhang. A hassle-free algorithm for private learning in practice: don't use tree
aggregation, use BLTs. 2024.
[6] Kairouz, McMahan, Song, Thakkar, Thakurta, Xu. Practical and private (deep) learning without
sampling or shuffling. ICML 2021. Appendix D.
[7] Honaker. Efficient use of differentially private binary trees. 2015.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.privacy.sampling import Sampling

Coefficients = Sequence[float] | np.ndarray


def square_root(rounds: int, momentum: float = 0.0) -> np.ndarray:
    """The first column of the square root of A, float64 [rounds]: 1, 1/2, 3/8, ... ([3]), times the
    series (1 - momentum x)^-1/2; it does not increase. Raises `ConfigError` if momentum is out of
    range.
    """
    _check_shape(1, rounds, momentum)
    steps = np.arange(1, rounds)
    root = np.concatenate([[1.0], np.cumprod((2 * steps - 1) / (2 * steps))])
    if not momentum:
        return root
    from scipy.signal import fftconvolve

    return np.minimum.accumulate(fftconvolve(root, root * momentum ** np.arange(rounds))[:rounds])


@lru_cache(maxsize=64)
def banded_toeplitz(bands: int, rounds: int, momentum: float = 0.0) -> np.ndarray:
    """The coefficients of least error for participations `bands` apart, float64 [bands], of norm
    1, by L-BFGS ([2]). Raises `ConfigError` if bands or momentum are out of range.
    """
    _check_shape(bands, rounds, momentum)
    from scipy.optimize import minimize

    root = square_root(bands)[1:]  # to start from
    options = {"ftol": 1e-15, "gtol": 1e-9}
    workload = (_workload(rounds, momentum),)
    optimum = minimize(_log_error, root, workload, jac=True, method="L-BFGS-B", options=options)
    c = np.concatenate([[1.0], optimum.x])
    c /= np.linalg.norm(c)
    c.setflags(write=False)
    return c


def buffered_column(decays: Coefficients, scales: Coefficients, rounds: int) -> np.ndarray:
    """The first column of a buffered linear Toeplitz matrix ([4]), float64 [rounds]: c_0 = 1 and
    c_j = sum over the buffers of scale x decay^(j - 1).
    """
    powers = np.power.outer(np.asarray(decays, float), np.arange(rounds - 1))
    return np.concatenate([[1.0], np.asarray(scales, float) @ powers])


@lru_cache(maxsize=64)
def buffered_toeplitz(
    buffers: int, rounds: int, momentum: float = 0.0, separation: int = 1, participations: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Decays and scales of so many buffers ([4]), float64 [buffers] each, of least error among
    those that do not increase, by L-BFGS from several starts ([5]). Raises `ConfigError` for
    buffers that are not 1 to 20, or a momentum out of range.
    """
    if not 1 <= buffers <= 20:
        raise ConfigError("buffers", buffers, "an integer from 1 to 20")
    _check_shape(1, rounds, momentum)
    from scipy.optimize import minimize
    from scipy.special import expit, logit

    workload = _workload(rounds, momentum)
    powers = np.arange(rounds - 1)

    def decays_and_scales(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # scales add up to less than 1, so that c does not increase
        weights = np.exp(x[buffers:] - max(x[buffers:].max(), 0.0))
        rest = math.exp(-max(x[buffers:].max(), 0.0))
        return expit(x[:buffers]), weights / (weights.sum() + rest)

    def excess(x: np.ndarray) -> tuple[float, np.ndarray]:
        decays, scales = decays_and_scales(x)
        c = buffered_column(decays, scales, rounds)
        value, slope = _log_error(c[1:], workload, separation, participations, True)
        basis = np.power.outer(decays, powers)
        by_scale = basis @ slope
        by_scale = scales * (by_scale - scales @ by_scale)
        basis[:, 1:] = basis[:, :-1] * powers[1:]
        basis[:, :1] = 0.0
        return value, np.concatenate([(basis @ slope) * scales * decays * (1 - decays), by_scale])

    best, min_error = None, math.inf
    for slowest in (1.0, 0.1, 0.01):  # of the rates at which a buffer fades, in 1 / rounds
        rates = np.geomspace(0.5, min(0.4, 1 / (slowest * rounds)), buffers)
        start = np.concatenate([logit(1 - rates), np.log(rates**0.5 / (rates**0.5).sum())])
        bounds = [(-10.0, 16.0)] * buffers + [(-20.0, 10.0)] * buffers
        options = {"ftol": 1e-9, "gtol": 1e-6, "maxiter": 300}
        optimum = minimize(
            excess, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options
        )
        if optimum.fun < min_error:
            best, min_error = optimum.x, float(optimum.fun)
    assert best is not None
    decays, scales = decays_and_scales(best)
    order = np.argsort(decays)
    decays, scales = decays[order], scales[order]
    for values in (decays, scales):
        values.setflags(write=False)
    return decays, scales


def _check_shape(bands: int, rounds: int, momentum: float) -> None:
    if not 1 <= bands <= rounds:
        raise ConfigError("bands", bands, f"an integer from 1 to the {rounds} rounds of the run")
    if not 0 <= momentum < 1:
        raise ConfigError("momentum", momentum, "a number from 0, below 1")


def _workload(rounds: int, momentum: float) -> np.ndarray:
    """The first column of A: how much of round 0's noise is in the model after 1, 2, ... rounds."""
    return np.cumsum(momentum ** np.arange(rounds))


def _log_error(
    tail: np.ndarray,
    workload: np.ndarray,
    separation: int = 1,
    participations: int = 1,
    use_fft: bool = False,
) -> tuple[float, np.ndarray]:
    """log(mean over the rounds of the squares in A C^-1, times the squared sensitivity), and its
    gradient in tail; `use_fft`: by FFT, for long tails.
    """
    from scipy.signal import fftconvolve, lfilter

    c = np.concatenate([[1.0], tail])
    rounds = len(workload)
    with np.errstate(over="ignore", invalid="ignore"):
        column = lfilter([1.0], c, workload)  # of A C^-1, which is Toeplitz too
        weights = column * np.arange(rounds, 0, -1) / rounds  # entry k stands in rounds - k rows
        mean = weights @ column
        fall = lfilter([1.0], c, column)  # d column / d c_j = -fall, j places later
        if use_fft:
            slope = -2 * fftconvolve(weights, fall[::-1])[rounds : rounds + len(tail)]
        else:
            slope = -2 * np.array([weights[j:] @ fall[: rounds - j] for j in range(1, len(c))])
    # a step too far, where C^-1 grows exponentially
    if not (np.isfinite(mean) and np.isfinite(slope).all()):
        return 1e300, np.zeros(len(tail))
    if participations == 1:
        return math.log(mean * (c @ c)), slope / mean + 2 * tail / (c @ c)
    column_sum = _column_sum(c, rounds, separation, participations)
    square = column_sum @ column_sum
    places = range(0, min(participations * separation, rounds), separation)
    shifted_columns = [np.pad(column_sum[place:], (0, len(c)))[1 : len(c)] for place in places]
    return math.log(mean * square), slope / mean + 2 * np.sum(shifted_columns, axis=0) / square


def _column_sum(c: np.ndarray, rounds: int, separation: int, participations: int) -> np.ndarray:
    """The sum of the columns of C at rounds 0, separation, ...: float64 [rounds]."""
    turns = -(-rounds // separation)
    rows = np.zeros(turns * separation)
    rows[: min(len(c), rounds)] = c[:rounds]
    sums = rows.reshape(turns, separation).cumsum(0)
    sums[participations:] -= sums[: max(turns - participations, 0)].copy()
    return sums.reshape(-1)[:rounds]


def toeplitz_squares(
    c: Coefficients, rounds: int, separation: int, participations: int
) -> np.ndarray:
    """The most that one client can move C x by in 1, 2, ... participations, squared L2 norms,
    float64 [at most participations], for updates of norm at most 1 in rounds at least `separation`
    apart: exact ([3] Theorem 2). Raises `ConfigError` for coefficients longer than the separation
    that are negative or increase.
    """
    c = np.asarray(c, np.float64)
    if len(c) > separation and (c[-1] < 0 or (np.diff(c) > 0).any()):
        expected = f"as many as the {separation} rounds after which a client may take part again, "
        expected += "or numbers from 0 that do not increase"
        raise ConfigError("coefficients", len(c), expected)
    max_participations = max(1, min(participations, -(-rounds // separation)))
    column = np.pad(c[:rounds], (0, max(rounds - len(c), 0)))
    column_sum = np.zeros(rounds)
    squares = np.zeros(max_participations)
    total = 0.0
    for n in range(max_participations):
        place = n * separation
        new, before = column[: rounds - place], column_sum[place:]
        total += float(new @ new + 2 * (new @ before))
        before += new
        squares[n] = total
    return squares


def tree_squares(
    rounds: int, separation: int, participations: int, restart: int | None = None
) -> np.ndarray:
    """The most that 1, 2, ... participations at least `separation` rounds apart can come to in the
    binary trees over `restart` rounds each (None: one tree), float64 [at most participations]: the
    sum over the complete nodes of (participations in it)^2 ([6] Appendix D), for updates of norm 1.
    Exact, by dynamic programming over the nodes.
    """
    max_participations = max(1, min(participations, -(-rounds // separation)))

    # best values: float64 [participations from 0, rounds that the next must still wait for], -inf
    # where there is no such pattern, or a better one that waits no longer
    @cache
    def complete(height: int, wait: int) -> np.ndarray:
        """Of a complete node of 2^height rounds, of which the first `wait` are barred."""
        size = 1 << height
        best = np.full((2, separation), -np.inf)
        if size > separation:
            best = append_node(complete(height - 1, wait), height - 1)
            return best + np.arange(len(best))[:, None] ** 2
        best[0, max(wait - size, 0)] = 0.0
        if wait < size:  # one at most, the earliest
            best[1, min(max(separation + wait - size, 0), separation - 1)] = height + 1
        return best

    def append_node(before: np.ndarray, height: int) -> np.ndarray:
        """Of what has the values `before`, followed by a complete node of this height."""
        rows = min(len(before) + (1 << height), max_participations + 1)
        best = np.full((rows, separation), -np.inf)
        for count, wait in np.argwhere(np.isfinite(before)).tolist():
            after = complete(height, wait)[: rows - count]
            part = best[count : count + len(after)]
            np.maximum(part, before[count, wait] + after, out=part)
        longer = np.maximum.accumulate(best, axis=1)[:, :-1]
        best[:, 1:][best[:, 1:] <= longer] = -np.inf
        return best

    block = min(restart or rounds, rounds)
    best = np.full((max_participations + 1, separation), -np.inf)
    best[0, 0] = 0.0
    for size in [block] * (rounds // block) + [rounds % block]:
        for height in reversed(range(size.bit_length())):
            if size >> height & 1:
                best = append_node(best, height)
    # where the last must be in an incomplete node, one more may come to less
    return np.maximum.accumulate(best.max(1)[1:])


# By name, the squares of a strategy at its best for so many rounds, a separation and a number of
# participations. What else it takes is an option of `raydpfl budget`.
STRATEGIES: dict[str, Callable[..., np.ndarray]] = {
    "tree": tree_squares,
    "square_root": lambda rounds, *most: _unit_squares(square_root(rounds), rounds, *most),
    "banded": lambda rounds, *most, bands=None: _unit_squares(
        banded_toeplitz(bands or min(most[0], rounds), rounds), rounds, *most
    ),
    "buffered": lambda rounds, *most, buffers=3: _unit_squares(
        buffered_column(*buffered_toeplitz(buffers, rounds, 0.0, *most), rounds), rounds, *most
    ),
}


def _unit_squares(c: np.ndarray, rounds: int, separation: int, participations: int) -> np.ndarray:
    return toeplitz_squares(c / np.linalg.norm(c), rounds, separation, participations)


def separation_refusal(sampling: Sampling, separation: int, bands: int | None = None) -> str | None:
    """Why noise that is correlated over the rounds is not covered, and what is; None: it is, by the
    squares above where cohorts are no secret, and under a Poisson sample of the group whose turn it
    is (`sampling`) as independent noise, if it spans no two turns. `separation`: the fewest rounds
    from one participation of a client to its next; `bands`: the rounds that noise is correlated
    over, None: all.
    """
    if not sampling.hidden or bands == 1:
        return None
    if sampling.coins is None:
        reason = f"under {sampling} it is not covered; public cohorts, "
        return f"{reason}all clients, or a Poisson sample of the group whose turn it is are"
    if bands is None or bands > separation:
        reason = f"at most {separation} bands, the rounds after which a client may take part again"
        return f"{reason}, are covered under {sampling}; any with public cohorts"
    return None
