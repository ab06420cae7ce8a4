"""The import rule: arrows point down, and nothing below the runtime line knows Ray."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import raydpfl
from raydpfl.methods import bounding, local, noise, probes, selection, server, weights

ROOT = Path(raydpfl.__file__).parent
# From the top of DESIGN.md's list to its bottom; rooms on one line may import one another only
# where the later names the earlier.
ORDER = [
    "__main__", "cli", "completion", "directing", "project", "notebook", "kinds", "outline",
    "budget", "audit", "check", "submit", "staging", "archive", "study", "tune", "report", "shown",
    "observers", "runner", "launch", "hosted", "coordinator", "record", "witnessing", "adapting",
    "surveying", "position", "account", "memory", "placement", "actors", "dealing", "slots",
    "remote", "client", "evaluator", "personal", "resident", "process", "delivery", "cluster",
    # no Ray from here on
    "plan", "parts", "saved", "origin", "defaults", "config", "track", "measure", "scores",
    "histogram", "tables", "tracking", "heterogeneity", "compare", "selection", "local", "bounding",
    "noise", "weights", "server", "sums", "privacy", "models", "data", "metrics", "tasks", "member",
    "own", "rounds", "rates", "arrow", "keys", "native", "compiling", "storage",
    "files", "device", "shared", "hints", "errors", "interrupts", "crew", "hardware", "loading",
    "reaper",
]  # fmt: skip
KNOW_RAY = {
    "runner",
    "actors",
    "launch",
    "process",
    "delivery",
    "cluster",
    "tune",
    "submit",
    "cli",
    "shown",
}


def room_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


# What a hook is handed may be named in its annotation, for the type checker alone.
HANDED = {"raydpfl.experiment"}


def statements(node: ast.AST):
    """Every statement within, at any depth."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from statements(child)


def typed(tree: ast.AST) -> set[ast.AST]:
    """The imports of a module that only a type checker sees."""
    return {
        each
        for node in statements(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for each in statements(node)
        if isinstance(each, ast.ImportFrom) and each.module in HANDED
    }


def imports(path: Path):
    """(imported module, line) of every import, those inside functions too."""
    tree = ast.parse(path.read_text())
    unseen = typed(tree)
    for node in statements(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if node.module == "raydpfl":
                yield from ((f"raydpfl.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(
                f"{path}:{node.lineno}: a relative import hides which room it reaches into"
            )


def sources():
    return [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]


def test_every_room_has_its_place_in_the_order():
    assert {room_of(path) for path in sources()} <= set(ORDER)


def test_imports_point_down_and_never_up():
    wrong = []
    for path in sources():
        here = room_of(path)
        for module, line in imports(path):
            if module.startswith("raydpfl."):
                there = module.split(".")[1]
                if there in ORDER and ORDER.index(there) < ORDER.index(here):
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong


@pytest.mark.slow
def test_nothing_below_the_runtime_line_imports_ray():
    below = [path for path in sources() if room_of(path) not in KNOW_RAY]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in below
        for module, line in imports(path)
        if module.split(".")[0] == "ray"
    ]
    assert not wrong


@pytest.mark.slow
def test_describing_an_experiment_does_not_load_ray():
    code = "import sys, raydpfl.simulation.plan; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_round_fits_on_one_screen():
    tree = ast.parse((ROOT / "coordinator.py").read_text())
    coordinator = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Coordinator"
    )
    method = next(
        node
        for node in coordinator.body
        if isinstance(node, ast.FunctionDef) and node.name == "round"
    )
    assert method.end_lineno - method.lineno < 40


def test_the_coordinator_is_a_page_and_names_no_method():
    text = (ROOT / "coordinator.py").read_text()
    families = [bounding, local, noise, selection, server, weights, probes]
    kinds = {kind for family in families for kind in family.FAMILY} - {"bounding"}  # a section
    classes = {cls.__name__ for family in families for cls in family.FAMILY.values()}
    nodes = [*ast.walk(ast.parse(text))]
    said = {node.value for node in nodes if isinstance(node, ast.Constant)}
    assert len(text.splitlines()) < 200
    assert not said & kinds and not set(re.findall(r"\w+", text)) & classes
