"""Every choice that a config has, read from the classes themselves (`raydpfl kinds`): in words, and
as a JSON Schema (draft 2020-12), by which editors complete and check a config (`--schema`).

>>> print(list_references("bounding.clip")[0].render())
bounding.clip
  (raydpfl.methods.bounding.clip:Clip)
  u min(1, c / ||u||) (Zhang 2021 eq. 3, Das 2021 eq. 4).
  scaling: update | gradient; default update
    what is bounded: the update, or update / lr, minus the sum of gradients, as
    Das 2021 writes it.
  bound: number, >= 1e-12, <= 1e+15; required
    c: the largest L2 norm of what one client sends.
>>> config_schema()["$defs"]["bounding.clip"]["properties"]["bound"]["maximum"]
1000000000000000.0
>>> config_schema()["$defs"]["bounding.clip"]["required"]
['kind', 'bound']
"""

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from raydpfl.config.hints import suggestion
from raydpfl.config.yaml import dump
from raydpfl.errors import ConfigError
from raydpfl.experiment import SECTIONS, Experiment
from raydpfl.privacy.accountants import ACCOUNTANTS
from raydpfl.privacy.papers import cite_papers
from raydpfl.privacy.sampling import SCHEMES

WIDTH = 80
BOUNDS = {
    "exclusiveMinimum": ">",
    "minimum": ">=",
    "exclusiveMaximum": "<",
    "maximum": "<=",
    "minItems": "at least",
    "minLength": "at least",
}
PLAIN = {
    "boolean": "true | false",
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "null": "null",
    "object": "mapping",
    "array": "list",
    None: "any value",
}
BASES = {spec.base.__name__ for spec in SECTIONS.values() if spec.family is not None}
# Sections in which a kind may stand for the member.
BY_NAME = ("data.task", "evaluate.metrics", "measure", "track")
USER_DEFINED = {"type": "string", "pattern": "[.:]"}


@dataclass(frozen=True)
class KeyReference:
    """A key of a section."""

    name: str
    type: str  # in words, with its bounds
    required: bool
    default: Any  # in JSON types; None where it is required
    about: str  # its description; may be empty

    def lines(self) -> Iterator[str]:
        """As text of at most `WIDTH` columns."""
        default = "required" if self.required else f"default {_yaml(self.default)}"
        yield from _wrap(f"{self.name}: {self.type}; {default}", "  ", "      ")
        yield from _wrap(self.about, "    ")


@dataclass(frozen=True)
class KindReference:
    """A member of a family, or a section that has no kinds (`kind` is then empty)."""

    family: str  # the section of the config that it is a choice of
    kind: str
    source: str  # its class
    about: str  # its docstring
    keys: tuple[KeyReference, ...]

    @property
    def name(self) -> str:
        """As `raydpfl kinds NAME` takes it."""
        return f"{self.family}.{self.kind}".strip(".")

    def render(self) -> str:
        """As text of at most `WIDTH` columns."""
        lines = [self.name, f"  ({self.source})", *_paragraphs(self.about)]
        for key in self.keys:
            lines += key.lines()
        return "\n".join(lines)


def list_references(name: str | None = None) -> list[KindReference]:
    """The members of all families, of one (`bounding`), or one of them (`bounding.clip`). The last
    word of a section is enough (`partition` for `data.partition`).

    Raises:
        ConfigError: there is none of this name.
    """
    references = _all_references()
    if name is None:
        return [*references]
    matches = [kind for kind in references if name in (kind.family, kind.name)]
    ends = (f".{name}", f".{name.removesuffix('s')}")
    matches = matches or [
        kind for kind in references if kind.family.endswith(ends) or kind.name.endswith(ends)
    ]
    if not matches:
        families = list(dict.fromkeys(kind.family for kind in references))
        expected = f"one of {', '.join(families)}; or FAMILY.KIND"
        near = suggestion(name.replace(".", " "), [*families, *(kind.name for kind in references)])
        raise ConfigError("kinds", name, f"{expected}{near}")
    return matches


def render(kinds: Iterable[KindReference]) -> str:
    """What `raydpfl kinds` prints."""
    return "\n\n".join(kind.render() for kind in kinds)


@cache
def _all_references() -> list[KindReference]:
    top = _section_schema(Experiment)
    top["description"] = "What stands outside of all sections."
    keys = ("seed", "rounds", "personal")
    top["properties"] = {key: top["properties"][key] for key in keys}
    kinds = [_kind("config", "", Experiment, top)]
    sections = SECTIONS.items()
    for name, spec in sections:
        if spec.family and not spec.default_kind:  # a rule of local, wherever else it may stand
            kinds += [_kind(name, kind, cls) for kind, cls in spec.family.items()]
    kinds += [_kind(name, "", spec.base) for name, spec in sections if spec.family is None]
    class_families: dict[str, Mapping[str, Any]] = {
        "privacy.accountants": ACCOUNTANTS,
        "selection.sampling": SCHEMES,
    }
    return kinds + [
        _kind(name, kind, type(member), {"description": cite_papers(inspect.getdoc(member) or "")})
        for name, members in class_families.items()
        for kind, member in members.items()
    ]


def _kind(
    family: str, kind: str, cls: type, schema: Mapping[str, Any] | None = None
) -> KindReference:
    schema = _section_schema(cls) if schema is None else schema
    keys = tuple(
        KeyReference(
            name,
            _words(key, schema.get("$defs", {})),
            name in schema.get("required", ()),
            key.get("default"),
            re.sub(r"(?<=[^.:])$", ".", key.get("description", "")),
        )
        for name, key in schema.get("properties", {}).items()
        if name != "kind"
    )
    path = f"{cls.__module__}:{cls.__qualname__}"
    return KindReference(family, kind, path, schema.get("description", ""), keys)


def _yaml(value: Any) -> str:
    """A default on one line."""
    if isinstance(value, Mapping) and "kind" in value:
        return str(value["kind"])
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        value = [_yaml(item) for item in value]
    text = dump([value]).strip() if value != "" else "- ''"
    return " ".join(text.removeprefix("- ").split()) if "\n" not in text else str(value)


def _words(schema: Mapping[str, Any], sections: Mapping[str, Any]) -> str:
    """A type of JSON Schema, which refers to `sections`, with its bounds, as in `number, > 0`."""
    if "anyOf" in schema:
        return " | ".join(_words(branch, sections) for branch in schema["anyOf"])
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        keys = ", ".join(sections[name]["properties"])
        return "a section with a kind" if name in BASES else f"{{{keys}}}"
    if "const" in schema or "enum" in schema:
        return " | ".join(map(str, schema.get("enum") or [schema["const"]]))
    words = PLAIN[schema.get("type")]
    if words == "list":
        items = schema.get("prefixItems") or filter(None, [schema.get("items")])
        words += " of " + (" and ".join(_words(item, sections) for item in items) or "values")
    for name, sign in BOUNDS.items():
        if name in schema and not (name == "minItems" and "prefixItems" in schema):
            value = schema[name]
            words += f", {sign} {value:g}" if abs(value) >= 1e5 else f", {sign} {value}"
    return words


def _wrap(text: str, indent: str, hanging_indent: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if hanging_indent is None else hanging_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _paragraphs(text: str) -> Iterator[str]:
    """A docstring: prose wrapped, what is indented as it is, examples left out."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(">>>"):
            continue
        if paragraph.startswith((" ", "|")):
            yield from textwrap.indent(paragraph, "  ").splitlines()
        elif paragraph.startswith("- "):
            for item in re.split(r"\n(?=- )", paragraph):
                yield from _wrap(" ".join(item.split()), "  ", "    ")
        else:
            yield from _wrap(paragraph, "  ")


@cache
def config_schema() -> dict[str, Any]:
    """The JSON Schema of a run's config, in JSON types."""
    config = _section_schema(Experiment)
    del config["required"]  # what a config lacks is at its default
    definitions = config["$defs"]
    for name, spec in SECTIONS.items():
        if spec.family is None or name == "evaluate.fine_tune":  # which is as `personal`
            continue
        for kind, cls in spec.family.items():
            member = _section_schema(cls)
            definitions |= member.pop("$defs", {})
            member["properties"]["kind"] = {"const": kind}
            if kind != spec.default_kind:
                member["required"] = ["kind", *member.get("required", ())]
            definitions[f"{name}.{kind}"] = member
        # one of the kinds, or a user-defined class by its import path, with any fields
        user_member = {"type": "object", "properties": {"kind": USER_DEFINED}, "required": ["kind"]}
        choices = [*({"$ref": f"#/$defs/{name}.{kind}"} for kind in spec.family), user_member]
        name_schemas = [{"enum": [*spec.family]}, USER_DEFINED] if name in BY_NAME else []
        definitions[name] = {"anyOf": [*choices, *name_schemas]}
    for name, spec in SECTIONS.items():
        if spec.family is not None and name not in ("personal", "evaluate.fine_tune"):
            definitions[spec.base.__name__] = {"$ref": f"#/$defs/{name}"}
    accountants = definitions["Privacy"]["properties"]["accountants"]
    accountants["type"] = ["array", "string"]  # one of them without a list
    rule = {"anyOf": [{"$ref": "#/$defs/personal"}, {"type": "null"}]}  # its kind has a default
    config["properties"]["personal"] |= rule
    definitions["Evaluate"]["properties"]["fine_tune"] |= rule
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **config}


def _section_schema(cls: type[BaseModel]) -> dict[str, Any]:
    """A mapping with the fields of a section or member, as pydantic describes it."""
    return json.loads(json.dumps(cls.model_json_schema()), object_hook=_clean_node)


def _clean_node(node: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema without its title, and with papers by author and year."""
    if isinstance(node.get("title"), str):
        del node["title"]
    if isinstance(node.get("description"), str):
        node["description"] = cite_papers(node["description"])
    return node
