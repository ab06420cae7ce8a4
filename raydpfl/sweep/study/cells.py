"""The cells of a study: one arm at one label of every axis, with the values that it leaves open.

A cell's experiment is put together from the sections of the file, those of its arm in their place,
then what each axis, the accounting and the scale say.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from raydpfl.config.overrides import copy_tree, is_space, value_at
from raydpfl.config.registry import Section, choose
from raydpfl.config.validation import validate
from raydpfl.errors import ConfigError
from raydpfl.experiment import DEFAULTS, SECTIONS, Experiment
from raydpfl.methods import noise
from raydpfl.sweep.spaces import Options, fill_spaces, parse, points, walk
from raydpfl.sweep.sweep import inline_clients
from raydpfl.sweep.trials import override_text

PLACEHOLDER = 1.0  # of a number that is not known yet


class Reference(Section):
    """A number that the finished runs of another arm give: the mean over their seeds."""

    arm: str
    value: str  # a number of the summary, one within a mapping there as `stationary.final_x`
    times: float = 1.0
    panel: Mapping[str, Any] = {}  # labels of axes where they are not those of the cell itself


def open_values(tree: Mapping[str, Any]) -> dict[str, Options | Reference]:
    """What is open in a tree of sections, by dotted key, in the tree's order: `{tune: ..}`, values
    to try, and `{from: ..}`, a number of another arm. Raises `ConfigError` for what is neither.

    >>> open_values({"local": {"lr": {"tune": [0.1, 1]}}, "bounding": {"bound": 1.0}})
    {'local.lr': Options(options=(0.1, 1), ordered=False)}
    """
    return walk(tree, _open_value)


def _open_value(key: str, value: Mapping[str, Any]) -> Options | Reference | None:
    if list(value) == ["from"]:
        return validate(Reference, key, value["from"])
    if list(value) != ["tune"]:
        return None
    options = value["tune"]
    space = parse(key, options if is_space(options) else {"grid": options})
    if not isinstance(space, Options):
        raise ConfigError(key, options, "a list of values to try, or powers_of_two")
    for first, second in itertools.combinations(space.options, 2):
        if first == second:
            pair = f"{first!r} and {second!r}"
            raise ConfigError(key, options, f"values that differ; {pair} make the same experiment")
    return space


def label(value: Any) -> str:
    """A value as a label: as YAML writes it.

    >>> label(True), label(0.1), label(None), label("iid")
    ('true', '0.1', 'none', 'iid')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def strip_mark(name: str) -> str:
    """The name of an axis or a key without the mark of one that may be skipped."""
    return name.removesuffix("?")


def apply_changes(
    tree: Mapping[str, Any], changes: Mapping[str, Any], keep: bool = False
) -> dict[str, Any]:
    """A copy of the tree with sections (whole) and dotted keys put in. A key that ends in `?` is
    skipped where the section's kind, after all other changes, has no such key. `keep`: with another
    kind of a section its keys stay as far as the new kind has them; else they go.
    """
    changes = copy_tree(dict(changes))
    required_changes = {name: value for name, value in changes.items() if strip_mark(name) == name}
    # no warning of keys that another kind leaves out: the file of a study means it
    result = SECTIONS.apply_changes(tree, required_changes.items(), quiet=True)
    if keep:
        required_changes = {**_kept_keys(tree, result, required_changes), **required_changes}
        result = SECTIONS.apply_changes(tree, required_changes.items(), quiet=True)
    optional_changes = {strip_mark(k): v for k, v in changes.items() if k not in required_changes}
    optional_changes = {k: v for k, v in optional_changes.items() if SECTIONS.has_key(result, k)}
    return SECTIONS.apply_changes(result, optional_changes.items(), quiet=True)


def _kept_keys(
    tree: Mapping[str, Any], result: Mapping[str, Any], changes: Iterable[str]
) -> dict[str, Any]:
    """The keys of sections whose kind is changed that the new kind has too."""
    keys: dict[str, Any] = {}
    for name in changes:
        section, _, key = name.rpartition(".")
        old_section = value_at(tree, section)
        if key == "kind" and section and isinstance(old_section, Mapping):
            paths = {f"{section}.{key}": old_section[key] for key in old_section if key != "kind"}
            keys |= {path: value for path, value in paths.items() if SECTIONS.has_key(result, path)}
    return keys


def is_private(tree: Mapping[str, Any]) -> bool:
    """Whether the noise of this tree claims any privacy; noise that cannot be made yet does."""
    section = {**DEFAULTS, **tree}["noise"]
    if isinstance(section, Mapping):
        values = {
            key: value.options[0] if isinstance(value, Options) else PLACEHOLDER
            for key, value in open_values(section).items()
        }
        section = fill_spaces(section, values)
    try:
        member = choose("noise", section, noise.FAMILY, noise.Noise)
        # wherever it is drawn
        return member.resolve_placement(per_sample=False, cohort_hidden=False).private()
    except ConfigError:
        return True


@dataclass(frozen=True, eq=False)
class StudyCell:
    """One arm at one label of every axis."""

    arm: str
    labels: Mapping[str, str]  # of the panels' axes
    accounting: str | None
    tree: Mapping[str, Any]  # an experiment, without what is open
    limit: int | None = None  # of every grid the first so many values count; None: all
    imports: tuple[str, ...] | None = None  # sections whose import paths are imported; None: all
    _experiments: dict[str, Experiment] = field(default_factory=dict)

    @cached_property
    def _open_values(self) -> dict[str, Options | Reference]:
        return open_values(self.tree)

    @cached_property
    def _spaces(self) -> dict[str, Options]:
        spaces = {k: value for k, value in self._open_values.items() if isinstance(value, Options)}
        return {key: Options(space.options[: self.limit]) for key, space in spaces.items()}

    @property
    def grid(self) -> dict[str, Options]:
        """The values to try, by dotted key; empty where there is nothing to choose."""
        has_choice = any(len(space.options) > 1 for space in self._spaces.values())
        return self._spaces if has_choice else {}

    @property
    def settings(self) -> int:
        """How many settings are tried; 0 where there is nothing to choose."""
        return math.prod(len(space.options) for space in self.grid.values()) if self.grid else 0

    @property
    def fixed_values(self) -> dict[str, Any]:
        """The values of which there is one each, where there is nothing to choose."""
        return {} if self.grid else {key: space.options[0] for key, space in self._spaces.items()}

    @property
    def references(self) -> dict[str, Reference]:
        """The numbers that other arms give, by dotted key."""
        return {k: value for k, value in self._open_values.items() if isinstance(value, Reference)}

    def experiment(
        self, values: Mapping[str, Any], seed: int, validation: float | None = None
    ) -> Experiment:
        """The experiment with all open `values` given by dotted key, as a trial. `validation` is
        the share of rows held out of a run that values are chosen by, in which the test set is not
        looked at; None for a final run.
        """
        key = repr((sorted(values.items()), seed, validation))
        if key not in self._experiments:
            tree = fill_spaces(self.tree, values) | {"seed": seed}
            if validation is not None:
                evaluate_fields = {"test": False, "validation": validation}
                tree["evaluate"] = {**tree.get("evaluate", {}), **evaluate_fields}
            try:
                experiment = Experiment.from_dict(tree, imports=self.imports)
            except ConfigError as error:
                expected = f"{error.expected} (in {self.display_name(values)})"
                raise ConfigError(error.field, error.value, expected) from None
            self._experiments[key] = inline_clients(experiment)
        return self._experiments[key]

    def setting_values(self) -> Iterator[dict[str, Any]]:
        """Every choice of the values to try, with placeholders for the numbers of other arms."""
        values = {**dict.fromkeys(self.references, PLACEHOLDER), **self.fixed_values}
        return ({**values, **point} for point in points(self.grid))

    def first_experiment(self, seed: int) -> Experiment:
        """The experiment with the first of its values to try."""
        return self.experiment(next(self.setting_values()), seed)

    def display_name(self, values: Mapping[str, Any] | None = None) -> str:
        """Its name in print, with these of its values."""
        labels = [f"{axis}={name}" for axis, name in self.place.items() if axis != "arm" and name]
        return " ".join(filter(None, [self.arm, *labels, override_text(values or {})]))

    @property
    def place(self) -> dict[str, str | None]:
        """Its labels, those of `accounting` and `arm` among them."""
        return {**self.labels, "accounting": self.accounting, "arm": self.arm}

    def at(self, labels: Mapping[str, str | None]) -> bool:
        """Whether it has these labels."""
        return labels.items() <= self.place.items()
