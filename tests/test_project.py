"""`raydpfl new`: a project that works as it is made."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

import forks
import pytest

import raydpfl
from raydpfl import Experiment, project

ROOT = Path(raydpfl.__file__).parent


@pytest.fixture
def made(tmp_path, monkeypatch, typed):
    """The directory of a project, where its own modules are found."""
    code, said, _ = typed("new", tmp_path / "mine")
    assert code == 0 and f"cd {tmp_path / 'mine'}" in said and "raydpfl run experiment.yaml" in said
    monkeypatch.syspath_prepend(tmp_path / "mine")
    return tmp_path / "mine"


def test_a_projects_config_is_its_own_method_and_its_tests_pass(made, tmp_path):
    tests = importlib.import_module("test_mine")
    for norm in (1e-9, 1.0, 1e300):
        tests.test_an_update_has_the_norm_that_the_equation_gives(norm)
    tests.test_two_rounds_of_the_experiment_are_private(tmp_path)
    assert Experiment.from_yaml(made / "experiment.yaml").bounding.kind == "mine:Tanh"


@pytest.mark.slow
def test_a_project_passes_as_its_readme_says(made):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = forks.run(command, cwd=made, timeout=300)
    assert done.returncode == 0 and "7 passed" in done.stdout, done.stdout


def test_what_is_in_a_directory_is_left_alone(made, tmp_path, complain):
    before = {path: path.read_bytes() for path in made.iterdir()}
    said = complain(["new", made])
    assert said.startswith("DIR = ") and said.endswith("a new directory, or one that is empty")
    assert {path: path.read_bytes() for path in made.iterdir()} == before
    (tmp_path / "file").touch()
    assert "one that is empty" in complain(["new", tmp_path / "file"])
    below = complain(["new", tmp_path / "file" / "mine"])
    assert "a directory that can be written to" in below
    (tmp_path / "empty").mkdir()
    assert len(project.make(tmp_path / "empty")) == len(before)


def test_the_template_is_part_of_an_installed_package():
    told = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    patterns = told["tool"]["setuptools"]["package-data"]["raydpfl"]
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    assert {*(ROOT / "template").iterdir()} <= found
