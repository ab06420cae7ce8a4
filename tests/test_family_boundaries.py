"""What the layers of `pyproject.toml` (import-linter) do not say: who knows Ray, which code names
methods, and that outside a family's folder no code tells its members apart: they answer hooks.

The syntax trees of the package are searched for `isinstance`, `match` and comparisons with a class
of a family, comparisons with a kind, tables keyed by either, `getattr` of a field, and flags.
"""

import ast
import importlib
import inspect
import pkgutil
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import raydpfl
from raydpfl.config.registry import Member
from raydpfl.methods import bounding, local, noise, probes, selection, server, weights
from raydpfl.privacy.accountants import Accountant
from raydpfl.privacy.sampling import SamplingScheme

ROOT = Path(raydpfl.__file__).parent
KNOW_RAY = ("runtime", "sweep", "jobs", "cli")
COORDINATOR = ROOT / "simulation" / "coordinator.py"
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


def known(here: str, what: str, *nodes: ast.AST) -> list[str]:
    """Names in these expressions that belong to families at home elsewhere than `here`."""
    sort = (ast.Name, ast.Attribute) if what in ("class", "flag") else ast.Constant
    parts = [part for node in nodes for part in ast.walk(node) if isinstance(part, sort)]
    names = [last_name(part) for part in parts if not ast.unparse(part).startswith("nn.")]
    table = families()[what]
    return [name for name in names if name in table and here not in table[name]]


def compared(node: ast.Compare, here: str) -> list[str]:
    sides = [node.left, *node.comparators]
    about = {last_name(side) for side in sides}
    asked = known(here, "class", *(side for side in sides if not isinstance(side, ast.Call)))
    if about & {"kind", *CALLED}:
        asked += known(here, "kind", *(side for side in sides if last_name(side) != "kind"))
    if about & {"model_fields", "model_dump"}:
        asked += known(here, "field", node.left)
    return asked + ["placement"] * ("placement" in about and here != "methods/noise")


def asked(node: ast.AST, here: str) -> list[str]:
    """What an expression in the folder `here` asks members of other families for."""
    match node:
        case ast.Call(
            func=ast.Name(id="isinstance" | "issubclass") | ast.Attribute(attr="register")
        ):
            return known(here, "class", *node.args[-1:])
        case ast.Call(func=ast.Name(id="getattr" | "hasattr")):
            return known(here, "field", node.args[1])
        case ast.Call(func=ast.Attribute(attr="startswith")) if last_name(node) == "kind":
            return known(here, "kind", *node.args)
        case ast.Compare():
            return compared(node, here)
        case ast.MatchClass():
            return known(here, "class", node.cls)
        case ast.MatchValue():
            return known(here, "kind", node.value)
        case ast.Subscript(value=ast.Dict(keys=keys)):
            named = [*filter(None, keys)]
            return known(here, "kind", *named) + known(here, "class", *named)
        case ast.Attribute():
            return known(here, "flag", node)[:1]
    return []


def asks(source: str, here: str) -> list[str]:
    nodes = ast.walk(ast.parse(source))
    return [f"{here}:{node.lineno} asks for {name}" for node in nodes for name in asked(node, here)]


def test_no_member_is_asked_what_it_is():
    files = [path for path in ROOT.rglob("*.py") if path.name != "__main__.py"]
    assert not [place for path in files for place in asks(path.read_text(), folder_of(path))]


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
    assert bool(asks(source, "simulation")) == (source in CHEATS)
    at_home = asks(source, "methods/bounding")
    assert not at_home or "placement" in source or "scheme" in source


@pytest.mark.slow
def test_nothing_below_the_runtime_imports_ray():
    below = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in KNOW_RAY]
    importing = re.compile(r"^\s*(import ray\b|from ray[. ])", re.MULTILINE)
    assert len(below) > 200
    assert not [str(path.relative_to(ROOT)) for path in below if importing.search(path.read_text())]


def test_the_coordinator_names_no_method():
    text = COORDINATOR.read_text()
    families = [bounding, local, noise, selection, server, weights, probes]
    kinds = {kind for family in families for kind in family.FAMILY} - {"bounding"}  # a section
    classes = {cls.__name__ for family in families for cls in family.FAMILY.values()}
    nodes = [*ast.walk(ast.parse(text))]
    said = {node.value for node in nodes if isinstance(node, ast.Constant)}
    assert not said & kinds and not set(re.findall(r"\w+", text)) & classes
