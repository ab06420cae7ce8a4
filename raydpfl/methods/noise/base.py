"""The base of the noises: what a member draws, and what accountants are told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raydpfl.config.registry import Member
from raydpfl.methods.noise import on_sums
from raydpfl.methods.noise.keyed_noise import query_noise, survey_noise
from raydpfl.privacy import Mechanism, Release, Sampling, Terms
from raydpfl.privacy.types import Placement, Relation, Unit

if TYPE_CHECKING:
    from raydpfl.experiment import Experiment

DELTA = 1e-5
Asked = Literal["auto", "replace_one", "add_remove", "zero_out"]


@dataclass(frozen=True)
class Facts:
    """What a noise is told of its run.

    Args:
        experiment: its whole config (`raydpfl.Experiment`).
        sizes: int64 [N], samples of each client.
        rounds: how many a guarantee composes.
        calibrated: of these, the rounds that an epsilon is for.
        weight: the largest weight of any client.
        survivors: the fewest clients that are left in any round.
        draws: gives whose participations noise at local steps is sized for, int64 arrays of
            clients, with repeats.
        surveys: histograms of all clients that a guarantee composes with the rounds.
        calibrated_surveys: of these, those that an epsilon is for.
        data_root: the folder of data sets; None: the default.
    """

    experiment: Experiment
    sizes: np.ndarray
    rounds: int
    calibrated: int
    weight: float
    survivors: int
    draws: Callable[[], list[np.ndarray]]
    surveys: int = 0
    calibrated_surveys: int = 0
    data_root: Path | None = None


@dataclass(frozen=True)
class SideQuery:
    """A side query of one round (such as the count of an adaptive bound), as noise is drawn on its
    sum.

    Args:
        name: of the query.
        seed: the run's seed of noise.
        t: the round, from 0.
        std: of the noise on the sum of the answers, in the units of an answer.
        clients: int64 [r], the cohort.
        draws: int64 [r], the index of each draw among its client's draws of the round, from 0.
        survivors: the fewest clients that any round keeps.
    """

    name: str
    seed: int
    t: int
    std: float
    clients: np.ndarray
    draws: np.ndarray
    survivors: int


class Source:
    """The server's noise in one run.

    It may keep what later rounds need, as long as a round's noise is a function of the run's seed
    and the round alone: after a resume, a new source is asked for the next round.
    """

    def on_sum(self, t: int, std: float) -> np.ndarray | None:
        """The noise on the sum of round t.

        Args:
            t: the round, from 0.
            std: of the noise on the sum, as the accountants were told for the bound in force.

        Returns:
            float64 [d]; None: the server draws none.
        """
        return None


class Noise(Member):
    """Base of the family: noise that protects clients, with one multiplier for the whole run.

    A member gives `size`, and what it draws. If the server draws on the sum, that is `source`. If
    each client draws on what it sends, it is `on_clients`, `client_std` and `least`, and `drawn_by`
    is "client". Whatever is drawn must be Gaussian and have the std asked for, as accountants
    assume: a run holds every draw of a class from outside the package against that law before it is
    released (`raydpfl.simulation.noise_monitor`). The delta of its guarantees is the field `delta`,
    if it has one, else 1e-5; or `terms` says it.

    >>> from raydpfl.methods.noise.keyed_noise import server_noise
    >>> class Plain(Source):
    ...     def __init__(self, seed, d):
    ...         self.seed, self.d = seed, d
    ...     def on_sum(self, t, std):
    ...         return server_noise(self.seed, t, std, self.d)
    >>> class Mine(Noise):
    ...     z: float = 2.0
    ...     delta: float = 1e-6
    ...     def size(self, outline, facts):
    ...         return self.z
    ...     def source(self, seed, d):
    ...         return Plain(seed, d)
    >>> Mine().source(seed=0, d=3).on_sum(t=0, std=1.0).shape
    (3,)
    >>> Mine().terms("auto", "replace_one")
    Terms(relation='replace_one', delta=1e-06, v=4.0)
    """

    # --- what it draws ---

    def on_clients(
        self, seed: int, t: int, clients: np.ndarray, draws: np.ndarray, std: float, d: int
    ) -> np.ndarray | None:
        """The noise that each of C clients adds to what it sends.

        Args:
            seed: the run's seed of noise.
            t: the round.
            clients: int64 [C].
            draws: int64 [C], the index of each draw among its client's draws this round, from 0.
            std: of one client's noise, as `client_std` gave it.
            d: parameters of the model.

        Returns:
            float64 [C, d], each row a function of its client's key alone; None: they draw none.
        """
        return None

    @property
    def keyed(self) -> bool:
        """Whether all that clients draw is `raydpfl.methods.noise.keyed_noise.client_noise`, which
        code that adds up updates as it trains them draws too.
        """
        return False

    def client_std(self, std: float, survivors: int) -> float:
        """Std of one client's noise; 0: clients draw none.

        Args:
            std: that the noise on the sum is to have.
            survivors: the fewest clients that are left in any round.
        """
        return 0.0

    def least(self, survivors: int) -> int:
        """The fewest clients whose noise a round's sum needs; 0 if clients draw none.

        `survivors` is the fewest clients that are left in any round.
        """
        return 0

    def source(self, seed: int, d: int) -> Source:
        """The server's noise in a run with this seed of noise, for a model of `d` parameters."""
        return Source()

    def on_query(self, query: SideQuery) -> float:
        """The noise on the sum of the answers to a side query, drawn by whoever draws the noise on
        updates: the server, or each client its part of std `client_std(query.std, survivors)`.

        Returns:
            One draw, of std `query.std` on the sum; 0 where that std is 0, or noise is drawn at
            local steps.
        """
        if not query.std or self.drawn_by() == "step":
            return 0.0
        if self.drawn_by() == "server":
            return query_noise(query.seed, query.t, query.std, query=query.name)
        part = self.client_std(query.std, query.survivors)
        drawn = zip(query.clients.tolist(), query.draws.tolist(), strict=True)
        # in client order, whoever trained them
        return sum(
            query_noise(query.seed, query.t, part, client, draw, query.name)
            for client, draw in drawn
        )

    def on_survey(self, seed: int, t: int, std: float, bins: int, clients: int) -> np.ndarray:
        """The noise on the counts of a histogram over all clients, drawn by whoever draws that on
        updates.

        Args:
            seed: of the survey's noise.
            t: the round that it is released after.
            std: of the noise on each count.
            bins: of the histogram.
            clients: who are asked.

        Returns:
            float64 [bins].
        """
        drawn = clients if self.drawn_by() == "client" else None
        return survey_noise(seed, t, std, bins, drawn)

    def unseen(self) -> bool:
        """Whether sums have noise that no client has drawn."""
        return self.least(1) == 0

    def apart(self) -> int:
        """The fewest rounds from one participation of a client to its next that the noise needs; 1:
        it may be in every round.
        """
        return 1

    def whitening(self) -> Callable[[np.ndarray], np.ndarray]:
        """For audits: a function of released sums, float64 [d] given one round after another, to
        sums whose noise is independent over the rounds.
        """
        return lambda released: released

    def carried(self) -> tuple[float, ...]:
        """For audits: the factors with which a round's sum is in the whitened sum of that round, of
        the next one, and so on.
        """
        return (1.0,)

    @property
    def of_seed(self) -> bool:
        """Whether all runs with one seed have the same noise."""
        return False

    def release(self) -> dict[str, Any]:
        """The fields that a release depends on, besides the size of the noise: part of the key."""
        return self.model_dump(mode="json")

    # --- what accountants are told ---

    def private(self) -> bool:
        """Whether a run with it claims any privacy."""
        return True

    def drawn_by(self) -> Placement:
        """Who draws it, as accountants are told."""
        return "server"

    def protects(self) -> Unit:
        """Whose data it protects."""
        return "client"

    def terms(self, asked: Asked, natural: Relation) -> Terms:
        """What guarantees are asked for: relation and delta.

        Args:
            asked: the relation in the config.
            natural: the relation that suits the selection's cohorts, for `auto`.

        Returns:
            By default `natural` for `auto`, else `asked`, and the field `delta`, or 1e-5 of a class
            without it.

        Raises:
            ConfigError: delta is not above 0 and below 1.
        """
        return Terms(natural if asked == "auto" else asked, getattr(self, "delta", DELTA))

    def target(self) -> float | None:
        """The epsilon that all clients are promised; None: it follows from the noise, or differs
        between clients.
        """
        return None

    def calibrated_over(self, rounds: int) -> int | None:
        """How many rounds of a run of `rounds` its size is for; None: its size is the same however
        many there are.
        """
        return None

    def kept(self, rounds: int) -> str | None:
        """The override by which a run of `rounds` goes on for more of them with the noise as it is;
        empty: it needs none. None: it cannot.
        """
        calibrated = self.calibrated_over(rounds)
        return "" if calibrated is None else f"noise.rounds={calibrated}"

    def simulated(self) -> bool:
        """Whether guarantees are about the clients that run."""
        return True

    def check_audit(self) -> None:
        """Raises `ConfigError` if guarantees are about clients that an audit cannot run."""

    def sampling(self, cohorts: Sampling) -> Sampling:
        """The law that accountants are told, given that of the cohorts that run."""
        return cohorts

    def exclusions(self, cohorts: Sampling) -> tuple[str, ...]:
        """What a guarantee must say about the cohorts that run, in words."""
        return ()

    def placed(self, experiment: Experiment) -> Noise:
        """The same noise with what depends on the other sections of the config filled in."""
        return self

    def resolved(self, experiment: Experiment, cohorts: Sampling) -> Noise:
        """The same noise with what depends on the run filled in, as its config is written.

        Args:
            experiment: of the run.
            cohorts: the law of its cohorts.

        Raises:
            ConfigError: it does not protect such cohorts.
        """
        return self

    def outline(self, experiment: Experiment, cohorts: Callable[[], Sampling]) -> Mechanism | None:
        """What the run releases at noise multiplier 1, as far as the config and the law of the
        cohorts say.

        Args:
            experiment: of the run.
            cohorts: gives the law of its cohorts.

        Returns:
            None: sums over cohorts have no noise.

        Raises:
            ConfigError: no rigorous accountant that was asked for covers it.
        """
        return on_sums.outline(self, experiment, cohorts())

    def size(self, outline: Mechanism, facts: Facts) -> float:
        """The noise multiplier z = std of the noise on the sum / (bound x largest weight), all
        queries of a round together.

        Args:
            outline: as `outline` gave it.
            facts: of the run.
        """
        raise NotImplementedError

    def noised(self, outline: Mechanism | None, facts: Facts) -> Release | None:
        """What the run releases; None: nothing is claimed about it.

        Args:
            outline: as `outline` gave it.
            facts: of the run.
        """
        assert outline is not None
        size = self.size(outline, facts)
        return on_sums.at_multiplier(outline, facts, size)

    def variances(
        self, experiment: Experiment, sizes: np.ndarray, root: Path | None
    ) -> np.ndarray | None:
        """V_k of 003 eq. 7: the variance of each client's noise for one local step and a bound of
        1.

        Args:
            experiment: of the run.
            sizes: samples of each client, int64 [N].
            root: the folder of data sets.

        Returns:
            float64 [N]; None: clients have no budgets of their own.
        """
        return None
