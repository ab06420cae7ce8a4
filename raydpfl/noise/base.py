"""The base of the noise family: what a member draws, and what accountants are told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raydpfl.member import Member
from raydpfl.noise import sums
from raydpfl.privacy import Mechanism, Release, Sampling, Terms
from raydpfl.privacy.facts import Placement, Relation, Unit

if TYPE_CHECKING:
    from raydpfl.config import Experiment

DELTA = 1e-5
Asked = Literal["auto", "replace_one", "add_remove", "zero_out"]


@dataclass(frozen=True)
class Facts:
    """What a noise is told of the run that it is for."""

    experiment: Experiment
    sizes: np.ndarray  # int64 [N], samples of each client
    rounds: int  # that a guarantee composes over
    weight: float  # the largest of any client's contribution
    survivors: int  # the fewest clients that any round keeps
    draws: Callable[[], list[np.ndarray]]  # the clients that each round exposes, with repeats
    data_root: Path | None = None


@dataclass(frozen=True)
class SideQuery:
    """A side query of one round (such as the count of an adaptive bound), as noise is drawn on its
    sum.
    """

    name: str
    seed: int  # the run's seed of noise
    t: int  # the round
    std: float  # of the noise on the sum of the answers
    clients: np.ndarray  # int64 [r], the cohort
    draws: np.ndarray  # int64 [r], the index of each draw among its client's draws, from 0
    survivors: int  # the fewest clients that any round keeps


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
    """Base of the family: noise that protects clients, with one multiplier for the whole run.

    A member gives `size`, and what it draws. Where the server draws on the sum, that is `source`,
    and `on_query` if a bounding asks for numbers besides updates. Where each client draws on what
    it sends, it is `on_clients`, `client_std` and `least`, and `drawn_by` says "client". Whatever
    is drawn has to be Gaussian, of the std asked for: this is what accountants take it to be.

    >>> from raydpfl.noise.drawn import server_noise
    >>> class Plain(Source):
    ...     def __init__(self, seed, d):
    ...         self.seed, self.d = seed, d
    ...     def on_sum(self, t, std):
    ...         return server_noise(self.seed, t, std, self.d)
    >>> class Mine(Noise):
    ...     z: float = 2.0
    ...     def size(self, outline, facts):
    ...         return self.z
    ...     def source(self, seed, d):
    ...         return Plain(seed, d)
    >>> Mine().source(seed=0, d=3).on_sum(t=0, std=1.0).shape
    (3,)
    """

    # --- what it draws ---

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

    def on_query(self, query: SideQuery) -> float:
        """The noise on the sum of the answers to a side query, drawn by whoever draws the noise on
        updates.

        Returns:
            One draw, of std `query.std` on the sum; 0: none is drawn.
        """
        return 0.0

    def unseen(self) -> bool:
        """Whether sums carry noise that no client has drawn."""
        return self.least(1) == 0

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

    # --- what accountants are told ---

    def private(self) -> bool:
        """Whether a run with it claims any privacy."""
        return True

    def drawn_by(self) -> Placement:
        """Who draws it, for accountants."""
        return "server"

    def protects(self) -> Unit:
        """Whose data it protects."""
        return "client"

    def terms(self, asked: Asked, natural: Relation) -> Terms:
        """What guarantees are given at: the neighbouring relation that is `asked` for, `natural`
        being that of the selection's cohorts, and delta.
        """
        return Terms(natural if asked == "auto" else asked, DELTA)

    def target(self) -> float | None:
        """The epsilon that all clients are promised alike; None where it follows from the noise."""
        return None

    def simulated(self) -> bool:
        """Whether the clients that a guarantee speaks of are those that run."""
        return True

    def check_audit(self) -> None:
        """Raises `ConfigError` where a guarantee speaks of clients that no audit can plant."""

    def sampling(self, cohorts: Sampling) -> Sampling:
        """The law that accountants count on, given that of the cohorts that run."""
        return cohorts

    def exclusions(self, cohorts: Sampling) -> tuple[str, ...]:
        """What a guarantee says of the cohorts that run, in words."""
        return ()

    def placed(self, experiment: Experiment) -> Noise:
        """Itself, with what it leaves to the other members settled."""
        return self

    def resolved(self, experiment: Experiment, cohorts: Sampling) -> Noise:
        """Itself for a run whose data are known, with what it had left open written out. Raises
        `ConfigError` for cohorts that it does not protect.
        """
        return self

    def outline(self, experiment: Experiment, cohorts: Callable[[], Sampling]) -> Mechanism | None:
        """What the run releases, with noise of multiplier 1: all that the config and the law of the
        cohorts tell. None where sums over cohorts have no noise.

        Raises `ConfigError` when none of the rigorous accountants asked for covers it.
        """
        return sums.outline(self, experiment, cohorts())

    def size(self, outline: Mechanism, facts: Facts) -> float:
        """The noise multiplier z: std of the noise on the sum of updates over (bound x weight), the
        round's queries taken together.
        """
        raise NotImplementedError

    def noised(self, outline: Mechanism | None, facts: Facts) -> Release | None:
        """What the run releases; None: nothing is claimed of it.

        Args:
            outline: as `outline` gave it.
            facts: of the run.
        """
        assert outline is not None
        size = self.size(outline, facts)
        return sums.at_multiplier(outline, facts.experiment, size, facts.rounds)

    def variances(
        self, experiment: Experiment, sizes: np.ndarray, root: Path | None
    ) -> np.ndarray | None:
        """V_k of 003 Problem 1, float64 [N]: the variance of each client's noise at a local step
        for a bound of 1; None where clients have no budgets of their own.
        """
        return None
