"""Noise on sums over cohorts, as accountants count it: who takes part, what is released."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from raydpfl import privacy
from raydpfl.config.registry import is_path
from raydpfl.config.setting import Setting
from raydpfl.config.user_classes import is_user_defined
from raydpfl.errors import ConfigError
from raydpfl.privacy import Mechanism, Query, Relation, SamplingScheme
from raydpfl.privacy.guarantee import DECLARED_SUFFIX

SHOWN = (
    "the tables and figures of this run show exact norms, losses and scores, which are not "
    "noised; how many clients there are, and how many samples each has, is taken as public"
)
COMMON = (
    "runs with one seed carry the same noise (noise.common), so no two of them may both be shown"
)
# what else a round releases than a bounding's queries, and what the ledger calls its noise
RESERVED = ("updates", "losses", "loss", "survey")
LOSSES = "losses, tested by `raydpfl check` and not by a run, that differ from the query"
RELATIONS: tuple[Relation, ...] = ("replace_one", "add_remove", "zero_out")
# By section, what accountants take as a user-defined member of it declares it.
ON_SUMS = {
    "noise": "noise that differs from that",
    "bounding": "contributions above the bound",
    "selection": "cohorts that differ from the sampling scheme",
    "selection.response": "cohorts that differ from the sampling scheme",
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
    bounding_queries = setting.queries
    names = [query.name for query in bounding_queries]
    if len({*names, *RESERVED}) < len(names) + len(RESERVED):
        expected = "a class whose queries have names that differ, none of them "
        expected += f"{', '.join(RESERVED)}; here they are {', '.join(map(str, names))}"
        raise ConfigError("bounding.kind", setting.kinds["bounding"], expected)
    update_share = 1 - sum(query.share for query in bounding_queries)
    sums = [Query("updates", 1.0, z / math.sqrt(update_share))]
    sums += [Query(q.name, q.bound, q.bound * z / math.sqrt(q.share)) for q in bounding_queries]
    return (*sums, *([setting.loss_query] if setting.loss_query else []))


def list_exclusions(
    setting: Setting, common: bool, at_steps: bool = False, scheme: SamplingScheme | None = None
) -> tuple[str, ...]:
    """What no accountant counts, in words: the `exclusions` of a guarantee. `common`: whether all
    runs with one seed have the same noise; `at_steps`: whether it is drawn at local steps;
    `scheme`: of the cohorts.
    """
    declared_facts = [*(AT_STEPS if at_steps else ON_SUMS).items()]
    if setting.loss_query is not None:
        declared_facts.append(("selection", LOSSES))
    names = () if scheme is None or not is_user_defined(type(scheme)) else (type(scheme).__name__,)
    return (
        *(f"privacy losses above those declared by {name} {DECLARED_SUFFIX}" for name in names),
        *(
            f"{fact} declared by {setting.kinds[section]} {DECLARED_SUFFIX}"
            for section, fact in declared_facts
            if section in setting.user_defined
        ),
        *(
            f"privacy losses above those of accountant {name} {DECLARED_SUFFIX}"
            for name in privacy.rigorous(setting.accountants)
            if is_path(name)
        ),
        *setting.exclusions,
        *((COMMON,) if common else ()),
        SHOWN,
    )


def covering_accountants(
    setting: Setting, mechanism: Mechanism, relation: Relation
) -> tuple[str, ...]:
    """The rigorous accountants among those asked for that cover the mechanism."""
    rigorous_names = privacy.rigorous(setting.accountants)
    return tuple(name for name in rigorous_names if not privacy.covers(name, mechanism, relation))


def calibrate_first(
    setting: Setting, accountants: Sequence[str], calibrate: Callable[[str], T], instead: str
) -> T:
    """The result of `calibrate` for the first accountant that it does not refuse. If it refuses
    all, raises the `ConfigError` of the first; without accountants one that names the calibrations
    `instead`.
    """
    if not accountants:
        expected = "pld or rdp among them, to calibrate noise.epsilon; or noise.calibration: "
        raise ConfigError("privacy.accountants", list(setting.accountants), f"{expected}{instead}")
    refusals = []
    for name in accountants:
        try:
            return calibrate(name)
        except ConfigError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def check_coverage(setting: Setting, mechanism: Mechanism, relation: Relation) -> None:
    """Raises `ConfigError`, with what to change, for a mechanism that none of the rigorous
    accountants asked for covers.
    """
    accountant = next(iter(privacy.rigorous(setting.accountants)), None)
    if accountant is None or covering_accountants(setting, mechanism, relation):
        return
    by_clients = mechanism.placement == "client"
    reason = privacy.covers(accountant, mechanism, relation)
    assert reason is not None
    if setting.cohort_hidden and by_clients:
        raise ConfigError("noise.placement", "client", f"server or auto: {reason}")
    alternatives = [name for name in RELATIONS if not privacy.covers(accountant, mechanism, name)]
    if not alternatives:
        raise ConfigError("privacy.accountants", accountant, f"one that covers the run: {reason}")
    expected = f"{' or '.join(alternatives)} with selection.kind {setting.kinds['selection']}"
    by_server = replace(mechanism, placement="server")
    if by_clients and not privacy.covers(accountant, by_server, relation):
        expected += f"; or {relation} with noise.placement server"
    elif relation == "add_remove":
        expected += "; add_remove needs secret cohorts of distinct clients, as uniform or poisson"
    raise ConfigError("privacy.relation", relation, expected)
