"""What a sampling law says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.privacy.guarantee import Participations
from raydpfl.privacy.pld import LossDistribution

if TYPE_CHECKING:
    from raydpfl.privacy.facts import Relation
    from raydpfl.privacy.mechanism import Sampling

# of one of an event's Gaussians, and of what is released once besides them, on the same grid
Losses: TypeAlias = tuple[LossDistribution, LossDistribution | None]


class Law:
    """Base of the sampling laws. A member has no state: population, cohort and the rest are those
    of the `Sampling` it is asked about.

    What a member must give: `kind`, `words`; where a cohort is a secret, `refuses`, and `losses` or
    `renyi`, whichever accountant is to cover it. The facts below have the answers of a cohort of
    fixed size without replacement, `as_in_the_papers` that of equally likely subsets.

    A run holds how many clients a cohort has in common with the one before against independent
    uniform draws of their sizes where a law says that it draws `any_subset`. A law by which clients
    come in groups says no to that and to `as_in_the_papers`.
    """

    kind: ClassVar[str] = ""
    # numbers of a `Sampling` that `raydpfl check` asks the law about
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"population": 100, "cohort": 10},
        {"population": 20, "cohort": 9},
    )

    def check(self, sampling: Sampling) -> None:
        """Raises `ConfigError` for numbers that the law cannot have."""
        if sampling.cohort > sampling.population:
            accepted = f"an integer from 1 to the population of {sampling.population}"
            raise ConfigError("cohort", sampling.cohort, accepted)

    def default(self, population: int) -> int | None:
        """The size of a cohort where none is said; None: it must be said."""
        return None

    def hidden(self, sampling: Sampling) -> bool:
        """Whether who takes part is a secret, which amplifies privacy."""
        return not self.everyone(sampling)

    def size(self, sampling: Sampling) -> int | None:
        """The size of every cohort; None where it varies."""
        return sampling.cohort

    def coins(self, sampling: Sampling) -> float | None:
        """The chance of the coin by which each client takes part on its own, so that the size is a
        secret too; None where clients depend on each other.
        """
        return None

    def repeats(self) -> bool:
        """Whether a client may stand in a cohort more than once."""
        return False

    def any_subset(self, sampling: Sampling) -> bool:
        """Whether, given its size, a cohort is any subset with the same chance, whatever the others
        were. Where it is, what cohorts have in common is held against that while a run goes on.
        """
        return self.as_in_the_papers(sampling)

    def as_in_the_papers(self, sampling: Sampling) -> bool:
        """Whether all subsets of one size are equally likely, as for the papers' formulas."""
        return True

    def gives(self, method: str) -> bool:
        """Whether this law has a method that an accountant needs (`losses` or `renyi`)."""
        return getattr(type(self), method) is not getattr(Law, method)

    def plural(self) -> str:
        """What its rounds are called when an accountant does not cover them."""
        return f"cohorts of law {self.kind}"

    def q(self, sampling: Sampling) -> float:
        """The chance that a given client is in a cohort; 1 where only the rounds that it is in are
        counted.
        """
        return sampling.cohort / sampling.population

    def everyone(self, sampling: Sampling) -> bool:
        """Whether every round takes everyone, so that there is nothing to amplify."""
        return sampling.cohort == sampling.population

    def words(self, sampling: Sampling) -> str:
        """The law in a few words, for guarantees."""
        raise NotImplementedError

    def refuses(self, relation: Relation) -> str | None:
        """Why no accountant covers a round's sampling under `relation`, and the nearest one that is
        covered; None: one does.
        """
        return None

    def losses(self, sampling: Sampling, mu: float) -> tuple[LossDistribution, ...]:
        """The privacy loss of one round of a Gaussian of `mu` = sensitivity / std, one for each
        direction that can differ (pld).

        Not covered by pld unless given.
        """
        raise NotImplementedError

    def losses_besides(
        self, sampling: Sampling, mu: float, each: int, also: float
    ) -> tuple[Losses, ...]:
        """The same where one Gaussian of mu `also` over everyone is released besides every `each`
        of them: the losses of both on one grid. Not covered by pld unless given.
        """
        raise NotImplementedError

    def renyi(self, sampling: Sampling, mu: float) -> np.ndarray:
        """The Renyi divergences of that round at `renyi.ORDERS`, float64 [orders] (rdp). Not
        covered by rdp unless given.
        """
        raise NotImplementedError

    def known(self, sampling: Sampling, rounds: int, most: int | None) -> Participations:
        """What a client spends against one who knows the cohorts of `rounds` rounds.

        `most`: how often any client was drawn, at most; None: that is not known.
        """
        times = rounds if most is None else min(most, rounds)
        return Participations(times, times, rounds)

    def most(self, sampling: Sampling, rounds: int, exposure: int) -> tuple[int, float, float]:
        """How often a client can be drawn, for the check of a run's draws: Bin(trials, chance), and
        over how many clients.

        `exposure`: how many of the `rounds` rounds accountants compose over.
        """
        return exposure, self.q(sampling), float(sampling.population)
