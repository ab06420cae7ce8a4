"""How often to draw each client when budgets differ: 003 sec. V, Problem 1 (PRIVACY.md sec. 6).

Let p^u be the unbiased probabilities and c_k the cost of drawing client k, a scale times the
variance of its noise (003: c_k = eta D V_k, V_k = `raydpfl.privacy.budget_variance`). The selection
probabilities p minimise over the simplex

    f(p) = D + F,   D = ||p - p^u||_1,   F = sqrt(D^2 + sum_k c_k p_k^2).

*Derivation.* f is convex. Where F > 0, F times a subgradient is s_k f + c_k p_k, with s_k in the
subdifferential of |p_k - p^u_k|. So p is optimal iff some nu equals that wherever p_k > 0, and is
at most that where p_k = 0. Hence c_k p_k is a := nu - f for a raised client, b := nu + f for a
lowered one, and in [a, b] for one that stays:

    p_k = min(max(p^u_k, a / c_k), b / c_k),   b - a = 2 f.

p^u itself is optimal iff

    max c p^u - min c p^u <= 2 sqrt(sum c (p^u)^2).

(In PRIVACY.md's "b - a = 2F" F is the whole objective, as its check value shows.) A raised client
has a >= 0, so b > 0 and no p^u_k > 0 is lowered to 0 (003 Proposition 2, whose proof needs
p^u_k > 0). A public client, c_k = 0, forces a = 0, and all the mass that moves goes to public
clients. f does not depend on how they share it; here they share it in proportion to p^u (equally
where that is 0).

*Solver.* Sorted by c_k p^u_k, the raised clients are a prefix and the lowered ones a suffix, and
the mass M = D / 2 that moves is piecewise linear in either level. Two binary searches on the sign
of b - a - 2f, which falls as M grows, find prefix and suffix. There the equation says that a linear
function equals the Euclidean norm of another: it is concave with one sign change, so Newton's
method from the side where too much has moved approaches the root without overshooting. Its unknown
is the level whose clients hold less mass per unit of level, not M: with c = (1e150, 1) the lowered
client keeps 6e-150, which M = 0.5 - 6e-150 cannot hold in float64.

Public: p^u and c, hence sizes and budgets. Nothing here may depend on the data.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from raydpfl.errors import ConfigError


@dataclass(frozen=True)
class Solution:
    """The minimiser of 003 Problem 1, p = min(max(p^u, a / c), b / c)."""

    probabilities: np.ndarray  # p, float64 [N]
    levels: tuple[float, float]  # (a, b). Where p = p^u, the extremes of c p^u.


def solve(unbiased: ArrayLike, cost: ArrayLike) -> Solution:
    """The exact solution of 003 Problem 1 in O(N log N): one sort, two binary searches, and a few
    Newton steps on one scalar.

    Args:
        unbiased: p^u, float64 [N], not negative and with sum 1.
        cost: c, float64 [N], from 0 (a public client) to 1e300; below 1e-300 it counts as 0.

    Raises:
        ConfigError: an argument is anything else.
    """
    unbiased, cost = _check_arguments(unbiased, cost)
    cost = np.where(cost < 1e-300, 0.0, cost)
    pull = cost * unbiased
    low = float(pull.min())
    high = float(pull.max())
    if high - low <= 2 * math.sqrt(pull @ unbiased):
        return Solution(unbiased.copy(), (low, high))
    moves = _Moves(pull, unbiased, cost)
    n = len(pull)
    j = min(bisect_right(range(n), 0.0, lo=1, key=moves.lowered_excess), n - 1)
    i = bisect_left(range(j), 0.0, lo=1, key=lambda k: -moves.raised_excess(k, j))
    a, b = moves.solve_levels(i, j)
    public = cost == 0
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.where(public, unbiased, np.minimum(np.maximum(unbiased, a / cost), b / cost))
    if public.any():
        share = unbiased[public] if unbiased[public].any() else np.ones(public.sum())
        p[public] += (unbiased - p).sum() * share / share.sum()
    return Solution(p, (a, b))


class _Moves:
    """Clients sorted by c p^u: [0, i) are raised to the level a, [j, n) lowered to the level b."""

    def __init__(self, pull: np.ndarray, unbiased: np.ndarray, cost: np.ndarray):
        order = np.argsort(pull, kind="stable")
        self.g = pull[order]
        u = unbiased[order]
        with np.errstate(divide="ignore"):
            w = 1 / cost[order]  # mass per unit of level
        self.mass_below, self.width_below, self.square_below = (
            np.concatenate(([0.0], np.cumsum(x))) for x in (u, w, self.g * u)
        )
        self.mass_above, self.width_above = (
            np.concatenate((np.cumsum(x[::-1])[::-1], [0.0])) for x in (u, w)
        )
        # the mass that lifts the prefix to g[i], or that is freed by lowering the suffix to g[j]:
        # sums of non-negative terms, so monotone and exact
        rise = np.diff(self.g)
        # infinite beyond the public clients, and where no mass is enough
        with np.errstate(invalid="ignore", over="ignore"):
            lift_steps = np.where(rise > 0, rise * self.width_below[1:-1], 0.0)
            self.lifted_mass = np.concatenate(([0.0], np.cumsum(lift_steps)))
        drop_steps = rise * np.where(rise > 0, self.width_above[1:-1], 0.0)
        self.dropped_mass = np.concatenate((np.cumsum(drop_steps[::-1])[::-1], [0.0]))

    def excess(self, i: int, j: int, moved_mass: float, a: float, b: float) -> tuple[float, float]:
        """b - a - 2f, and minus its slope in the moved mass without the part of the levels."""
        raised_mass = moved_mass + float(self.mass_below[i])
        lowered_mass = b * float(self.width_above[j])
        squares = max(0.0, self.square_below[j] - self.square_below[i])
        norm = math.hypot(2 * moved_mass, math.sqrt(squares + a * raised_mass + b * lowered_mass))
        gap = b - a - 4 * moved_mass
        return gap - 2 * norm, 4 - 2 * gap / norm if norm else 0.0

    def lowered_excess(self, j: int) -> float:
        """The excess where the suffix is lowered to g[j]."""
        moved_mass = float(self.dropped_mass[j])
        i = int(np.searchsorted(self.lifted_mass, moved_mass, side="right"))
        level = float((moved_mass + self.mass_below[i]) / self.width_below[i])
        return self.excess(i, j, moved_mass, max(float(self.g[i - 1]), level), float(self.g[j]))[0]

    def raised_excess(self, i: int, j: int) -> float:
        """The excess where the prefix is raised to g[i], with the suffix from j on lowered."""
        moved_mass = float(self.lifted_mass[i])
        mass = float(self.mass_above[j])
        if not moved_mass < mass:
            return -math.inf
        level = (mass - moved_mass) / float(self.width_above[j])
        return self.excess(i, j, moved_mass, float(self.g[i]), level)[0]

    def solve_levels(self, i: int, j: int) -> tuple[float, float]:
        """The levels where the excess is 0, by Newton's method from where too much has moved."""
        mass_l = float(self.mass_above[j])
        width_l = float(self.width_above[j])
        mass_r = float(self.mass_below[i])
        width_r = float(self.width_below[i])
        by_b = width_l <= width_r
        level = float(self.g[j - 1] if by_b else self.g[i])  # too much has moved here
        while True:
            if by_b:
                b = level
                moved_mass = mass_l - level * width_l
                a = (mass_r + moved_mass) / width_r
            else:
                a = level
                moved_mass = level * width_r - mass_r
                b = (mass_l - moved_mass) / width_l
            value, slope = self.excess(i, j, moved_mass, a, b)
            step = value / (1 / width_l + 1 / width_r + slope)  # still to be moved
            next_level = level - step / width_l if by_b else level + step / width_r
            if not step < 0 or next_level == level:
                return a, b
            level = next_level


def solve_cvxpy(unbiased: ArrayLike, cost: ArrayLike) -> np.ndarray:
    """The probabilities by CVXPY and CLARABEL, float64 [N]: the reference that `solve` is tested
    against. Raises `ConfigError` as `solve` does, and `cvxpy.SolverError`.

    As a second-order cone program, Problem 1 gives p only to 1e-5, since f is flat. So p is
    polished: with F = min over t > 0 of t / 2 + (D^2 + sum c p^2) / (2 t), a fixed t leaves a
    quadratic program that is not flat. Four of these, each with the last value of t, give p to 1e-7
    (1e-5 with public clients).

    Args:
        unbiased, cost: as for `solve`; costs up to about 1e6.
    """
    unbiased, cost = _check_arguments(unbiased, cost)
    import cvxpy  # takes a second, and only the reference needs it

    gain = cvxpy.Variable(len(cost), nonneg=True)
    loss = cvxpy.Variable(len(cost), nonneg=True)
    p = unbiased + gain - loss
    distance = cvxpy.sum(gain) + cvxpy.sum(loss)
    spread = cvxpy.hstack([distance, cvxpy.multiply(np.sqrt(cost), p)])

    def minimise(function: cvxpy.Expression, tolerance: float) -> None:
        simplex = [cvxpy.sum(gain) == cvxpy.sum(loss), p >= 0]
        tolerances = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), tolerance)
        problem = cvxpy.Problem(cvxpy.Minimize(function), simplex)
        problem.solve(solver=cvxpy.CLARABEL, **tolerances)
        if spread.value is None:
            raise cvxpy.SolverError(problem.status)

    minimise(distance + cvxpy.norm(spread, 2), 1e-10)
    for _ in range(4):
        t = float(np.linalg.norm(spread.value))
        minimise(t * distance + cvxpy.sum_squares(spread) / 2, 1e-12)
    return p.value


def _check_arguments(unbiased: ArrayLike, cost: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    unbiased = np.asarray(unbiased, np.float64)
    cost = np.asarray(cost, np.float64)
    simplex = (unbiased >= 0).all() and abs(unbiased.sum() - 1) <= 1e-9
    if unbiased.ndim != 1 or not simplex:
        expected = "a vector of probabilities: non-negative, with sum 1"
        raise ConfigError("unbiased", unbiased, expected)
    if cost.shape != unbiased.shape or not ((cost >= 0) & (cost <= 1e300)).all():
        expected = f"a vector of {len(unbiased)} costs from 0 to 1e300, one per client"
        raise ConfigError("cost", cost, expected)
    return unbiased, cost
