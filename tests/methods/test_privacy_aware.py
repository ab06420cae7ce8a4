"""Privacy-aware probabilities: the exact solver against CVXPY and optimality conditions."""

import math

import numpy as np
import pytest
from conftest import messages, refusal

from raydpfl.errors import ConfigError
from raydpfl.methods.selection import FAMILY, Population
from raydpfl.methods.selection.privacy_aware_solver import solve, solve_cvxpy


def objective(probabilities: np.ndarray, unbiased: np.ndarray, cost: np.ndarray) -> float:
    """f(p) = D + sqrt(D^2 + sum c p^2), D = ||p - p^u||_1 (003 Problem 1), for float64 [N]."""
    distance = float(np.abs(probabilities - unbiased).sum())
    return distance + math.hypot(distance, math.sqrt((cost * probabilities) @ probabilities))


def kkt_residual(probabilities: np.ndarray, unbiased: np.ndarray, cost: np.ndarray) -> float:
    """How far p is from the optimality conditions of 003 Problem 1; 0 where it is optimal.

    The largest of |sum p - 1|, the most negative p_k, and the stationarity gap: the distance
    between the bounds that clients put on nu (see the derivation), as a fraction of the largest
    term in them. A client counts as unmoved only if p_k = p^u_k to the bit, so this judges exact
    solutions, not those of iterative solvers. Where f is small (nearly all mass is on public
    clients), the rounding of p alone can make it 1e-16 / f.

    Args:
        probabilities, unbiased, cost: p, p^u and c, float64 [N].
    """
    value = objective(probabilities, unbiased, cost)
    pull = cost * probabilities
    at_least = np.where(
        probabilities > 0, pull + np.where(probabilities > unbiased, value, -value), -np.inf
    ).max()
    at_most = (pull + np.where(probabilities < unbiased, -value, value)).min()
    gap = (at_least - at_most) / max(value, pull.max()) if value > 0 else 0.0
    return float(max(abs(probabilities.sum() - 1), -probabilities.min(), gap, 0.0))


def instance(
    rng: np.random.Generator, orders: tuple[float, float], clients: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities from even to very uneven, costs log-uniform over the given powers of ten."""
    n = clients or int(rng.integers(2, 40))
    return rng.dirichlet(np.full(n, rng.choice([0.3, 1, 30]))), 10 ** rng.uniform(*orders, n)


def moved(p, unbiased) -> float:
    """The mass taken from the lowered to the raised clients."""
    return np.abs(p - unbiased).sum() / 2


def check(unbiased, cost):
    """The solution, after what must hold for every one of them."""
    solution = solve(unbiased, cost)
    p = solution.probabilities
    (a, b) = solution.levels
    assert kkt_residual(p, unbiased, cost) < 1e-12
    best = objective(unbiased, unbiased, cost) * (1 + 1e-15)
    assert objective(p, unbiased, cost) <= best
    assert 0 <= a <= b * (1 + 1e-12)
    assert (p[unbiased > 0] > 0).all()
    return solution


def test_the_solution_of_the_two_client_problem_is_the_published_check_value():
    unbiased, cost = np.array([0.5, 0.5]), np.array([64.0, 1.0])
    solution = check(unbiased, cost)
    p = solution.probabilities
    found = (moved(p, unbiased), *solution.levels, objective(p, unbiased, cost))
    np.testing.assert_allclose(found, (0.415688, 0.915688, 5.395968, 2.240140), atol=5e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
def test_the_exact_solver_agrees_with_cvxpy_on_fifty_random_instances():
    rng = np.random.default_rng(0)
    changed = 0
    for trial in range(50):
        unbiased, cost = instance(rng, [(-3, 4), (-1, 2), (0, 6)][trial % 3])
        p = check(unbiased, cost).probabilities
        reference = solve_cvxpy(unbiased, cost)
        changed += moved(p, unbiased) > 0
        np.testing.assert_allclose(p, reference, atol=1e-6, rtol=0)
        best = objective(reference, unbiased, cost)
        assert objective(p, unbiased, cost) == pytest.approx(best, abs=1e-9)
    assert changed > 30


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
def test_with_public_clients_the_private_ones_and_the_objective_agree_with_cvxpy():
    rng = np.random.default_rng(1)
    for _ in range(8):
        unbiased, cost = instance(rng, (-1, 4), clients=12)
        cost[:3] = 0
        p = check(unbiased, cost).probabilities
        reference = solve_cvxpy(unbiased, cost)
        np.testing.assert_allclose(p[3:], reference[3:], atol=1e-5, rtol=0)
        best = objective(reference, unbiased, cost)
        assert objective(p, unbiased, cost) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("orders", [(-1, 1), (0, 12), (-150, 150), (0, 300), (-300, 0)])
def test_the_optimality_conditions_hold_for_costs_of_any_magnitude(orders):
    rng = np.random.default_rng(2)
    for trial in range(150):
        unbiased, cost = instance(rng, orders, clients=int(rng.integers(1, 40)))
        if trial % 3 == 1:  # ties, in cost and in probability
            cost, unbiased = rng.choice(cost[:3], len(cost)), np.full(len(cost), 1 / len(cost))
        if trial % 3 == 2 and len(cost) > 2:  # clients without data, and public ones
            unbiased[rng.integers(len(cost))] = 0
            unbiased /= unbiased.sum()
            cost[rng.integers(len(cost), size=2)] = 0
        check(unbiased, cost)


def test_the_residual_rejects_what_is_not_optimal():
    rng = np.random.default_rng(4)
    for _ in range(30):
        unbiased, cost = instance(rng, (2, 5), clients=10)
        p = check(unbiased, cost).probabilities
        assert kkt_residual(unbiased, unbiased, cost) > 1e-2
        assert kkt_residual(p * 1.001, unbiased, cost) > 1e-4
        low = np.argmin(cost * p)
        high = np.argmax(cost * p)
        p[low], p[high] = p[low] - 1e-3 * p[high], p[high] * 1.001
        assert kkt_residual(p, unbiased, cost) > 1e-4


def test_one_client_equal_costs_and_all_public_leave_the_unbiased_probabilities_untouched():
    assert check(np.ones(1), np.array([1e200])).probabilities.tolist() == [1.0]
    for cost in (0.0, 1e-300, 1.0, 1e6, 1e300):
        even = np.full(7, 1 / 7)
        assert np.array_equal(check(even, np.full(7, cost)).probabilities, even)
    uneven = np.array([0.7, 0.2, 0.1, 0.0])
    assert np.array_equal(check(uneven, np.zeros(4)).probabilities, uneven)
    assert np.array_equal(check(uneven, np.full(4, 1e-3)).probabilities, uneven)


def test_the_unbiased_probabilities_are_kept_exactly_up_to_their_optimality_condition():
    unbiased = np.array([0.5, 0.5])
    edge = 3 + math.sqrt(12)  # where (c - 1) / 2 = 2 sqrt((c + 1) / 4)
    assert np.array_equal(
        check(unbiased, np.array([edge * (1 - 1e-9), 1.0])).probabilities, unbiased
    )
    beyond = check(unbiased, np.array([edge * (1 + 1e-6), 1.0])).probabilities
    assert 0 < moved(beyond, unbiased) < 1e-5


def test_equal_costs_with_uneven_data_move_mass_once_noise_outweighs_bias():
    unbiased = np.array([0.9, 0.05, 0.05])
    assert np.array_equal(check(unbiased, np.full(3, 1.0)).probabilities, unbiased)
    np.testing.assert_allclose(check(unbiased, np.full(3, 1e12)).probabilities, 1 / 3, rtol=1e-5)


def test_what_the_private_clients_lose_the_public_ones_share_in_proportion_to_their_data():
    unbiased = np.array([0.3, 0.1, 0.4, 0.2])
    cost = np.array([0.0, 0.0, 1e4, 1e4])
    solution = check(unbiased, cost)
    assert moved(solution.probabilities, unbiased) > 0.5 and solution.levels[0] == 0
    np.testing.assert_allclose(solution.probabilities[0] / solution.probabilities[1], 3)
    unweighed = check(np.array([0.0, 0.0, 0.6, 0.4]), cost).probabilities
    assert unweighed[0] == unweighed[1] > 0.25


def test_a_budget_that_grows_without_end_tends_to_a_public_client():
    unbiased = np.array([0.2, 0.5, 0.3])
    cost = np.array([0.0, 1e3, 1e5])
    public = check(unbiased, cost)
    nearly = [
        check(unbiased, np.array([tiny, 1e3, 1e5])) for tiny in (1e-12, 1e-100, 1e-299, 1e-310)
    ]
    for solution in nearly:
        np.testing.assert_allclose(solution.probabilities, public.probabilities, rtol=1e-11)


def test_the_lowered_client_keeps_the_digits_that_the_moved_mass_cannot_hold():
    solution = check(np.array([0.5, 0.5]), np.array([1e150, 1.0]))
    # D = 1, p_2 = 1 in the limit
    a = 1.0
    b = 1.0 + 2 * (1 + math.sqrt(2))
    np.testing.assert_allclose(solution.levels, (a, b), rtol=1e-14)
    np.testing.assert_allclose(solution.probabilities[0], b * 1e-150, rtol=1e-14)
    # here the lowered level is 100 - 8e-17
    raised = check(np.array([1.0, 0.0]), np.array([100.0, 1e20]))
    np.testing.assert_allclose(raised.probabilities[1], (100 - 2 * 10) * 1e-20, rtol=1e-14)


@pytest.mark.parametrize("orders", [(-2, 5), (-140, 140)])
def test_the_order_of_the_clients_and_cutting_one_in_two_do_not_matter(orders):
    rng = np.random.default_rng(7)
    for _ in range(40):
        unbiased, cost = instance(rng, orders)
        p = check(unbiased, cost).probabilities
        order = rng.permutation(len(p))
        np.testing.assert_allclose(
            check(unbiased[order], cost[order]).probabilities, p[order], rtol=1e-9, atol=1e-15
        )
        # Half the data at twice the cost, twice, is one and the same client: 2 (2c) (p/2)^2 = c
        # p^2.
        halves = check(np.repeat(unbiased, 2) / 2, np.repeat(2 * cost, 2)).probabilities
        np.testing.assert_allclose(halves.reshape(-1, 2).sum(1), p, rtol=1e-9, atol=1e-15)


def test_a_hundred_thousand_clients_are_solved_to_the_same_precision():
    check(*instance(np.random.default_rng(8), (-3, 8), clients=100_000))


@pytest.mark.parametrize(("unbiased", "cost", "field"), messages("probabilities and costs"))
def test_probabilities_and_costs_that_cannot_be_are_refused_by_name(unbiased, cost, field):
    for solver in (solve, solve_cvxpy):
        with pytest.raises(ConfigError, match=f"^{field} = "):
            solver(unbiased, cost)


def test_a_scale_at_which_cvxpy_finds_no_optimum_is_refused():
    chosen = FAMILY["privacy_aware"](cohort=2, scale=1e15, solver="cvxpy")
    population = Population(np.array([5, 10, 20]), np.array([1e3, 3e3, 1e4]))
    with refusal(
        r"selection.scale = 1000000000000000.0: expected one at which cvxpy finds an optimum"
    ):
        chosen.draw_probabilities(population)
