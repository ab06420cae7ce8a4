"""Noise on sums over cohorts, as accountants count it: who takes part, what is released."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from raydpfl import privacy
from raydpfl.config.setting import Setting
from raydpfl.config.user_classes import is_user_defined
from raydpfl.errors import ConfigError
from raydpfl.privacy import Mechanism, Query, Relation, Sampling
from raydpfl.privacy.guarantee import DECLARED
from raydpfl.privacy.types import Placement

SHOWN = (
    "the tables and figures of this run show exact norms, losses and scores, which are not "
    "noised; how many samples each client has is taken as public"
)
COMMON = (
    "runs with one seed carry the same noise (noise.common), so no two of them may both be shown"
)
# what else a round releases than a bounding's queries, and what the ledger calls its noise
RESERVED = ("updates", "losses", "loss", "survey")
RELATIONS: tuple[Relation, ...] = ("replace_one", "add_remove", "zero_out")
# By section, what accountants take as a user-defined member of it declares it.
ON_SUMS = {
    "noise": "noise that differs from that",
    "bounding": "contributions above the bound",
    "selection": "cohorts that differ from the sampling scheme",
    "weights": "weights above the largest",
}
# at steps cohorts are counted as they are drawn, and weights move what is released
AT_STEPS = {
    "noise": ON_SUMS["noise"],
    "bounding": ON_SUMS["bounding"],
    "local": "batches that differ from the sampling scheme",
}
T = TypeVar("T")


def queries(setting: Setting, z: float) -> tuple[Query, ...]:
    """The sums of a round: the updates, and what bounding and selection also ask for, with bounds
    and stds per unit of the bound in force.

    `z` is the noise multiplier, std of the sum / bound, of all queries together but the losses.
    Raises `ConfigError` for two queries of one name, by which their noise is keyed.
    """
    asked = setting.queries
    names = [query.name for query in asked]
    if len({*names, *RESERVED}) < len(names) + len(RESERVED):
        expected = "a class whose queries have names that differ, none of them "
        expected += f"{', '.join(RESERVED)}; here they are {', '.join(map(str, names))}"
        raise ConfigError("bounding.kind", setting.kinds["bounding"], expected)
    rest = 1 - sum(query.share for query in asked)
    sums = [Query("updates", 1.0, z / math.sqrt(rest))]
    sums += [Query(q.name, q.bound, q.bound * z / math.sqrt(q.share)) for q in asked]
    return (*sums, *([setting.loss_query] if setting.loss_query else []))


def excluded(setting: Setting, common: bool, at_steps: bool = False) -> tuple[str, ...]:
    """What no accountant counts, in words: the `exclusions` of a guarantee. `common`: whether all
    runs with one seed have the same noise; `at_steps`: whether it is drawn at local steps.
    """
    declared = [*(AT_STEPS if at_steps else ON_SUMS).items()]
    if setting.loss_query is not None:
        declared.append(("selection", "losses that differ from the query"))
    return (
        *(
            f"{fact} declared by {setting.kinds[section]} {DECLARED}"
            for section, fact in declared
            if section in setting.user_defined
        ),
        *setting.exclusions,
        *((COMMON,) if common else ()),
        SHOWN,
    )


def outline(
    setting: Setting,
    sampling: Sampling,
    placement: Placement,
    relation: Relation,
    exclusions: tuple[str, ...],
) -> Mechanism:
    """The sums of a run at noise multiplier 1. Raises `ConfigError` where nothing that clients send
    is bounded, or no rigorous accountant that was asked for covers it.
    """
    if setting.bound is None:
        expected = "one that bounds what a client sends, as clip with a bound: noise "
        expected += f"{setting.kinds['noise']} is scaled by that bound"
        raise ConfigError("bounding.kind", setting.kinds["bounding"], expected)
    stateful = setting.kinds[setting.stateful[0]] if setting.stateful else ""
    mechanism = Mechanism(
        sampling,
        queries(setting, 1.0),
        setting.rounds,
        placement=placement,
        stateful=stateful or ("model.local" if setting.local_parameters else ""),
        noise_in_state="local" in setting.stateful and placement == "client",
        survey=setting.survey,
    )
    if is_user_defined(type(sampling.scheme)):
        name = type(sampling.scheme).__name__
        exclusions = (f"privacy losses above those declared by {name} {DECLARED}", *exclusions)
    if mechanism.unproved:
        exclusions += (mechanism.unproved,)
    mechanism = replace(mechanism, exclusions=exclusions)
    asked = privacy.rigorous(setting.accountants)
    if asked and not covering(setting, mechanism, relation):
        raise _refusal(setting, mechanism, asked[0], relation)
    return mechanism


def covering(setting: Setting, mechanism: Mechanism, relation: Relation) -> tuple[str, ...]:
    """The rigorous accountants among those asked for that cover the mechanism."""
    asked = privacy.rigorous(setting.accountants)
    return tuple(name for name in asked if not privacy.covers(name, mechanism, relation))


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
    setting: Setting, mechanism: Mechanism, accountant: str, relation: Relation
) -> ConfigError:
    """The error for a mechanism that no rigorous accountant covers, with what to change."""
    by_clients = mechanism.placement == "client"
    reason = privacy.covers(accountant, mechanism, relation)
    assert reason is not None
    if setting.cohort_hidden and by_clients:
        return ConfigError("noise.placement", "client", f"server or auto: {reason}")
    others = [other for other in RELATIONS if not privacy.covers(accountant, mechanism, other)]
    if not others:
        return ConfigError("privacy.accountants", accountant, f"one that covers the run: {reason}")
    expected = f"{' or '.join(others)} with selection.kind {setting.kinds['selection']}"
    by_server = replace(mechanism, placement="server")
    if by_clients and not privacy.covers(accountant, by_server, relation):
        expected += f"; or {relation} with noise.placement server"
    elif relation == "add_remove":
        expected += "; add_remove needs selection.kind poisson, and noise that the server draws"
    return ConfigError("privacy.relation", relation, expected)
