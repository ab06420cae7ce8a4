"""`raydpfl new`: a project that works as it is made."""

import importlib
import inspect
import sys
import tomllib
from pathlib import Path

import numpy as np
import processes
import pytest

import raydpfl
from raydpfl import Experiment
from raydpfl.cli import new_project
from raydpfl.cli.commands import run
from raydpfl.data import parse

ROOT = Path(raydpfl.__file__).parent


@pytest.fixture
def made(tmp_path, monkeypatch, typed):
    """Makes a project of a family, and imports its tests."""

    def make(*options):
        folder = tmp_path / "mine"
        code, said, _ = typed("new", folder, *options)
        assert code == 0 and f"cd {folder}" in said and "raydpfl run experiment.yaml" in said
        monkeypatch.syspath_prepend(folder)
        for name in ("mine", "test_mine"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return folder, importlib.import_module("test_mine")

    yield make
    for name in ("mine", "test_mine"):
        sys.modules.pop(name, None)


def test_a_project_is_a_bounding_unless_another_family_is_asked_for(made):
    folder, tests = made()
    for norm in (1e-9, 1.0, 1e300):
        tests.test_an_update_has_the_norm_that_the_equation_gives(norm)
    assert Experiment.from_yaml(folder / "experiment.yaml").bounding.kind == "mine:Tanh"
    assert "mine:Tanh" in (folder / "README.md").read_text()


@pytest.mark.parametrize("family", new_project.FAMILIES)
def test_a_project_of_each_family_runs_and_its_own_test_passes(made, family, tmp_path):
    folder, tests = made("--family", family)
    values = {"tmp_path": tmp_path, "norm": 1.0}
    of_check = "test_the_promises_of_its_family_are_kept"
    for name in [each for each in vars(tests) if each.startswith("test_") and each != of_check]:
        test = getattr(tests, name)
        taken = inspect.signature(test).parameters.keys()
        test(**{key: value for key, value in values.items() if key in taken})
    assert "mine:" in (folder / "experiment.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("family", new_project.FAMILIES)
def test_a_member_of_each_family_keeps_its_contract(made, family):
    _, tests = made("--family", family)
    tests.test_the_promises_of_its_family_are_kept()


def test_a_family_that_is_none_is_refused_by_name(tmp_path, complain):
    said = complain(["new", tmp_path / "mine", "--family", "nois"])
    assert said.startswith("--family = 'nois': expected one of bounding, selection, local, noise")
    assert not (tmp_path / "mine").exists()
    help_of = " ".join(run.FAMILY.split())
    assert all(name in help_of for name in new_project.FAMILIES)


@pytest.mark.slow
def test_a_project_passes_as_its_readme_says(made):
    folder, _ = made()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = processes.run(command, cwd=folder, timeout=300)
    assert done.returncode == 0 and "7 passed" in done.stdout, done.stdout


def test_what_is_in_a_directory_is_left_alone(tmp_path, complain):
    folder = tmp_path / "mine"
    new_project.make(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    said = complain(["new", folder])
    assert said.startswith("DIR = ") and said.endswith("a new directory, or one that is empty")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "file").touch()
    assert "one that is empty" in complain(["new", tmp_path / "file"])
    below = complain(["new", tmp_path / "file" / "mine"])
    assert "a directory that can be written to" in below
    (tmp_path / "empty").mkdir()
    assert len(new_project.make(tmp_path / "empty")) == len(before)


def test_the_data_of_the_template_tests_on_rows_of_no_client(own_module):
    own_module("own_data", (ROOT / "cli" / "template" / "data.py.txt").read_text())
    split = parse({"kind": "own_data:Visits", "clients": 12}).split(0, None)
    rows, _ = split.rows(0, 12)
    assert len(rows) == 120 and not np.isin(split.test()[0], rows).any()


def test_the_template_is_part_of_an_installed_package():
    told = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    patterns = told["tool"]["setuptools"]["package-data"]["raydpfl.cli"]
    found = {path for pattern in patterns for path in (ROOT / "cli").glob(pattern)}
    assert {*(ROOT / "cli" / "template").iterdir()} <= found
