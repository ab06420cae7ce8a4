"""The JSON Schema (draft 2020-12) of a run's config, by which editors complete and check it
(`raydpfl kinds --schema`).

>>> schema()["$defs"]["bounding.clip"]["properties"]["bound"]["maximum"]
1000000000000000.0
>>> schema()["$defs"]["bounding.clip"]["required"]
['kind', 'bound']
"""

import json
from functools import cache
from typing import Any

from pydantic import BaseModel

from raydpfl.experiment import SECTIONS, Experiment
from raydpfl.privacy.papers import cite_papers

# Sections in which a kind may stand for the member.
BY_NAME = ("data.task", "evaluate.metrics", "measure", "track")
USER_DEFINED = {"type": "string", "pattern": "[.:]"}


@cache
def schema() -> dict[str, Any]:
    """The schema, in JSON types."""
    config = section(Experiment)
    del config["required"]  # what a config lacks is at its default
    definitions = config["$defs"]
    for name, spec in SECTIONS.items():
        if spec.family is None or name == "evaluate.fine_tune":  # which is as `personal`
            continue
        for kind, cls in spec.family.items():
            member = section(cls)
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


def section(cls: type[BaseModel]) -> dict[str, Any]:
    """A mapping with the fields of a section or member, as pydantic describes it."""
    return json.loads(json.dumps(cls.model_json_schema()), object_hook=_clean_node)


def _clean_node(node: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema without its title, and with papers by author and year."""
    if isinstance(node.get("title"), str):
        del node["title"]
    if isinstance(node.get("description"), str):
        node["description"] = cite_papers(node["description"])
    return node
