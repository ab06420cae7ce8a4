"""The public facts about the clients, a cohort, and the base of the selections."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field

from raydpfl.config.registry import Member, overrides
from raydpfl.core.prng import Purpose, bit_streams
from raydpfl.errors import ConfigError, RunError
from raydpfl.privacy import Query, Sampling


class Population:
    """The public facts about the clients: all that a selection may look at. Arrays derived from
    them are computed once (`cached`); a pickle leaves them out.

    Args:
        sizes: samples of each client, int64 [N].
        privacy_cost: d V_k, the expected squared norm of client k's noise at one local step for a
            bound of 1 (003 Problem 1), float64 [N]; 0 for a public client. None: no budgets.
        table: what the file named by the selection gives, float64 [N] (`Selection.table`), or None.

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
        if self.sizes.flags.writeable:  # accountants read it, and user code is handed it
            self.sizes = self.sizes.copy()
            self.sizes.flags.writeable = False
        if self.sizes.ndim != 1 or not self.sizes.any() or self.sizes.min() < 0:
            raise ConfigError("sizes", sizes, "samples per client: whole numbers from 0, not all 0")
        self.samples = int(self.sizes.sum())
        self.privacy_cost = None if privacy_cost is None else np.asarray(privacy_cost, np.float64)
        cost = self.privacy_cost
        if cost is not None and (cost.shape != self.sizes.shape or not (cost >= 0).all()):
            expected = f"{len(self.sizes)} numbers from 0, one per client"
            raise ConfigError("privacy_cost", privacy_cost, expected)
        self.table = table
        self._cache: dict[Hashable, Any] = {}

    @classmethod
    def balanced(cls, count: int, table: np.ndarray | None = None) -> Self:
        """`count` clients with one sample each, which differ at most in the `table`."""
        return cls(np.broadcast_to(np.int64(1), count), table=table)

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Population, (self.sizes, self.privacy_cost, self.table)

    def cached(self, name: Hashable, compute: Callable[[], Any]) -> Any:
        """`compute()`, which is called once for every `name`."""
        if name not in self._cache:
            self._cache[name] = compute()
        return self._cache[name]

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
    lost: int = 0  # how many more were selected and trained, but dropped out

    def __len__(self) -> int:
        return len(self.clients)

    @classmethod
    def of(cls, clients: np.ndarray) -> Self:
        """The cohort of clients int64 [r] in any order, one drawn twice listed twice."""
        clients = np.sort(clients)
        return cls(clients, np.arange(len(clients)) - np.searchsorted(clients, clients))


# the losses of the model on the data of clients, int64 [k] and ascending: float64 [k], as
# `Selection.answer` makes each
Ask = Callable[[np.ndarray], np.ndarray]


class Selection(Member):
    """Base of the family. A member gives `select` and `sampling`.

    A selected client drops out after training with probability `dropout`, independently of the
    others. The divisor stays the same. Noise of clients that drop out is missing, and accountants
    take `clients_left` for it.
    """

    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="probability that a client of the cohort does not answer",
    )

    # --- who takes part ---

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        """The cohort of round t, from 0: a function of (seed, t) and of the public population, with
        random draws from `raydpfl.core.prng.stream(seed, Purpose.COHORT, t=t)`.

        `ask(clients)` gives losses, to a member that chooses by them. Such a member gives `exposed`
        too, as all who are asked are exposed.
        """
        raise NotImplementedError

    def sampling(self, population: Population) -> Sampling:
        """The sampling scheme that `select` follows, for the accountants."""
        raise NotImplementedError

    def probabilities(self, population: Population) -> np.ndarray | None:
        """p float64 [N] of each draw, where a cohort consists of independent draws; else None."""
        return None

    # whether the plain mean of what a cohort sends already weighs clients by their data
    weighs_data = overrides(probabilities)

    def exposed(self, seed: int, t: int, population: Population) -> np.ndarray:
        """The clients about whose data round t releases something, which accountants count, fixed
        before the run: int64 [k], a client drawn twice listed twice. By default the cohort.
        """
        return self.draw(seed, t, population).clients

    def calibration_draws(self, seed: int, rounds: int, population: Population) -> list[np.ndarray]:
        """The clients whose participations noise at local steps is sized for, round by round, with
        repeats: those exposed. A member that gives others says so in `uncounted`.
        """
        return [self.exposed(seed, t, population) for t in range(rounds)]

    @property
    def uncounted(self) -> str | None:
        """What `calibration_draws` leave out, in words, so that clients may spend more than their
        budgets; None: nothing.
        """
        return None

    asks = overrides(exposed)  # whether clients are exposed that do not take part

    def fits(self, count: int) -> None:
        """Raises `ConfigError` if a population of `count` clients cannot give such cohorts."""

    def draw(self, seed: int, t: int, population: Population, ask: Ask | None = None) -> Cohort:
        """The clients that send an update in round t: those selected, without those that drop out.

        Raises `ConfigError` for a member that asks for losses without `ask`, which only a run has.
        """

        def refuse_losses(clients: np.ndarray) -> np.ndarray:
            expected = "one whose cohorts are known before the run; this one asks for losses, so "
            expected += "that it must give exposed(seed, t, population), and only a run can draw"
            raise ConfigError("selection.kind", self.kind, expected)

        cohort = self.select(seed, t, population, ask or refuse_losses)
        if not isinstance(cohort, Cohort):
            given = type(cohort).__name__
            raise RunError(f"selection.kind {self.kind}: select gives {given}, not a Cohort")
        return self.drop(seed, t, cohort)

    def drop(self, seed: int, t: int, cohort: Cohort) -> Cohort:
        """`cohort` without the clients that drop out in round t."""
        if not self.dropout:
            return cohort
        keys = {"clients": cohort.clients, "draws": cohort.draws}
        streams = bit_streams(seed, Purpose.DROPOUT, t=t, **keys)
        coins = np.array([np.random.Generator(stream).random() for stream in streams])
        stay = coins >= self.dropout
        return Cohort(cohort.clients[stay], cohort.draws[stay], cohort.lost + int((~stay).sum()))

    # --- what is public of it ---

    def hides_size(self) -> bool:
        """Whether the size of a cohort is a secret, because clients take part independently. Then
        the relation is add_remove, unless the config names one, and the server draws the noise.
        """
        return False

    @property
    def separation(self) -> int:
        """The fewest rounds from one participation of a client to its next."""
        return 1

    def most_participations(self, rounds: int) -> int:
        """The most of `rounds` rounds that a client takes part in."""
        return -(-rounds // self.separation)

    def divisor(self, population: Population) -> float:
        """What the server divides the sum of the contributions by."""
        return float(self.sampling(population).cohort)

    def means(self, population: Population) -> bool:
        """Whether the sum over `divisor` is the plain mean of what was sent, in every round."""
        is_weighted = self.hides_size() or self.dropout or self.corrections(population) is not None
        return not is_weighted and self.divisor(population) == self.sampling(population).cohort

    def counted(self, cohort: Cohort, population: Population) -> float:
        """How many clients answered in a round; the expected number where the size is a secret."""
        sampling = self.sampling(population)
        if self.hides_size() or (sampling.hidden and sampling.size is None):
            return sampling.cohort * (1 - self.dropout)
        return len(cohort)

    def corrections(self, population: Population) -> np.ndarray | None:
        """Factors on the clients' weights that undo unequal probabilities, float64 [N]; None: 1."""
        return None

    def table(self, count: int, root: Path | None = None) -> np.ndarray | None:
        """The numbers of `count` clients in the file that this selection names, float64 [N]; None:
        it names no file. `root` is the folder of data sets. Raises `ConfigError` for a bad file.
        """
        return None

    def costs(self, d: int, variances: Callable[[], np.ndarray | None]) -> np.ndarray | None:
        """`Population.privacy_cost`, float64 [N]; None: not used.

        `d` is the number of parameters; `variances` gives the variance of each client's noise at a
        local step for a bound of 1, float64 [N], None without budgets of clients.
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
        """What a client answers when it is asked for its loss: all that leaves it. `losses` are of
        its samples, float64 [n_k]; `noise_seed` is the run's seed of noise.
        """
        return float(losses.mean())

    def composed_rounds(self, seed: int, rounds: int, population: Population) -> np.ndarray:
        """How many rounds of `sampling` the guarantee of a client composes, after 1, 2, ... rounds:
        int64 [rounds]. All, or, where a client's participations count, the most of any client.
        """
        if not self.sampling(population).by_participation:
            return np.arange(1, rounds + 1)
        counts = Counter[int]()
        max_counts = np.zeros(rounds, np.int64)
        for t in range(rounds):
            clients = self.exposed(seed, t, population).tolist()
            counts.update(clients)
            max_counts[t] = max((counts[client] for client in clients), default=0)
        return np.maximum.accumulate(max_counts)

    def open_to(self, clients: np.ndarray, t: int) -> np.ndarray:
        """Whether, by public facts, each of `clients` can be in the cohort of round t: bool [k]."""
        return np.ones(len(clients), bool)

    def clients_left(self, seed: int, rounds: int, population: Population) -> int:
        """The fewest clients left in any of the first `rounds` rounds; without dropout the nominal
        cohort, and nothing is drawn.
        """
        if not self.dropout:
            return self.sampling(population).cohort
        return min(len(self.draw(seed, t, population)) for t in range(rounds))
