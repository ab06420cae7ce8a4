"""`raydpfl kinds` says what the classes say, in words and as a JSON Schema; a misspelt or foreign
key is answered with ours.
"""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml
from conftest import messages, refusal
from jsonschema import Draft202012Validator

import raydpfl
from raydpfl import Experiment, experiment
from raydpfl.cli import kinds
from raydpfl.config.hints import FOREIGN, METHODS
from raydpfl.config.yaml import read
from raydpfl.privacy.accountants import ACCOUNTANTS

ROOT = Path(raydpfl.__file__).parent.parent
# Families that no section of a config chooses from: what a study shows.
NO_SECTION = {"report/figures"}


def test_every_family_of_the_package_is_printed():
    bases = {cls.__module__ for each in kinds.list_references() for cls in _mro(each)}
    for path in sorted((ROOT / "raydpfl").rglob("*.py")):
        folder = path.parent.relative_to(ROOT / "raydpfl").as_posix()
        if path.name != "__init__.py" or folder in NO_SECTION or folder == ".":
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if _makes_family(node)]
        if calls:
            room = f"raydpfl.{folder.replace('/', '.')}."
            assert any(name.startswith(room) for name in bases), folder


def _makes_family(node):
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "family"


def _mro(kind):
    module, _, name = kind.source.partition(":")
    cls = __import__(module, fromlist=["_"])
    for part in name.split("."):
        cls = getattr(cls, part)
    return cls.__mro__


def test_what_is_printed_is_what_the_classes_take():
    fields = {key.name: key for key in kinds.list_references("local.sgd")[0].keys}
    assert fields["lr"].type == "number, > 0" and fields["lr"].default == 0.1
    assert fields["batch"].type == "whole number, >= 1 | full | {share}"
    assert (
        fields["proximal"].default == 0.0
        and "FedProx" in kinds.list_references("local.sgd")[0].about
    )
    bound = next(key for key in kinds.list_references("clip")[0].keys if key.name == "bound")
    assert bound.required and bound.type == "number, >= 1e-12, <= 1e+15"
    keys = kinds.list_references("data.table")[0].keys
    partition = next(key for key in keys if key.name == "partition")
    assert "partition: a section with a kind; default iid" in "\n".join(partition.lines())
    for noise in ("discrete_gaussian", "skellam"):
        fields = {key.name: key for key in kinds.list_references(f"noise.{noise}")[0].keys}
        assert fields["source"].default == "keyed" and "seed, round" in fields["source"].about


def test_every_default_is_one_that_the_config_takes_back():
    for section, spec in experiment.SECTIONS.items():
        if spec.family is not None:
            continue
        cls = spec.base
        defaults = {key.name: key.default for key in kinds.list_references(section)[0].keys}
        assert cls.model_validate(defaults) == cls()


def test_all_of_it_fits_eighty_columns():
    wide = [
        line
        for line in kinds.render(kinds.list_references()).splitlines()
        if len(line) > kinds.WIDTH
    ]
    assert not wide


@pytest.mark.parametrize("name", ["bounding", "bounding.clip", "partition", "partitions", "pld"])
def test_a_family_or_a_member_is_asked_for_by_name(name):
    found = kinds.list_references(name)
    stem = name.removesuffix("s")
    assert found and all(stem in each.name.split(".") or stem == each.name for each in found)


def test_a_name_that_there_is_not_is_answered_with_the_nearest():
    with refusal(r"kinds = 'boundin': expected .*; nearest: bounding"):
        kinds.list_references("boundin")


def test_the_command_prints_text_json_and_the_version(typed):
    assert typed("kinds", "server")[1].startswith("server.sgd\n")
    found = json.loads(typed("kinds", "server.adam", "--json")[1])
    assert [each["kind"] for each in found] == ["adam"]
    assert {"name", "type", "required", "default", "about"} == set(found[0]["keys"][0])
    assert typed("--version") == (0, f"raydpfl {raydpfl.__version__}\n", "")


def test_the_version_is_one_everywhere():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == raydpfl.__version__
    assert 'version = {attr = "raydpfl.__version__"}' in (ROOT / "pyproject.toml").read_text()


def test_every_name_that_other_tools_have_is_answered_with_what_is_here():
    for name, meant in [*FOREIGN.items(), *METHODS.items()]:
        path, _, kind = meant.partition(" ")[0].partition("=")
        section, _, key = path.rpartition(".")
        found = kinds.list_references(f"{section}.{kind}" if kind else section or "config")
        names = {each.name for one in found for each in one.keys}
        assert kind or key in {*names, "kind"}, (name, meant)


@pytest.mark.parametrize(("override", "said"), messages("names of other frameworks"))
def test_a_misspelt_or_foreign_key_is_answered_in_one_line(override, said):
    with refusal(f"; {re.escape(said)}$"):
        Experiment.from_dict({}, [override])


def test_papers_are_named_by_author_and_year():
    text = kinds.render(kinds.list_references())
    assert "Das 2021 eq. 4" in text
    assert not re.findall(r"(?<![\d.,])00[0-3]\b.{0,9}", text)
    for name, member in ACCOUNTANTS.items():
        assert not re.search("00[0-3]", f"{name} {member.label}")


# The JSON Schema of a config takes what the reader of configs takes, and refuses misspelt keys.

CONFIGS = sorted((ROOT / "experiments").glob("*.yaml"))
FAMILIES = [name for name, spec in experiment.SECTIONS.items() if spec.family and "." not in name]
VALIDATOR = Draft202012Validator(kinds.config_schema())
SHORT_FORMS = [
    {"data": {"kind": "table", "train": "a.csv", "x": "image", "classes": [1, 2]}},
    {"data": {"kind": "table", "train": "a.csv", "x": ["a", "b"], "classes": 2}},
    {"model": {"kind": "mlp", "hidden": 100}},
    {"model": {"kind": "mlp", "hidden": [100, 50]}},
]
USER_DEFINED = [
    {"bounding": {"kind": "mine:Tanh", "bound": 1.0, "softness": [1, 2]}},
    {"model": {"kind": "torch.nn:Linear", "args": {"in_features": 3, "out_features": 2}}},
    {"personal": {"proximal": 0.1}, "evaluate": {"metrics": ["auc", {"kind": "mine:F2"}]}},
    {"privacy": {"accountants": "pld"}, "measure": ["clients", {"kind": "bounding"}]},
    {"noise": {"kind": "gaussian", "epsilon": {"kind": "uniform", "low": 1, "high": 2}}},
]
REFUSED = [
    {"slection": {"kind": "full"}},
    {"bounding": {"kind": "clip", "bond": 1.0}},
    {"bounding": {"kind": "clip"}},
    {"bounding": {"kind": "clip", "bound": 0}},
    {"noise": {"kind": "gumbel", "std": 1.0}},
    {"data": {"kind": "synthetic", "partition": {"kind": "dirichlet", "alpha": 1.0}}},
    {"evaluate": {"metrics": ["aucc"]}},
    {"client": {"precision": "float16"}},
    {"rounds": "many"},
]


@pytest.mark.slow
def test_it_is_a_schema_and_the_command_prints_it(typed):
    printed = json.loads(typed("kinds", "--schema")[1])
    Draft202012Validator.check_schema(printed)
    assert printed == json.loads(json.dumps(VALIDATOR.schema))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_valid_as_it_is_written_and_with_its_defaults(path):
    VALIDATOR.validate(read(path))
    VALIDATOR.validate(json.loads(json.dumps(Experiment.from_yaml(path).to_dict())))


@pytest.mark.parametrize("section", FAMILIES)
def test_every_example_of_a_member_is_valid(section):
    several = section in ("measure", "track")
    for kind, cls in experiment.SECTIONS[section].family.items():
        for example in cls.examples:
            given = json.loads(json.dumps({"kind": kind, **example}))
            needed = {name for name, each in cls.model_fields.items() if each.is_required()}
            if needed <= given.keys():
                VALIDATOR.validate({section: [given] if several else given})


@pytest.mark.parametrize("config", [*SHORT_FORMS, *USER_DEFINED, *REFUSED], ids=str)
def test_a_misspelt_key_and_a_wrong_value_are_refused_and_no_short_form_or_own_class(config):
    assert VALIDATOR.is_valid(config) == (config not in REFUSED)
