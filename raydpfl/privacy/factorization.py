"""Correlated noise: banded Toeplitz factorisations, whose noise of one round takes back a part of
the noise of the rounds before ([1], [2]; its privacy is proved in docs/proofs.md).

With A the lower triangle of ones, A x are the sums so far of the rounds' sums x (a row each). With
A = B C the server releases A x + B z = A (x + C^-1 z). C x + z is one Gaussian mechanism, and round
t shows x_t + y_t with y = C^-1 z. C is lower-triangular Toeplitz with `bands` diagonals c, so that
y follows from the last few of its own values (`raydpfl.methods.noise.banded_gaussian.Correlated`).
c makes the noise in the sums so far least:

>>> c = banded_toeplitz(bands=8, rounds=1000)
>>> c.round(3)
array([0.5  , 0.387, 0.356, 0.338, 0.323, 0.309, 0.293, 0.269])
>>> # std of that noise (root mean square, in noise multiplier x bound), without and with it
>>> round(error([1.0], 1000), 2), round(error(c, 1000), 2)
(22.37, 8.35)

[1] Denisov, McMahan, Rush, Smith, Thakurta. Improved differential privacy for SGD via optimal
private linear operators on adaptive streams. NeurIPS 2022. Theorem 2.1.
[2] McKenna. Scaling up the banded matrix factorization mechanism for large scale differentially
private ML. 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.privacy.sampling import Sampling


def banded_toeplitz(bands: int, rounds: int, momentum: float = 0.0) -> np.ndarray:
    """The coefficients c with the least `error`, float64 [bands], of norm 1, for a server of this
    momentum, by L-BFGS. Raises `ConfigError` if bands or momentum are out of range.
    """
    _check_shape(bands, rounds, momentum)
    return _optimum(bands, rounds, momentum).copy()


def _check_shape(bands: int, rounds: int, momentum: float) -> None:
    if not 1 <= bands <= rounds:
        raise ConfigError("bands", bands, f"an integer from 1 to the {rounds} rounds of the run")
    if not 0 <= momentum < 1:
        raise ConfigError("momentum", momentum, "a number from 0, below 1")


@lru_cache(maxsize=64)
def _optimum(bands: int, rounds: int, momentum: float) -> np.ndarray:
    from scipy.optimize import minimize

    steps = np.arange(1, bands)
    # to start from: the square root of A, 1, 1/2, 3/8, ...
    root = np.cumprod((2 * steps - 1) / (2 * steps))
    options = {"ftol": 1e-15, "gtol": 1e-9}
    workload = (_workload(rounds, momentum),)
    optimum = minimize(_log_error, root, workload, jac=True, method="L-BFGS-B", options=options)
    c = np.concatenate([[1.0], optimum.x])
    return c / np.linalg.norm(c)


def _workload(rounds: int, momentum: float) -> np.ndarray:
    """The first column of A: how much of round 0's noise is in the model after 1, 2, ... rounds."""
    return np.cumsum(momentum ** np.arange(rounds))


def _log_error(tail: np.ndarray, workload: np.ndarray) -> tuple[float, np.ndarray]:
    """log(mean over the rounds of the squares in A C^-1, times |c|^2), and its gradient in tail."""
    from scipy.signal import lfilter

    c = np.concatenate([[1.0], tail])
    rounds = len(workload)
    with np.errstate(over="ignore", invalid="ignore"):
        column = lfilter([1.0], c, workload)  # of A C^-1, which is Toeplitz too
        weighted = column * np.arange(rounds, 0, -1) / rounds  # entry k stands in rounds - k rows
        mean = weighted @ column
        fall = lfilter([1.0], c, column)  # d column / d c_j = -fall, j places later
        slope = -2 * np.array([weighted[j:] @ fall[: rounds - j] for j in range(1, len(c))])
    # a step too far, where C^-1 grows exponentially
    if not (np.isfinite(mean) and np.isfinite(slope).all()):
        return 1e300, np.zeros(len(tail))
    return math.log(mean * (c @ c)), slope / mean + 2 * tail / (c @ c)


def error(c: Sequence[float] | np.ndarray, rounds: int, momentum: float = 0.0) -> float:
    """Std of the noise on a coordinate of the sum so far (with momentum, of the velocities v =
    momentum v + u), root mean square over the rounds, in units of noise multiplier x bound. Only
    the direction of c [bands], the diagonals of C, matters. Raises `ConfigError`.
    """
    c = np.asarray(c, np.float64)
    _check_shape(len(c), rounds, momentum)
    return math.exp(_log_error(c[1:] / c[0], _workload(rounds, momentum))[0] / 2)


def sensitivity(c: Sequence[float] | np.ndarray, rounds: int, separation: int) -> float:
    """The most that one client can add to C x, an L2 norm: sqrt(ceil(rounds / separation)) |c|, for
    updates of norm at most 1, at least `separation` rounds apart. Exact if `separation` divides
    `rounds` and is `len(c)`; else an upper bound, as the last columns are cut off. Raises
    `ConfigError` if participations may be nearer than the bands, where columns overlap.
    """
    if separation < len(c):
        expected = (
            f"at most the {separation} rounds that lie between two participations of a client"
        )
        raise ConfigError("bands", len(c), expected)
    return math.sqrt(math.ceil(rounds / separation)) * float(np.linalg.norm(c))


def check(bands: int, sampling: Sampling, separation: int) -> None:
    """Raises `ConfigError` unless noise of so many bands is covered: all of the group whose turn it
    is take part, or a Poisson sample of it. `sampling` is that of the group, without turns that of
    the population; `separation` the rounds from one turn of a group to its next, 1 without turns.
    """
    if bands == 1:
        return
    if separation < bands:
        expected = f"at most {separation}, the rounds after which a client may take part again; "
        expected += "or a selection by turns with more groups"
        raise ConfigError("bands", bands, expected)
    if not (sampling.everyone or not sampling.hidden or sampling.coins is not None):
        expected = "above 1 all of a group must take part, or a Poisson sample of it"
        raise ConfigError("bands", bands, f"1 under {sampling}; {expected}")
