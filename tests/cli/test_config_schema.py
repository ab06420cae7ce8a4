"""The JSON Schema of a config takes what the reader of configs takes, and refuses misspelt keys."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

import raydpfl
from raydpfl import Experiment
from raydpfl.cli.app import app
from raydpfl.cli.kinds import config_schema
from raydpfl.config.yaml import read
from raydpfl.experiment import SECTIONS

ROOT = Path(raydpfl.__file__).parent.parent
CONFIGS = sorted((ROOT / "experiments").glob("*.yaml"))
VALIDATOR = Draft202012Validator(config_schema())


@pytest.mark.slow
def test_it_is_a_schema_and_the_command_prints_it():
    printed = json.loads(CliRunner().invoke(app, ["kinds", "--schema"]).output)
    Draft202012Validator.check_schema(printed)
    assert printed == json.loads(json.dumps(VALIDATOR.schema))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_valid_as_it_is_written_and_with_its_defaults(path):
    VALIDATOR.validate(read(path))
    VALIDATOR.validate(json.loads(json.dumps(Experiment.from_yaml(path).to_dict())))


@pytest.mark.parametrize(
    "config",
    [
        {"data": {"kind": "table", "train": "a.csv", "x": "image", "classes": [1, 2]}},
        {"data": {"kind": "table", "train": "a.csv", "x": ["a", "b"], "classes": 2}},
        {"model": {"kind": "mlp", "hidden": 100}},
        {"model": {"kind": "mlp", "hidden": [100, 50]}},
    ],
    ids=str,
)
def test_what_may_stand_alone_need_be_no_list(config):
    VALIDATOR.validate(config)


@pytest.mark.parametrize(
    "section", [name for name in SECTIONS if SECTIONS[name].family and "." not in name]
)
def test_every_example_of_a_member_is_valid(section):
    several = section in ("measure", "track")
    for kind, cls in SECTIONS[section].family.items():
        for example in cls.examples:
            given = json.loads(json.dumps({"kind": kind, **example}))
            needed = {name for name, each in cls.model_fields.items() if each.is_required()}
            if needed <= given.keys():
                VALIDATOR.validate({section: [given] if several else given})


@pytest.mark.parametrize(
    "config",
    [
        {"slection": {"kind": "full"}},
        {"bounding": {"kind": "clip", "bond": 1.0}},
        {"bounding": {"kind": "clip"}},
        {"bounding": {"kind": "clip", "bound": 0}},
        {"noise": {"kind": "gumbel", "std": 1.0}},
        {"data": {"kind": "synthetic", "partition": {"kind": "dirichlet", "alpha": 1.0}}},
        {"evaluate": {"metrics": ["aucc"]}},
        {"client": {"precision": "float16"}},
        {"rounds": "many"},
    ],
    ids=str,
)
def test_a_misspelt_key_and_a_wrong_value_are_refused(config):
    assert not VALIDATOR.is_valid(config)


@pytest.mark.parametrize(
    "config",
    [
        {"bounding": {"kind": "mine:Tanh", "bound": 1.0, "softness": [1, 2]}},
        {"model": {"kind": "torch.nn:Linear", "args": {"in_features": 3, "out_features": 2}}},
        {"personal": {"proximal": 0.1}, "evaluate": {"metrics": ["auc", {"kind": "mine:F2"}]}},
        {"privacy": {"accountants": "pld"}, "measure": ["clients", {"kind": "bounding"}]},
        {"noise": {"kind": "gaussian", "epsilon": {"kind": "uniform", "low": 1, "high": 2}}},
    ],
    ids=str,
)
def test_user_defined_classes_and_short_forms_are_valid(config):
    VALIDATOR.validate(config)
