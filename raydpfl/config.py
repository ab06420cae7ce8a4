"""An experiment: the whole description of a run, as one typed tree.

>>> experiment = Experiment.from_dict({
...     "rounds": 3,
...     "data": {"kind": "fashion_mnist_mini", "clients": 300},
...     "selection": {"kind": "uniform", "cohort": 30},
...     "bounding": {"kind": "clip", "bound": 1.0},
... }, overrides=["local.lr=0.05"])
>>> experiment.local.lr, experiment.noise.kind
(0.05, 'none')

A section with a `kind` is one choice of a family and is checked by that member alone; the rest is checked here. What
depends on the data or on the machine is checked by `raydpfl.plan` and `raydpfl.placement`, still before anything starts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, StrictInt, field_validator

from raydpfl import bounding, data, local, models, noise, selection, server
from raydpfl.errors import ConfigError
from raydpfl.member import Member, choose, load, validate
from raydpfl.privacy import budgets


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class Privacy(Section):
    """Who accounts, under which neighbouring relation, and how much may be spent."""

    accountants: tuple[Literal["pld", "rdp", "paper"], ...] = ("pld", "rdp", "paper")  # the first rigorous one calibrates the noise
    relation: Literal["auto", "replace_one", "add_remove", "zero_out"] = "auto"  # auto: add_remove for Poisson, else replace_one
    budget: float | None = Field(default=None, gt=0)  # epsilon that the run stops short of exceeding

    @field_validator("accountants", mode="after")
    @classmethod
    def _once_each(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("should name each accountant once")
        return value


class Client(Section):
    """How clients become actors, and how they train."""

    actors: StrictInt | Literal["auto", "per-client"] = "auto"
    num_cpus: float = Field(default=1, ge=0)
    num_gpus: float = Field(default=0, ge=0)
    lane: StrictInt | Literal["auto"] = "auto"  # clients trained and summed at once; part of the run's bits
    way: Literal["auto", "sample_space", "fused", "layerwise", "vmap", "loop", "noop"] = "auto"
    on_error: Literal["fail", "drop"] = "fail"  # drop: the client counts with an update of 0 (scaffold: one that leaves its variate as it is), and its noise

    @field_validator("actors", "lane", mode="after")
    @classmethod
    def _counts(cls, value: int | str, info: Any) -> int | str:
        least = 0 if info.field_name == "actors" else 1
        if isinstance(value, int) and value < least:
            raise ValueError(f"should be at least {least}")
        return value


class Evaluate(Section):
    every: int = Field(default=10, ge=1)  # rounds; the last round always counts
    batch: int = Field(default=1000, ge=1)


class Measure(Section):
    """What a run records beyond its rounds; all of it is off by default, as each costs more than 2 % of some round."""

    clients: bool = False  # a row per client and round in clients.parquet
    bounding: bool = False  # signal to noise, angles to the last global update, the sums of clipping's bias (000, 001)
    repeats: int = Field(default=0, ge=0)  # trainings more per client, for its expected update in those sums (000 Theorem 3.1)
    trajectory: bool = False  # the model after every round, in trajectory.bin
    heterogeneity: bool = False  # Gamma_s, Gamma_n (002) and f_i(w*) - f_i* (001), computed after the last round
    tensorboard: bool = True

    @field_validator("repeats", mode="after")
    @classmethod
    def _repeats_of_something(cls, value: int, info: Any) -> int:
        if value == 1 or (value and not info.data.get("bounding")):
            raise ValueError("0, or at least 2 together with measure.bounding: true")
        return value


FAMILIES: dict[str, tuple[dict, type]] = {
    "selection": (selection.FAMILY, selection.Selection),
    "local": (local.FAMILY, local.Local),
    "bounding": (bounding.FAMILY, bounding.Bounding),
    "noise": (noise.FAMILY, noise.Noise),
    "weights": (server.WEIGHTS, server.Weights),
    "server": (server.FAMILY, server.Server),
}
KINDS: dict[str, dict] = {  # of every section that is a choice, those within others too
    **{name: family for name, (family, _) in FAMILIES.items()},
    "data": data.FAMILY, "model": models.FAMILY, "data.sizes": data.SIZES, "data.partition": data.PARTITIONS, "data.features": data.FEATURES,
    "selection.response": selection.RESPONSES, "noise.epsilon": budgets.FAMILY,
}  # fmt: skip


class Experiment(Section):
    """Everything that decides a run's bits, and how it is carried out. See `raydpfl show` for all keys with their defaults."""

    seed: int = Field(default=0, ge=0, lt=1 << 64)
    rounds: int = Field(default=100, ge=1, le=10**9)
    data: SerializeAsAny[data.Data]
    model: SerializeAsAny[models.Model]
    selection: SerializeAsAny[selection.Selection]
    local: SerializeAsAny[local.Local]
    bounding: SerializeAsAny[bounding.Bounding]
    noise: SerializeAsAny[noise.Noise]
    weights: SerializeAsAny[server.Weights]
    server: SerializeAsAny[server.Server]
    privacy: Privacy = Privacy()
    client: Client = Client()
    evaluate: Evaluate = Evaluate()
    measure: Measure = Measure()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], overrides: Iterable[str] = ()) -> Experiment:
        """Raises `ConfigError` naming the first field that is wrong. `overrides` are `section.key=value`, the value in YAML."""
        tree = overridden(values, overrides)
        unknown = [key for key in tree if key not in cls.model_fields]
        if unknown:
            raise ConfigError(unknown[0], tree[unknown[0]], f"no such section; the sections are {', '.join(cls.model_fields)}")
        tree = {**DEFAULTS, **tree}
        built: dict[str, Any] = {key: tree[key] for key in ("seed", "rounds") if key in tree}
        built["data"] = data.parse(tree["data"])
        built["model"] = models.parse(tree["model"])
        for name, (family, base) in FAMILIES.items():
            built[name] = choose(name, tree[name], family, base)
        for name, section in (("privacy", Privacy), ("client", Client), ("evaluate", Evaluate), ("measure", Measure)):
            built[name] = validate(section, name, tree.get(name, {}))
        if built["noise"].placement == "auto":
            by_sample = built["bounding"].sample_bound is not None
            placement = "step" if by_sample else "server" if _poisson(built["selection"]) else "client"
            built["noise"] = built["noise"].model_copy(update={"placement": placement})
        experiment = validate(cls, "", built)
        experiment._combinations()
        return experiment

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Iterable[str] = ()) -> Experiment:
        """As `from_dict`, from a YAML file."""
        return cls.from_dict(read(path), overrides)

    def to_dict(self) -> dict[str, Any]:
        """The complete tree, defaults included, in plain YAML types."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The complete config; `from_yaml` of it is this experiment."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    @property
    def private(self) -> bool:
        return self.noise.kind != "none"

    @property
    def stateful(self) -> Member | None:
        """The member by which clients keep something from one of their rounds to the next; at most one does."""
        return next((member for member in (self.local, self.bounding) if member.stateful), None)

    @property
    def relation(self) -> str:
        if self.noise.placement == "step":
            return "replace_one"
        if self.privacy.relation != "auto":
            return self.privacy.relation
        return "add_remove" if _poisson(self.selection) else "replace_one"

    def _combinations(self) -> None:
        """What no single section can refuse."""
        size = self.noise.model_dump(exclude_none=True)
        if self.private and not isinstance(self.noise, noise.Gaussian):
            raise ConfigError("noise.kind", self.noise.kind, "none, gaussian or a subclass of raydpfl.noise.Gaussian: accountants cover no other noise")
        if self.stateful and self.private and _poisson(self.selection) and self.local.stateful:
            raise ConfigError("selection.kind", self.selection.kind, f"one with cohorts of known size: the server of {self.local.kind} divides by it")
        by_sample = self.bounding.sample_bound is not None
        if self.private and self.bounding.initial_bound is None and not by_sample:
            raise ConfigError("noise.kind", self.noise.kind, "noise needs a bound; set bounding.kind to clip, normalize, ... with a bound")
        if self.private and by_sample != (self.noise.placement == "step"):
            accepted = "step, with per_sample_clip" if by_sample else "client or server; noise at local steps needs bounding.kind per_sample_clip"
            raise ConfigError("noise.placement", self.noise.placement, accepted)
        if self.noise.placement == "step":
            self._steps(size)
        elif isinstance(size.get("epsilon"), dict):
            raise ConfigError("noise.epsilon", size["epsilon"], "a number; budgets of clients' own need placement step, and bounding.kind per_sample_clip")
        if "std" in size and self.bounding.adaptive:
            raise ConfigError("noise.std", size["std"], "with an adaptive bound the noise moves with it; give noise.multiplier or noise.epsilon")
        if "epsilon" in size and not self.privacy.accountants:
            raise ConfigError("privacy.accountants", [], "noise.epsilon needs an accountant to calibrate the noise with: pld or rdp")
        if self.privacy.budget is not None and not (self.private and self.privacy.accountants):
            raise ConfigError("privacy.budget", self.privacy.budget, "a budget needs noise and an accountant; this run spends without bound")
        if self.bounding.sends == "model" and self.weights.kind != "uniform":
            raise ConfigError("weights.kind", self.weights.kind, "uniform with model_clip: the new model is the mean of those sent")
        if self.local.stateful and self.bounding.stateful:
            raise ConfigError("bounding.kind", self.bounding.kind, f"a bounding without memory beside local.kind {self.local.kind}, which has one")
        if self.stateful and self.weights.kind != "uniform":
            raise ConfigError("weights.kind", self.weights.kind, f"uniform, as {self.stateful.kind} keeps the plain mean over all clients")
        if self.local.stateful and self.noise.placement == "server":
            accepted = f"client or step with local.kind {self.local.kind}: noise that no client's variate holds would add up in the server's, round after round"
            raise ConfigError("noise.placement", "server", accepted)
        if self.local.stateful and self.bounding.sends == "model":
            raise ConfigError("bounding.kind", self.bounding.kind, f"one that sends updates, for local.kind {self.local.kind}")

    def _steps(self, size: dict) -> None:
        """What noise at local steps refuses beside."""
        if self.client.on_error == "drop":
            raise ConfigError("client.on_error", "drop", "fail, with noise at local steps: a client that failed would send no noise, and be known by it")
        if getattr(getattr(self.data, "partition", None), "kind", None) == "overlapping":
            accepted = "one that gives a sample to a single client, with noise at local steps, which protects samples"
            raise ConfigError("data.partition.kind", "overlapping", accepted)
        if "v" in self.noise.model_fields_set and self.noise.v != 4.0:
            raise ConfigError("noise.v", self.noise.v, "none with placement step, whose formulas have no such constant")
        if size.get("virtual_cohort"):
            raise ConfigError("noise.virtual_cohort", size["virtual_cohort"], "none with placement step: each client's noise is its own")
        if self.privacy.relation not in ("auto", "replace_one"):
            raise ConfigError("privacy.relation", self.privacy.relation, "replace_one (of a sample), for noise at local steps")


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


def read(path: str | Path) -> Any:
    """What a YAML file holds, an empty mapping if nothing. Raises `ConfigError`."""
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"a file that can be read ({getattr(error, 'strerror', None) or error})") from None
    except yaml.YAMLError as error:
        raise ConfigError("config", str(path), f"a YAML file ({error})") from None
    return {} if values is None else values


def overridden(values: Mapping[str, Any], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """A copy of the tree `values` with every override `section.key=value` put in."""
    if not isinstance(values, Mapping):
        raise ConfigError("config", values, "a mapping of sections")
    tree = copy.deepcopy(dict(values))
    for override in sorted(overrides, key=lambda text: ".kind=" not in text):  # kinds first: they decide which keys there are
        _override(tree, override)
    return tree


def _override(tree: dict[str, Any], override: str) -> None:
    """Sets `section.key` of the tree, making the sections on the way."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError("override", override, "section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(path, text, "a value in YAML") from None
    *sections, key = path.split(".")
    node: Any = tree
    for depth, name in enumerate(sections):
        if depth and node.get(name, {}) is None:  # a section that is not there: data.features
            del node[name]
        node = node.setdefault(name, dict(DEFAULTS.get(name, {})) if depth == 0 else {})
        if not isinstance(node, dict):
            raise ConfigError(path, value, f"{'.'.join(sections[: depth + 1])} is {node!r}, which has no keys")
    if key == "kind" and isinstance(value, str) and node.get("kind") != value:
        _keep_known(node, ".".join(sections), value)
    node[key] = value


def _poisson(selected: selection.Selection) -> bool:
    """Whether the size of a cohort is a secret."""
    return "poisson" in (selected.kind, getattr(selected, "law", None))


def _keep_known(node: dict[str, Any], section: str, kind: str) -> None:
    """Another kind of a family: of the old member's keys, those that the new one has too are kept."""
    found = KINDS.get(section, {}).get(kind)
    if found is None and section in KINDS and (":" in kind or "." in kind):
        found = load(kind, f"{section}.kind")
        if section == "model" and not (isinstance(found, type) and issubclass(found, models.Model)):
            found = models.Module
    if isinstance(found, type) and issubclass(found, Member):  # of an unknown kind all keys stay, and the kind is what is complained of
        for name, value in [*node.items()]:
            field = found.model_fields.get(name)
            if field is None or (value is None and field.default is not None):  # null says nothing where the new one has something
                del node[name]
