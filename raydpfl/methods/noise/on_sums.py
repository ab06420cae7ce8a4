"""Sums over cohorts, as accountants read them: who takes part, what is released, what noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from raydpfl import privacy
from raydpfl.config.user_classes import is_own
from raydpfl.errors import ConfigError
from raydpfl.privacy import Mechanism, Query, Sampling
from raydpfl.privacy.guarantee import DECLARED
from raydpfl.privacy.types import Relation

if TYPE_CHECKING:
    from raydpfl.experiment import Experiment
    from raydpfl.methods.noise.base import Facts, Noise

SHOWN = (
    "the tables and figures of this run show exact norms, losses and scores, which are not "
    "noised; how many samples each client has is taken as public"
)
PERSONAL = (
    "each client's own model (personal): it is not released, and no epsilon covers it against who "
    "sees it there"
)
COMMON = (
    "runs with one seed carry the same noise (noise.common), so no two of them may both be shown"
)
# what a round releases besides a bounding's queries, and what the ledger calls its noise
RESERVED = ("updates", "losses", "loss", "survey")
RELATIONS: tuple[Relation, ...] = ("replace_one", "add_remove", "zero_out")
T = TypeVar("T")


def queries(experiment: Experiment, z: float) -> tuple[Query, ...]:
    """The sums of a round: the updates, and what bounding and selection ask for besides.

    Args:
        experiment: of the run.
        z: the noise multiplier, std of the sum / bound, of all queries together but for those
            `apart`.

    Returns:
        Queries whose bound and std are per unit of the bound in force.

    Raises:
        ConfigError: two queries have one name, by which their noise is drawn.
    """
    asked = experiment.bounding.queries()
    names = [each.name for each in asked]
    if len({*names, *RESERVED}) < len(names) + len(RESERVED):
        expected = (
            f"a class whose queries have names that differ, none of them "
            f"{', '.join(RESERVED)}; here they are {', '.join(map(str, names))}"
        )
        raise ConfigError("bounding.kind", experiment.bounding.kind, expected)
    rest = 1 - sum(each.share for each in asked)
    found = [Query("updates", 1.0, z / math.sqrt(rest))]
    for each in asked:
        found.append(Query(each.name, each.bound, each.bound * z / math.sqrt(each.share)))
    losses = experiment.selection.loss_query
    if losses is not None:
        found.append(losses)
    return tuple(found)


def declared(experiment: Experiment, noise: Noise, at_steps: bool) -> tuple[str, ...]:
    """What accountants take from user-defined classes, in words: where noise is drawn `at_steps`,
    and else.
    """
    e = experiment
    facts = {
        "noise that differs from that": noise,
        "contributions above the bound": e.bounding,
    }
    if at_steps:  # cohorts are counted as they are drawn, and weights move what is released
        facts["batches that differ from the sampling scheme"] = e.local
    else:
        facts["cohorts that differ from the sampling scheme"] = e.selection
        facts["weights above the largest"] = e.weights
    if e.selection.loss_query is not None:
        facts["losses that differ from the query"] = e.selection
    return tuple(
        f"{fact} declared by {member.kind} {DECLARED}"
        for fact, member in facts.items()
        if member.is_own
    )


def excluded(experiment: Experiment, noise: Noise, at_steps: bool = False) -> tuple[str, ...]:
    """What no accountant counts, in words: the `exclusions` of a guarantee."""
    said = (*declared(experiment, noise, at_steps), *experiment.data.exclusions)
    said += experiment.selection.exclusions
    said += (*experiment.evaluate.exclusions, *experiment.model.exclusions)
    said += (PERSONAL,) if experiment.personal else ()
    said += (COMMON,) if noise.of_seed else ()
    return (*said, SHOWN)


def outline(noise: Noise, experiment: Experiment, cohorts: Sampling) -> Mechanism:
    """See `Noise.outline`. Raises `ConfigError` too for a bounding of nothing that clients send."""
    if experiment.bounding.initial_bound is None:
        expected = f"one that bounds what a client sends, as clip with a bound: noise {noise.kind} "
        expected += "is scaled by that bound"
        raise ConfigError("bounding.kind", experiment.bounding.kind, expected)
    remembering = experiment.stateful.kind if experiment.stateful else ""
    if experiment.model.local:
        remembering = remembering or "model.local"
    placement = noise.drawn_by()
    mechanism = Mechanism(
        noise.sampling(cohorts),
        queries(experiment, 1.0),
        experiment.rounds,
        placement=placement,
        memory=remembering,
        remembers_noise=experiment.local.remembers and noise.least(1) > 0,
        survey=experiment.evaluate.survey,
    )
    exclusions = (*excluded(experiment, noise), *noise.exclusions(cohorts))
    if is_own(type(cohorts.law)):
        law = f"privacy losses above those declared by {type(cohorts.law).__name__} {DECLARED}"
        exclusions = (law, *exclusions)
    if mechanism.unproved:
        exclusions += (mechanism.unproved,)
    mechanism = replace(mechanism, exclusions=exclusions)
    asked = privacy.rigorous(experiment.privacy.accountants)
    if asked and not covering(experiment, mechanism):
        raise _refusal(experiment, mechanism, asked[0], by_clients=noise.least(1) > 0)
    return mechanism


def at_multiplier(mechanism: Mechanism, facts: Facts, z: float) -> Mechanism:
    """An outline at noise multiplier `z`, over the rounds and surveys that a guarantee composes."""
    released = queries(facts.experiment, z)
    return replace(mechanism, queries=released, rounds=facts.rounds).asking(facts.surveys)


def covering(experiment: Experiment, mechanism: Mechanism) -> tuple[str, ...]:
    """The rigorous accountants among those asked for that cover the mechanism."""
    asked = privacy.rigorous(experiment.privacy.accountants)
    relation = experiment.relation
    return tuple(name for name in asked if not mechanism.uncovered(name, relation))


def first_that_can(accountants: Sequence[str], calibrate: Callable[[str], T]) -> T:
    """The result of `calibrate` for the first accountant that it does not refuse; at a tiny delta
    pld reaches no epsilon. If it refuses all, raises the `ConfigError` of the first.
    """
    refusals = []
    for name in accountants:
        try:
            return calibrate(name)
        except ConfigError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _refusal(
    experiment: Experiment, mechanism: Mechanism, accountant: str, by_clients: bool
) -> ConfigError:
    """The error for a mechanism that no rigorous accountant covers, with what to change."""
    asked = experiment.relation
    reason = mechanism.uncovered(accountant, asked)
    assert reason is not None
    if experiment.selection.hides_size() and by_clients:
        return ConfigError("noise.placement", "client", f"server or auto: {reason}")
    others = [each for each in RELATIONS if not mechanism.uncovered(accountant, each)]
    if not others:
        return ConfigError("privacy.accountants", accountant, f"one that covers the run: {reason}")
    expected = f"{' or '.join(others)} with selection.kind {experiment.selection.kind}"
    drawn = replace(mechanism, placement="server")
    if by_clients and not drawn.uncovered(accountant, asked):
        expected += f"; or {asked} with noise.placement server"
    elif asked == "add_remove":
        expected += "; add_remove needs selection.kind poisson, and noise that the server draws"
    return ConfigError("privacy.relation", asked, expected)
