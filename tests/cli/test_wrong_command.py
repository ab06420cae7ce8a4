"""What is given to the wrong command is answered with the right one."""

import pytest
import yaml
from conftest import SMALL, messages

from raydpfl.cli import experiment_reader

SPACE = {"kind": "sgd", "lr": {"grid": [0.1, 0.2]}}
PRIVATE = {"private": {"runs": "geometric", "mean": 3}}
ARMS = {"study": {"id": "rates", "title": "Two", "seeds": 2}, **SMALL, "arms": {"Clip": {}}}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a file and a directory of each kind."""
    monkeypatch.chdir(tmp_path)
    trees = {"experiment": SMALL, "sweep": {**SMALL, "local": SPACE}, "study": ARMS}
    (tmp_path / "private.yaml").write_text(yaml.safe_dump({**trees["sweep"], "sweep": PRIVATE}))
    for name, tree in trees.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        (tmp_path / name).mkdir()
        file = "config.yaml" if name == "experiment" else f"{name}.yaml"
        (tmp_path / name / file).write_text(yaml.safe_dump(tree))
    return tmp_path


@pytest.mark.parametrize(("words", "said"), messages("commands"))
def test_another_command_is_named(words, said, place, complain):
    assert said in complain(words)


def test_what_is_of_the_right_kind_keeps_its_own_complaint(place, complain):
    wrong = "local.lr={grid: [0.1, -1]}"
    said = complain(["sweep", "experiment.yaml", wrong])
    assert said.startswith("local.lr = -1")
    said = complain(["run", "experiment.yaml", "rounds=0"])
    assert said.startswith("rounds = 0")


def test_every_command_that_takes_a_file_or_a_directory_is_known():
    every = {kind for _, kinds in experiment_reader.ACCEPTED_PATHS.values() for kind in kinds}
    assert every == experiment_reader.ADVICE.keys()
    assert set(experiment_reader.FILES.values()) <= every
