"""Individual budgets: what adaptive lengths amount to, and what a filter lets through."""

import math

import numpy as np
import pytest
from conftest import mechanism

from raydpfl.core.prng import Purpose, stream
from raydpfl.privacy import gaussian_delta, gaussian_epsilon
from raydpfl.privacy.guarantee import Observer
from raydpfl.privacy.individual import IndividualBudgets

GRID = np.linspace(-9, 9, 601)
NORMAL = np.exp(-(GRID**2) / 2) / math.sqrt(2 * math.pi) * (GRID[1] - GRID[0])


@pytest.mark.parametrize("draw", range(12))
def test_no_adaptive_choice_of_lengths_passes_the_gaussian_of_the_budget(draw):
    """Two rounds; the second length, of either sign, follows from what the first has released."""
    random = stream(0, Purpose.DATA, draw=draw)
    mu, share = random.uniform(0.5, 2.5), random.uniform(0.1, 0.9)
    first = mu * math.sqrt(share)
    rest = mu * math.sqrt(1 - share)
    choices = [
        np.where(random.uniform(-2, 2) < GRID, rest, 0.0),  # where the first says most, or least
        rest * random.uniform(-1, 1, len(GRID)),
        np.full(len(GRID), rest),
    ]
    second = choices[draw % 3] * (-1) ** draw
    exponent = first * GRID[:, None] - first**2 / 2
    exponent = exponent + second[:, None] * GRID - second[:, None] ** 2 / 2
    without = NORMAL[:, None] * NORMAL
    ratio = np.exp(exponent)
    for epsilon in (0.0, 0.3, 1.0, 3.0):
        most = gaussian_delta(epsilon, mu) + 1e-4
        removed = (without * (ratio - math.exp(epsilon)).clip(min=0)).sum()
        added = (without * (1 - math.exp(epsilon) * ratio).clip(min=0)).sum()
        assert max(removed, added) <= most
        if draw % 3 == 2:  # all is spent whatever was released: the bound is attained
            assert removed == pytest.approx(most, abs=1e-3)


@pytest.mark.parametrize("relation", ["replace_one", "zero_out", "add_remove"])
def test_a_filter_lets_through_what_the_budget_allows_and_no_more(relation):
    random = stream(1, Purpose.DATA)
    budgets = IndividualBudgets(np.array([0.5, 2.0, 8.0, math.inf]), 1e-5, relation)
    state = budgets.start()
    factor = 2 if relation == "replace_one" else 1
    squares = np.zeros(4)
    left = np.zeros(4, bool)
    for _ in range(60):
        clients = np.flatnonzero(random.random(4) < 0.7)
        lengths = random.uniform(0, 1, len(clients))
        std = float(random.uniform(3, 8))  # may change from round to round
        limits = budgets.limits(clients, std, state)
        budgets.spend(clients, lengths, std, state)
        for client, length, limit in zip(clients, lengths, limits, strict=True):
            more = squares[client] + (factor * length / std) ** 2
            over = gaussian_epsilon(math.sqrt(more), 1e-5) > budgets.epsilons[client]
            assert (length <= limit) == (not over and not left[client])
            left[client] |= over
            squares[client] = squares[client] if left[client] else more
    assert state["spent"] == pytest.approx(squares)
    assert state["left"].tolist() == left.tolist()
    assert left[:2].all() and not left[3]
    said = budgets.summary(state)
    assert said["left"] == left.sum()
    assert said["epsilon_spent"][-1] <= 8.0


def test_a_guarantee_is_the_largest_budget_and_more_for_single_updates():
    fixed = mechanism("fixed", 100, 16, 4.0, 50, placement="client")
    budgets = IndividualBudgets(np.array([1.0, 4.0, math.inf]), 1e-5, "replace_one")
    sums, single = budgets.guarantees(fixed)
    assert sums.epsilon == pytest.approx(4.0, rel=1e-9)
    assert sums.observer == Observer.AGGREGATES
    assert sums.sampling.knows == "cohort known, own budgets"
    assert single.epsilon == gaussian_epsilon(4 * math.sqrt(budgets.squares[1]), 1e-5)
    assert any("have left" in words for words in sums.exclusions)
    assert "1 public clients" in sums.exclusions[-1]
    assert "from 1 to 4" in str(sums.sampling)
    poisson = mechanism("poisson", 100, 16, 4.0, 50)
    (sums,) = IndividualBudgets(np.ones(2), 1e-5, "add_remove").guarantees(poisson)
    assert sums.relation == "zero_out"
    assert not list(IndividualBudgets(np.full(2, math.inf), 1e-5, "zero_out").guarantees(fixed))
