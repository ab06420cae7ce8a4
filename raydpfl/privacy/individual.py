"""Individual accounting: what a client spends by the norms of what it sends, and budgets of their
own at which clients leave [1].

Against an observer who knows the cohorts a client's round is a Gaussian of mu = length of its
contribution / std of the noise on the sum, twice that under replace_one. A client whose squares
would add up to more than its budget's sends nothing in that round and in all that follow. What it
then releases is at most a Gaussian of its budget's mu, although lengths depend on what was released
before (docs/proofs.md). So the filter of Renyi divergences [1] is at all orders that of one mu, and
its epsilon the exact one of that Gaussian [2].

>>> budgets = IndividualBudgets(np.array([1.0, 4.0]), delta=1e-5, relation="zero_out")
>>> state = budgets.start()
>>> for _ in range(3):  # clients 0 and 1, contributions of length 1, noise of std 5
...     budgets.spend(np.array([0, 1]), np.ones(2), 5.0, state)
>>> state["spent"].round(2), state["left"]  # client 0 has left in the second round
(array([0.04, 0.12]), array([1, 0], dtype=int8))

What a client has spent, and that it has left, follow from norms that are not released: who tells
them tells something of its data that no guarantee counts.

[1] Feldman, Zrnic. Individual privacy accounting via a Renyi filter. NeurIPS 2021.
[2] Koskela, Tobaben, Honkela. Individual privacy accounting with Gaussian differential privacy.
    ICLR 2023.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from raydpfl.core.messages import State
from raydpfl.privacy import pld
from raydpfl.privacy.guarantee import SHARES, Guarantee, Observer, Scope
from raydpfl.privacy.mechanism import Mechanism
from raydpfl.privacy.search import bisect_brackets
from raydpfl.privacy.tradeoff import TradeOff
from raydpfl.privacy.types import Relation

SPENDING_EXCLUSION = (
    "which clients have left and what each has spent, which follow from norms that are not "
    "released (summary.json says how many and how much)"
)
_MARGIN = 1e-9  # relative, of lengths: contributions are rounded to less than that of the bound


@dataclass(frozen=True, eq=False)
class IndividualBudgets:
    """The budgets of all clients, and what they spend of them."""

    epsilons: np.ndarray  # float64 [N]; infinite for a public client, which never leaves
    delta: float
    relation: Relation  # of the run; with cohorts known add_remove is zero_out

    @cached_property
    def squares(self) -> np.ndarray:
        """mu^2 of the Gaussian that a client may amount to, float64 [N]."""
        kinds, member = np.unique(self.epsilons, return_inverse=True)
        finite = kinds[np.isfinite(kinds)]
        low, high = np.full(len(finite), -math.log(1e4)), np.full(len(finite), -math.log(1e-12))

        def unsafe(x: np.ndarray) -> np.ndarray:
            return pld.gaussian_delta(finite, np.exp(-x)) > self.delta

        mus = np.exp(-bisect_brackets(unsafe, low, high, times=60))
        return np.append(mus**2, np.full(len(kinds) - len(finite), math.inf))[member.reshape(-1)]

    @property
    def sensitivity_factor(self) -> int:
        """How many lengths of contributions the sum may move by where a client differs."""
        return 2 if self.relation == "replace_one" else 1

    def start(self) -> State:
        """Before the first round: mu^2 that each client has `spent`, and who has `left`."""
        count = len(self.epsilons)
        return {"spent": np.zeros(count), "left": np.zeros(count, np.int8)}

    def limits(self, clients: np.ndarray, std: float, state: State) -> np.ndarray:
        """The longest contribution, weight included, that these clients may still send with noise
        of `std` on the sum, float64 [r]; below 0: it has left.
        """
        rest = np.maximum(self.squares[clients] - state["spent"][clients], 0.0)
        limits = (1 - _MARGIN) * std / self.sensitivity_factor * np.sqrt(rest)
        return np.where(state["left"][clients], -1.0, limits)

    def spend(self, clients: np.ndarray, lengths: np.ndarray, std: float, state: State) -> None:
        """Counts contributions of different clients, of these lengths, float64 [r], within their
        limits; the others leave.
        """
        stays = lengths <= self.limits(clients, std, state)
        state["spent"][clients[stays]] += (self.sensitivity_factor * lengths[stays] / std) ** 2
        state["left"][clients[~stays]] = 1

    def guarantees(self, mechanism: Mechanism) -> Iterator[Guarantee]:
        """What the budgets guarantee after any number of rounds: against an observer of every
        aggregate who knows the cohorts, and of every single update where these have noise.
        """
        private = np.isfinite(self.epsilons)
        if not private.any():
            return
        relation: Relation = "replace_one" if self.sensitivity_factor == 2 else "zero_out"
        mu = math.sqrt(self.squares[private].max())
        low, high = self.epsilons[private].min(), self.epsilons[private].max()
        spread = f"{high:.4g}" if low == high else f"from {low:.4g} to {high:.4g}"
        words = f"individual budgets, a client leaves before it exceeds its own: {spread}"
        knows = "cohort known, own budgets"  # a row of its own in tables
        scope = Scope(f"{mechanism.sampling}, cohort known, {words}", knows)
        public = int((~private).sum())
        exclusions = (*mechanism.with_known_cohorts().exclusions, SPENDING_EXCLUSION)
        exclusions += (f"{public} public clients, who have an infinite budget",) if public else ()
        mu_factors = {Observer.AGGREGATES: 1.0}
        if mechanism.distributed:
            mu_factors[Observer.UPDATES] = mechanism.draws
        for observer, factor in mu_factors.items():
            epsilon = float(pld.gaussian_epsilon(factor * mu, self.delta))
            yield Guarantee(
                "rigorous", "pld", "client", relation, observer, scope, epsilon, self.delta,
                exclusions, curve=partial(TradeOff.gaussian, factor * mu),
            )  # fmt: skip

    def summary(self, state: State) -> dict[str, Any]:
        """For summary.json: how many clients have left, and quantiles of the epsilon that each
        client that is not public has spent.
        """
        private = np.isfinite(self.epsilons)
        costs = pld.gaussian_epsilon(np.sqrt(state["spent"][private]), self.delta)
        quantiles = np.quantile(costs, SHARES, method="inverted_cdf") if len(costs) else costs
        return {
            "left": int(state["left"].sum()),
            "at": list(SHARES),
            "epsilon_spent": quantiles.tolist(),
        }
