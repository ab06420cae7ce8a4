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
        self, accountant: str, epsilon: float, delta: float, failures: tuple[str, ...] = ()
    ) -> Guarantee:
        """The guarantee against this observer, with a rigorous accountant's epsilon and the
        conditions that failed; `unproven` where no proof is known for the mechanism.
        """
        mechanism = self.mechanism
        has_proof = not mechanism.proof_gap
        return Guarantee(
            "rigorous" if has_proof else "unproven", accountant, mechanism.unit, self.relation,
            self.observer, self.scope, epsilon, delta, mechanism.exclusions,
            failures if has_proof else (*failures, str(mechanism.proof_gap)),
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
    original_relation = relation
    if mechanism.unit != "client":
        scope = Scope.from_batches(sampling)
        yield ObserverView(Observer.UPDATES, scope, mechanism, relation, rounds)
        return
    survey = mechanism.survey
    extras = str(survey) if survey and survey.times else ""
    scope = Scope.from_cohorts(sampling, extras=extras)
    if sampling.hidden or sampling.everyone:
        yield ObserverView(Observer.AGGREGATES, scope, mechanism, relation, rounds)
    open_release = mechanism.with_known_cohorts()
    max_draws = None if sampling.everyone else participations
    counts = sampling.scheme.participations(sampling, rounds, max_draws)
    # that m draws cost m^2 rounds at most is so of Gaussian noise
    if not sampling.everyone and not (mechanism.laplace and sampling.repeats):
        scope = Scope.from_cohorts(sampling, counts, extras)
        relation = "zero_out" if relation == "add_remove" else relation
        yield ObserverView(Observer.AGGREGATES, scope, open_release, relation, counts.gaussians)
    if mechanism.distributed:
        # what a client's state holds of what it sent is seen
        update_mechanism = replace(
            open_release.seen(1 / mechanism.draws),
            noise_in_state=False,
            survey=survey.single_answer() if survey else None,
        )
        yield ObserverView(Observer.UPDATES, scope, update_mechanism, relation, counts.most)
    if mechanism.colluders:
        extras = ", ".join(filter(None, (extras, f"{mechanism.colluders} colluders")))
        if sampling.hidden or sampling.everyone:
            scope = Scope.from_cohorts(sampling, extras=extras)
            release = mechanism.with_colluders(known_cohorts=False)
            yield ObserverView(Observer.COLLUDERS, scope, release, original_relation, rounds)
        if not sampling.everyone:
            scope = Scope.from_cohorts(sampling, counts, extras)
            release = mechanism.with_colluders(known_cohorts=True).with_known_cohorts()
            yield ObserverView(Observer.COLLUDERS, scope, release, relation, counts.gaussians)
