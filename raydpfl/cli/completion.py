"""What a shell completes of the words after `raydpfl`: kinds, fields of a config with their values,
members and studies. Files the shell completes itself.

The fields come from the classes (`raydpfl.cli.kinds`), which takes seconds to import, so a table of
them is kept in the cache; a config is read as YAML alone, and nothing that it names is imported.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
import yaml

import raydpfl
from raydpfl.storage.files import cache_root, keep_json, read_own_json, read_text

Values = dict[str, list[str]]  # the values worth offering, by key
# the keys of each kind, by family; a section without kinds has one whose name is empty
Fields = dict[str, dict[str, Values]]
CHOICE = re.compile(r"[\w.-]+")  # a literal, as types are worded
TYPES = ("number", "text", "mapping")
CONFIG_NAMES = ("config.yaml", "sweep.yaml")
# families whose members no section of a config is one of
UNSECTIONED = ("measure", "track", "evaluate.metrics", "privacy.accountants", "selection.sampling")


def kinds(incomplete: str) -> list[str]:
    """For `raydpfl kinds`: families, and the members of one once no other is meant."""
    family_fields = fields()
    names = [name for name in family_fields if name.startswith(incomplete)]
    for family in family_fields:
        if names == [family] or incomplete.startswith(family):
            names += [f"{family}.{kind}" for kind in family_fields[family] if kind]
    return _matches(names, incomplete)


def members(incomplete: str) -> list[str]:
    """For `raydpfl check`: the members that come with the project, as `family:kind`."""
    names = [f"{family}:{kind}" for family, kinds in fields().items() for kind in kinds if kind]
    return _matches(names, incomplete)


def kinds_after_colon(context: typer.Context, incomplete: str) -> list[str]:
    """The kinds of a family that bash has cut off, as it takes a colon for a word of its own."""
    words = context.params.get("overrides") or []
    if (words and words != [":"]) or (not words and incomplete != ":"):
        return []
    return _matches(fields().get(context.params.get("member", ""), {}), incomplete.strip(":"))


def completer(words: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What completes one of the words that a function gives once they are asked for."""
    return lambda incomplete: _matches(words(), incomplete)


def studies(incomplete: str) -> list[str]:
    """For `raydpfl reproduce`: the studies that come with the project, and their papers."""
    paths = (Path(raydpfl.__file__).parent / "sweep" / "study" / "papers").glob("*/*.yaml")
    ids = sorted(f"{path.parent.name}/{path.stem}" for path in paths)
    papers = dict.fromkeys(study_id.partition("/")[0] for study_id in ids)
    return _matches((*papers, *ids, "all"), incomplete)


def _matches(words: Iterable[str], incomplete: str) -> list[str]:
    """Those of the words that begin with what is there."""
    return [word for word in words if word.startswith(incomplete)]


def overrides(context: typer.Context, incomplete: str) -> list[str]:
    """For `section.key=value`: the fields that the config's own members have; after `=` the values
    that a field can have by name, and its default.

    bash takes `=` for a word of its own, and completes what follows it alone.
    """
    words = [*(context.params.get("overrides") or ())]
    tree = _tree(context.params.get("config"))
    for override in _join_words(words):
        _apply_override(tree, *override.split("=", 1))
    choices = dict(_field_values(tree))
    line = words[:-1] if words[-1:] == ["="] else words  # typer leaves out one that comes last
    if line and line[-1] in choices and not (line is words and incomplete):
        return _matches(choices[line[-1]], incomplete)
    key, sign, start = incomplete.partition("=")
    if not sign:
        offers = [f"{field}=" for field in _matches(choices, key)]
        if len(offers) > 1:
            return offers
        key = offers[0].strip("=") if offers else key  # with its values no shell ends the word
    values = [f"{key}={value}" for value in _matches(choices.get(key, ()), start)]
    return values if sign else [*offers, *values]


def _join_words(words: list[str]) -> Iterator[str]:
    """Whole overrides, of words that a shell may have cut at `=`."""
    for place, word in enumerate(words):
        if "=" in word.strip("="):
            yield word
        elif word == "=" and 0 < place < len(words) - 1:
            yield f"{words[place - 1]}={words[place + 1]}"


def _apply_override(tree: dict[str, Any], key: str, value: str) -> None:
    """Puts an override into the tree; another kind takes the place of all that was there."""
    *sections, last = key.split(".")
    node = tree
    for name in sections:
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node = node[name]
    if last == "kind":
        node.clear()
    node[last] = value


def _field_values(tree: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Every field of the config's sections, with its values."""
    family_fields = fields()
    for family, kind_fields in family_fields.items():
        section = tree if family == "config" else _section(tree, family)
        if family in UNSECTIONED or (section is None and "." in family):
            continue
        prefix = "" if family == "config" else f"{family}."
        if "" not in kind_fields:
            yield f"{prefix}kind", [*kind_fields]
        usual = next(iter(kind_fields))  # the first of a family, and of a section without kinds
        kind = (section or {}).get("kind", usual) if usual else usual
        for key, values in kind_fields.get(kind, {}).items():
            if f"{prefix}{key}" not in family_fields:  # it has fields of its own
                yield f"{prefix}{key}", values


def _section(tree: Mapping[str, Any], family: str) -> Mapping[str, Any] | None:
    """A section of a config; None if there is none."""
    node: Any = tree
    for name in family.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else None


def _tree(config: str | None) -> dict[str, Any]:
    """The config that is named, or the directory's; empty where it cannot be read."""
    if not config:
        return {}
    path = Path(config)
    if path.is_dir():
        path = next((path / name for name in CONFIG_NAMES if (path / name).exists()), path)
    try:
        tree = yaml.safe_load(read_text(path))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def fields() -> Fields:
    """All fields of a config, from the cache, or from the classes."""
    path = cache_root() / "completion" / f"{_state()}.json"
    try:
        return read_own_json(path)
    except (OSError, ValueError):
        field_table = table()
        keep_json(path, field_table)
        return field_table


def _state() -> str:
    """Another one whenever the code is another."""
    folder = Path(raydpfl.__file__).parent
    times = [os.stat(path).st_mtime_ns for path in folder.rglob("*.py")]
    return f"{raydpfl.__version__}-{len(times)}-{max(times)}"


def table() -> Fields:
    """All fields of a config, from the classes."""
    from raydpfl.cli import kinds as reference

    field_table: Fields = {}
    for one in reference.list_references():
        values = {key.name: _values(key) for key in one.keys}
        field_table.setdefault(one.family, {})[one.kind] = values
    return field_table


def _values(key: Any) -> list[str]:
    """What a key can have by name, and its default if it is one word."""
    words = [word for word in key.type.split(" | ") if CHOICE.fullmatch(word)]
    values = [word for word in words if word not in TYPES]
    plain = isinstance(key.default, int | float | str) and not isinstance(key.default, bool)
    if plain and CHOICE.fullmatch(str(key.default)):
        values.append(str(key.default))
    return [*dict.fromkeys(values)]
