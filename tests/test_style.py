"""What the linter has no rule for: short functions, and one thing a line."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import raydpfl

PACKAGE = Path(raydpfl.__file__).parent
PROJECT = PACKAGE.parent
FOLDERS = ("raydpfl", "experiments", "tests")
LINES = 40
BUILTINS = {name for name in dir(builtins) if not name.startswith("_")} - {
    "copyright", "credits", "exit", "help", "license", "quit",  # an interpreter's own
}  # fmt: skip


LOOKED_AT = (
    ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Expr, ast.Assign, ast.If, ast.While,
    ast.IfExp, ast.Assert, ast.comprehension, ast.match_case, ast.arg, ast.Import, ast.ImportFrom,
)  # fmt: skip


def wrong(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, what is wrong there) of all rules."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, LOOKED_AT))
    return sorted({each for node in nodes for each in at(node)})


def at(node: ast.AST) -> Iterator[tuple[int, str]]:
    """What is wrong with one node, those within it apart."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > LINES:
            yield node.lineno, f"{node.name} has {lines} lines"
    elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.IfExp, ast.BoolOp)):
        yield node.lineno, "a choice written as an expression whose value nobody takes"
    elif isinstance(node, ast.Assign) and unrelated(node):
        yield node.lineno, "assigns unrelated values at once"
    for condition in conditions(node):
        within = [part for part in ast.walk(condition) if isinstance(part, ast.NamedExpr)]
        yield from ((part.lineno, "assigns within a condition") for part in within)
    yield from ((line, f"{name} is a builtin") for line, name in bound(node) if name in BUILTINS)


def unrelated(node: ast.Assign) -> bool:
    """Whether several names get values that read none of these names, as those of a swap do."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    given = {ast.unparse(each) for each in target.elts}
    read = {
        ast.unparse(part)
        for each in node.value.elts
        for part in ast.walk(each)
        if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript))
    }
    return not given & read


def conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return node.ifs
    if isinstance(node, ast.match_case) and node.guard is not None:
        return [node.guard]
    return []


def bound(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that a statement gives a new meaning in its module or function; an attribute of a class
    hides nothing, as it is read by the dot."""
    if isinstance(node, ast.arg):
        yield node.lineno, node.arg
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield node.lineno, alias.asname or alias.name
    elif isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)):
        for statement in node.body:
            yield from named(statement)
    elif isinstance(node, ast.comprehension):
        yield from ((part.lineno, part.id) for part in ast.walk(node.target) if is_name(part))


def named(statement: ast.stmt) -> Iterator[tuple[int, str]]:
    """Names that a statement binds, those in its blocks too, in its own scope."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.lineno, statement.name
        return
    for part in ast.iter_child_nodes(statement):
        if isinstance(part, ast.stmt):
            yield from named(part)
        else:
            for each in ast.walk(part):
                if is_name(each) and isinstance(each.ctx, (ast.Store, ast.Del)):
                    yield each.lineno, each.id
                elif isinstance(each, ast.stmt):  # of an except or a case
                    yield from named(each)


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_are_short_and_a_line_does_one_thing(folder):
    found = {}
    for path in sorted((PROJECT / folder).rglob("*.py")):
        file = path.relative_to(PROJECT).as_posix()
        places = wrong(ast.parse(path.read_text()))
        if places:
            found[file] = places
    assert not found


PUBLIC = (
    "raydpfl", "raydpfl.privacy", "raydpfl.selection", "raydpfl.noise", "raydpfl.bounding",
    "raydpfl.server", "raydpfl.weights", "raydpfl.audit",
)  # fmt: skip


def is_code(found: object) -> bool:
    return inspect.isfunction(found) or isinstance(found, type)


def unsaid(found: object) -> str:
    """What the docstring of a public class or function leaves out; empty: nothing."""
    text = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__
    if not text:
        return "has no docstring"
    takes = 0 if inspect.isclass(found) else len(inspect.signature(found).parameters)
    if takes > 1 and "Args:" not in text and ">>>" not in text:
        return f"has {takes} parameters, and neither Args nor an example"
    return ""


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_say_what_they_take(package):
    module = importlib.import_module(package)
    public = {name: getattr(module, name) for name in module.__all__}
    code = {name: each for name, each in public.items() if is_code(each)}
    assert not {name: unsaid(each) for name, each in code.items() if unsaid(each)}


def test_what_is_left_unsaid_is_seen():
    assert unsaid(lambda x, y: x + y) == "has no docstring"
    assert unsaid(unrelated) == "" and unsaid(bound) == ""
    assert "3 parameters" in unsaid(undocumented)


def undocumented(one: int, two: int, three: int) -> int:
    """Adds."""
    return one + two + three


BAD = {
    "a long function": "def f():\n" + "    f()\n" * LINES,
    "a choice as a statement": "f() if x else g()",
    "an and as a statement": "x and f()",
    "unrelated values": "a, b = 1, 2",
    "unrelated attributes": "self.a, self.b = c.a, c.b",
    "assigning in an if": "if x := f():\n    pass",
    "assigning in a while": "while (x := f()) is not None:\n    pass",
    "assigning in a choice": "y = 1 if (x := f()) else 2",
    "assigning in a comprehension": "[y for x in z if (y := f(x))]",
    "an argument": "def f(round):\n    pass",
    "a lambda's argument": "lambda filter: 1",
    "a variable": "def f():\n    if x:\n        sum = 1",
    "a loop's variable": "for id in x:\n    pass",
    "a variable where an error is caught": "try:\n    f()\nexcept E:\n    all = 1",
    "a comprehension's": "[hash for hash in x]",
    "an import": "from x import open",
    "a function": "def max():\n    pass",
}
GOOD = {
    "a function of the most lines": "def f():\n" + "    f()\n" * (LINES - 1),
    "a swap": "a, b = b, a",
    "a step of a recurrence": "self.a, self.b = self.b, self.a + self.b",
    "unpacking": "a, b = f()",
    "a choice of values": "y = 1 if x else 2",
    "a method": "class A:\n    def max(self):\n        pass",
    "an attribute": "class A:\n    id: int = 1",
}


@pytest.mark.parametrize("code", BAD)
def test_what_the_rules_are_against_is_seen(code):
    assert wrong(ast.parse(BAD[code]))


@pytest.mark.parametrize("code", GOOD)
def test_what_the_rules_allow_is_left_alone(code):
    assert not wrong(ast.parse(GOOD[code]))
