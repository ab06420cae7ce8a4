"""What a sweep tries: the experiment with its search spaces, the section `sweep`, and the settings
and trials they make.

>>> rate = {"loguniform": [1e-3, 1.0]}
>>> search = {"search": "random", "samples": 2}
>>> sweep = Sweep.from_dict({"local": {"kind": "sgd", "lr": rate}, "sweep": search})
>>> [round(values["local.lr"], 5) for values in sweep.setting_values()]
[0.18837, 0.13904]
>>> Sweep.from_dict({"local": {"kind": "sgd", "lr": {"grid": [0]}}})
Traceback (most recent call last):
raydpfl.errors.ConfigError: local.lr = 0: expected a number greater than 0
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from raydpfl.config.overrides import flatten, value_at
from raydpfl.config.registry import Section
from raydpfl.config.validation import validate
from raydpfl.config.yaml import dump, read
from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError, rename_fields
from raydpfl.experiment import Experiment, overridden
from raydpfl.models.metric_columns import CLIENT, TEST, VALIDATION, score_set, sign
from raydpfl.privacy import Repetition
from raydpfl.privacy.repetition import Kind
from raydpfl.simulation.composed_runs import ACCOUNTED
from raydpfl.simulation.plan import FREE_KEYS
from raydpfl.sweep.search_runner import Difference, read_config_tree
from raydpfl.sweep.spaces import Options, Space, fill_spaces, find, points
from raydpfl.sweep.trials import SearchSetting, identity, meaning, name_of, override_text

# What may differ between a sweep and its resumption: where it runs, and how far it goes.
_EXTENT = ("samples", "repeats", "concurrent", "cpus", "timeout", "on_error", "storage")
CHANGEABLE_KEYS = FREE_KEYS | {f"sweep.{key}" for key in _EXTENT}
MAX_TRIALS = 100_000  # each has a directory and is looked at before the first begins
# Fields that mean something only with some values of another.
_DEPENDENCIES = {
    "samples": ("search", ("random", "optuna")),
    "ahead": ("search", ("optuna",)),
    "grace": ("scheduler", ("asha", "median")),
    "reduction": ("scheduler", ("asha",)),
}
_SEEDS = 2  # the step of the streams of the seeds of a private search; of its number of trials, 1
# What a private search fixes, and why.
_PRIVATE_VALUES = {
    "search": ("random", "its values are drawn independently of one another and of the results"),
    "samples": (None, "its number of trials is drawn"),
    "repeats": (1, "a trial is one run"),
    "scheduler": ("none", "a trial that others stop is not independent of them"),
    "storage": (None, "it would show the other trials"),
    "on_error": ("choose", "whether any trial failed is a fact about the data"),
}


class PrivateSearch(Section):
    """The key `sweep.private`: how many trials there are, of which the best alone is released."""

    runs: Kind
    mean: float  # number of trials
    shape: float | None = None  # of negative_binomial

    def repetition(self) -> Repetition:
        """The distribution of the number of trials."""
        with rename_fields(lambda name: f"sweep.private.{name}"):
            return Repetition(self.runs, self.mean, self.shape)


class Search(Section):
    """The section `sweep`: how the spaces are searched."""

    search: Literal["grid", "random", "optuna"] = "grid"
    samples: int | None = Field(default=None, ge=1)  # settings that random and optuna try
    metric: str = "test_accuracy"  # at the last evaluation
    repeats: int = Field(default=1, ge=1)  # trials of a setting, with seeds seed, seed + 1, ...
    scheduler: Literal["none", "asha", "median"] = "none"  # stops trials early by the metric
    grace: int = Field(default=10, ge=1)  # rounds that every trial is given
    # asha lets one in so many go on, at rounds grace, grace x reduction, ...
    reduction: int = Field(default=3, ge=2)
    # settings that optuna proposes before it must know the first one's result; so many run at once
    ahead: int = Field(default=8, ge=1)
    # trials at once; default: as many as the cluster holds
    concurrent: int | None = Field(default=None, ge=1)
    # of a trial's own process; default: 1 inline, 0 with client actors
    cpus: float | None = Field(default=None, ge=0)
    timeout: float | None = Field(default=None, gt=0)  # seconds of a trial; default: see `limits`
    on_error: Literal["fail", "choose"] = "fail"  # with failed trials: no best, or of the others
    # URL of an Optuna storage (sqlite:///sweeps.db) that shows the sweep as a study too
    storage: str | None = None
    # the number of trials is drawn at random, and the best alone released; None: all are shown
    private: PrivateSearch | None = None

    def effective_fields(self) -> dict[str, Any]:
        """With all defaults, but for fields that mean nothing here."""
        values = self.model_dump(mode="json")
        for name, (condition_key, expected) in _DEPENDENCIES.items():
            if values[condition_key] not in expected:
                del values[name]
        return values


@dataclass(frozen=True)
class Sweep:
    """An experiment with search spaces. `tree` is the config as given, overrides put in, without
    the section `sweep`; `imports` are the sections whose import paths are imported (None: all).
    """

    tree: dict[str, Any]
    search: Search
    spaces: dict[str, Space]
    imports: tuple[str, ...] | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], overrides: Iterable[str] = ()) -> Sweep:
        """A sweep from the tree of a config whose fields may have search spaces, and overrides
        `section.key=value`. Raises `ConfigError` for the first field that is wrong: every value of
        a grid, and both ends of an interval, are tried on.
        """
        sweep = cls.parse_unchecked(values, overrides)
        sweep.check_search()
        sweep.check_settings()
        return sweep

    @classmethod
    def parse_unchecked(
        cls,
        values: Mapping[str, Any],
        overrides: Iterable[str] = (),
        imports: Iterable[str] | None = None,
    ) -> Sweep:
        """As `from_dict`, but for the settings, which may be such that make no experiment."""
        tree = overridden(values, overrides)
        search = validate(Search, "sweep", tree.pop("sweep", {}))
        if search.private:
            defaults = {"search": "random", "on_error": "choose"}
            defaults = {k: v for k, v in defaults.items() if k not in search.model_fields_set}
            search = search.model_copy(update=defaults)
        for name in search.model_fields_set & _DEPENDENCIES.keys():
            condition_key, expected = _DEPENDENCIES[name]
            value = getattr(search, name)
            if getattr(search, condition_key) not in expected and value is not None:
                condition = f"nothing unless sweep.{condition_key} is {' or '.join(expected)}"
                raise ConfigError(f"sweep.{name}", value, condition)
        return cls(tree, search, find(tree), None if imports is None else tuple(imports))

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Iterable[str] = ()) -> Sweep:
        """As `from_dict`, from a YAML file."""
        return cls.from_dict(read(path), overrides)

    @classmethod
    def from_directory(cls, folder: Path, overrides: Iterable[str] = ()) -> Sweep:
        """The sweep of this directory. Raises `ConfigError` unless its sweep.yaml is whole."""
        return cls.from_dict(read_config_tree(folder, "sweep"), overrides)

    def to_yaml(self) -> str:
        """The config with its spaces, of which `...`, its last line, marks the end."""
        return dump({**self.tree, "sweep": self._explicit_fields}) + "...\n"

    @property
    def size(self) -> int:
        """How many settings it tries; Optuna may propose one twice."""
        if self.search.private:
            return self.search.private.repetition().draw(stream(self.seed, Purpose.SWEEP, step=1))
        return self.search.samples or math.prod(int(space.count) for space in self.spaces.values())

    @property
    def sign(self) -> int:
        return sign(self.search.metric, self.probes[0].metrics)

    def setting_values(self) -> Iterable[dict[str, Any]]:
        """The values of every setting, in order; not for Optuna, which decides as results come."""
        if self.search.search == "grid":
            yield from points(
                {key: space for key, space in self.spaces.items() if isinstance(space, Options)}
            )
            return
        known_names: set[Any] = set()
        for sample in range((1 if self.search.private else 100) * self.size):
            draws = stream(self.seed, Purpose.SWEEP, t=sample).random(len(self.spaces))
            point = (space.at(u) for space, u in zip(self.spaces.values(), draws, strict=True))
            values = dict(zip(self.spaces, point, strict=True))
            name = sample if self.search.private else identity(values)
            if name not in known_names:
                known_names.add(name)
                yield values
            if len(known_names) == self.size:
                return

    def setting(self, values: Mapping[str, Any]) -> SearchSetting:
        """The setting of these values, with no trials yet. Raises `ConfigError` if they make no
        experiment.
        """
        tree = fill_spaces(self.tree, values)
        return SearchSetting(dict(values), Experiment.from_dict(tree, imports=self.imports))

    def support(self) -> Iterator[tuple[dict[str, Any], Experiment]]:
        """Values and trials of a private search that have all releases that any of its trials can
        have. Values that do not bear on these are left at their first; of an interval that does
        there are three.
        """
        base = {key: space.probes[0] for key, space in self.spaces.items()}
        sections = {*ACCOUNTED}.union(*(probe.accounted_with() for probe in self.probes))
        spaces = {key: Options(space.probes) for key, space in self.spaces.items()}
        for values in points({k: spaces[k] for k in spaces if k.partition(".")[0] in sections}):
            yield values, self.trial(self.setting({**base, **values}).experiment)

    def seeds(self, place: int) -> list[int]:
        """The seeds of the trials of the setting at this place: of a private search one that no
        other has, so that cohorts and noise are independent.
        """
        if self.search.private:
            generator = stream(self.seed, Purpose.SWEEP, t=place, step=_SEEDS)
            return [int(generator.integers(1 << 63))]
        return [*range(self.seed, self.seed + self.search.repeats)]

    def trial(self, experiment: Experiment) -> Experiment:
        """What a trial of this experiment runs, as `inline_clients` has it, and without a score of
        the test set, unless the metric or the config asks for one.
        """
        trial = inline_clients(experiment)
        if self.search.private and trial.data.seed is None:
            data = trial.data.model_copy(update={"seed": trial.seed})  # the same clients for all
            trial = trial.model_copy(update={"data": data})
        if score_set(self.search.metric) == TEST or "test" in self.tree.get("evaluate", {}):
            return trial
        evaluate = trial.evaluate.model_copy(update={"test": False})
        return trial.model_copy(update={"evaluate": evaluate})

    def differs(self, other: Sweep) -> Difference:
        """(field, own value, that of `other`) of the first difference that makes it another sweep,
        by what the configs mean: a default may be written out, and 1 is 1.0. Which values a
        searched field takes is no difference.
        """
        pair = (self, other)
        keys = self.spaces.keys() ^ other.spaces.keys()
        fields = [{k: value_at(sweep.tree, k) for k in keys} for sweep in pair]
        values = {key: space.probes[0] for key, space in self.spaces.items()}
        try:
            configs = [meaning(sweep.setting(values).experiment, self.spaces) for sweep in pair]
        except ConfigError:  # what this sweep's values make no experiment of is not this sweep
            configs = [flatten(fill_spaces(sweep.tree, values)) for sweep in pair]
        searches = [flatten({"sweep": sweep.search.model_dump()}) for sweep in pair]
        own_leaves, other_leaves = (
            spaces | search | leaves | spaces
            for spaces, search, leaves in zip(fields, searches, configs, strict=True)
        )
        for key in dict.fromkeys([*own_leaves, *other_leaves]):
            if own_leaves.get(key) != other_leaves.get(key) and key not in CHANGEABLE_KEYS:
                return key, own_leaves.get(key), other_leaves.get(key)
        return None

    def tries_others(self, other: Sweep) -> bool:
        """Whether the settings are not those of `other`, by what they mean; not of Optuna."""
        if self.search.search == "optuna":
            return False
        own_names, other_names = (
            {name_of(s.setting(values).experiment, s.spaces) for values in s.setting_values()}
            for s in (self, other)
        )
        return own_names != other_names

    @cached_property
    def seed(self) -> int:
        return Experiment.from_dict({"seed": self.tree.get("seed", 0)}).seed

    def check_settings(self) -> None:
        """Raises `ConfigError` for a setting that makes no experiment, and for what the settings
        together rule out.
        """
        search = self.search
        limit = min(experiment.rounds for experiment in self.probes)
        if search.scheduler != "none" and search.grace > limit:
            raise ConfigError("sweep.grace", search.grace, f"at most the {limit} rounds of a trial")
        if self.probes[0].seed + search.repeats > 1 << 64:
            raise ConfigError("sweep.repeats", search.repeats, "seeds below 2^64")
        known_values: dict[str, dict[str, Any]] = {}
        for values, experiment in zip(self.probe_values(), self.probes, strict=True):
            if search.private:
                self.check_releases(experiment)
            scores = [
                name for name in experiment.evaluation_scores if sign(name, experiment.metrics)
            ]
            if search.metric not in scores:
                reason = _missing_score_reason(search.metric, experiment)
                expected = f"a score of every trial; {reason}"
                raise ConfigError("sweep.metric", search.metric, expected)
            # no two values may make one experiment, as 1 and 1.0 do
            same_values = known_values.setdefault(name_of(experiment, self.spaces), values)
            for key, value in values.items():
                if text_of(same_values[key]) != text_of(value):
                    pair = f"{same_values[key]!r} and {value!r}"
                    expected = f"values that differ; {pair} make the same experiment"
                    raise ConfigError(key, value_at(self.tree, key), expected)

    def check_search(self) -> None:
        """Raises `ConfigError` where there is nothing to search, or more settings than there are or
        can be tried, whatever the settings are.
        """
        search = self.search
        if search.private:
            self._check_private()
        if "seed" in self.spaces:
            expected = "a number; sweep.repeats runs every setting with several seeds"
            raise ConfigError("seed", self.tree["seed"], expected)
        if not self.spaces and search.repeats == 1 and not search.private:
            expected = "a search space in some field, or sweep.repeats above 1"
            raise ConfigError("sweep", self._explicit_fields, expected)
        for key, space in self.spaces.items():
            if search.search == "grid" and not isinstance(space, Options):
                expected = "a grid, choice or powers_of_two; an interval needs sweep.search"
                raise ConfigError(key, value_at(self.tree, key), f"{expected} random or optuna")
        if search.search != "grid" and search.samples is None and not search.private:
            expected = f"a number of settings to try, for sweep.search {search.search}"
            raise ConfigError("sweep.samples", None, expected)
        max_settings = math.prod(space.count for space in self.spaces.values())
        if search.search == "random" and self.size > max_settings and not search.private:
            expected = f"at most the {max_settings:.0f} settings that the spaces hold"
            raise ConfigError("sweep.samples", search.samples, expected)
        if self.size * search.repeats > MAX_TRIALS:
            expected = f"at most {MAX_TRIALS:,} trials, which are settings times repeats"
            raise ConfigError("sweep", self._explicit_fields, expected)

    def _check_private(self) -> None:
        assert self.search.private
        self.search.private.repetition()
        for name, (value, reason) in _PRIVATE_VALUES.items():
            if (actual_value := getattr(self.search, name)) != value:
                expected = f"{value or 'none'} with sweep.private: {reason}"
                raise ConfigError(f"sweep.{name}", actual_value, expected)
        for key in self.spaces:
            if key.partition(".")[0] == "data" or key.startswith("evaluate.validation"):
                expected = "one value with sweep.private, whose trials have the same clients"
                raise ConfigError(key, value_at(self.tree, key), expected)

    def check_releases(self, experiment: Experiment) -> None:
        """Raises `ConfigError` for a trial of a private search whose score or end is of rows of the
        clients without noise, or that has no noise on sums.
        """
        metric = self.search.metric
        if score_set(metric) == TEST and experiment.data.tests_clients:
            expected = "a score of evaluate.histogram with sweep.private, or test rows that are "
            expected += "not the clients' own, as those of a file, data.test; these are, and no "
            expected += "epsilon covers exact answers about them"
            raise ConfigError("sweep.metric", metric, expected)
        is_noised = score_set(metric) == CLIENT and experiment.evaluate.histogram is not None
        if score_set(metric) != TEST and not is_noised:
            expected = "a score of the test set, or of evaluate.histogram, with sweep.private; "
            expected += "this one is an exact answer about rows of the clients, which no epsilon "
            expected += "covers"
            raise ConfigError("sweep.metric", metric, expected)
        if experiment.evaluate.stop:
            stop = experiment.evaluate.stop.model_dump(mode="json")
            expected = "none with sweep.private: it ends runs by exact scores of the clients' rows"
            raise ConfigError("evaluate.stop", stop, expected)
        external_kinds = [tracker.kind for tracker in experiment.track if tracker.is_external()]
        if external_kinds:
            expected = "one that writes to a run's own directory, or none, with sweep.private: "
            expected += "others would show all trials"
            raise ConfigError("track", external_kinds, expected)
        if experiment.noise.drawn_by() not in ("client", "server"):
            expected = "noise on what clients send, or on its sum, in every trial of sweep.private"
            raise ConfigError("noise.kind", experiment.noise.kind, expected)
        if not experiment.noise.repeatable:
            expected = "keyed with sweep.private: the best model comes of repeating its run, "
            expected += "which with noise of the system releases another"
            raise ConfigError("noise.source", "system", expected)

    @property
    def _explicit_fields(self) -> dict[str, Any]:
        return self.search.model_dump(exclude_unset=True)

    def probe_values(self) -> Iterator[dict[str, Any]]:
        """Values that show whether every field takes its space: all that are listed beforehand, and
        the ends of every interval.
        """
        if self.search.search != "grid":
            first_values = {key: space.probes[0] for key, space in self.spaces.items()}
            yield first_values
            for key, space in self.spaces.items():
                yield from ({**first_values, key: value} for value in space.probes)
        if self.search.search != "optuna":
            yield from self.setting_values()

    @cached_property
    def probes(self) -> list[Experiment]:
        """The experiments that tell whether the sweep can be run, as trials. A `ConfigError` on a
        field that is not searched names the setting too.
        """
        probes = []
        for values in self.probe_values():
            try:
                probes.append(self.trial(self.setting(values).experiment))
            except ConfigError as error:
                if not values or error.field in values:
                    raise
                expected = f"{error.expected} (in the setting {override_text(values)})"
                raise ConfigError(error.field, error.value, expected) from None
        return probes


def inline_clients(experiment: Experiment) -> Experiment:
    """As a trial: `client.actors` auto is 0, as a sweep spreads over the cluster by its trials."""
    if experiment.client.actors != "auto":
        return experiment
    client = experiment.client.model_copy(update={"actors": 0})
    return experiment.model_copy(update={"client": client})


def text_of(value: Any) -> str:
    """A key by which written values differ: 1 is not 1.0."""
    return identity({"value": value})


def _missing_score_reason(score: str, experiment: Experiment) -> str:
    evaluate = experiment.evaluate
    if score_set(score) == VALIDATION and not evaluate.validation:
        return "evaluate.validation holds out no rows: give it a share, as 0.1"
    if score not in experiment.scores:
        return f"the scores here are {', '.join(experiment.scores)}"
    if score_set(score) == TEST and not evaluate.test:
        return "evaluate.test is false"
    return "nobody can say whether more or less of this one is better"
