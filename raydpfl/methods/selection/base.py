"""The public facts about the clients, a cohort, and the base of the selections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from raydpfl.config.registry import Member
from raydpfl.core.prng import Purpose, bit_streams
from raydpfl.errors import ConfigError
from raydpfl.privacy import Query, Sampling


class Population:
    """What is public about the clients: all that a selection may look at.

    Arrays derived from it are computed once and kept, so that a draw costs O(cohort log N) and not
    O(N). A pickle leaves them out. `samples` is the number of all clients together.

    Args:
        sizes: samples of each client, int64 [N].
        privacy_cost: d V_k, the expected squared norm of client k's noise at one local step for a
            bound of 1 (003 Problem 1), float64 [N]; 0 for a public client. None: clients have no
            budgets of their own.
        table: what the file that the selection names says of each client, float64 [N]
            (`Selection.table`); None: it names none.

    Raises:
        ConfigError: an array has the wrong shape or sign, or no client has samples.
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
        """`count` clients with one sample each, which differ at most in the `table`."""
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

    def cached(self, name: Hashable, compute: Callable[[], Any]) -> Any:
        """`compute()`, which is called once for every `name`."""
        if name not in self._memo:
            self._memo[name] = compute()
        return self._memo[name]

    @property
    def shares(self) -> np.ndarray:
        """p^u, the share of each client in all samples, n_k / sum n: float64 [N]."""
        return self.cached("shares", lambda: self.sizes / self.samples)


@dataclass(frozen=True)
class Cohort:
    """The clients of one round."""

    clients: np.ndarray  # int64 [r], ascending; a client drawn twice is listed twice
    # int64 [r], the index of each draw among its client's draws this round, from 0
    draws: np.ndarray
    # how many more were selected and trained, but dropped out before sending anything
    lost: int = 0

    def __len__(self) -> int:
        return len(self.clients)

    @classmethod
    def of(cls, clients: np.ndarray) -> Cohort:
        """The cohort of clients int64 [r] in any order, one drawn twice listed twice."""
        clients = np.sort(clients)
        first = np.searchsorted(clients, clients)  # where each client's run begins
        return cls(clients, np.arange(len(clients)) - first)


# asks clients, int64 [k] and ascending, for the loss of the model on their data: float64 [k], as
# `Selection.answer` makes it of each
Ask = Callable[[np.ndarray], np.ndarray]


class Selection(Member):
    """Base of the family. A member gives `select` and `sampling`; the defaults hold for cohorts of
    distinct clients.

    `dropout` is the probability with which a selected client fails after training, independently of
    the others (keyed by seed, round, client and draw). The divisor stays the same. Noise that
    failed clients would have drawn is missing, and `clients_left` tells the accountants so.

    >>> class First(Selection):
    ...     cohort: int = 2
    ...     def select(self, seed, t, population, ask):
    ...         return Cohort.of(np.arange(self.cohort))
    ...     def sampling(self, population):
    ...         return Sampling("public", len(population), self.cohort, rule="the first")
    >>> First(cohort=3).draw(seed=0, t=0, population=Population.balanced(10)).clients
    array([0, 1, 2])
    """

    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="probability that a client of the cohort does not answer",
    )

    # --- who takes part ---

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        """Who trains in round t: a function of (seed, t) and of what is public of the population.

        Random draws are from `stream(seed, Purpose.COHORT, t=t)` of `raydpfl.core.prng`, a numpy
        generator.

        Args:
            seed: the seed of the run's cohorts.
            t: the round, counted from 0.
            population: the public facts.
            ask: `ask(clients)` gives the clients' losses, to a member that chooses by them. Such a
                member gives `exposed` too, as all who are asked are exposed.
        """
        raise NotImplementedError

    def sampling(self, population: Population) -> Sampling:
        """The sampling that `select` follows, for the accountants."""
        raise NotImplementedError

    def probabilities(self, population: Population) -> np.ndarray | None:
        """p float64 [N]: the chances of the clients at each single draw, where a cohort consists of
        independent draws; None where it does not.
        """
        return None

    def exposed(self, seed: int, t: int, population: Population) -> np.ndarray:
        """The clients about whose data round t releases something. Accountants count these, and
        they are known before the run.

        Arguments as for `select`. By default they are the cohort without those that drop out.

        Returns:
            int64 [k], a client drawn twice listed twice.
        """
        return self.draw(seed, t, population).clients

    def assumed(self, seed: int, t: int, population: Population) -> np.ndarray:
        """The clients whose part in round t noise at local steps is sized for, int64 [k], one that
        is drawn twice standing twice: by default all who are exposed. A member that gives others
        says in `uncounted` what it leaves out.
        """
        return self.exposed(seed, t, population)

    @property
    def uncounted(self) -> str | None:
        """What the noise is sized without, in words, so that clients may spend more than they were
        promised; None: nothing.
        """
        return None

    @property
    def asks(self) -> bool:
        """Whether clients are exposed that do not take part."""
        return type(self).exposed is not Selection.exposed

    def _unasked(self, clients: np.ndarray) -> np.ndarray:
        expected = (
            "one whose cohorts are known before the run; this one asks for losses, so that it must "
            "give exposed(seed, t, population), and only a run can draw"
        )
        raise ConfigError("selection.kind", self.kind, expected)

    def fits(self, count: int) -> None:
        """Raises `ConfigError` if a population of `count` clients cannot give such cohorts."""

    def draw(self, seed: int, t: int, population: Population, ask: Ask | None = None) -> Cohort:
        """Who sends an update in round t: those selected, without those that drop out.

        Arguments as for `select`. Without `ask`, which only a run has, a member that asks for
        losses raises `ConfigError`.
        """
        return self.drop(seed, t, self.select(seed, t, population, ask or self._unasked))

    def drop(self, seed: int, t: int, cohort: Cohort) -> Cohort:
        """`cohort` without the clients that fail in round t."""
        if not self.dropout:
            return cohort
        who = {"clients": cohort.clients, "draws": cohort.draws}
        streams = bit_streams(seed, Purpose.DROPOUT, t=t, **who)
        coins = [np.random.Generator(stream).random() for stream in streams]
        kept = np.array(coins) >= self.dropout
        return Cohort(cohort.clients[kept], cohort.draws[kept], cohort.lost + int((~kept).sum()))

    # --- what is public of it ---

    def hides_size(self) -> bool:
        """Whether the size of a cohort is a secret, because clients take part independently.

        A client can then be absent without anyone knowing. So the neighbouring relation is
        add_remove, unless the config names one, and the server draws the noise.
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
        """Whether the sum over `divisor` is the plain mean of what was sent, in every round."""
        if self.hides_size() or self.dropout or self.corrections(population) is not None:
            return False
        return self.divisor(population) == self.sampling(population).cohort

    def counted(self, cohort: Cohort, population: Population) -> float:
        """How many clients answered in a round; the expected number where the size of its cohort is
        a secret.
        """
        sampling = self.sampling(population)
        if self.hides_size() or (sampling.hidden and sampling.size is None):
            return sampling.cohort * (1 - self.dropout)
        return len(cohort)

    def weighs_data(self) -> bool:
        """Whether the plain mean of what a cohort sends already weighs clients by their data."""
        return False

    def corrections(self, population: Population) -> np.ndarray | None:
        """Factors on the clients' weights that undo that some are drawn more often than others,
        float64 [N]; None: all 1.
        """
        return None

    def table(self, count: int, root: Path | None = None) -> np.ndarray | None:
        """What the file that this selection names says of each client.

        Args:
            count: N, the number of clients.
            root: the folder of data sets.

        Returns:
            float64 [N]; None: it names no file.

        Raises:
            ConfigError: the file cannot be read, or does not suit so many clients.
        """
        return None

    def costs(self, d: int, variances: Callable[[], np.ndarray | None]) -> np.ndarray | None:
        """What it costs to select each client (`Population.privacy_cost`).

        Args:
            d: parameters of the model.
            variances: gives the variance of each client's noise at a local step for a bound of 1,
                float64 [N]; None where clients have no budgets of their own.

        Returns:
            float64 [N]; None: the selection does not use it.
        """
        return None

    # --- what it spends ---

    @property
    def exclusions(self) -> tuple[str, ...]:
        """Data-dependent choices that no accountant counts, in words."""
        return ()

    @property
    def loss_query(self) -> Query | None:
        """What `answer` releases, as accountants count it; None: nothing that they can count."""
        return None

    def answer(self, losses: np.ndarray, noise_seed: int, t: int, client: int) -> float:
        """What a client answers when it is asked for its loss: all that leaves it.

        Args:
            losses: of its samples, float64 [n_k].
            noise_seed: the run's seed of noise.
            t: the round.
            client: its id.
        """
        return float(losses.mean())

    def composed_rounds(self, seed: int, rounds: int, population: Population) -> np.ndarray:
        """How many rounds of `sampling` the guarantee of a client composes, after 1, 2, ... rounds:
        int64 [rounds].

        All of them, unless only a client's own rounds count: then the largest number of any client.
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
        """Whether, as far as is public, each of these clients can be in the cohort of round `t`:
        bool [k].
        """
        return np.ones(len(clients), bool)

    def clients_left(self, seed: int, rounds: int, population: Population) -> int:
        """The fewest clients that are left in any of the first `rounds` rounds; without dropout the
        nominal cohort, and nothing is drawn.
        """
        if not self.dropout:
            return self.sampling(population).cohort
        drawn = (self.draw(seed, t, population) for t in range(rounds))
        return min(len(cohort) for cohort in drawn)
