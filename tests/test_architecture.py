"""What the layers of `pyproject.toml` (import-linter) do not say: who knows Ray, and which code
names methods.
"""

import ast
import re
from pathlib import Path

import pytest

import raydpfl
from raydpfl.methods import bounding, local, noise, probes, selection, server, weights

ROOT = Path(raydpfl.__file__).parent
KNOW_RAY = ("runtime", "sweep", "jobs", "cli")
COORDINATOR = ROOT / "simulation" / "coordinator.py"


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
