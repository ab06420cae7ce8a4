"""An experiment: the whole description of a run, as one typed tree.

>>> experiment = Experiment.from_dict({
...     "rounds": 3,
...     "data": {"kind": "fashion_mnist_mini", "clients": 300},
...     "selection": {"kind": "uniform", "cohort": 30},
...     "bounding": {"kind": "clip", "bound": 1.0},
... }, overrides=["local.lr=0.05"])
>>> experiment.local.lr, experiment.noise.kind
(0.05, 'none')

A section with a `kind` is one choice of a family and is checked by that member alone; the rest is
checked here. What depends on the data or on the machine is checked by `raydpfl.simulation.plan` and
`raydpfl.simulation.pool`, still before anything starts.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    SerializeAsAny,
    StrictInt,
    field_validator,
)

from raydpfl import data, models
from raydpfl import tracking as trackers
from raydpfl.config import user_classes
from raydpfl.config.hints import said
from raydpfl.config.registry import (
    Member,
    Section,
    choose,
    fields_of,
    importing,
    imports,
    is_path,
    load,
    unread,
    validate,
    within,
)
from raydpfl.core.hardware import Precision
from raydpfl.errors import RAISED, ConfigError, in_line, renamed
from raydpfl.methods import bounding, local, noise, selection, server, weights
from raydpfl.methods import probes as measures
from raydpfl.methods.local import Local
from raydpfl.models import metric_columns, tasks
from raydpfl.models.client_histogram import Histogram
from raydpfl.models.metrics import Metric
from raydpfl.models.metrics import parse as parse_metrics
from raydpfl.models.metrics import standing as standing_metrics
from raydpfl.privacy import Relation, Survey, Terms, budgets
from raydpfl.privacy.accountants import ASKED, named, standing
from raydpfl.storage.files import read_text

log = logging.getLogger("raydpfl")


def whole(value: Any) -> Any:
    """A float without a fraction as the int that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def asked_for(value: Any) -> str:
    """The name of an accountant, or the import path of a user's own, which is imported where that
    is allowed. Raises `ValueError`.
    """
    if isinstance(value, str) and (value in ASKED or ":" in value):
        if value not in ASKED and imports("privacy"):
            with renamed(lambda _: "privacy.accountants"):
                named(value)
        return value
    *most, last = map(repr, ASKED)
    known = f"{', '.join(most)} or {last}"
    raise ValueError(f"{known}; or the import path of your own (package.module:Name)")


Asked = Annotated[str, PlainValidator(asked_for)]
Whole = Annotated[StrictInt, BeforeValidator(whole)]


class Privacy(Section):
    """Who accounts, under which neighbouring relation, and how much may be spent."""

    # the first rigorous one calibrates the noise
    accountants: tuple[Asked, ...] = ("pld", "rdp", "paper")
    # auto: add_remove for Poisson, else replace_one
    relation: Literal["auto", "replace_one", "add_remove", "zero_out"] = "auto"
    # epsilon that the run stops short of exceeding
    budget: float | None = Field(default=None, gt=0)

    @field_validator("accountants", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("accountants", mode="after")
    @classmethod
    def _once_each(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("each accountant once")
        return value


class Client(Section):
    """How clients become actors, and how they train."""

    # auto: in this process, until actors that start behind the rounds pay (`raydpfl.runtime.launcher`)
    actors: Whole | Literal["auto", "per-client"] = "auto"
    # cores of each actor, of those that Ray has, and the threads of compiled code in it
    num_cpus: float = Field(default=1, ge=0)
    # share of a GPU of each actor; 0: it trains on the CPU
    num_gpus: float = Field(default=0, ge=0)
    # what the products of training are taken in; parameters, losses and updates are float32
    precision: Precision = "float32"
    # clients trained at once, at most; bits depend on it. auto: some of a cohort for each core; on
    # a GPU all of it, where half of the memory holds them, so that several actors need a number
    lane: Whole | Literal["auto"] = "auto"
    # how a lane trains; auto: the fastest that carries the method out
    way: Literal[
        "auto",
        "compiled",
        "sample_space",
        "fused",
        "convolutional",
        "layerwise",
        "one_batch",
        "vmap",
        "loop",
        "noop",
    ] = "auto"
    # Seconds that an actor has for its share of a round, before it is replaced; auto: see
    # `raydpfl.runtime.actor_pool.Patience`.
    # Without actors nobody could take over: a number then ends the run, and auto waits.
    timeout: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    # drop: the client counts with an update of 0 (scaffold: one that leaves its variate as it is),
    # and its noise
    on_error: Literal["fail", "drop"] = "fail"

    @field_validator("precision", mode="after")
    @classmethod
    def _of_gpus(cls, value: Precision, info: Any) -> Precision:
        if value == "tf32" and not info.data.get("num_gpus"):
            raise ValueError("float32 or bfloat16 without a GPU (client.num_gpus is 0)")
        return value

    @field_validator("actors", "lane", mode="after")
    @classmethod
    def _counts(cls, value: int | str, info: Any) -> int | str:
        least = 0 if info.field_name == "actors" else 1
        if isinstance(value, int) and value < least:
            raise ValueError(f"a number of at least {least}")
        return value


class Stop(Section):
    """When a run ends before its last round: once a score of rows held out is no better for long
    enough.
    """

    metric: str = "validation_loss"  # a score of rows held out, never of the test set
    patience: int = Field(ge=1)  # evaluations after the best one without a better one
    # min, max: of which less, or more, is better; auto: as the metric says
    mode: Literal["auto", "min", "max"] = "auto"

    def check(self, experiment: Experiment) -> None:
        """Raises `ConfigError` for a score that evaluations do not give, or of which nobody knows
        what is better.
        """
        held_out = experiment.given if experiment.evaluate.validation else ()
        known = [name for name in held_out if metric_columns.set_of(name) != metric_columns.TEST]
        if self.metric not in known:
            held = ", ".join(known) or "evaluate.validation holds out no rows: give it a share"
            accepted = f"a score of rows held out of training ({held})"
            raise ConfigError("evaluate.stop.metric", self.metric, accepted)
        if not self.sign(experiment):
            accepted = f"min or max: nobody knows of {self.metric} whether more of it is better"
            raise ConfigError("evaluate.stop.mode", self.mode, accepted)

    def sign(self, experiment: Experiment) -> int:
        """1: more of the score is better; -1: less of it."""
        if self.mode == "auto":
            return metric_columns.sign(self.metric, experiment.metrics)
        return 1 if self.mode == "max" else -1


def _rule(section: str, value: Any) -> Any:
    """A local rule for personal models, by default of kind sgd; None: there is none."""
    if isinstance(value, Mapping):
        value = {"kind": "sgd", **value}
    return None if value is None else choose(section, value, local.FAMILY, Local)


class HeldOut(Section):
    """Clients that are held out of training."""

    clients: float = Field(gt=0, lt=1)  # share of them


class Evaluate(Section):
    """When the model is evaluated, and on what."""

    every: int = Field(default=10, ge=1)  # rounds; the last round always counts
    batch: int = Field(default=1000, ge=1)  # rows at a time
    test: bool = True  # false: the test set is not looked at
    # share of each client's rows that is held out of training and evaluated on; or, as in
    # {clients: 0.1}, of the clients, with all their rows, who are no part of the population then
    validation: Annotated[float, Field(ge=0, lt=1)] | HeldOut = 0.0

    # what the model is scored by: the first is that by which a run is followed; auto: as the task
    # says. The loss and the accuracy are always there
    metrics: Literal["auto"] | tuple[SerializeAsAny[Metric], ...] = "auto"

    # a metric of every client, on the rows that it holds out (on those that it trains on, where
    # none are), and what it comes to over the clients: exact, and so not private
    per_client: SerializeAsAny[Metric] | None = None
    # per_client as counts over bins with noise, which guarantees account for
    histogram: Histogram | None = None
    # per_client of a model that each client trains further, alone, by this local rule, on the rows
    # that it trains on, and that it then forgets
    fine_tune: SerializeAsAny[Local] | None = None
    stop: Stop | None = None  # when the run ends early

    @field_validator("fine_tune", mode="before")
    @classmethod
    def _fine_tune(cls, value: Any) -> Any:
        return _rule("evaluate.fine_tune", value)

    @field_validator("per_client", mode="before")
    @classmethod
    def _per_client(cls, value: Any) -> Any:
        return None if value is None else parse_metrics([value], "evaluate.per_client")[0]

    @field_validator("metrics", mode="before")
    @classmethod
    def _metrics(cls, value: Any) -> Any:
        return value if value == "auto" else parse_metrics(value)

    @property
    def apart(self) -> float | dict[str, float]:
        """What is held out of training, as `raydpfl.data.prepare` takes it."""
        if isinstance(self.validation, HeldOut):
            return {"clients": self.validation.clients}
        return self.validation

    @property
    def survey(self) -> Survey | None:
        """What all clients are asked for, as accountants are told; None: nothing with noise."""
        if self.per_client is None or self.histogram is None:
            return None
        return Survey(self.per_client.name, self.histogram.std)

    def check(self, experiment: Experiment) -> None:
        """Raises `ConfigError` for what an evaluation cannot give."""
        if self.stop:
            self.stop.check(experiment)
        share = self.validation if isinstance(self.validation, float) else 0.0
        if self.fine_tune and not (self.per_client and share):
            accepted = (
                "none without evaluate.per_client, the metric that a client is scored by, and"
            )
            reason = f"{accepted} evaluate.validation, a share of its rows that it is scored on"
            raise ConfigError("evaluate.fine_tune", self.fine_tune.kind, reason)
        if self.histogram is None:
            return
        noise = experiment.noise
        field = "evaluate.histogram"
        if self.per_client is None:
            accepted = "none without evaluate.per_client, the metric whose values it is of"
            raise ConfigError(field, self.histogram.model_dump(mode="json"), accepted)
        if not noise.private() or noise.protects() != "client" or not noise.simulated():
            accepted = (
                "noise that protects the clients who are asked, on what they send or on its sum "
                "(without noise nothing is private, and evaluate.per_client gives exact scores; at "
                "local steps nobody adds up answers; of a virtual cohort not all answer)"
            )
            raise ConfigError(field, self.histogram.model_dump(mode="json"), accepted)
        if experiment.personal or experiment.model.local:
            accepted = (
                "none with models of clients' own (model.local, personal): who has one has taken "
                "part, and a secret cohort would be told by the answers"
            )
            raise ConfigError(field, self.histogram.model_dump(mode="json"), accepted)
        if experiment.rounds % self.every:
            accepted = (
                f"a multiple of evaluate.every, {self.every}, with evaluate.histogram: clients are "
                "asked after every so many rounds, and not once more at the end"
            )
            raise ConfigError("rounds", experiment.rounds, accepted)

    @property
    def exclusions(self) -> tuple[str, ...]:
        """What of it no accountant counts, in words."""
        said: tuple[str, ...] = ()
        if self.per_client and not self.histogram:
            said += (
                f"the {self.per_client.name} of every client (evaluate.per_client), its quantiles, "
                "mean and spread are exact answers to queries on the clients' rows; no epsilon "
                "covers them",
            )
        if not self.validation:
            return said
        return (
            *said,
            "the validation scores (evaluate.validation) are exact answers to queries on rows of "
            "the clients, which were held out of training; no epsilon covers them, nor what is "
            "chosen by them",
        )


# Where a run's values of the parameters of `raydpfl.privacy` come from.
_FIELDS = {
    "kind": "selection.kind",
    "population": "data.clients",
    "cohort": "selection.cohort",
    "beside": "selection.loss_std",
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
    "accountant": "privacy.accountants",
}


def as_fields() -> AbstractContextManager[None]:
    """What `raydpfl.privacy` refuses by the name of a parameter is refused by that of the field
    which its value came from.
    """
    return renamed(lambda name: _FIELDS.get(name, name))


FAMILIES: dict[str, tuple[dict, type]] = {
    "selection": (selection.FAMILY, selection.Selection),
    "local": (local.FAMILY, local.Local),
    "bounding": (bounding.FAMILY, bounding.Bounding),
    "noise": (noise.FAMILY, noise.Noise),
    "weights": (weights.FAMILY, weights.Weights),
    "server": (server.FAMILY, server.Server),
}
KINDS: dict[str, dict] = {  # of every section that is a choice, those within others too
    **{name: family for name, (family, _) in FAMILIES.items()},
    "data": data.FAMILY,
    "model": models.FAMILY,
    "data.sizes": data.SIZES,
    "data.partition": data.PARTITIONS,
    "data.features": data.FEATURES,
    "data.task": tasks.FAMILY,
    "selection.response": selection.RESPONSES,
    "noise.epsilon": budgets.FAMILY,
    "evaluate.fine_tune": local.FAMILY,
    "personal": local.FAMILY,
}


class Experiment(Section):
    """Everything that decides a run's bits, and how it is carried out. See `raydpfl show` for all
    keys with their defaults.
    """

    # of all that is drawn at random
    seed: Annotated[int, BeforeValidator(whole)] = Field(default=0, ge=0, lt=1 << 64)
    rounds: int = Field(default=100, ge=1, le=10**9)  # T
    data: SerializeAsAny[data.Data]
    model: SerializeAsAny[models.Model]
    selection: SerializeAsAny[selection.Selection]
    local: SerializeAsAny[Local]
    bounding: SerializeAsAny[bounding.Bounding]
    noise: SerializeAsAny[noise.Noise]
    weights: SerializeAsAny[weights.Weights]
    server: SerializeAsAny[server.Server]
    privacy: Privacy = Privacy()
    client: Client = Client()
    evaluate: Evaluate = Evaluate()
    # a model of each client's own, which it trains by this local rule in the rounds that it is part
    # of, and never sends; `proximal` draws it to the model (Ditto)
    personal: SerializeAsAny[Local] | None = None
    measure: tuple[SerializeAsAny[measures.Probe], ...] = ()
    track: tuple[SerializeAsAny[trackers.Tracker], ...] = trackers.parse(trackers.DEFAULT)

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, Any],
        overrides: Iterable[str] = (),
        imports: Iterable[str] | None = None,
    ) -> Experiment:
        """An experiment from a config.

        Args:
            values: the tree of the config.
            overrides: fields to change, each `section.key=value`, the value in YAML.
            imports: sections whose import paths are imported; None: all. Members of the others are
                `unread`; what no section alone can refuse is left to whoever imports them.

        Raises:
            ConfigError: names the first field that is wrong.
        """
        with importing(imports):
            tree = overridden(values, overrides)
            _one_run(tree)
            tree = {**DEFAULTS, **tree}
            built: dict[str, Any] = {key: tree[key] for key in ("seed", "rounds") if key in tree}
            built["data"] = data.parse(tree["data"])
            built["model"] = models.parse(tree["model"])
            for name, (family, base) in FAMILIES.items():
                built[name] = choose(name, tree[name], family, base)
            for name, cls_of_section in SECTIONS.items():
                built[name] = validate(cls_of_section, name, tree.get(name, {}))
            built["personal"] = _rule("personal", tree.get("personal"))
            built["measure"] = measures.parse(tree.get("measure", ()))
            built["track"] = trackers.parse(tree.get("track", trackers.DEFAULT))
            experiment = validate(cls, "", built)
        if experiment.unread.keys() - {"model", "server", "evaluate", "track"}:
            return experiment
        placed = experiment.noise.placed(experiment)
        experiment = experiment.model_copy(update={"noise": placed})
        for section, member in experiment._every_member():
            _refusals(experiment, section, member)
        experiment.evaluate.check(experiment)
        return experiment

    @classmethod
    def from_yaml(
        cls, path: str | Path, overrides: Iterable[str] = (), imports: Iterable[str] | None = None
    ) -> Experiment:
        """As `from_dict`, from a YAML file."""
        return cls.from_dict(read(path), overrides, imports)

    def imported(self) -> Experiment:
        """With everything that the config names imported."""
        return Experiment.from_dict(self.to_dict()) if self.unread else self

    @property
    def unread(self) -> dict[str, str]:
        """The sections that are, or hold, a member whose class was not imported, and the import
        paths."""
        found: dict[str, str] = {}
        for section, member in self._every_member():
            if member.unread():
                found.setdefault(section.partition(".")[0], member.kind)
        return found

    def code(self, sections: Iterable[str] | None = None) -> list[str]:
        """The import paths in these sections (None: all), where nothing of them was imported."""
        names = type(self).model_fields if sections is None else sections
        found = [path for name in names for path in unread(getattr(self, name))]
        own_accountants = [each for each in self.privacy.accountants if ":" in each]
        return found + (own_accountants if "privacy" in names else [])

    def named_files(self) -> set[tuple[str, str]]:
        """The files that the config names, each with the field that does: where members say so, and
        text of own members (and `model.args`) that is the name of a file."""
        found = set()
        for section, member in self._every_member():
            named = member.files()
            if is_path(member.kind):
                named = {**_paths(member.model_dump(mode="json")), **named}
            found |= {(f"{section}.{field}", name) for field, name in named.items()}
        return found

    def complete(self) -> None:
        """Raises `ConfigError` for an own member that lacks what its base leaves to it."""
        for section, member in self._every_member():
            if is_path(member.kind):
                user_classes.complete(type(member), section, member.kind)

    def accounted_with(self) -> set[str]:
        """The sections that what another one's member spends depends on."""
        return {name for _, member in self._every_member() for name in member.accounted_with}

    def warnings(self) -> list[str]:
        """What its members have whoever reads the results know."""
        said: list[str] = []
        for _, member in self._every_member():
            said += member.warnings(self)
        return said

    def _every_member(self) -> Iterator[tuple[str, Member]]:
        for name in type(self).model_fields:
            yield from within(getattr(self, name), name)

    def to_dict(self) -> dict[str, Any]:
        """The complete tree, defaults included, in plain YAML types."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The complete config; `from_yaml` of it is this experiment."""
        return dump(self.to_dict())

    @property
    def private(self) -> bool:
        """Whether a run claims any privacy."""
        return self.noise.private()

    @property
    def stateful(self) -> Member | None:
        """The member by which clients keep something from one of their rounds to the next; at most
        one does.
        """
        return next((member for member in (self.local, self.bounding) if member.remembers), None)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What the model is scored by on rows of all clients together."""
        given = self.evaluate.metrics
        if given == "auto":
            given = parse_metrics(self.data.task.scores())
        return standing_metrics(given)

    @property
    def scores(self) -> tuple[str, ...]:
        """The columns of the rounds table that an evaluation fills; those of the test set are there
        in any case.
        """
        found = metric_columns.columns(self.metrics, bool(self.evaluate.validation))
        metric = self.evaluate.per_client
        return found if metric is None else (*found, *metric_columns.of_clients(metric))

    @property
    def given(self) -> tuple[str, ...]:
        """The scores that an evaluation gives; none where there is nothing to evaluate on."""
        sets = {
            metric_columns.TEST: self.evaluate.test,
            metric_columns.VALIDATION: True,
            metric_columns.CLIENT: True,
        }
        return tuple(name for name in self.scores if sets[metric_columns.set_of(name)])

    @property
    def accountants(self) -> tuple[str, ...]:
        """Those that are asked for; where samples are protected the papers' formulas for theirs
        stand for `paper`.
        """
        return standing(self.privacy.accountants, self.noise.protects())

    @property
    def terms(self) -> Terms:
        """What guarantees are given at: relation, delta, and the constant of papers' formulas."""
        natural: Relation = "add_remove" if self.selection.hides_size() else "replace_one"
        return self.noise.terms(self.privacy.relation, natural)

    @property
    def relation(self) -> Relation:
        """The neighbouring relation of the guarantees."""
        return self.terms.relation


SECTIONS: dict[str, type[Section]] = {
    "privacy": Privacy,
    "client": Client,
    "evaluate": Evaluate,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"kind": "fashion_mnist_mini", "clients": 300},
    "model": {"kind": "softmax"},
    "selection": {"kind": "uniform", "cohort": 30},
    "local": {"kind": "sgd"},
    "bounding": {"kind": "none"},
    "noise": {"kind": "none"},
    "weights": {"kind": "uniform"},
    "server": {"kind": "sgd"},
}


DEPTH = 50  # of values within values
_TOO_DEEP = "values within values, too deep"


def read(path: str | Path, field: str = "config") -> Any:
    """What a YAML file holds, an empty mapping if nothing. Raises `ConfigError` naming `field`."""
    try:
        values = parse_yaml(read_text(Path(path)))
    except yaml.YAMLError as error:
        raise ConfigError(field, str(path), f"a YAML file ({error})") from None
    except (OSError, ValueError) as error:  # also text that is none, and a name that none can have
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(field, str(path), f"a file that can be read ({reason})") from None
    return {} if values is None else values


MERGED = 10_000  # keys that a mapping may have once others are merged into it (<<)


class _Loader(yaml.SafeLoader):
    """YAML in which 1e1 is a number, as in YAML 1.2, and not text as in YAML 1.1; and in which a
    mapping has a key once, as else the last would silently count."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    told = f"the key {key.value!r} twice in one mapping"
                    raise yaml.constructor.ConstructorError(None, None, told, key.start_mark)
                seen.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MERGED:
            raise yaml.YAMLError(f"a mapping that others make larger than {MERGED:,} keys")


class _Dumper(yaml.SafeDumper):
    """What `_Loader` reads back: text that looks like such a number stands in quotes."""


for _yaml in (_Loader, _Dumper):
    _scientific = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")
    _yaml.add_implicit_resolver("tag:yaml.org,2002:float", _scientific, list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """What a text in YAML says, numbers such as 1e1 being numbers.

    Raises `yaml.YAMLError`, also for values nested deeper than `DEPTH`, and for aliases by which a
    short text says more than anyone could have meant.
    """
    try:
        values = yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError(_TOO_DEEP) from None
    # as of a date or a number that is none
    except (ValueError, OverflowError, AttributeError, TypeError) as error:
        raise yaml.YAMLError(str(error)) from None
    _check_size(values, max(len(text), 10_000))
    return values


def _check_size(values: Any, most: int) -> None:
    """Raises `yaml.YAMLError` for values nested deeper than `DEPTH`, or for more than `most`."""
    left = [(values, 0)]
    while left:
        value, depth = left.pop()
        most -= 1
        if depth > DEPTH:
            raise yaml.YAMLError(_TOO_DEEP)
        if most < 0:
            raise yaml.YAMLError("aliases that stand for more values than the text is long")
        if isinstance(value, dict):
            left += [(each, depth + 1) for pair in value.items() for each in pair]
        elif isinstance(value, (list, tuple, set)):
            left += [(each, depth + 1) for each in value]


def dump(values: Any) -> str:
    """YAML that `parse_yaml` reads back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The leaves of a tree of sections, by dotted key.

    >>> flat({"seed": 1, "local": {"lr": 0.1}})
    {'seed': 1, 'local.lr': 0.1}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{path}{key}.")
        else:
            found[f"{path}{key}"] = value
    return found


def at(tree: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; None if there is none."""
    node: Any = tree
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def overridden(values: Mapping[str, Any], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """A copy of the tree `values` with every override `section.key=value` put in (`changed`)."""
    if not isinstance(values, Mapping):
        raise ConfigError("config", values, "a mapping of sections")
    return changed(values, [_parsed(override) for override in overrides])


def _parsed(override: str) -> tuple[str, Any]:
    """The dotted key and the value of `section.key=value`."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError("override", override, "section.key=value")
    try:
        return path, parse_yaml(text)
    except yaml.YAMLError:
        raise ConfigError(path, text, "a value in YAML") from None


def copied(tree: Any) -> Any:
    """A copy of a tree of mappings and lists. What stands in it more than once, as what a YAML file
    has an anchor for, is copied for each place.

    >>> noise = {"kind": "gaussian"}
    >>> tree = copied({"noise": noise, "others": [noise]})
    >>> tree["noise"] is noise, tree["noise"] is tree["others"][0]
    (False, False)
    """
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [copied(value) for value in tree]
    return tree


def changed(
    values: Mapping[str, Any], changes: Iterable[tuple[str, Any]], quiet: bool = False
) -> dict[str, Any]:
    """A copy of a tree of sections with changes put in.

    Whole sections come first, then kinds, from the outer to the inner, then all else. Another kind
    is another member: nothing of what the section had for the old one is kept, but for what is
    given beside the change. What is lost is logged, in one line.

    Args:
        values: the tree.
        changes: dotted keys and their values.
        quiet: whether nothing is logged.

    Raises:
        ConfigError: for a key in what has none.
    """
    tree = copied(dict(values))
    found = sorted(changes, key=lambda change: _turn(change[0]))
    given = [path for path, _ in found]
    for path, value in found:
        _put(tree, path, value, given, quiet)
    return tree


def _turn(path: str) -> tuple[int, int]:
    """When a change has its turn: kinds decide which keys there are."""
    depth = path.count(".")
    if not depth:
        return 0, 0
    return (1, depth) if path.endswith(".kind") else (2, 0)


def _put(tree: dict[str, Any], path: str, value: Any, given: Sequence[str], quiet: bool) -> None:
    """Sets a dotted key of the tree, making the sections on the way."""
    *sections, key = path.split(".")
    node: Any = tree
    for depth, name in enumerate(sections):
        if node.get(name, {}) is None:  # a section that is not there: data.features
            del node[name]
        node = node.setdefault(name, dict(DEFAULTS.get(name, {})) if depth == 0 else {})
        if not isinstance(node, dict):
            raise ConfigError(
                path, value, f"a key of a section; {'.'.join(sections[: depth + 1])} is {node!r}"
            )
    if key == "kind" and "kind" in node and node["kind"] != value:
        lost = _drop(node, ".".join(sections), value, given)
        if lost and not quiet:
            log.warning("%s; give beside it what is to stay", lost)
    node[key] = value


def _drop(node: dict[str, Any], section: str, kind: Any, given: Sequence[str]) -> str:
    """Of a section that becomes of another kind, or of several, nothing stays. What is lost, in
    words; empty: nothing.

    Of an unknown kind all stays, and the kind is what is complained of.
    """
    family = KINDS.get(section)
    named = isinstance(kind, str) and (kind in (family or {}) or is_path(kind))
    if family is None or not (named or is_space(kind)):
        return ""
    old = node.pop("kind")
    beside = {path.removeprefix(f"{section}.").partition(".")[0] for path in given}
    fields = fields_of(family.get(old) if isinstance(old, str) else None) or {}
    lost = [
        f"{name}={value}"
        for name, value in node.items()
        if name not in beside and not (name in fields and _is_default(fields[name], value))
    ]
    node.clear()
    if not lost:
        return ""
    return f"{section}.kind={kind} leaves out what {section} had of {old}: {', '.join(lost)}"


def _is_default(field: Any, value: Any) -> bool:
    """Whether a field of a member has this value of itself; a member within by its fields."""
    default = field.default
    plain = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
    return value == (list(plain) if isinstance(plain, tuple) else plain)


def takes(tree: Mapping[str, Any], path: str) -> bool:
    """Whether the section of this path, of the kind that it has in the tree, has such a key."""
    section, _, key = path.rpartition(".")
    if section in SECTIONS or not section:
        return key in (SECTIONS[section] if section else Experiment).model_fields
    node = at({**DEFAULTS, **tree}, section)
    usual = "sgd" if KINDS.get(section) is local.FAMILY else None
    kind = node.get("kind", usual) if isinstance(node, Mapping) else None
    return key == "kind" or (isinstance(kind, str) and key in _fields(section, kind))


def _fields(section: str, kind: str) -> Collection[str]:
    """The keys of a section of this kind; none of an unknown one."""
    fields = fields_of(KINDS.get(section, {}).get(kind))
    if fields is None and section in KINDS and is_path(kind) and imports(section):
        fields = fields_of(load(kind, f"{section}.kind"))
        if section == "model":
            fields = fields or dict(models.Module.model_fields)
    return fields or {}


# What a search space is named by (see `raydpfl.sweep`).
SPACES = ("grid", "choice", "uniform", "loguniform", "powers_of_two")


def is_space(value: Any) -> bool:
    """Whether this stands for several values, of which a sweep tries one after another."""
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in SPACES


def _one_run(tree: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for what is no section, and for a sweep, which is not one run."""
    sweeps = "raydpfl sweep runs a config with search spaces"
    if "study" in tree:
        raise ConfigError(
            "study", tree["study"], "none in the config of one run; raydpfl reproduce runs a study"
        )
    if "sweep" in tree:
        raise ConfigError("sweep", tree["sweep"], f"none in the config of one run; {sweeps}")
    unknown = [key for key in tree if key not in Experiment.model_fields]
    if unknown:
        accepted = f"one of the sections {', '.join(Experiment.model_fields)}"
        near = said(unknown[0], Experiment.model_fields)
        raise ConfigError(unknown[0], tree[unknown[0]], f"{accepted}{near}")
    nodes = [(key, value) for key, value in tree.items() if isinstance(value, Mapping)]
    for path, node in nodes:
        if is_space(node):
            raise ConfigError(path, node, f"one value; this is a search space, {sweeps}")
        for key, value in node.items():
            if isinstance(value, Mapping):
                nodes.append((f"{path}.{key}", value))


def _is_file(text: str) -> bool:
    """Whether a text looks like the name of a file, and is that of one."""
    return re.search(r"[/.]", text) is not None and "\0" not in text and os.path.isfile(text)


def _paths(values: Mapping[str, Any]) -> dict[str, str]:
    """By dotted key, the texts in a tree that look like names of files and are."""
    found: dict[str, str] = {}
    nodes: list[tuple[str, Any]] = [(key, value) for key, value in values.items() if key != "kind"]
    while nodes:
        key, value = nodes.pop()
        if isinstance(value, Mapping):
            nodes += [(f"{key}.{name}", each) for name, each in value.items() if name != "kind"]
        elif isinstance(value, list):
            nodes += [(key, each) for each in value]
        elif isinstance(value, str) and _is_file(value):
            found[key] = value
    return found


def _refusals(experiment: Experiment, section: str, member: Member) -> None:
    """Asks a member what it refuses: each of its classes that has a `check`, its base first.

    Raises `ConfigError`, also for a user's own `check` that raises anything else.
    """
    for cls in reversed(type(member).__mro__):
        check = vars(cls).get("check")
        if check is None:
            continue
        try:
            check(member, experiment)
        except ConfigError:
            raise
        except RAISED as error:
            if not user_classes.is_own(cls):
                raise
            accepted = f"a class whose check raises nothing but ConfigError ({in_line(error)})"
            raise ConfigError(f"{section}.kind", member.kind, accepted) from None
