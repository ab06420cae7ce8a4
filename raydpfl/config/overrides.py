"""Changes to the tree of a config: `section.key=value`, whole sections, other kinds."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel

from raydpfl.config.registry import choose, is_import_allowed, is_path, load
from raydpfl.config.validation import validate
from raydpfl.config.yaml import parse_yaml
from raydpfl.errors import ConfigError

log = logging.getLogger("raydpfl")
# what a search space is named by (see `raydpfl.sweep`)
SPACES = ("grid", "choice", "uniform", "loguniform", "powers_of_two")


@dataclass(frozen=True)
class Spec:
    """A section of a config."""

    base: type[Any]  # the class of what it holds; of a family the base of its members
    family: Mapping[str, type[Any]] | None = None  # the members, by kind; None: it has no kinds
    default: Any = None  # the section where the config lacks it
    default_kind: str | None = None  # the kind of a member without one; None: it must have one
    # makes its value of what the config has; None: `choose`, or `validate` without a family
    parse: Callable[[Any], Any] | None = None
    foreign_base: type[Any] | None = None  # whose keys a class from outside has that is no member

    def value(self, name: str, values: Any) -> Any:
        """The section of this name. Raises `ConfigError`."""
        if self.parse is not None:
            return self.parse(values)
        if self.family is None:
            return validate(self.base, name, values)
        return choose(name, values, self.family, self.base)

    def fields(self, section: str, kind: Any) -> Mapping[str, Any]:
        """The keys of the section with this kind; none for an unknown one."""
        if self.family is None:
            return self.base.model_fields
        cls: Any = self.family.get(kind) if isinstance(kind, str) else None
        if cls is None and is_path(kind) and is_import_allowed(section):
            cls = load(kind, f"{section}.kind")
            cls = cls if hasattr(cls, "model_fields") else self.foreign_base
        return getattr(cls, "model_fields", {})


class Schema(dict[str, Spec]):
    """The sections of a config, by dotted name."""

    root: type[BaseModel]  # of the whole config

    @property
    def defaults(self) -> dict[str, dict[str, Any]]:
        """The members that a config without these sections has."""
        return {
            name: spec.default
            for name, spec in self.items()
            if spec.family and isinstance(spec.default, dict)
        }

    def overridden(self, values: Mapping[str, Any], overrides: Iterable[str] = ()) -> dict:
        """A copy of the tree `values` with every override `section.key=value` (YAML) put in as
        `apply_changes` does it. Raises `ConfigError`.
        """
        if not isinstance(values, Mapping):
            raise ConfigError("config", values, "a mapping of sections")
        return self.apply_changes(values, [_parse_override(override) for override in overrides])

    def apply_changes(
        self, values: Mapping[str, Any], changes: Iterable[tuple[str, Any]], quiet: bool = False
    ) -> dict[str, Any]:
        """A copy of a tree of sections with dotted keys set to values.

        Whole sections come first, then kinds, from the outer to the inner, then all else. A section
        of another kind keeps nothing but what is changed along with the kind; what is lost is
        logged in one line, unless `quiet`. Raises `ConfigError` for a key in what has none.
        """
        tree = copy_tree(dict(values))
        sorted_changes = sorted(changes, key=lambda change: _order(change[0]))
        paths = [path for path, _ in sorted_changes]
        for path, value in sorted_changes:
            *sections, key = path.split(".")
            node: Any = tree
            for depth, name in enumerate(sections):
                if node.get(name) is None:  # absent, or null, as data.features
                    node[name] = dict(self.defaults.get(name, {})) if depth == 0 else {}
                node = node[name]
                if not isinstance(node, dict):
                    place = ".".join(sections[: depth + 1])
                    raise ConfigError(path, value, f"a key of a section; {place} is {node!r}")
            if key == "kind" and "kind" in node and node["kind"] != value:
                loss_warning = self._clear(node, ".".join(sections), value, paths)
                if loss_warning and not quiet:
                    log.warning("%s; give next to it what is to stay", loss_warning)
            node[key] = value
        return tree

    def _clear(self, node: dict[str, Any], section: str, kind: Any, paths: list[str]) -> str:
        """Empties a section that becomes of another known kind, or of several; what is lost."""
        spec = self.get(section)
        if spec is None or spec.family is None:
            return ""
        if not (is_path(kind) or is_space(kind) or (isinstance(kind, str) and kind in spec.family)):
            return ""
        old_kind = node.pop("kind")
        old_class = spec.family.get(old_kind) if isinstance(old_kind, str) else None
        fields = getattr(old_class, "model_fields", {})
        kept_keys = {path.removeprefix(f"{section}.").partition(".")[0] for path in paths}
        losses = [
            f"{name}={value}"
            for name, value in node.items()
            if name not in kept_keys and not (name in fields and value == _default(fields[name]))
        ]
        node.clear()
        if not losses:
            return ""
        text = ", ".join(losses)
        return f"{section}.kind={kind} leaves out what {section} had of {old_kind}: {text}"

    def has_key(self, tree: Mapping[str, Any], path: str) -> bool:
        """Whether the section of a dotted key, of its kind in the tree, has such a key."""
        section, _, key = path.rpartition(".")
        if not section:
            return key in self.root.model_fields
        spec = self.get(section)
        if spec is None or spec.family is None:
            return key == "kind" if spec is None else key in spec.base.model_fields
        node = value_at({**self.defaults, **tree}, section)
        kind = node.get("kind", spec.default_kind) if isinstance(node, Mapping) else None
        return key == "kind" or key in spec.fields(section, kind)


def _default(field: Any) -> Any:
    """The default of a field, as a config has it."""
    default = field.default
    json_default = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
    return list(json_default) if isinstance(json_default, tuple) else json_default


def _parse_override(override: str) -> tuple[str, Any]:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError("override", override, "section.key=value")
    try:
        return path, parse_yaml(text)
    except yaml.YAMLError:
        raise ConfigError(path, text, "a value in YAML") from None


def _order(path: str) -> tuple[int, int]:
    """Kinds decide which keys there are."""
    depth = path.count(".")
    return (1, depth) if path.endswith(".kind") else (2 if depth else 0, 0)


def flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The leaves of a tree of sections, by dotted key.

    >>> flatten({"seed": 1, "local": {"lr": 0.1}})
    {'seed': 1, 'local.lr': 0.1}
    """
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        place = f"{path}{key}"
        leaves |= flatten(value, f"{place}.") if isinstance(value, Mapping) else {place: value}
    return leaves


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; None if there is none."""
    node: Any = tree
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def copy_tree(tree: Any) -> Any:
    """A copy of a tree, with a copy for each place of what stood in several (by YAML's anchors)."""
    if isinstance(tree, dict):
        return {key: copy_tree(value) for key, value in tree.items()}
    return [copy_tree(value) for value in tree] if isinstance(tree, list) else tree


def is_space(value: Any) -> bool:
    """Whether this stands for several values, of which a sweep tries one after another."""
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in SPACES


def has_space(tree: Mapping[str, Any]) -> bool:
    """Whether there is a space anywhere in a tree of sections."""
    parts = [value for value in tree.values() if isinstance(value, Mapping)]
    return any(is_space(part) or has_space(part) for part in parts)
