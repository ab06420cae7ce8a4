"""What accountants are told of who draws the noise: the server, each client on what it sends, or
each client at its local steps. It decides who can observe what.

>>> from raydpfl.privacy.mechanism import Mechanism, Query, Sampling
>>> query = Query("update", bound=1.0, std=4.0)
>>> run = Mechanism(Sampling("fixed", 1920, 80), (query,), rounds=100, placement="client")
>>> [str(view.observer) for view in views(run, "replace_one", 100, None)]
['every aggregate', 'every aggregate', 'every single update']
>>> place_of("client").draws(run.sampling)  # sqrt(80): how stds of 80 independent draws add up
8.94427190999916
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from raydpfl.privacy.guarantee import Batches, Cohorts, Guarantee, Observer, Scope
from raydpfl.privacy.types import Placement, Relation, one_of

if TYPE_CHECKING:
    from raydpfl.privacy.mechanism import Mechanism, Sampling


@dataclass(frozen=True)
class View:
    """What one observer sees: `rounds` rounds of `mechanism`, under `relation`. `scope` is the part
    of the sampling that its guarantee relies on.
    """

    observer: Observer
    scope: Scope
    mechanism: Mechanism
    relation: Relation
    rounds: int

    def guarantee(
        self, accountant: str, epsilon: float, delta: float, failed: tuple[str, ...] = ()
    ) -> Guarantee:
        """The guarantee against this observer, with a rigorous accountant's epsilon.

        Args:
            accountant: its name.
            epsilon: by that accountant; infinite where nothing is guaranteed.
            delta: that epsilon is at.
            failed: the conditions that fail, in words.

        Returns:
            A guarantee that is rigorous, or `unproven` where no proof is known for the mechanism.
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
    """Base of the places where noise is drawn. The defaults are those of one draw on the sum over a
    cohort.
    """

    one: ClassVar[str] = ""  # what one draw is on, for tables; empty: the sum itself
    caveat: ClassVar[str] = ""  # what else a reader of its guarantees should know

    def draws(self, sampling: Sampling) -> float:
        """Std of the noise on the sum / std of one draw: 1 on the sum itself, sqrt(r) for r
        clients, B for the mean over a batch of B.
        """
        return 1.0

    def refuses(self, sampling: Sampling, relation: Relation) -> str | None:
        """Why no accountant covers such noise with cohorts drawn by `sampling`, under `relation`,
        and the nearest combination that is covered; None: there is no objection here.
        """
        return None

    def views(
        self, mechanism: Mechanism, relation: Relation, rounds: int, participations: int | None
    ) -> Iterator[View]:
        """See the function `views`."""
        sampling = mechanism.sampling
        survey = mechanism.survey
        besides = str(survey) if survey and survey.times else ""
        if sampling.hidden or sampling.everyone:
            scope = Cohorts(sampling, besides=besides)
            yield View(Observer.AGGREGATES, scope, mechanism, relation, rounds)
        most = None if sampling.everyone else participations
        known = sampling.law.known(sampling, rounds, most)
        scope = Cohorts(sampling, besides=besides)
        under = relation
        unsampled = mechanism.unsampled()
        if not sampling.everyone:
            scope = Cohorts(sampling, known, besides)
            # Whoever sees the cohort sees who is there, so all that add_remove can still mean is
            # an absent contribution.
            under = "zero_out" if relation == "add_remove" else relation
            yield View(Observer.AGGREGATES, scope, unsampled, under, known.gaussians)
        yield from self.singles(
            mechanism, View(Observer.UPDATES, scope, unsampled, under, known.most)
        )

    def singles(self, mechanism: Mechanism, view: View) -> Iterator[View]:
        """The observers of single updates, made from `view`, which has the noise of the whole sum
        on every update.
        """
        yield from ()


class CentralNoise(Place):
    """The server, once on the sum: nobody sees a single update with noise."""


class DistributedNoise(Place):
    """Each of a cohort's r clients on what it sends, so that the sum has sqrt(r) times the std."""

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
        survey = seen.survey.of_one() if seen.survey else None
        # what a client remembers of what it sent is seen
        seen = replace(seen, remembers_noise=False, survey=survey)
        yield replace(view, mechanism=seen)


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
    """The observers that differ, the one who sees least first.

    Args:
        mechanism: what runs.
        relation: the neighbouring relation that is asked for. Against an observer who knows the
            cohorts, `add_remove` becomes `zero_out`: it sees who is there.
        rounds: rounds composed.
        participations: the largest number of times that any client was drawn; None: unknown, so
            that every round counts.
    """
    return mechanism.place.views(mechanism, relation, rounds, participations)
