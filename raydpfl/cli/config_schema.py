"""The JSON Schema (draft 2020-12) of a run's config, by which editors complete and check it
(`raydpfl kinds --schema`).

>>> found = schema()
>>> found["$defs"]["bounding.clip"]["properties"]["bound"]["maximum"]
1000000000000000.0
>>> found["$defs"]["bounding.clip"]["required"]
['kind', 'bound']
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raydpfl.config.registry import fields_of
from raydpfl.experiment import SECTIONS, Experiment
from raydpfl.privacy.papers import cited

PLAIN: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    dict: "object",
}
BOUNDS = {
    "gt": "exclusiveMinimum",
    "ge": "minimum",
    "lt": "exclusiveMaximum",
    "le": "maximum",
    "min_length": "minItems",
}
# Local rules whose kind has a default, and sections in which a kind may stand for the member.
RULES = ("personal", "fine_tune")
BY_NAME = ("data.task", "evaluate.metrics", "measure", "track")
USER_DEFINED = {"type": "string", "pattern": "[.:]"}


def schema() -> dict[str, Any]:
    """The schema, in JSON types."""
    definitions: dict[str, Any] = {}
    for name, spec in SECTIONS.items():
        if spec.family is not None and name != "evaluate.fine_tune":  # which is as `personal`
            definitions[name] = _family(name, spec.family)
            for kind, cls in spec.family.items():
                definitions[f"{name}.{kind}"] = _member(kind, cls, spec.usual)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The config of a raydpfl run",
        "type": "object",
        "properties": {
            name: _described(name, field) for name, field in Experiment.model_fields.items()
        },
        "additionalProperties": False,
        "$defs": definitions,
    }


def _family(name: str, family: Iterable[str]) -> dict[str, Any]:
    """One of the kinds of a family, or a user-defined class by its import path, with any fields."""
    kinds: list[dict[str, Any]] = [{"$ref": f"#/$defs/{name}.{kind}"} for kind in family]
    kinds.append({"type": "object", "properties": {"kind": USER_DEFINED}, "required": ["kind"]})
    if name in BY_NAME:
        kinds += [{"enum": [*family]}, USER_DEFINED]
    return {"anyOf": kinds}


def _member(kind: str, cls: type[BaseModel], usual: str | None) -> dict[str, Any]:
    schema = _section(cls)
    schema["properties"]["kind"] = {"const": kind}
    if kind != usual:
        schema["required"] = ["kind", *schema.get("required", ())]
    return schema


def _section(cls: type[BaseModel]) -> dict[str, Any]:
    """A mapping with the fields of a section or member."""
    fields = {name: field for name, field in cls.model_fields.items() if name != "kind"}
    schema: dict[str, Any] = {
        "type": "object",
        "description": cited(inspect.cleandoc(cls.__doc__ or "")),
        "properties": {name: _described(name, field) for name, field in fields.items()},
        "additionalProperties": False,
    }
    required = [name for name, field in fields.items() if field.is_required()]
    return schema | ({"required": required} if required else {})


def _described(name: str, field: FieldInfo) -> dict[str, Any]:
    """A field's type, description and default."""
    schema = _bounded(_type(field.annotation), field.metadata)
    if name in RULES:
        schema = {"anyOf": [{"$ref": "#/$defs/personal"}, {"type": "null"}]}
    elif name == "accountants":
        schema = {"anyOf": [schema, {"type": "string"}]}
    if field.description:
        schema["description"] = cited(field.description)
    default = field.get_default(call_default_factory=True)
    if default is not PydanticUndefined:
        schema["default"] = _plain(default)
    return schema


def _plain(value: Any) -> Any:
    """A default in JSON types."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _type(annotation: Any) -> dict[str, Any]:
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if origin is Annotated:
        return _bounded(_type(inner[0]), inner[1:])
    if origin is Literal:
        return {"enum": [*inner]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type(branch) for branch in inner]}
    if origin is tuple and inner[-1] is not Ellipsis:
        return {"type": "array", "prefixItems": [_type(item) for item in inner], "items": False}
    if origin in (tuple, list):
        return {"type": "array", "items": _type(inner[0])}
    if fields_of(annotation) is not None:
        names = [name for name, spec in SECTIONS.items() if spec.base is annotation]
        return {"$ref": f"#/$defs/{names[0]}"}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _section(annotation)
    named = PLAIN.get(origin or annotation)
    return {"type": named} if named else {}


def _bounded(schema: dict[str, Any], metadata: Iterable[Any]) -> dict[str, Any]:
    """A type with the bounds of its annotation."""
    for limit in metadata:
        if isinstance(limit, FieldInfo):
            schema = _bounded(schema, limit.metadata)
        for name, key in BOUNDS.items():
            value = getattr(limit, name, None)
            if value is not None:
                schema = {**schema, key: value}
    return schema
