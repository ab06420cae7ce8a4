"""Reads and writes YAML: numbers such as 1e1, no key twice, no bombs."""

import re
from pathlib import Path
from typing import Any

import yaml

from raydpfl.errors import ConfigError
from raydpfl.storage.files import read_text

DEPTH = 50  # of values within values
MAX_MERGED_KEYS = 10_000  # keys that a mapping may have once others are merged into it (<<)
_DEPTH_ERROR = "values within values, too deep"


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


class _Loader(yaml.SafeLoader):
    """YAML in which 1e1 is a number, as in YAML 1.2, and not text as in YAML 1.1; and in which a
    mapping has a key once, as else the last would silently count."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        known_keys: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in known_keys:
                    message = f"the key {key.value!r} twice in one mapping"
                    raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
                known_keys.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_MERGED_KEYS:
            raise yaml.YAMLError(f"a mapping that others make larger than {MAX_MERGED_KEYS:,} keys")


class _Dumper(yaml.SafeDumper):
    """What `_Loader` reads back: text that looks like such a number stands in quotes."""


# as in YAML 1.2, 010 is no octal number and 1:30 none of sixties
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith((":int", ":float"))]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_integer_pattern = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)\Z")
_float_pattern = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|\.(inf|Inf|INF)|(\d+\.?\d*|\.\d+)[eE][-+]?\d+)\Z"
    r"|\.(nan|NaN|NAN)\Z"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _integer_pattern, list("-+0123456789"))
for _yaml in (_Loader, _Dumper):
    _yaml.add_implicit_resolver("tag:yaml.org,2002:float", _float_pattern, list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """The values of a text in YAML. Raises `yaml.YAMLError`, also for values nested deeper than
    `DEPTH`, and for aliases that stand for more values than the text is long.
    """
    try:
        values = yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError(_DEPTH_ERROR) from None
    # as of a date or a number that is none
    except (ValueError, OverflowError, AttributeError, TypeError, IndexError) as error:
        raise yaml.YAMLError(str(error)) from None
    _check_size(values, max(len(text), 10_000))
    return values


def _check_size(values: Any, budget: int) -> None:
    """Raises `yaml.YAMLError` for values nested deeper than `DEPTH`, or for more than `budget`."""
    stack = [(values, 0)]
    while stack:
        value, depth = stack.pop()
        budget -= 1
        if depth > DEPTH:
            raise yaml.YAMLError(_DEPTH_ERROR)
        if budget < 0:
            raise yaml.YAMLError("aliases that stand for more values than the text is long")
        if isinstance(value, dict):
            stack += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, (list, tuple, set)):
            stack += [(part, depth + 1) for part in value]


def dump(values: Any) -> str:
    """YAML that `parse_yaml` reads back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
