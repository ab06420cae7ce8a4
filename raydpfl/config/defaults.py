"""Which keys of a config stand at their defaults, and a config in YAML with a comment at each of
them (`raydpfl show`).

>>> from raydpfl import Experiment
>>> from raydpfl.experiment import DEFAULTS
>>> given = {"rounds": 3, "model": {"kind": "softmax"}, "local": {"kind": "sgd", "lr": 0.5}}
>>> usual = set(keys(Experiment.from_dict(given), given, DEFAULTS))
>>> ("local", "momentum") in usual, ("model", "kind") in usual, ("local", "lr") in usual
(True, True, False)
>>> print(marked("seed: 0\\nrounds: 3\\nlocal:\\n  lr: 0.5\\n  momentum: 0.0\\n", usual), end="")
seed: 0          # default
rounds: 3
local:
  lr: 0.5
  momentum: 0.0  # default
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

MARK = "# default"
FAR = 60  # columns; a longer line does not move the marks of all others
Key = tuple[str, ...]  # the names from the outermost section to the key


def keys(
    experiment: BaseModel, tree: Mapping[str, Any], kinds: Mapping[str, Mapping[str, Any]]
) -> Iterator[Key]:
    """The keys that a config leaves, or puts, at their defaults.

    Args:
        experiment: of the config.
        tree: of the config, in which keys may be missing.
        kinds: the fields of default sections, as `raydpfl.experiment.DEFAULTS`.
    """
    for name in type(experiment).model_fields:
        value = getattr(experiment, name)
        if isinstance(value, BaseModel):
            yield from within(value, tree.get(name), kinds.get(name, {}).get("kind"), (name,))
        elif _at_default(experiment, name, tree):
            yield (name,)


def within(section: BaseModel, values: Any, kind: Any = None, place: Key = ()) -> Iterator[Key]:
    """As `keys`, of one section: a mapping, a kind alone, or None; `kind` is its default,
    `place` the names that lead to it.
    """
    if not isinstance(values, Mapping):
        values = {} if values is None else {"kind": values}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name == "kind":
            if value == values.get("kind", kind) == kind or "kind" not in values:
                yield (*place, name)
        elif isinstance(value, BaseModel):
            usual = getattr(field.get_default(call_default_factory=True), "kind", None)
            yield from within(value, values.get(name), usual, (*place, name))
        elif _at_default(section, name, values):
            yield (*place, name)


def _at_default(section: BaseModel, name: str, values: Mapping[str, Any]) -> bool:
    field = type(section).model_fields[name]
    usual = field.get_default(call_default_factory=True)
    return name not in values or getattr(section, name) == usual


def marked(text: str, usual: Collection[Key]) -> str:
    """A config in YAML, as `dump` writes it, with a comment at each of the keys that have their
    defaults; its meaning is the same.
    """
    lines = text.splitlines()
    at = {place for key, place in _places(yaml.compose(text), ()) if key in usual}
    widest = max((len(lines[place]) for place in at if len(lines[place]) < FAR), default=0)
    for place in at:
        lines[place] = f"{lines[place]:<{widest}}  {MARK}"
    return "".join(f"{line}\n" for line in lines)


def _places(node: yaml.Node | None, place: Key) -> Iterator[tuple[Key, int]]:
    """Every key with a value in its line, which a comment may end, and that line."""
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        key = (*place, name.value)
        line = name.start_mark.line
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _places(value, key)
        elif isinstance(value, yaml.SequenceNode) or value.end_mark.line == line:
            yield key, line
