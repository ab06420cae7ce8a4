"""Outside a family's folder no code tells its members apart: they answer hooks.

The syntax trees of the package are searched for `isinstance`, `match` and comparisons with a class
of a family, comparisons with a kind, tables keyed by either, `getattr` of a field, and flags.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import raydpfl
from raydpfl.config.registry import Member
from raydpfl.privacy.accountants import Accountant
from raydpfl.privacy.sampling import SamplingScheme

ROOT = Path(raydpfl.__file__).parent
# A family's own folder; a member that stands in none of them has the room that it stands in.
FOLDERS = (
    *("methods/bounding", "methods/noise", "methods/weights", "methods/server"),
    *("methods/selection", "methods/local", "methods/probes"),
    *("privacy/sampling", "privacy/accountants", "models/metrics", "models/tasks", "models"),
    *("data/sources", "data/partitions", "data/sizes", "data/features"),
)
# What reads, makes and checks members of every family, and so handles their root.
MACHINERY = ("config/registry", "config/user_classes")
CALLED = {*(folder.split("/")[-1] for folder in FOLDERS), "scheme", "accountant", "member"}
SHARED = {"paper", "bounding"}  # kinds that are a kind of guarantee, or a section, as well
FACTS = {"rigorous"}  # of an accountant: a fact that is printed, and no flag


def folder_of(path: Path) -> str:
    """The family folder that a file of the package is in, or its room."""
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    if name in MACHINERY:
        return "member"
    inside = (folder for folder in FOLDERS if f"{name}/".startswith(f"{folder}/"))
    return next(inside, name.split("/")[0])


@cache
def classes() -> list[type]:
    """Every class of the package, in the module that it stands in."""
    names = [module.name for module in pkgutil.walk_packages([str(ROOT)], "raydpfl.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    every = [(module, cls) for module in modules for cls in vars(module).values()]
    return [
        cls for module, cls in every if isinstance(cls, type) and cls.__module__ == module.__name__
    ]


@cache
def families() -> dict[str, dict[str, set[str]]]:
    """Classes, kinds, fields and flags of all families, each with the folders it is at home in."""
    table: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    vague = {*FACTS}  # names that other classes have too say little
    for cls in classes():
        if not issubclass(cls, (Member, SamplingScheme, Accountant)):
            vague |= vars(cls).keys() | getattr(cls, "__annotations__", {}).keys()
            continue
        fields = getattr(cls, "model_fields", {})
        kind = fields["kind"].default if fields else getattr(cls, "name", None)
        flags = [name for name in vars(cls) if name[0] != "_" and type(vars(cls)[name]) is bool]
        entries = {"class": [cls.__name__], "kind": [kind or cls.__name__], "flag": flags}
        for what, names in (entries | {"field": fields.keys() - dir(Member)}).items():
            for name in names:
                table[what][name].add(folder_of(Path(inspect.getfile(cls))))
    for what, unclear in (("field", vague), ("flag", vague), ("kind", SHARED)):
        table[what] = {name: table[what][name] for name in table[what].keys() - unclear}
    return table


def last_name(node: ast.AST) -> str:
    """What `x`, `a.x`, `a["x"]`, `a.x.lower()` and `type(x)` are called."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return last_name(node.func.value)
    if isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.slice
    return getattr(node, "id", getattr(node, "attr", getattr(node, "value", ""))) or ""


class Asks:
    """The places where code in the folder `here` tells members of other families apart."""

    def __init__(self, source: str, here: str):
        self.here = here
        kinds = {
            ast.Call: self.call,
            ast.Compare: self.compare,
            ast.MatchClass: lambda node: self.known("class", node.cls),
            ast.MatchValue: lambda node: self.known("kind", node.value),
            ast.Subscript: self.table,
            ast.Attribute: lambda node: self.known("flag", node)[:1],
        }
        nodes = [node for node in ast.walk(ast.parse(source)) if type(node) in kinds]
        self.places = [
            f"{here}:{getattr(node, 'lineno', '')} asks for {name}"
            for node in nodes
            for name in kinds[type(node)](node)
        ]

    def known(self, what: str, *nodes: ast.AST) -> list[str]:
        """Names in these expressions that belong to families at home elsewhere."""
        sort = (ast.Name, ast.Attribute) if what in ("class", "flag") else ast.Constant
        parts = [part for node in nodes for part in ast.walk(node) if isinstance(part, sort)]
        inside = [last_name(part) for part in parts if not ast.unparse(part).startswith("nn.")]
        table = families()[what]
        return [name for name in inside if name in table and self.here not in table[name]]

    def call(self, node: ast.Call) -> list[str]:
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in ("isinstance", "issubclass", "register"):
            return self.known("class", *node.args[-1:])
        if name in ("getattr", "hasattr"):
            return self.known("field", node.args[1])
        if name == "startswith" and last_name(node) == "kind":
            return self.known("kind", *node.args)
        return []

    def compare(self, node: ast.Compare) -> list[str]:
        sides = [node.left, *node.comparators]
        about = {last_name(side) for side in sides}
        asked = self.known("class", *(side for side in sides if not isinstance(side, ast.Call)))
        if about & {"kind", *CALLED}:
            asked += self.known("kind", *(side for side in sides if last_name(side) != "kind"))
        if about & {"model_fields", "model_dump"}:
            asked += self.known("field", node.left)
        return asked + ["placement"] * ("placement" in about and self.here != "methods/noise")

    def table(self, node: ast.Subscript) -> list[str]:
        keys = [*filter(None, node.value.keys)] if isinstance(node.value, ast.Dict) else []
        return self.known("kind", *keys) + self.known("class", *keys)


def test_no_member_is_asked_what_it_is():
    files = [path for path in ROOT.rglob("*.py") if path.name != "__main__.py"]
    assert not [place for path in files for place in Asks(path.read_text(), folder_of(path)).places]


CHEATS = (
    "isinstance(x, bounding.Clip)", "isinstance(x, (int, Clip))", "issubclass(type(x), Bounding)",
    "type(x) is bounding.Clip", "type(x) in (Clip, Normalize)", "x.kind in ('clip', 'normalize')",
    "match x:\n    case Clip():\n        pass", "match x.kind:\n    case 'clip':\n        pass",
    "'clip' != x.kind", "x.kind.lower() == 'clip'", "x.kind.startswith('clip')",
    "config['bounding']['kind'] == 'clip'", "{'clip': 1, 'normalize': 2}[x.kind]",
    "{bounding.Clip: 1}[type(x)]", "f.register(bounding.Clip)", "x.placement == 'step'",
    "getattr(x, 'quantile', None)", "'quantile' in x.model_fields", "scheme == 'poisson'",
    "type(x).factor is bounding.Bounding.factor",
)  # fmt: skip
INNOCENT = (
    "x.factor(1.0, 1.0)", "isinstance(x, int)", "error.kind == 'timeout'", "Clip(bound=1.0)",
    "{'a': 1}[x.name]", "getattr(error, 'strerror', None)", "str(x.placement)",
)  # fmt: skip


@pytest.mark.parametrize("source", [*CHEATS, *INNOCENT])
def test_telling_members_apart_is_seen_and_nothing_else_is(source):
    assert bool(Asks(source, "simulation").places) == (source in CHEATS)
    at_home = Asks(source, "methods/bounding").places
    assert not at_home or "placement" in source or "scheme" in source
