"""Nobody asks a member what it is: outside a family's own folder its members answer hooks, and are
not told apart.

The syntax trees of the package are searched for the ways of telling members apart: `isinstance`,
`issubclass` and `match` on their classes, comparisons of classes, of overridden methods, of a kind
or of a placement, `getattr` and `hasattr` of what a member has, class flags, and tables keyed by a
kind. Class expressions are resolved in their module, and through local names; what cannot be
resolved is known by its name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import raydpfl
from raydpfl.config.registry import Member
from raydpfl.privacy.accountants import Accountant
from raydpfl.privacy.sampling import SamplingScheme

ROOT = Path(raydpfl.__file__).parent
# A family's own folder; a member that stands in none of them has the room that it stands in.
FOLDERS = (
    "methods/bounding",
    "methods/noise",
    "methods/weights",
    "methods/server",
    "methods/selection",
    "methods/local",
    "methods/probes",
    "privacy/sampling",
    "privacy/accountants",
    "data/sources",
    "data/partitions",
    "data/sizes",
    "data/features",
    "models/metrics",
    "models/tasks",
    "models",
)
# What reads, makes and checks members of every family, and so handles their root.
MACHINERY = ("config/registry", "config/overrides", "config/user_classes")
# What members, and what only passes their answers on, are called where a name is all that is known.
CALLED = {*(folder.split("/")[-1] for folder in FOLDERS), "scheme", "accountant", "member"}
FIELDS = ("model_fields", "model_fields_set", "model_dump", "__dict__")
STRINGS = ("lower", "upper", "strip", "casefold", "startswith", "endswith", "removeprefix")
PLACEMENTS = {"client", "server", "step"}
# What a guarantee says of its accountant (DESIGN.md): a fact that is printed, and no flag.
FACTS = {"rigorous"}


class Asked(NamedTuple):
    line: int
    what: str


def folder_of(path: Path) -> str:
    """The family folder that a file of the package is in, or its room."""
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    if name in MACHINERY:
        return "member"
    for folder in FOLDERS:
        if name == folder or name.startswith(f"{folder}/"):
            return folder
    return name.split("/")[0]


@cache
def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name."""
    found = {"raydpfl": ROOT / "__init__.py"}
    for each in pkgutil.walk_packages([str(ROOT)], "raydpfl."):
        if not each.name.endswith("__main__"):
            path = ROOT.joinpath(*each.name.split(".")[1:])
            found[each.name] = path / "__init__.py" if each.ispkg else path.with_suffix(".py")
    return found


def subclasses(base: type) -> Iterator[type]:
    for cls in base.__subclasses__():
        if cls.__module__.startswith("raydpfl.") and cls.__name__ != "Unread":
            yield cls
            yield from subclasses(cls)


@cache
def family_classes() -> dict[type, str]:
    """The bases and members of all families, with the folder that each is at home in."""
    for name in modules():
        importlib.import_module(name)
    found = {}
    for root in (Member, SamplingScheme, Accountant):
        for cls in {root, *subclasses(root)}:
            found[cls] = folder_of(Path(inspect.getfile(cls)))
    return found


@cache
def homes() -> dict[str, set[str]]:
    """By the name of a class its folders."""
    found: dict[str, set[str]] = {}
    for cls, folder in family_classes().items():
        found.setdefault(cls.__name__, set()).add(folder)
    return found


@cache
def named(field: str) -> dict[str, set[str]]:
    """By the `kind` of a member, or by the `name` of an accountant, the folders of its families."""
    found: dict[str, set[str]] = {}
    for cls, folder in family_classes().items():
        of_config = getattr(cls, "model_fields", {}).get(field)
        text = of_config.default if of_config else getattr(cls, field, None)
        if isinstance(text, str) and text:
            found.setdefault(text, set()).add(folder)
    return found


@cache
def attributes() -> dict[str, set[str]]:
    """Fields, hooks and constants of members, with their folders: what `getattr` might look for."""
    found: dict[str, set[str]] = {}
    for cls, folder in family_classes().items():
        for name in {*vars(cls), *getattr(cls, "model_fields", ())}:
            if not name.startswith(("_", "model_")) and name not in dir(Member):
                found.setdefault(name, set()).add(folder)
    return found


@cache
def flags() -> dict[str, set[str]]:
    """Names that stand for a class: constants that are true or false, and properties that are so in
    every class, with the folders of their families."""
    found: dict[str, set[str]] = {}
    varying: set[str] = set()
    for cls, folder in family_classes().items():
        for name, value in vars(cls).items():
            if name.startswith("_") or name in FACTS:
                continue
            if isinstance(value, bool) or always(value):
                found.setdefault(name, set()).add(folder)
            elif isinstance(value, property):
                varying.add(name)
    return {name: folders for name, folders in found.items() if name not in varying}


def always(value: Any) -> bool:
    """Whether a class attribute is a property that returns True, or False, whatever the member."""
    if not isinstance(value, property):
        return False
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(value.fget)))
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return len(returned) == 1 and isinstance(getattr(returned[0], "value", None), bool)


@cache
def others() -> set[str]:
    """What classes of the package that are of no family have: a name that says little."""
    found: set[str] = set()
    for name in modules():
        for cls in vars(importlib.import_module(name)).values():
            if inspect.isclass(cls) and cls.__module__ == name and cls not in family_classes():
                found |= vars(cls).keys() | getattr(cls, "__annotations__", {}).keys()
    return found


LOOKED_AT = (
    ast.Assign, ast.arg, ast.Call, ast.Compare, ast.Match, ast.Subscript, ast.Attribute, ast.Try,
)  # fmt: skip


class Asks:
    """The places of one file that tell members apart."""

    def __init__(self, source: str, here: str, names: dict[str, Any]):
        """`here` is the folder of the file, `names` are the globals of its module."""
        self.tree = ast.parse(source)
        self.here = here
        self.names = names
        self.locals: dict[str, ast.expr] = {}
        self.annotations: dict[str, ast.expr] = {}
        self.nodes = [node for node in ast.walk(self.tree) if isinstance(node, LOOKED_AT)]
        for node in self.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.locals[node.targets[0].id] = node.value
            elif isinstance(node, ast.arg) and node.annotation is not None:
                self.annotations[node.arg] = node.annotation

    def places(self) -> list[Asked]:
        return sorted({each for node in self.nodes for each in self.at(node)})

    def at(self, node: ast.AST) -> Iterator[Asked]:
        if isinstance(node, ast.Call):
            yield from self.call(node)
        elif isinstance(node, ast.Compare):
            yield from self.compare(node)
        elif isinstance(node, ast.Match):
            yield from self.match(node)
        elif isinstance(node, ast.Subscript):
            yield from self.table(node.value, node.slice)
        elif isinstance(node, ast.Attribute):
            yield from self.flag(node)
        elif isinstance(node, ast.Try):
            yield from self.caught(node)

    def call(self, node: ast.Call) -> Iterator[Asked]:
        if isinstance(node.func, ast.Name) and len(node.args) > 1:
            yield from self.builtin(node, node.func.id)
        elif isinstance(node.func, ast.Attribute) and node.args:
            method = node.func.attr
            if method == "get":
                yield from self.table(node.func.value, node.args[0])
            elif method in ("register", "dispatch"):
                for cls in self.foreign(node.args[0]):
                    yield Asked(node.lineno, f"{method} of {cls}")
            elif method in STRINGS:
                for text in texts(node.args[0]):
                    yield from self.word(node.lineno, text, node.func.value)

    def builtin(self, node: ast.Call, name: str) -> Iterator[Asked]:
        """`isinstance` and its like."""
        if name in ("isinstance", "issubclass"):
            for cls in self.foreign(node.args[1]):
                yield Asked(node.lineno, f"{name} of {cls}")
        elif name in ("getattr", "hasattr"):
            for text in texts(node.args[1]):
                if self.of_member(node.args[0], text, attributes()):
                    yield Asked(node.lineno, f"{name} of {text}")

    def compare(self, node: ast.Compare) -> Iterator[Asked]:
        sides = [node.left, *node.comparators]
        if any(last_name(self.resolved(side)) == "placement" for side in sides):
            yield Asked(node.lineno, "compares a placement")
        for side in sides:
            for cls in self.foreign(side):
                yield Asked(node.lineno, f"compares with {cls}")
            for text in texts(side):
                for other in sides:
                    yield from self.word(node.lineno, text, other)

    def word(self, line: int, text: str, other: ast.expr) -> Iterator[Asked]:
        """A text that something is compared with."""
        about = last_name(self.resolved(other))
        if "placement" in about and about != "placement" and text in PLACEMENTS:
            yield Asked(line, f"compares a placement with {text}")
        elif about == "kind" and self.elsewhere(named("kind"), text):
            yield Asked(line, f"compares a kind with {text}")
        elif about in ("__name__", "__qualname__") and self.elsewhere(homes(), text):
            yield Asked(line, f"compares a class's name with {text}")
        elif about in CALLED and (
            self.elsewhere(named("kind"), text) or self.elsewhere(named("name"), text)
        ):
            yield Asked(line, f"compares a member with {text}")
        elif about in FIELDS and self.elsewhere(attributes(), text):
            yield Asked(line, f"looks for the field {text}")

    def match(self, node: ast.Match) -> Iterator[Asked]:
        for part in ast.walk(node):
            if isinstance(part, ast.MatchClass):
                for cls in self.foreign(part.cls):
                    yield Asked(part.lineno, f"matches {cls}")
            elif isinstance(part, ast.MatchValue):
                for text in texts(part.value):
                    yield from self.word(part.value.lineno, text, node.subject)
                    if last_name(self.resolved(node.subject)) == "placement":
                        yield Asked(part.value.lineno, "compares a placement")

    def table(self, table: ast.expr, key: ast.expr) -> Iterator[Asked]:
        """`table[key]` and `table.get(key)`."""
        about = last_name(self.resolved(key))
        if last_name(self.resolved(table)) == "model_dump":
            for text in texts(key):
                if self.elsewhere(attributes(), text):
                    yield Asked(key.lineno, f"looks for the field {text}")
        elif isinstance(key, ast.Call) and getattr(key.func, "id", "") == "type":
            if self.keyed_by_member(table):
                yield Asked(key.lineno, "looks up by class")
        elif about == "placement" and isinstance(key, ast.Attribute):
            yield Asked(key.lineno, "looks up by placement")
        elif about == "kind" and self.here != "member" and self.keyed_by_member(table):
            yield Asked(key.lineno, "looks up by kind")

    def keyed_by_member(self, table: ast.expr) -> bool:
        """Whether the keys of a table are kinds or classes of families that are at home elsewhere.

        Not so of a family's own table, by which its members are made; so of one that is not known.
        """
        table = self.resolved(table)
        if isinstance(table, ast.Dict):
            keys = [key for key in table.keys if key is not None]
            classes = [cls for key in keys for cls in self.foreign(key)]
            words = [text for key in keys for text in texts(key)]
            return bool(classes) or any(self.elsewhere(named("kind"), word) for word in words)
        value = self.value(table)
        if not isinstance(value, dict):
            return isinstance(table, (ast.Name, ast.Attribute))
        made = [each if inspect.isclass(each) else type(each) for each in value.values()]
        if any(cls in family_classes() for cls in made):
            return False
        return any(
            key in family_classes() if inspect.isclass(key) else key in named("kind")
            for key in value
        )

    def flag(self, node: ast.Attribute) -> Iterator[Asked]:
        if isinstance(node.ctx, ast.Load) and self.of_member(node.value, node.attr, flags()):
            yield Asked(node.lineno, f"reads {node.attr}")

    def caught(self, node: ast.Try) -> Iterator[Asked]:
        """Hooks that are tried for whether there are any."""
        types = [ast.unparse(handler.type) for handler in node.handlers if handler.type]
        if any("NotImplementedError" in each or "AttributeError" in each for each in types):
            tried = [part for each in node.body for part in ast.walk(each)]
            for part in (part for part in tried if isinstance(part, ast.Attribute)):
                if self.of_member(part.value, part.attr, attributes()):
                    yield Asked(part.lineno, f"tries {part.attr}")

    def of_member(self, owner: ast.expr, name: str, table: dict[str, set[str]]) -> bool:
        """Whether this attribute of `owner` is one of a member that is at home elsewhere."""
        if not self.elsewhere(table, name):
            return False
        annotated = self.value(self.annotations.get(getattr(owner, "id", "")))
        if isinstance(annotated, type) and annotated not in family_classes():
            return False
        if name in others() or self.here in attributes().get(name, ()):
            return last_name(owner) in CALLED
        return True

    def elsewhere(self, table: dict[str, set[str]], name: str) -> bool:
        """Whether a name is of a family, and of none that is at home here."""
        return name in table and self.here not in table[name]

    def foreign(self, node: ast.expr) -> Iterator[str]:
        """The classes of families at home elsewhere that an expression names."""
        value = self.value(self.resolved(node))
        if value is None:  # a local name
            names = {last_name(part) for part in ast.walk(node) if not isinstance(part, ast.Call)}
            yield from sorted(
                name for name in names if name[:1].isupper() and self.elsewhere(homes(), name)
            )
        for cls in value if isinstance(value, tuple) else (value,):
            owner = defined_in(cls)
            if owner is not None and family_classes().get(owner, self.here) != self.here:
                yield owner.__name__

    def resolved(self, node: ast.expr) -> ast.expr:
        """What a local name was last given."""
        if isinstance(node, ast.Name) and node.id not in self.names:
            return self.locals.get(node.id, node)
        return node

    def value(self, node: ast.expr | None) -> Any:
        """What names, attributes, items of tables and tuples of them stand for; else None."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self.value(node.value), node.attr, None)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            table = self.value(node.value)
            return table.get(node.slice.value) if isinstance(table, dict) else None
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return tuple(self.value(each) for each in node.elts)
        return None


def defined_in(value: Any) -> type | None:
    """A class itself, or the one that a method stands in."""
    if inspect.isclass(value):
        return value
    outer = getattr(value, "__qualname__", "").rpartition(".")[0]
    owner = getattr(inspect.getmodule(value), outer, None) if outer else None
    return owner if inspect.isclass(owner) else None


def last_name(node: ast.AST) -> str:
    """What `x`, `a.x`, `a["x"]`, `getattr(a, "x")` and `a.x.lower()` are called: x."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return next(texts(node.slice), "")
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in STRINGS:
            return last_name(node.func.value)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "model_dump":
            return "model_dump"
        words = [text for argument in node.args[:2] for text in texts(argument)]
        return words[0] if words else next(map(last_name, node.args), "")
    return ""


def texts(node: ast.AST) -> Iterator[str]:
    """The strings that an expression is, or holds as a tuple, list or set."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        for each in node.elts:
            yield from texts(each)


def asked(name: str, path: Path) -> list[Asked]:
    """The places of a module of the package that tell members apart."""
    return Asks(path.read_text(), folder_of(path), vars(importlib.import_module(name))).places()


def test_no_member_is_asked_what_it_is():
    wrong = []
    for name, path in modules().items():
        file = path.relative_to(ROOT).as_posix()
        own = file.startswith("methods/noise/")  # whose field the placement is
        wrong += [
            f"{file}:{line} {what}"
            for line, what in asked(name, path)
            if not (own and "a placement" in what)
        ]
    assert not wrong


# As the code of a file that is in no family's folder.
CHEATS = {
    "isinstance": "isinstance(x, bounding.Clip)",
    "isinstance of the base": "isinstance(x, bounding.Bounding)",
    "isinstance of several": "isinstance(x, (int, bounding.Clip))",
    "issubclass": "issubclass(type(x), bounding.Clip)",
    "a class under another name": "Known = bounding.Clip\nisinstance(x, Known)",
    "a class imported within": "from raydpfl.methods.bounding import Clip\nisinstance(x, Clip)",
    "a class from the table": "isinstance(x, bounding.FAMILY['clip'])",
    "type": "type(x) is bounding.Clip",
    "__class__": "x.__class__ == bounding.Clip",
    "type among several": "type(x) in (bounding.Clip, bounding.Normalize)",
    "the class's name": "type(x).__name__ == 'Clip'",
    "match of a class": "match x:\n    case bounding.Clip():\n        pass",
    "match of a kind": "match x.kind:\n    case 'clip':\n        pass",
    "match of a placement": "match x.placement:\n    case 'step':\n        pass",
    "kind": "x.kind == 'clip'",
    "kind turned round": "'clip' != x.kind",
    "kind among several": "x.kind in ('clip', 'normalize')",
    "kind under another name": "chosen = x.kind\nchosen == 'clip'",
    "kind in other letters": "x.kind.lower() == 'clip'",
    "start of a kind": "x.kind.startswith('clip')",
    "kind from the config": "config['bounding']['kind'] == 'clip'",
    "kind by getattr": "getattr(x, 'kind') == 'clip'",
    "table of kinds": "{'clip': 1, 'normalize': 2}[x.kind]",
    "table of classes": "{bounding.Clip: 1}[type(x)]",
    "table of classes, asked": "{bounding.Clip: 1}.get(type(x))",
    "singledispatch": "f.register(bounding.Clip)",
    "placement": "x.placement == 'step'",
    "no placement": "x.placement != 'client'",
    "table of placements": "{'client': 1, 'server': 2}[x.placement]",
    "getattr of a field": "getattr(x, 'quantile', None)",
    "hasattr of a field": "hasattr(x, 'quantile')",
    "whether it has a field": "'quantile' in x.model_fields",
    "whether a field was given": "'quantile' in x.model_fields_set",
    "field of the dumped": "given = x.model_dump()\ngiven.get('quantile')",
    "whether a hook is overridden": "type(x).factor is bounding.Bounding.factor",
    "trying a hook": "try:\n    scheme.losses(1)\nexcept NotImplementedError:\n    pass",
    "trying a field": "try:\n    x.quantile\nexcept AttributeError:\n    pass",
    "scheme by its name": "scheme == 'poisson'",
}
INNOCENT = {
    "hook": "x.factor(1.0, 1.0)",
    "isinstance of something else": "isinstance(x, int)",
    "a kind of something else": "error.kind == 'timeout'",
    "making one": "bounding.Clip(bound=1.0)",
    "a table of something else": "{'a': 1}[x.name]",
    "getattr of something else": "getattr(error, 'strerror', None)",
    "placement shown": "str(x.placement)",
}


@pytest.mark.parametrize("backend", CHEATS)
def test_every_way_of_asking_is_seen(backend):
    from raydpfl.methods import bounding

    assert Asks(CHEATS[backend], "coordinator", {"bounding": bounding}).places()


@pytest.mark.parametrize("backend", INNOCENT)
def test_what_asks_no_member_is_left_alone(backend):
    from raydpfl.methods import bounding

    assert not Asks(INNOCENT[backend], "coordinator", {"bounding": bounding}).places()


def test_a_family_may_tell_its_own_members_apart():
    from raydpfl.methods import bounding

    for backend in ("isinstance", "kind", "getattr of a field"):
        assert not Asks(CHEATS[backend], "methods/bounding", {"bounding": bounding}).places()
