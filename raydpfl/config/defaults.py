"""Which keys of a config stand at their defaults, and a config in YAML with a comment at each of
them (`raydpfl show`).

>>> text = "local:\\n  lr: 0.5\\n  momentum: 0.0\\n"
>>> print(annotate_defaults(text, {("local", "momentum")}), end="")
local:
  lr: 0.5
  momentum: 0.0  # default
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

MARK = "# default"
MAX_MARK_COLUMN = 60  # columns; a longer line does not move the marks of all others
Key = tuple[str, ...]  # the names from the outermost section to the key


def keys(
    section: BaseModel,
    values: Any,
    kinds: Mapping[str, Mapping[str, Any]] | None = None,
    kind: Any = None,
    place: Key = (),
) -> Iterator[Key]:
    """The keys that a config leaves, or puts, at their defaults.

    Args:
        section: an experiment, or one of its sections.
        values: its tree, in which keys may be missing; a kind alone; or None.
        kinds: the fields of default sections, as `raydpfl.experiment.DEFAULTS`.
        kind: the default kind of the section.
        place: the names that lead to it.
    """
    if not isinstance(values, Mapping):
        values = {} if values is None else {"kind": values}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        default = field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            default_kind = (kinds or {}).get(name, {}).get("kind", getattr(default, "kind", None))
            yield from keys(value, values.get(name), kind=default_kind, place=(*place, name))
        elif name not in values or (values[name] == kind if name == "kind" else value == default):
            yield (*place, name)


def annotate_defaults(text: str, default_keys: Collection[Key]) -> str:
    """A config in YAML, as `dump` writes it, with a comment at each of the keys that have their
    defaults; its meaning is the same.
    """
    lines = text.splitlines()
    places = {place for key, place in _places(yaml.compose(text), ()) if key in default_keys}
    lengths = [len(lines[place]) for place in places]
    column = max((length for length in lengths if length < MAX_MARK_COLUMN), default=0)
    for place in places:
        lines[place] = f"{lines[place]:<{column}}  {MARK}"
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
