"""Who can observe what of a mechanism, from where its noise is drawn."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from raydpfl.privacy.guarantee import Guarantee, Observer, Scope
from raydpfl.privacy.mechanism import Mechanism
from raydpfl.privacy.types import Relation


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
        """The guarantee against this observer, with a rigorous accountant's epsilon and the
        conditions that failed; `unproven` where no proof is known for the mechanism.
        """
        mechanism = self.mechanism
        proved = not mechanism.unproved
        return Guarantee(
            "rigorous" if proved else "unproven", accountant, mechanism.unit, self.relation,
            self.observer, self.scope, epsilon, delta, mechanism.exclusions,
            failed if proved else (*failed, str(mechanism.unproved)),
        )  # fmt: skip


def views(
    mechanism: Mechanism, relation: Relation, rounds: int, participations: int | None
) -> Iterator[ObserverView]:
    """The observers that differ in `rounds` rounds, the one who sees least first: of aggregates,
    not knowing the cohorts and knowing them, and of single updates where these have noise; with
    `Mechanism.colluders` also of aggregates and of what these know (docs/proofs.md).

    One who knows the cohorts sees who is there, so that `add_remove` becomes `zero_out`.
    `participations`: the most times that any client was drawn; None: every round may count.
    """
    sampling = mechanism.sampling
    asked = relation
    if mechanism.unit != "client":
        scope = Scope.of_batches(sampling)
        yield ObserverView(Observer.UPDATES, scope, mechanism, relation, rounds)
        return
    survey = mechanism.survey
    also = str(survey) if survey and survey.times else ""
    scope = Scope.of_cohorts(sampling, also=also)
    if sampling.hidden or sampling.everyone:
        yield ObserverView(Observer.AGGREGATES, scope, mechanism, relation, rounds)
    unsampled = mechanism.unsampled()
    most = None if sampling.everyone else participations
    spent = sampling.scheme.participations(sampling, rounds, most)
    # that m draws cost m^2 rounds at most is so of Gaussian noise
    if not sampling.everyone and not (mechanism.laplace and sampling.repeats):
        scope = Scope.of_cohorts(sampling, spent, also)
        relation = "zero_out" if relation == "add_remove" else relation
        yield ObserverView(Observer.AGGREGATES, scope, unsampled, relation, spent.gaussians)
    if mechanism.distributed:
        # what a client's state holds of what it sent is seen
        single = replace(
            unsampled.seen(1 / mechanism.draws),
            noise_in_state=False,
            survey=survey.of_one() if survey else None,
        )
        yield ObserverView(Observer.UPDATES, scope, single, relation, spent.most)
    if mechanism.colluders:
        also = ", ".join(filter(None, (also, f"{mechanism.colluders} colluders")))
        if sampling.hidden or sampling.everyone:
            scope = Scope.of_cohorts(sampling, also=also)
            seen = mechanism.with_colluders(cohorts_known=False)
            yield ObserverView(Observer.COLLUDERS, scope, seen, asked, rounds)
        if not sampling.everyone:
            scope = Scope.of_cohorts(sampling, spent, also)
            seen = mechanism.with_colluders(cohorts_known=True).unsampled()
            yield ObserverView(Observer.COLLUDERS, scope, seen, relation, spent.gaussians)
