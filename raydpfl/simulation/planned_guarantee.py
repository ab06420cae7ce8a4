"""What a run would guarantee, from its config."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from raydpfl import models
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.methods import server
from raydpfl.privacy import LocalSteps, Mechanism, segments_of
from raydpfl.privacy.calculator import Budget, PersonalBudget, Unknown
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.resolution import resolve


def planned_budget(
    experiment: Experiment,
    data_root: Path | None = None,
    person: int | None = None,
    name: str = "",
    ledger: Sequence[Mapping[str, Any]] = (),
) -> Budget | PersonalBudget:
    """What a run would guarantee, with its cohorts drawn, and the noise that each accountant would
    ask for; client by client if the noise is at local steps. Nothing is trained; the data (in
    `data_root`) are prepared, for the clients' sizes. `person`: how many samples of a client a
    person has; None: all. `ledger`: the lines of the run `name`; rounds from before a restart with
    fresh noise count too. Raises `ConfigError` for a run that would be refused, or has no noise.
    """
    experiment = strip_model(experiment)
    if not experiment.private:
        expected = "a noise with a budget, such as noise={kind: gaussian, epsilon: 8}"
        raise ConfigError("noise.kind", experiment.noise.kind, expected)
    plan = resolve(experiment, data_root)
    check_mechanism(name, plan, ledger)
    plan = plan.extend_history(segments_of(ledger))
    experiment = plan.experiment
    participations = plan.participations(experiment.rounds)
    budget: Budget | PersonalBudget
    if plan.mechanism and plan.mechanism.by_draws:
        steps = cast(LocalSteps, plan.mechanism)
        budget = PersonalBudget(steps, participations, experiment.privacy.accountants, person)
    elif person is not None:
        expected = "none where whole clients are protected, with all their samples"
        raise ConfigError("--person", person, expected)
    else:
        budget = _cohort_budget(plan, cast(Mechanism, plan.mechanism), participations)
    if plan.history:
        count = sum(map(len, plan.history))
        budget.notes.append(f"{count} rounds from before a restart with fresh noise count too")
    if experiment.privacy.budget is not None:
        budget.notes.append(_budget_note(plan, experiment.privacy.budget))
    return budget


def _cohort_budget(plan: Plan, mechanism: Mechanism, participations: Counter) -> Budget:
    """The budget of sums over cohorts; `participations` is how often every client is drawn."""
    experiment = plan.experiment
    assert experiment.bounding.initial_bound is not None  # there is noise on updates
    scale = experiment.bounding.initial_bound * plan.weight
    updates, *side_queries = mechanism.queries
    updates = replace(updates, bound=updates.bound * scale, std=updates.std * scale)
    mechanism = replace(mechanism, queries=(updates, *side_queries))
    if plan.history:
        rounds = int(plan.composed_rounds[-1]) + plan.extra_composed_rounds
        mechanism = replace(mechanism, rounds=rounds).with_surveys(int(plan.surveys[-1]))
    target = experiment.noise.target()
    unknown: Unknown = "epsilon" if target is None else "noise"
    is_virtual = experiment.noise.stands_for is not None
    max_participations = None if is_virtual else max(participations.values(), default=1)
    terms = experiment.terms
    individual = tuple(plan.individual.guarantees(mechanism)) if plan.individual else ()
    return Budget(
        mechanism, terms.relation, terms.delta, unknown, target, 1, max_participations, terms.v,
        run=mechanism, individual=individual,
    )  # fmt: skip


def _budget_note(plan: Plan, budget: float) -> str:
    """How many rounds a budget lasts for, in words."""
    curves = plan.curves()
    names = plan.rigorous_accountants
    epsilons = np.min([curves[name] for name in names], axis=0)
    rounds = f"{int((epsilons <= budget).sum())} of the {plan.experiment.rounds} rounds"
    return f"privacy.budget {budget:g} lasts for {rounds}, by {' and '.join(names)}"


def check_mechanism(name: str, plan: Plan, ledger: Sequence[Mapping[str, Any]]) -> None:
    """Raises `ConfigError` unless the ledger of the run `name` is of the plan's mechanism."""
    assert plan.mechanism is not None
    digest = plan.mechanism.round_digest()
    if any(line.get("mechanism") != digest for line in ledger):
        expected = "a run whose ledger has the mechanism of its config, as this version reads it"
        raise ConfigError("RUN", name, expected)


def strip_model(experiment: Experiment) -> Experiment:
    """The experiment as far as it bears on privacy. A user's own model is not imported if its size
    does not count, and an own server not if no noise is correlated over the rounds."""
    if experiment.accounted_with() & experiment.unimported_kinds.keys():
        return experiment.import_members()
    changes: dict[str, Any] = {}
    if "model" in experiment.unimported_kinds:
        client = experiment.client.model_copy(update={"backend": "auto"})
        changes |= {"model": models.FAMILY["linear"](), "client": client}
    if "server" in experiment.unimported_kinds:
        changes["server"] = server.ServerSgd()
    return experiment.model_copy(update=changes)
