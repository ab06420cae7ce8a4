"""What every selection shares: the public facts about the clients, a cohort, and the base of the
family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, stream
from raydpfl.member import Member
from raydpfl.privacy import Query, Sampling


class Population:
    """What is public about the clients, and all that a selection may look at.

    `sizes` int64 [N]: samples per client. `privacy_cost` float64 [N], or None where no client has a
    budget of its own: d V_k, the squared norm of client k's noise per squared bound and step (003
    Problem 1); 0 for a public client. `table` float64 [N]: what a file that the selection names
    says of each client (`Selection.table`), or None. `samples`: of all clients together.

    Arrays derived from these are computed once and remembered, so that a draw costs O(cohort log N)
    and not O(N). A pickle leaves them out.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        privacy_cost: np.ndarray | None = None,
        table: np.ndarray | None = None,
    ):
        self.sizes = np.asarray(sizes, np.int64)
        if self.sizes.flags.writeable:  # accountants read it, and members are handed it
            self.sizes = self.sizes.copy()
            self.sizes.flags.writeable = False
        if (
            self.sizes.ndim != 1
            or not len(self.sizes)
            or self.sizes.min() < 0
            or not self.sizes.any()
        ):
            raise ConfigError("sizes", sizes, "samples per client: whole numbers from 0, not all 0")
        self.samples = int(self.sizes.sum())
        self.privacy_cost = None if privacy_cost is None else np.asarray(privacy_cost, np.float64)
        if self.privacy_cost is not None and (
            self.privacy_cost.shape != self.sizes.shape or not (self.privacy_cost >= 0).all()
        ):
            raise ConfigError(
                "privacy_cost", privacy_cost, f"{len(self.sizes)} numbers from 0, one per client"
            )
        self.table = table
        self._memo: dict[Hashable, Any] = {}

    @classmethod
    def balanced(cls, count: int, table: np.ndarray | None = None) -> Population:
        """`count` clients with one sample each: all alike, but for what a `table` says of them."""
        return cls(np.broadcast_to(np.int64(1), count), table=table)

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        budgets = "" if self.privacy_cost is None else ", with budgets"
        return f"Population({len(self)} clients, {self.samples} samples{budgets})"

    def __reduce__(self) -> tuple[Callable[..., Population], tuple[Any, ...]]:
        alike = self.sizes.strides == (0,) and self.privacy_cost is None and self.table is None
        if alike:
            return Population.balanced, (len(self),)
        return Population, (self.sizes, self.privacy_cost, self.table)

    def remember(self, name: Hashable, compute: Callable[[], Any]) -> Any:
        """`compute()`, once for every `name`."""
        if name not in self._memo:
            self._memo[name] = compute()
        return self._memo[name]

    @property
    def shares(self) -> np.ndarray:
        """p^u float64 [N]: a client's share of all samples, n_k / sum n."""
        return self.remember("shares", lambda: self.sizes / self.samples)


@dataclass(frozen=True)
class Cohort:
    """The clients of one round: `clients` int64 [r], ascending; `draws` int64 [r] counts a client's
    repeats from 0.

    `lost` more were selected and trained, but failed before they could send anything.
    """

    clients: np.ndarray
    draws: np.ndarray
    lost: int = 0

    def __len__(self) -> int:
        return len(self.clients)

    @classmethod
    def of(cls, clients: np.ndarray) -> Cohort:
        """Of clients (int64) in any order, one drawn twice standing twice."""
        clients = np.sort(clients)
        first = np.searchsorted(clients, clients)  # where each client's run begins
        return cls(clients, np.arange(len(clients)) - first)


# asks clients, int64 [k], ascending, for the losses of the model on their data: float64 [k], in
# their order, as `Selection.answer` lets each say
Ask = Callable[[np.ndarray], np.ndarray]


class Selection(Member):
    """Base of the family. A member gives `select` and `sampling`; the rest has an answer that holds
    for cohorts of distinct clients.

    `dropout` is the probability that a selected client fails after training, on its own (keyed by
    seed, round, client and draw). The divisor stays what it was; noise that the failed ones would
    have drawn is missing, which `survivors` tells the accountants.
    """

    dropout: float = Field(default=0.0, ge=0, lt=1)

    # --- who takes part ---

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        """Who trains in round t: a function of (seed, t) and of what is public of the population.

        A draw is from `stream(seed, Purpose.COHORT, t=t)` of `raydpfl.keys`, a numpy generator.

        Args:
            seed: the seed of the run's cohorts.
            t: the round, counted from 0.
            population: the public facts.
            ask: for a member that chooses clients by their losses, `ask(clients)` gives them. Such
                a member gives `exposed` too, as all who are asked are exposed.
        """
        raise NotImplementedError

    def sampling(self, population: Population) -> Sampling:
        """The law that `select` follows, for the accountants."""
        raise NotImplementedError

    def probabilities(self, population: Population) -> np.ndarray | None:
        """p float64 [N]: the chances of the clients at each single draw, where a cohort consists of
        independent draws; None where it does not.
        """
        return None

    def exposed(self, seed: int, t: int, population: Population) -> np.ndarray:
        """The clients of whose data something is released in round t, int64 [k], one that is drawn
        twice standing twice: known before the run, and all that accountants count.

        By default the cohort, without those that drop out.
        """
        return self.draw(seed, t, population).clients

    @property
    def asks(self) -> bool:
        """Whether others are exposed than those who take part."""
        return type(self).exposed is not Selection.exposed

    def _unasked(self, clients: np.ndarray) -> np.ndarray:
        accepted = (
            "one whose cohorts are known before the run; this one asks for losses, so that it must "
            "give exposed(seed, t, population), and only a run can draw"
        )
        raise ConfigError("selection.kind", self.kind, accepted)

    def fits(self, count: int) -> None:
        """Raises `ConfigError` when a population of `count` clients cannot give such cohorts."""

    def draw(self, seed: int, t: int, population: Population, ask: Ask | None = None) -> Cohort:
        """Who sends an update in round t: those selected, without those that drop out. A member
        that asks for losses can only do so in a run, which gives `ask`.
        """
        return self.drop(seed, t, self.select(seed, t, population, ask or self._unasked))

    def drop(self, seed: int, t: int, cohort: Cohort) -> Cohort:
        """`cohort` without the clients that fail in round t."""
        if not self.dropout:
            return cohort
        drawn = zip(cohort.clients.tolist(), cohort.draws.tolist(), strict=True)
        coins = [
            stream(seed, Purpose.DROPOUT, t=t, client=client, draw=draw).random()
            for client, draw in drawn
        ]
        kept = np.array(coins) >= self.dropout
        return Cohort(cohort.clients[kept], cohort.draws[kept], cohort.lost + int((~kept).sum()))

    # --- what is public of it ---

    def hides_size(self) -> bool:
        """Whether the size of a cohort is a secret, as each client takes part by a coin of its own.

        Then a client may be absent without anyone's knowing: the neighbouring relation is
        add_remove unless the config names one, and the server draws the noise.
        """
        return False

    @property
    def separation(self) -> int:
        """The fewest rounds from one participation of a client to its next."""
        return 1

    def divisor(self, population: Population) -> float:
        """What the server divides the sum of the contributions by."""
        return float(self.sampling(population).cohort)

    def means(self, population: Population) -> bool:
        """Whether that quotient is the plain mean of what was sent, in every round."""
        if self.hides_size() or self.dropout or self.corrections(population) is not None:
            return False
        return self.divisor(population) == self.sampling(population).cohort

    def counted(self, cohort: Cohort, population: Population) -> float:
        """How many clients answered in a round, as far as may be told: where the size of its cohort
        is a secret, the number to expect.
        """
        sampling = self.sampling(population)
        if self.hides_size() or (sampling.hidden and sampling.size is None):
            return sampling.cohort * (1 - self.dropout)
        return len(cohort)

    def weighs_data(self) -> bool:
        """Whether the plain mean of what a cohort sends weighs clients by their data already."""
        return False

    def corrections(self, population: Population) -> np.ndarray | None:
        """Factors float64 [N] on the clients' weights, which undo that some are drawn more often
        than others; None: all 1.
        """
        return None

    def table(self, count: int, root: Path | None = None) -> np.ndarray | None:
        """What the file that this selection names says of each of `count` clients, float64 [N];
        None: it names none.
        """
        return None

    def costs(self, d: int, variances: Callable[[], np.ndarray | None]) -> np.ndarray | None:
        """What it costs to select each client, float64 [N] (`Population.privacy_cost`); None for a
        selection that does not weigh it.

        Args:
            d: parameters of the model.
            variances: gives the variance of each client's noise at a local step for a bound of 1,
                float64 [N]; None where clients have no budgets of their own.
        """
        return None

    # --- what it spends ---

    @property
    def exclusions(self) -> tuple[str, ...]:
        """Choices that depend on data and that no accountant counts, in words."""
        return ()

    @property
    def loss_query(self) -> Query | None:
        """What `answer` releases, as accountants count it; None: nothing that they know of."""
        return None

    def answer(self, losses: np.ndarray, noise_seed: int, t: int, client: int) -> float:
        """What a client that is asked says its loss is, and all that leaves it of `losses`, float64
        [n_k], those of its samples.
        """
        return float(losses.mean())

    def exposures(self, seed: int, rounds: int, population: Population) -> np.ndarray:
        """Int64 [rounds]: how many rounds of `sampling` the guarantee of any one client composes
        over, after 1, 2, ... rounds.
        """
        if not self.sampling(population).by_participation:
            return np.arange(1, rounds + 1)
        seen = Counter[int]()
        most = np.zeros(rounds, np.int64)
        for t in range(rounds):
            clients = self.exposed(seed, t, population).tolist()
            seen.update(clients)
            most[t] = max((seen[client] for client in clients), default=0)
        return np.maximum.accumulate(most)

    def open_to(self, clients: np.ndarray, t: int) -> np.ndarray:
        """Bool [k]: whether it is public that these clients can be in the cohort of round `t`."""
        return np.ones(len(clients), bool)

    def survivors(self, seed: int, rounds: int, population: Population) -> int:
        """The fewest clients that any of the first `rounds` rounds keeps; the whole nominal cohort,
        undrawn, when none can drop out.
        """
        if not self.dropout:
            return self.sampling(population).cohort
        drawn = (self.draw(seed, t, population) for t in range(rounds))
        return min(len(cohort) for cohort in drawn)
