"""The base of the noise family: what a member draws, and what accountants are told of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from raydpfl.member import Member


class Source:
    """The server's noise in one run. It may keep what later rounds need of earlier ones, so long as
    a round's noise is a function of the run's seed and the round alone: after a resume a new source
    is asked for the next round.
    """

    def on_sum(self, t: int, std: float) -> np.ndarray | None:
        """The noise on the sum of round t, float64 [d]; None: the server draws none.

        `std` is that of the sum, as the accountants were told for the bound in force.
        """
        return None


class Noise(Member):
    """Base of the family. What is not given draws nothing.

    Where each client draws on what it sends, a member gives `client_std` and `on_clients`, and
    `least`; where the server draws on the sum, `source`. `on_query` is drawn on the sum of what
    clients answer besides their updates.
    """

    def on_clients(
        self, seed: int, t: int, clients: np.ndarray, draws: np.ndarray, std: float, d: int
    ) -> np.ndarray | None:
        """What C clients add to what they send, each to its own.

        Args:
            seed: the run's seed of noise.
            t: the round.
            clients: int64 [C].
            draws: int64 [C], the index of each draw among its client's draws this round, from 0.
            std: of one client's noise, as `client_std` gave it.
            d: parameters of the model.

        Returns:
            float64 [C, d], a function of each client's own key alone; None: they draw none.
        """
        return None

    def client_std(self, std: float, survivors: int) -> float:
        """Std of the noise that each client draws, so that the sum has `std` in the round that
        fewest clients, `survivors`, are left in; 0: clients draw none.
        """
        return 0.0

    def least(self, survivors: int) -> int:
        """The fewest clients whose noise a round's sum needs; 0 where it needs nobody's."""
        return 0

    def source(self, seed: int, d: int) -> Source:
        """The server's noise of a run, for a model of `d` parameters."""
        return Source()

    def on_query(
        self,
        seed: int,
        t: int,
        std: float,
        clients: np.ndarray,
        draws: np.ndarray,
        survivors: int,
        query: str = "count",
    ) -> float:
        """The noise on the sum of the answers to a side query, from whoever draws noise on updates.

        Args:
            seed: the run's seed of noise.
            t: the round.
            std: of the sum.
            clients: int64 [r], the cohort.
            draws: int64 [r].
            survivors: the fewest clients that any round keeps.
            query: the name of the query.
        """
        return 0.0

    def apart(self) -> int:
        """The fewest rounds from one participation of a client to its next that the noise counts
        on; 1: none.
        """
        return 1

    def whitening(self) -> Callable[[np.ndarray], np.ndarray]:
        """Turns released sums, float64 [d] given one round after another, into sums whose noise is
        independent over the rounds; for audits.
        """
        return lambda released: released

    def carried(self) -> tuple[float, ...]:
        """How much of a round's sum stands in the whitened sum of that round, of the next one, ...;
        for audits.
        """
        return (1.0,)

    @property
    def of_seed(self) -> bool:
        """Whether all runs with one seed carry the same noise."""
        return False

    def release(self) -> dict[str, Any]:
        """What of this section a release depends on, besides how large the noise came out."""
        return self.model_dump(mode="json")
