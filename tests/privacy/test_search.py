"""What comes back from a search is safe, and hardly anything nearer would be."""

import math

import numpy as np
import pytest

from raydpfl.privacy.search import (
    bisect_brackets,
    largest_count,
    narrow_bracket,
    near_guess,
    safe_end,
)

# falling functions of x with a root each, as sharp and as flat as accounting has them
FALLING = {
    "line": lambda x, root: root - x,
    "cliff": lambda x, root: -math.tanh(1e4 * (x - root)),
    "power": lambda x, root: math.exp(-5 * (x - root)) - 1,
    "steps": lambda x, root: math.ceil(50 * (root - x)) / 50,
    "bent": lambda x, root: (root - x) * (3 if x < root else 0.2),
    "far below": lambda x, root: min(max(20 * (root - x), -1e-3), 20.0),
}
ROOTS = np.random.default_rng(7).uniform(-3, 3, 25).tolist()


def wide(excess, low: float, high: float, tolerance: float) -> float:
    return narrow_bracket(excess, (low, excess(low)), (high, excess(high)), tolerance)


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("search", [safe_end, wide])
def test_a_root_comes_back_from_above_and_within_the_tolerance(name, search):
    for root in ROOTS:
        asked = []

        def excess(x: float, root: float = root, asked: list = asked) -> float:
            asked.append(x)
            return FALLING[name](x, root)

        for tolerance in (1e-2, 1e-5):
            found = search(excess, root - 2.0, root + 1.0, tolerance)
            assert found in asked and FALLING[name](found, root) <= 0
            assert FALLING[name](found - 1.01 * tolerance - 1e-14, root) > 0


@pytest.mark.parametrize("name", [name for name in FALLING if name != "far below"])
@pytest.mark.parametrize("guess", [-4.0, -0.3, 0.0, 1e-4, 0.3, 4.0])
@pytest.mark.parametrize("slope", [-0.3, -1.0, -3.0])
def test_a_search_from_a_guess_ends_on_the_safe_side_however_wrong_the_guess(name, guess, slope):
    for root in ROOTS[:8]:
        found = near_guess(lambda x, r=root: FALLING[name](x, r), root + guess, slope, 1e-3)
        assert found is not None and FALLING[name](found, root) <= 0


def test_a_search_that_meets_no_root_says_so():
    assert near_guess(lambda x: 1.0, 0.0, -1.0, 1e-3) is None
    with pytest.raises(ValueError, match="no root between 0 and 1"):
        safe_end(lambda x: 1.0, 0, 1, 1e-3)


def test_the_lower_end_is_the_safe_one_of_a_rising_function():
    for root in ROOTS:
        found = safe_end(lambda x, r=root: x - r, root - 1.0, root + 2.0, 1e-6)
        assert root - 1e-6 <= found <= root


def test_arrays_are_halved_each_by_itself_and_their_ends_stay_where_there_is_no_root():
    roots = np.array([*ROOTS, -9.0, 9.0])
    found = bisect_brackets(lambda x: x < roots, np.full(27, -4.0), np.full(27, 4.0), 40)
    assert (found[:-2] >= roots[:-2]).all() and (found[:-2] - roots[:-2] <= 8 * 2.0**-40).all()
    assert found[-2] == pytest.approx(-4.0) and found[-1] == 4.0


def test_the_last_number_that_fits_is_found_by_few_questions_none_far_beyond_it():
    for most in (1, 2, 3, 10, 1 << 20):
        for limit in {0, 1, 2, most - 1, most, most + 5}:
            asked = []
            assert largest_count(lambda n, a=asked, m=limit: a.append(n) or n <= m, most) == min(
                limit, most
            )
            assert max(asked) <= min(most, 2 * limit + 1) and len(asked) <= 45
