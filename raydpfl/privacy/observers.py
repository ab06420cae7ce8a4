"""Who draws the noise (the server, clients on what they send, or clients at their local
steps), and who can therefore observe what.

>>> from raydpfl.privacy.mechanism import Query
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
from typing import ClassVar

from raydpfl.privacy.guarantee import Guarantee, Observer, Scope
from raydpfl.privacy.mechanism import Mechanism
from raydpfl.privacy.sampling import Sampling
from raydpfl.privacy.types import Placement, Relation, one_of


@dataclass(frozen=True)
class ObserverView:
    """What one observer sees; `scope` is the part of the sampling that its guarantee relies on."""

    observer: Observer
    scope: Scope
    mechanism: Mechanism
    relation: Relation
    rounds: int

    def guarantee(
        self, accountant: str, epsilon: float, delta: float, failed: tuple[str, ...] = ()
    ) -> Guarantee:
        """The guarantee against this observer, with a rigorous accountant's epsilon, infinite where
        nothing is guaranteed, and the conditions that failed. It is `unproven` where no proof is
        known for the mechanism.
        """
        mechanism = self.mechanism
        proved = not mechanism.unproved
        return Guarantee(
            "rigorous" if proved else "unproven", accountant, mechanism.unit, self.relation,
            self.observer, self.scope, epsilon, delta, mechanism.exclusions,
            failed if proved else (*failed, str(mechanism.unproved)),
        )  # fmt: skip


class Place:
    """Base of the places where noise is drawn; defaults are those of one draw on the sum."""

    draw: ClassVar[str] = ""  # what one draw is on, for tables; empty: the sum itself
    caveat: ClassVar[str] = ""  # what else a reader of its guarantees should know

    def draws(self, sampling: Sampling) -> float:
        """Std of the noise on the sum / std of one draw: 1, or sqrt(r) for r clients, or B."""
        return 1.0

    def refuses(self, sampling: Sampling, relation: Relation) -> str | None:
        """Why no accountant covers such noise, and the nearest that is covered; or None."""
        return None

    def views(
        self, mechanism: Mechanism, relation: Relation, rounds: int, participations: int | None
    ) -> Iterator[ObserverView]:
        """See the function `views`."""
        sampling = mechanism.sampling
        survey = mechanism.survey
        also = str(survey) if survey and survey.times else ""
        scope = Scope.of_cohorts(sampling, also=also)
        if sampling.hidden or sampling.everyone:
            yield ObserverView(Observer.AGGREGATES, scope, mechanism, relation, rounds)
        unsampled = mechanism.unsampled()
        most = None if sampling.everyone else participations
        spent = sampling.scheme.participations(sampling, rounds, most)
        if not sampling.everyone:
            scope = Scope.of_cohorts(sampling, spent, also)
            # Who is there is seen, so all that add_remove can still mean is an absent contribution.
            relation = "zero_out" if relation == "add_remove" else relation
            yield ObserverView(Observer.AGGREGATES, scope, unsampled, relation, spent.gaussians)
        whole = ObserverView(Observer.UPDATES, scope, unsampled, relation, spent.most)
        yield from self.singles(mechanism, whole)

    def singles(self, mechanism: Mechanism, view: ObserverView) -> Iterator[ObserverView]:
        """The observers of single updates, from `view`, which has the noise of the whole sum."""
        yield from ()


class CentralNoise(Place):
    """The server, once on the sum: no one sees a single update with noise."""


class DistributedNoise(Place):
    """Each of a cohort's r clients on what it sends, so that the sum has sqrt(r) times the std."""

    draw = "one_client"
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

    def singles(self, mechanism: Mechanism, view: ObserverView) -> Iterator[ObserverView]:
        seen = view.mechanism.with_noise(
            mechanism.noise_multiplier / self.draws(mechanism.sampling)
        )
        survey = seen.survey.of_one() if seen.survey else None
        # what a client's state holds of what it sent is seen
        seen = replace(seen, noise_in_state=False, survey=survey)
        yield replace(view, mechanism=seen)


class LocalStepNoise(Place):
    """A client at all of its local steps, once on the sum over a batch. Every update is seen."""

    draw = "the_mean_gradient"
    caveat = (
        "it holds for a fresh batch at each step, not for shuffled epochs; participations are "
        "those that occur, or a cap that is kept"
    )

    def draws(self, sampling: Sampling) -> float:
        return float(sampling.cohort)

    def views(
        self, mechanism: Mechanism, relation: Relation, rounds: int, participations: int | None
    ) -> Iterator[ObserverView]:
        yield ObserverView(
            Observer.UPDATES, Scope.of_batches(mechanism.sampling), mechanism, relation, rounds
        )


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
) -> Iterator[ObserverView]:
    """The observers that differ in `rounds` rounds, the one who sees least first. Against one who
    knows the cohorts, `add_remove` becomes `zero_out`: it sees who is there. `participations` is
    the largest number of times that any client was drawn; None: unknown, so that every round
    counts.
    """
    return place_of(mechanism.placement).views(mechanism, relation, rounds, participations)
