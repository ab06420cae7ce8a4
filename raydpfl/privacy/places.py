"""Who draws a mechanism's noise, and so what an observer meets: the server, each client on what it
sends, or a client at each of its local steps.

>>> from raydpfl.privacy.mechanism import Mechanism, Query, Sampling
>>> query = Query("update", bound=1.0, std=4.0)
>>> run = Mechanism(Sampling("fixed", 1920, 80), (query,), rounds=100, placement="client")
>>> [str(view.observer) for view in views(run, "replace_one", 100, None)]
['every aggregate', 'every aggregate', 'every single update']
>>> place_of("client").draws(run.sampling)  # independent draws of one std add up to this many
8.94427190999916
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from raydpfl.privacy.facts import Placement, Relation, one_of
from raydpfl.privacy.guarantee import Batches, Cohorts, Guarantee, Observer, Scope

if TYPE_CHECKING:
    from raydpfl.privacy.mechanism import Mechanism, Sampling


@dataclass(frozen=True)
class View:
    """What an observer meets: `rounds` rounds of `mechanism`, under `relation`; `scope` is what of
    the sampling its guarantee counts on.
    """

    observer: Observer
    scope: Scope
    mechanism: Mechanism
    relation: Relation
    rounds: int

    def guarantee(
        self, accountant: str, epsilon: float, delta: float, failed: tuple[str, ...] = ()
    ) -> Guarantee:
        """What a rigorous accountant's epsilon guarantees against this observer; not proved where
        no proof is known for such a mechanism.
        """
        mechanism = self.mechanism
        kind: Literal["rigorous", "unproven"] = "rigorous"
        if mechanism.unproved:
            kind = "unproven"
            failed += (mechanism.unproved,)
        return Guarantee(
            kind,
            accountant,
            mechanism.unit,
            self.relation,
            self.observer,
            self.scope,
            epsilon,
            delta,
            mechanism.exclusions,
            failed,
        )


class Place:
    """Base of the places where noise is drawn. What it answers is what holds for one draw on the
    sum over a cohort.
    """

    one: ClassVar[str] = ""  # what one draw is on, for tables; empty: the sum itself
    caveat: ClassVar[str] = ""  # what a reader of its guarantees should know beside

    def draws(self, sampling: Sampling) -> float:
        """Std of the noise on the sum / std of one draw."""
        return 1.0

    def refuses(self, sampling: Sampling, relation: Relation) -> str | None:
        """Why no accountant covers such noise with cohorts drawn by `sampling` under `relation`,
        and the nearest combination that is covered; None: nothing here stands against it.
        """
        return None

    def views(
        self, mechanism: Mechanism, relation: Relation, rounds: int, participations: int | None
    ) -> Iterator[View]:
        """See the function `views`."""
        sampling = mechanism.sampling
        if sampling.hidden or sampling.everyone:
            yield View(Observer.AGGREGATES, Cohorts(sampling), mechanism, relation, rounds)
        most = None if sampling.everyone else participations
        known = sampling.law.known(sampling, rounds, most)
        scope = Cohorts(sampling)
        under = relation
        unsampled = mechanism.unsampled()
        if not sampling.everyone:
            scope = Cohorts(sampling, known)
            # Whoever sees the cohort sees who is there, so all that add_remove can still mean is
            # an absent contribution.
            under = "zero_out" if relation == "add_remove" else relation
            yield View(Observer.AGGREGATES, scope, unsampled, under, known.gaussians)
        yield from self.singles(
            mechanism, View(Observer.UPDATES, scope, unsampled, under, known.most)
        )

    def singles(self, mechanism: Mechanism, view: View) -> Iterator[View]:
        """The observers of single updates; `view` is one of them who meets the noise of the sum on
        each.
        """
        yield from ()


class CentralNoise(Place):
    """The server, once on the sum: nobody sees a single update with noise."""


class DistributedNoise(Place):
    """Each client of a cohort on what it sends, so that the sum carries sqrt(r) times the std."""

    one = "one_client"
    caveat = (
        "k clients who pool what they know of their own noise, or k that drop out, leave "
        "sqrt((r - k) / r) of the noise on a sum of r"
    )

    def draws(self, sampling: Sampling) -> float:
        return math.sqrt(sampling.cohort)

    def refuses(self, sampling: Sampling, relation: Relation) -> str | None:
        drawn = "noise drawn by the clients"
        if sampling.coins is not None:
            reason = f"{drawn} has a std that depends on the secret Poisson cohort"
            return f"{reason}; nearest: noise.placement server"
        if relation == "add_remove":
            reason = f"{drawn} comes and goes with a client under add_remove"
            return f"{reason}; nearest: noise.placement server, or replace_one"
        return None

    def singles(self, mechanism: Mechanism, view: View) -> Iterator[View]:
        seen = view.mechanism.with_noise(
            mechanism.noise_multiplier / self.draws(mechanism.sampling)
        )
        # what a client remembers of what it sent is seen
        yield replace(view, mechanism=replace(seen, remembers_noise=False))


class LocalStepNoise(Place):
    """A client at each of its local steps, once on the sum over a batch. Every update is seen."""

    one = "the_mean_gradient"
    caveat = (
        "it holds for a fresh batch at each step, not for shuffled epochs; participations are "
        "those that occur, or a cap that is kept"
    )

    def draws(self, sampling: Sampling) -> float:
        return float(sampling.cohort)

    def views(
        self, mechanism: Mechanism, relation: Relation, rounds: int, participations: int | None
    ) -> Iterator[View]:
        yield View(Observer.UPDATES, Batches(mechanism.sampling), mechanism, relation, rounds)


_PLACES: dict[str, Place] = {
    "client": DistributedNoise(),
    "server": CentralNoise(),
    "step": LocalStepNoise(),
}


def place_of(name: str) -> Place:
    """The place of a name. Raises `ConfigError`."""
    one_of("placement", name, Placement)
    return _PLACES[name]


def views(
    mechanism: Mechanism, relation: Relation, rounds: int, participations: int | None
) -> Iterator[View]:
    """The observers worth telling apart after `rounds` rounds, whoever sees least first.

    `participations` is the largest number of times that any client was drawn; None where that is
    not known.
    """
    return mechanism.place.views(mechanism, relation, rounds, participations)
