"""An experiment: the whole description of a run, as one typed tree.

>>> experiment = Experiment.from_dict({
...     "rounds": 3,
...     "data": {"kind": "fashion_mnist_mini", "clients": 300},
...     "selection": {"kind": "uniform", "cohort": 30},
...     "bounding": {"kind": "clip", "bound": 1.0},
... }, overrides=["local.lr=0.05"])
>>> experiment.local.lr, experiment.noise.kind
(0.05, 'none')

A section with a `kind` is one choice of a family and is checked by that member. What depends on the
data or on the machine is checked by `raydpfl.simulation.resolution` and `raydpfl.runtime.launcher`,
still before anything starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny

from raydpfl import data, models, tracking
from raydpfl.config import user_classes
from raydpfl.config.hints import suggestion
from raydpfl.config.overrides import Schema, Spec, is_space
from raydpfl.config.registry import (
    Member,
    Section,
    allow_imports,
    is_path,
    iter_members,
    unimported_paths,
)
from raydpfl.config.setting import Setting
from raydpfl.config.validation import validate
from raydpfl.config.yaml import dump, read
from raydpfl.data.features import Features
from raydpfl.errors import USER_EXCEPTIONS, ConfigError, located_message, rename_fields
from raydpfl.methods import bounding, local, noise, probes, selection, server, weights
from raydpfl.methods.local import Local
from raydpfl.methods.selection.first_responders import Response
from raydpfl.models import metric_columns, metrics, tasks
from raydpfl.models.metrics import Metric, add_defaults
from raydpfl.models.metrics import parse as parse_metrics
from raydpfl.privacy import Relation, Terms, budgets
from raydpfl.privacy.accountants import resolve_accountants
from raydpfl.sections import Client, Evaluate, Privacy, normalize_integer, rule
from raydpfl.training.backends import BACKENDS

PERSONAL = (
    "each client's own model (personal): it is not released, and no epsilon covers it against who "
    "sees it there"
)
TESTED = (
    "the test scores (evaluate.test) are exact answers to queries on test rows, which are the "
    "clients' own; no epsilon covers them, nor what is chosen by them"
)


# The fields that the parameters of `raydpfl.privacy` come from.
_FIELDS = {
    "kind": "selection.kind",
    "population": "data.clients",
    "cohort": "selection.cohort",
    "side_query": "selection.loss_std",
    "batch": "local.batch",
    "steps": "local.steps",
    "sampling": "local.sampling",
    "bound": "bounding.bound",
    "placement": "noise.placement",
    "target": "noise.epsilon",
    "epsilon": "noise.epsilon",
    "budgets": "noise.epsilon",
    "delta": "noise.delta",
    "multiplier": "noise.multiplier",
    "stds": "noise.std",
    "calibration": "noise.calibration",
    "bands": "noise.bands",
    "v": "noise.v",
    "relation": "privacy.relation",
    "colluders": "privacy.colluders",
    "accountant": "privacy.accountants",
}


def report_config_fields() -> AbstractContextManager[None]:
    """Errors on parameters of `raydpfl.privacy` name the fields that their values come from."""
    return rename_fields(lambda name: _FIELDS.get(name, name))


class Experiment(Section):
    """Everything that decides a run's bits, and how it is carried out. See `raydpfl show` for all
    keys with their defaults.
    """

    seed: Annotated[int, BeforeValidator(normalize_integer)] = Field(
        default=0, ge=0, lt=1 << 64, description="of all that is drawn at random"
    )
    rounds: int = Field(default=100, ge=1, le=10**9, description="T")
    data: Annotated[
        SerializeAsAny[data.Data], Field(description="samples of clients, and the test set")
    ]
    model: Annotated[SerializeAsAny[models.Model], Field(description="what clients train")]
    selection: Annotated[
        SerializeAsAny[selection.Selection], Field(description="the clients of a round")
    ]
    local: Annotated[SerializeAsAny[Local], Field(description="what a client does in a round")]
    bounding: Annotated[
        SerializeAsAny[bounding.Bounding], Field(description="of what a client sends")
    ]
    noise: Annotated[SerializeAsAny[noise.Noise], Field(description="that makes the sum private")]
    weights: Annotated[SerializeAsAny[weights.Weights], Field(description="of clients in the sum")]
    server: Annotated[SerializeAsAny[server.Server], Field(description="how a sum moves the model")]
    privacy: Annotated[Privacy, Field(description="delta, and who accounts")] = Privacy()
    client: Annotated[Client, Field(description="where clients train")] = Client()
    evaluate: Annotated[Evaluate, Field(description="scores of the model")] = Evaluate()
    personal: SerializeAsAny[Local] | None = Field(
        default=None,
        description=(
            "a model of each client's own, which it trains by this local rule in the rounds that "
            "it is part of, and never sends; `proximal` draws it to the model (Ditto)"
        ),
    )
    measure: Annotated[
        tuple[SerializeAsAny[probes.Probe], ...], Field(description="what else is measured")
    ] = ()
    track: Annotated[
        tuple[SerializeAsAny[tracking.Tracker], ...], Field(description="where a run is shown")
    ] = tracking.parse(tracking.DEFAULT)

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, Any],
        overrides: Iterable[str] = (),
        imports: Iterable[str] | None = None,
    ) -> Experiment:
        """An experiment from the tree of a config. Raises `ConfigError` for the first wrong field.

        Args:
            values: the tree.
            overrides: fields to change, each `section.key=value`, the value in YAML.
            imports: sections whose import paths are imported; None: all. Members of the others are
                placeholders (`unimported_kinds`), and combinations with them are not checked.
        """
        with allow_imports(imports):
            tree = overridden(values, overrides)
            _check_single_run(tree)
            fields = {
                name: SECTIONS[name].value(name, tree.get(name, SECTIONS[name].default))
                if name in SECTIONS
                else tree[name]
                for name in cls.model_fields
                if name in SECTIONS or name in tree
            }
            experiment = validate(cls, "", fields)
        if experiment.unimported_kinds.keys() - {"model", "server", "evaluate", "track"}:
            return experiment
        per_sample = experiment.bounding.sample_bound is not None
        noise = experiment.noise.resolve_placement(per_sample, experiment.selection.hides_size())
        experiment = experiment.model_copy(update={"noise": noise})
        setting = experiment.setting()
        for section, member in experiment._members():
            _check_member(replace(setting, section=section), member)
        experiment.evaluate.check(setting, experiment.evaluation_scores, experiment.metrics)
        return experiment

    def setting(self) -> Setting:
        """The facts that cross its families, for the section `noise`."""
        members = dict(self._members())
        rule = self.local.linear()
        stateful = [name for name in ("local", "bounding") if getattr(self, name).stateful]
        return Setting(
            section="noise",
            kinds={section: member.kind for section, member in members.items()},
            user_defined=frozenset(name for name in members if members[name].is_user_defined),
            rounds=self.rounds,
            drawn_by=self.noise.drawn_by(),
            virtual_cohort=self.noise.stands_for is not None,
            bound=self.bounding.initial_bound,
            bound_order=self.bounding.order,
            per_sample_bound=self.bounding.sample_bound,
            adaptive_bound=self.bounding.adapts,
            sends_model=self.bounding.sends_model(),
            queries=self.bounding.queries(),
            stateful=tuple(stateful),
            plain_steps=rule is not None and rule.plain and not self.local.corrects,
            epochs=self.local.epochs,
            dropout=self.selection.dropout,
            cohort_hidden=self.selection.hides_size(),
            min_separation=self.selection.separation,
            most_participations=self.selection.most_participations(self.rounds),
            asks_losses=self.selection.asks,
            loss_query=self.selection.loss_query,
            data_weighted=self.selection.weighs_data,
            uncounted=self.selection.uncounted,
            weighted=not self.weights.plain(),
            momentum=self.server.persistence(),
            shared_samples=self.data.overlaps(),
            local_parameters=bool(self.model.local),
            tested=self.evaluate.test,
            held_out=self.evaluate.held_out,
            survey=self.evaluate.survey,
            accountants=self.privacy.accountants,
            relation=self.privacy.relation,
            individual=self.privacy.individual is not None,
            colluders=self.privacy.colluders,
            budget=self.privacy.budget,
            precision=self.client.precision,
            drops_failures=self.client.on_error == "drop",
            exclusions=(
                *self.data.exclusions,
                *self.selection.exclusions,
                *self.evaluate.exclusions,
                *self.model.exclusions,
                *((TESTED,) if self.evaluate.test and self.data.tests_clients else ()),
                *((PERSONAL,) if self.personal else ()),
            ),
            sample_exclusions=self.data.sample_exclusions,
        )

    @classmethod
    def from_yaml(
        cls, path: str | Path, overrides: Iterable[str] = (), imports: Iterable[str] | None = None
    ) -> Experiment:
        """As `from_dict`, from a YAML file."""
        return cls.from_dict(read(path), overrides, imports)

    def import_members(self) -> Experiment:
        """The same experiment, with all that the config names imported."""
        return Experiment.from_dict(self.to_dict()) if self.unimported_kinds else self

    @property
    def unimported_kinds(self) -> dict[str, str]:
        """The import path by section, of members whose classes were not imported."""
        kinds: dict[str, str] = {}
        for section, member in self._members():
            if member.is_placeholder():
                kinds.setdefault(section.partition(".")[0], member.kind)
        return kinds

    def code(self, sections: Iterable[str] | None = None) -> list[str]:
        """The import paths in these sections (None: all) that were not imported."""
        names = type(self).model_fields if sections is None else sections
        return [path for name in names for path in unimported_paths(getattr(self, name))]

    def named_files(self) -> set[tuple[str, str]]:
        """(field, file) of the files that the config names: by members' `files`, and texts of
        user-defined members (and `model.args`) that are names of files.
        """
        return {file for section, member in self._members() for file in _files(section, member)}

    def user_files(self) -> set[tuple[str, str]]:
        """Those of `named_files` that user-defined members name, but for those of data and
        `model.init`, whose contents `Plan.shards` and `Model.meaning` have.
        """
        members = [(name, member) for name, member in self._members() if is_path(member.kind)]
        members = [pair for pair in members if pair[0].partition(".")[0] != "data"]
        files = {file for section, member in members for file in _files(section, member)}
        return {(field, name) for field, name in files if field != "model.init"}

    def check_user_methods(self) -> None:
        """Raises `ConfigError` for a user-defined member that lacks a method of its family."""
        for section, member in self._members():
            if is_path(member.kind):
                user_classes.check_required_methods(type(member), section, member.kind)

    def accounted_with(self) -> set[str]:
        """The sections on which what a run spends depends by its members."""
        return {name for _, member in self._members() for name in member.accounted_with}

    def warnings(self) -> list[str]:
        """What readers of the results should know, in words (`Member.warnings`)."""
        setting = self.setting()
        return [text for _, member in self._members() for text in member.warnings(setting)]

    def _members(self) -> Iterator[tuple[str, Member]]:
        for name in type(self).model_fields:
            yield from iter_members(getattr(self, name), name)

    def to_dict(self) -> dict[str, Any]:
        """The complete tree, defaults included, in plain YAML types."""
        return self.model_dump(mode="json", round_trip=True)  # without computed fields

    def to_yaml(self) -> str:
        """The complete config; `from_yaml` of it is this experiment."""
        return dump(self.to_dict())

    @property
    def private(self) -> bool:
        """Whether a run claims any privacy."""
        return self.noise.private()

    @property
    def stateful(self) -> Member | None:
        """The member by which clients have a state; at most one does."""
        return next((member for member in (self.local, self.bounding) if member.stateful), None)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What the model is scored by on rows of all clients together."""
        metrics = self.evaluate.metrics
        if metrics == "auto":
            metrics = parse_metrics(self.data.task.scores())
        return add_defaults(metrics)

    @property
    def is_chunk_invariant(self) -> bool:
        """Whether all that a client trains, its personal model included, has the same bits in any
        chunk.
        """
        return BACKENDS[self.client.backend].threads and self.personal is None

    @property
    def scores(self) -> tuple[str, ...]:
        """The columns of the rounds table for evaluations; those of the test set in any case."""
        columns = metric_columns.columns(self.metrics, bool(self.evaluate.validation))
        metric = self.evaluate.per_client
        return columns if metric is None else (*columns, *metric_columns.client_statistics(metric))

    @property
    def evaluation_scores(self) -> tuple[str, ...]:
        """The columns that an evaluation fills; none where there is nothing to evaluate on."""
        sets = {
            metric_columns.TEST: self.evaluate.test,
            metric_columns.VALIDATION: True,
            metric_columns.CLIENT: True,
        }
        return tuple(name for name in self.scores if sets[metric_columns.score_set(name)])

    @property
    def accountants(self) -> tuple[str, ...]:
        """Those that are asked for, `paper` resolved to the formulas for clients or samples."""
        is_per_step = self.noise.drawn_by() == "step"
        return resolve_accountants(self.privacy.accountants, "sample" if is_per_step else "client")

    @property
    def terms(self) -> Terms:
        """What guarantees are given at: relation, delta, and the constant of papers' formulas."""
        default_relation: Relation = "add_remove" if self.selection.hides_size() else "replace_one"
        return self.noise.terms(self.privacy.relation, default_relation)

    @property
    def relation(self) -> Relation:
        """The neighbouring relation of the guarantees."""
        return self.terms.relation


SECTIONS = Schema(
    {
        "selection": Spec(selection.Selection, selection.FAMILY, {"kind": "uniform", "cohort": 30}),
        "local": Spec(Local, local.FAMILY, {"kind": "sgd"}),
        "bounding": Spec(bounding.Bounding, bounding.FAMILY, {"kind": "none"}),
        "noise": Spec(noise.Noise, noise.FAMILY, {"kind": "none"}),
        "weights": Spec(weights.Weights, weights.FAMILY, {"kind": "uniform"}),
        "server": Spec(server.Server, server.FAMILY, {"kind": "sgd"}),
        "data": Spec(data.Data, data.FAMILY, {"kind": "fashion_mnist_mini", "clients": 300}),
        "model": Spec(
            models.Model,
            models.FAMILY,
            {"kind": "softmax"},
            parse=models.parse,
            foreign_base=models.Module,
        ),
        "data.sizes": Spec(data.Sizes, data.SIZES),
        "data.partition": Spec(data.Partition, data.PARTITIONS),
        "data.features": Spec(Features, data.FEATURES),
        "data.task": Spec(tasks.Task, tasks.FAMILY),
        "selection.response": Spec(Response, selection.RESPONSES),
        "noise.epsilon": Spec(budgets.BudgetDistribution, budgets.FAMILY),
        "privacy.individual": Spec(budgets.BudgetDistribution, budgets.FAMILY),
        "personal": Spec(Local, local.FAMILY, default_kind="sgd", parse=partial(rule, "personal")),
        "measure": Spec(probes.Probe, probes.FAMILY, (), parse=probes.parse),
        "track": Spec(tracking.Tracker, tracking.FAMILY, tracking.DEFAULT, parse=tracking.parse),
        "evaluate.metrics": Spec(Metric, metrics.FAMILY),
        "evaluate.fine_tune": Spec(Local, local.FAMILY, default_kind="sgd"),
        "privacy": Spec(Privacy, default={}),
        "client": Spec(Client, default={}),
        "evaluate": Spec(Evaluate, default={}),
    }
)
SECTIONS.root = Experiment
DEFAULTS = SECTIONS.defaults
overridden = SECTIONS.overridden


def _check_single_run(tree: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for what is no section, and for a sweep, which is not one run."""
    sweeps = "raydpfl sweep runs a config with search spaces"
    for key, use in (("study", "raydpfl reproduce runs a study"), ("sweep", sweeps)):
        if key in tree:
            raise ConfigError(key, tree[key], f"none in the config of one run; {use}")
    unknown_keys = [key for key in tree if key not in Experiment.model_fields]
    if unknown_keys:
        expected = f"one of the sections {', '.join(Experiment.model_fields)}"
        hint = suggestion(str(unknown_keys[0]), Experiment.model_fields)
        raise ConfigError(unknown_keys[0], tree[unknown_keys[0]], f"{expected}{hint}")
    nodes = [(key, value) for key, value in tree.items() if isinstance(value, Mapping)]
    for path, node in nodes:
        if is_space(node):
            raise ConfigError(path, node, f"one value; this is a search space, {sweeps}")
        for key, value in node.items():
            if isinstance(value, Mapping):
                nodes.append((f"{path}.{key}", value))


def _files(section: str, member: Member) -> Iterator[tuple[str, str]]:
    """(field, file) of the files that a member names: see `Experiment.named_files`."""
    yield from ((f"{section}.{field}", name) for field, name in member.files().items())
    if is_path(member.kind):
        yield from _paths(section, member.model_dump(mode="json"))


def _paths(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """The texts in a tree that look like names of files and are, with their dotted keys."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            if name != "kind":
                yield from _paths(f"{key}.{name}", part)
    elif isinstance(value, list):
        for part in value:
            yield from _paths(key, part)
    elif isinstance(value, str) and re.search(r"[/.]", value) and os.path.isfile(value):
        yield key, value


def _check_member(setting: Setting, member: Member) -> None:
    """Calls every `check` of a member's classes, its base first. Raises `ConfigError`, also for a
    user-defined `check` that raises anything else, and for options of a user-defined class that no
    config can hold.
    """
    if member.is_user_defined:
        user_classes.check_options(member, setting.section, member.kind)
    for cls in reversed(type(member).__mro__):
        check = vars(cls).get("check")
        if check is None:
            continue
        try:
            check(member, setting)
        except ConfigError:
            raise
        except USER_EXCEPTIONS as error:
            if not user_classes.is_user_defined(cls):
                raise
            reason = located_message(error)
            expected = f"a class whose check raises nothing but ConfigError ({reason})"
            raise ConfigError(f"{setting.section}.kind", member.kind, expected) from None
