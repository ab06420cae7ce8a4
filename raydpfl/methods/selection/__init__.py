"""Who takes part in a round.

The contract of a member: the cohort of a round is a function of (seed, round) and of the public
`Population` alone; its clients are in ascending order, one drawn twice listed twice; `sampling` is
exactly the sampling scheme that `select` follows, so that sampler and accountant cannot disagree.

>>> clients = Population.balanced(10)
>>> Uniform(cohort=3).exposed(seed=0, t=5, population=clients)
array([1, 2, 5])
>>> print(Uniform(cohort=3).sampling(clients))
fixed size 3 of 10

Public: the clients' sizes and budgets, the cohort size, the sampling scheme. Whether a drawn cohort
is secret depends on the observer, and every guarantee says what it assumes. A draw costs O(cohort
log N); what takes longer (the sums of probabilities, Problem 1) is done once.
"""

from raydpfl.config.registry import family
from raydpfl.methods.selection.base import Ask, Cohort, Population, Selection
from raydpfl.methods.selection.first_responders import RESPONSES
from raydpfl.methods.selection.poisson import Poisson
from raydpfl.methods.selection.privacy_aware_solver import Solution, solve, solve_cvxpy
from raydpfl.methods.selection.uniform import Uniform

__all__ = [
    "FAMILY", "RESPONSES", "Ask", "Cohort", "Poisson", "Population", "Selection", "Solution",
    "Uniform", "solve", "solve_cvxpy",
]  # fmt: skip

FIRST = ("uniform", "poisson", "full", "fedavg_stale", "multinomial", "availability", "cyclic")
FAMILY: dict[str, type[Selection]] = family(__name__, Selection, FIRST)
FAMILY["unbiased"] = FAMILY["multinomial"]  # as 003 calls it
FAMILY["balls_in_bins"] = FAMILY["random_allocation"]  # as Chua et al. call it
