"""The cells of a study: one arm at one label of every axis, with what it leaves open.

A cell's experiment is put together from the sections of the file, those of its arm in their place,
then what each axis, the accounting and the scale say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raydpfl.config.registry import choose
from raydpfl.errors import ConfigError
from raydpfl.experiment import DEFAULTS, Experiment, at, changed, copied, takes
from raydpfl.methods import noise
from raydpfl.sweep.spaces import Options
from raydpfl.sweep.spaces import put as filled
from raydpfl.sweep.study.tuned_values import From, Open, find, points
from raydpfl.sweep.sweep import inline, short

PLACEHOLDER = 1.0  # of a number that is not known yet


def label(value: Any) -> str:
    """What a value is called as a label: as YAML has it.

    >>> label(True), label(0.1), label(None), label("iid")
    ('true', '0.1', 'none', 'iid')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def plain(name: str) -> str:
    """The name of an axis or a key without the mark of one that may be skipped."""
    return name.removesuffix("?")


def put(tree: Mapping[str, Any], changes: Mapping[str, Any], keep: bool = False) -> dict[str, Any]:
    """A copy of the tree with sections (whole) and dotted keys put in. A key that ends in `?` is
    skipped where the section's kind, after all other changes, has no such key.

    `keep`: with another kind of a section its keys stay as far as the new kind has them; else they
    go.
    """
    changes = copied(dict(changes))
    firm = {name: value for name, value in changes.items() if plain(name) == name}
    # what another kind leaves out is what the file of a study says, cell by cell
    made = changed(tree, firm.items(), quiet=True)
    if keep:
        made = changed(tree, {**_kept(tree, made, firm), **firm}.items(), quiet=True)
    soft = {plain(name): value for name, value in changes.items() if name not in firm}
    taken = {path: value for path, value in soft.items() if takes(made, path)}
    return changed(made, taken.items(), quiet=True)


def _kept(
    tree: Mapping[str, Any], made: Mapping[str, Any], changes: Iterable[str]
) -> dict[str, Any]:
    """What sections of which the kind is changed had, and have a place for still."""
    found: dict[str, Any] = {}
    for name in changes:
        section, _, key = name.rpartition(".")
        if key == "kind" and section:
            node = at(tree, section)
            before = node if isinstance(node, Mapping) else {}
            paths = {f"{section}.{each}": before[each] for each in before if each != "kind"}
            found |= {path: value for path, value in paths.items() if takes(made, path)}
    return found


def private(tree: Mapping[str, Any]) -> bool:
    """Whether the noise of this tree claims any privacy; noise that is not settled yet does."""
    section = {**DEFAULTS, **tree}["noise"]
    if isinstance(section, Mapping):
        some = {
            key: value.options[0] if isinstance(value, Options) else PLACEHOLDER
            for key, value in find(section).items()
        }
        section = filled(section, some)
    try:
        return choose("noise", section, noise.FAMILY, noise.Noise).private()
    except ConfigError:
        return True


@dataclass(frozen=True, eq=False)
class Cell:
    """One arm at one label of every axis."""

    arm: str
    labels: Mapping[str, str]  # of the panels' axes
    accounting: str | None
    tree: Mapping[str, Any]  # an experiment, but for what is open
    tries: int | None = None  # the first so many values of every grid count; None: all
    imports: tuple[str, ...] | None = None  # sections whose import paths are imported; None: all

    @cached_property
    def open(self) -> dict[str, Open]:
        return find(self.tree)

    @property
    def _options(self) -> dict[str, Options]:
        found = {key: value for key, value in self.open.items() if isinstance(value, Options)}
        return {key: Options(value.options[: self.tries]) for key, value in found.items()}

    @property
    def grid(self) -> dict[str, Options]:
        """The values to try, by dotted key; empty where there is nothing to choose."""
        found = self._options
        return found if any(len(each.options) > 1 for each in found.values()) else {}

    @property
    def fixed(self) -> dict[str, Any]:
        """The values of which there is one each, where there is nothing to choose."""
        return {} if self.grid else {key: each.options[0] for key, each in self._options.items()}

    @property
    def taken(self) -> dict[str, From]:
        """The numbers that other arms give, by dotted key."""
        return {key: value for key, value in self.open.items() if isinstance(value, From)}

    @cached_property
    def _made(self) -> dict[str, Experiment]:
        return {}

    def experiment(
        self, values: Mapping[str, Any], seed: int, validation: float | None = None
    ) -> Experiment:
        """The experiment with all that is open given, as a trial; made once.

        Args:
            values: By dotted key.
            seed: Of the run.
            validation: The share of rows held out of a run that values are chosen by, in which the
                test set is not looked at; None for a final run.
        """
        given = repr((sorted(values.items()), seed, validation))
        if given not in self._made:
            self._made[given] = self._make(values, seed, validation)
        return self._made[given]

    def _make(self, values: Mapping[str, Any], seed: int, validation: float | None) -> Experiment:
        tree = filled(self.tree, values)
        tree["seed"] = seed
        if validation is not None:
            tree["evaluate"] = {
                **tree.get("evaluate", {}),
                "test": False,
                "validation": validation,
            }
        try:
            return inline(Experiment.from_dict(tree, imports=self.imports))
        except ConfigError as error:
            expected = f"{error.expected} (in {self.named(values)})"
            raise ConfigError(error.field, error.value, expected) from None

    def tried(self) -> Iterator[dict[str, Any]]:
        """Every choice of the values to try, with placeholders for the numbers to come."""
        known = {**dict.fromkeys(self.taken, PLACEHOLDER), **self.fixed}
        return ({**known, **point} for point in points(self.grid))

    def named(self, values: Mapping[str, Any] | None = None) -> str:
        """What it is called in print, with these of its values."""
        parts = [self.arm, *(f"{axis}={name}" for axis, name in self.labels.items())]
        if self.accounting is not None:
            parts.append(f"accounting={self.accounting}")
        parts += [f"{key}={short(value)}" for key, value in (values or {}).items()]
        return " ".join(parts)

    def at(self, labels: Mapping[str, str | None]) -> bool:
        """Whether it stands at these labels, of which `arm` and `accounting` may be two."""
        mine = {**self.labels, "arm": self.arm, "accounting": self.accounting}
        return all(mine.get(axis) == name for axis, name in labels.items())
