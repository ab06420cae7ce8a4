"""The base of sampling laws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.privacy.guarantee import Participations
from raydpfl.privacy.pld import LossDistribution

if TYPE_CHECKING:
    from raydpfl.privacy.mechanism import Sampling
    from raydpfl.privacy.types import Relation

# that of one of an event's Gaussians, and that of the one over everyone, on the same grid
Losses: TypeAlias = tuple[LossDistribution, LossDistribution | None]


class Law:
    """Base of the sampling laws. A member has no state: population, cohort and the rest are those
    of the `Sampling` that it is asked about.

    A member gives `kind` and `words`. Where a cohort is a secret it also gives `refuses`, and
    `losses` (for pld) or `renyi` (for rdp). The other defaults are those of a cohort of fixed size
    without replacement, all subsets equally likely.

    If a law draws `any_subset`, a run checks how many clients two consecutive cohorts share against
    independent uniform draws. A law that draws clients in groups answers False to that and to
    `as_in_the_papers`.
    """

    kind: ClassVar[str] = ""
    # fields of a `Sampling` that `raydpfl check` tries the law with
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"population": 100, "cohort": 10},
        {"population": 20, "cohort": 9},
    )

    def check(self, sampling: Sampling) -> None:
        """Raises `ConfigError` for a population, cohort or p_max that the law cannot have."""
        if sampling.cohort > sampling.population:
            expected = f"an integer from 1 to the population of {sampling.population}"
            raise ConfigError("cohort", sampling.cohort, expected)

    def default(self, population: int) -> int | None:
        """The cohort where none is given; None: it must be given."""
        return None

    def hidden(self, sampling: Sampling) -> bool:
        """Whether who takes part is a secret, which amplifies privacy."""
        return not self.everyone(sampling)

    def size(self, sampling: Sampling) -> int | None:
        """The size of every cohort; None where it varies."""
        return sampling.cohort

    def coins(self, sampling: Sampling) -> float | None:
        """The probability with which each client takes part, independently of the others, so that
        the size of a cohort is a secret too; None where clients are not independent.
        """
        return None

    def repeats(self) -> bool:
        """Whether a client may be in a cohort more than once."""
        return False

    def any_subset(self, sampling: Sampling) -> bool:
        """Whether, given its size, a cohort is a uniform subset, independent of other rounds. The
        draws of a run are then checked for that.
        """
        return self.as_in_the_papers(sampling)

    def as_in_the_papers(self, sampling: Sampling) -> bool:
        """Whether cohorts have one size and all subsets are equally likely, as the papers' formulas
        assume.
        """
        return True

    def gives(self, method: str) -> bool:
        """Whether this law has a method that an accountant needs (`losses` or `renyi`); False for
        one that names none.
        """
        return bool(method) and getattr(type(self), method) is not getattr(Law, method)

    def plural(self) -> str:
        """What its cohorts are called in messages."""
        return f"cohorts of law {self.kind}"

    def q(self, sampling: Sampling) -> float:
        """The probability that a given client is in a cohort; 1 where only the client's own rounds
        are counted.
        """
        return sampling.cohort / sampling.population

    def everyone(self, sampling: Sampling) -> bool:
        """Whether every round takes everyone, so that nothing is amplified."""
        return sampling.cohort == sampling.population

    def words(self, sampling: Sampling) -> str:
        """The law in a few words, for guarantees."""
        raise NotImplementedError

    def refuses(self, relation: Relation) -> str | None:
        """Why no accountant covers a round's sampling under `relation`, and the nearest relation or
        selection that is covered; None: some accountant covers it.
        """
        return None

    def losses(self, sampling: Sampling, mu: float) -> tuple[LossDistribution, ...]:
        """The privacy loss of one round, for pld; without this method pld does not cover the law.

        Args:
            sampling: population and cohort.
            mu: sensitivity / std of the Gaussian sum.

        Returns:
            A distribution for each direction that can differ: one under replace_one, which is
            symmetric, and two where a client is removed or added.
        """
        raise NotImplementedError

    def losses_besides(
        self, sampling: Sampling, mu: float, each: int, also: float
    ) -> tuple[Losses, ...]:
        """As `losses`, where one more Gaussian, of mu `also` and over everyone, is released with
        every `each` rounds: the losses of both, on one grid. Without this method pld does not cover
        that.
        """
        raise NotImplementedError

    def renyi(self, sampling: Sampling, mu: float) -> np.ndarray:
        """Renyi divergences of that round at `raydpfl.privacy.rdp.ORDERS`, float64 [orders], for
        rdp; without this method rdp does not cover the law.
        """
        raise NotImplementedError

    def known(self, sampling: Sampling, rounds: int, most: int | None) -> Participations:
        """What a client spends against an observer who knows the cohorts.

        Args:
            sampling: population and cohort.
            rounds: rounds composed.
            most: the largest number of times that any client was drawn; None: unknown.
        """
        times = rounds if most is None else min(most, rounds)
        return Participations(times, times, rounds)

    def most(self, sampling: Sampling, rounds: int, exposure: int) -> tuple[int, float]:
        """How often a client can be drawn, for the check of a run's draws.

        Args:
            sampling: population and cohort.
            rounds: of the run.
            exposure: how many of them accountants compose.

        Returns:
            Trials, and the largest chance of any client in each.
        """
        return exposure, self.q(sampling)
