"""What a shell completes of a command line."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from conftest import SMALL

from raydpfl import experiment
from raydpfl.cli import completion
from raydpfl.cli.commands import data


@pytest.fixture
def complete(tmp_path):
    """What is offered for the last of these words, after a config in which clients are Poisson."""
    path = tmp_path / "c.yaml"
    tree = {**SMALL, "selection": {"kind": "poisson", "cohort": 20}}
    path.write_text(yaml.safe_dump({key: tree[key] for key in tree if key != "weights"}))

    def offered(*words):
        params = {"config": str(path), "overrides": [*words[:-1]]}
        return completion.overrides(SimpleNamespace(params=params), words[-1])

    return offered


def test_fields_are_those_of_the_configs_own_members(complete):
    assert "selection.cohort=" in complete("selection.")
    assert "bounding.quantile=" not in complete("bounding.")
    assert "bounding.quantile=" in complete("bounding.kind=quantile_clip", "bounding.")
    assert complete("data.partition.")[:2] == ["data.partition.kind=", "data.partition.kind=iid"]
    shards = complete("data.partition.kind=shards", "data.partition.")
    assert shards == ["data.partition.kind=", "data.partition.per_client="]
    assert {"seed=", "rounds=", "local.lr=", "client.actors=", "weights.kind="} <= {*complete("")}


def test_the_only_field_is_offered_with_values_so_that_no_shell_ends_the_word(complete):
    assert complete("evaluate.ev") == ["evaluate.every=", "evaluate.every=10"]
    assert complete("local.momentum=") == ["local.momentum=0.0"]
    assert complete("client.on_error=d") == ["client.on_error=drop"]
    assert complete("nowhere.") == complete("nowhere.x=") == []


def test_what_bash_cuts_at_the_sign_is_completed_alike(complete):
    kinds = [*experiment.SECTIONS["bounding"].family]
    assert complete("bounding.kind", "=", "") == complete("bounding.kind", "") == kinds
    assert complete("bounding.kind", "=", "model") == ["model_clip"]
    assert "bounding.quantile=" in complete("bounding.kind", "=", "quantile_clip", "bounding.")


def test_a_config_that_cannot_be_read_offers_the_fields_of_the_default(tmp_path):
    for name in ("nowhere.yaml", str(tmp_path), None):
        found = completion.overrides(SimpleNamespace(params={"config": name}), "local.")
        assert "local.lr=" in found
    assert {name: next(iter(experiment.SECTIONS[name].family)) for name in experiment.DEFAULTS} == {
        name: section["kind"] for name, section in experiment.DEFAULTS.items()
    }


def test_kinds_members_and_studies_are_completed():
    assert completion.kinds("bou")[:2] == ["bounding", "bounding.none"]
    assert "bounding.clip" in completion.kinds("bounding.c")
    assert completion.members("server:y") == ["server:yogi"]
    for words, last in (([":"], "y"), ([], ":")):  # as bash cuts them
        context = SimpleNamespace(params={"member": "server", "overrides": words})
        assert "yogi" in completion.kinds_after_colon(context, last)
    assert completion.studies("002/fig1") == ["002/fig1", "002/fig1-network"]
    assert "all" in completion.studies("")
    assert data.DATA("cifar100") == ["cifar100"]


def test_the_table_of_fields_is_kept_until_the_code_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    found = completion.fields()
    monkeypatch.setattr(completion, "table", lambda: pytest.fail("the classes are read again"))
    assert completion.fields() == found
    monkeypatch.setattr(completion, "_state", lambda: "another")
    monkeypatch.setattr(completion, "table", lambda: {"bounding": {}})
    assert completion.fields() == {"bounding": {}}


@pytest.mark.slow
def test_the_command_completes_as_a_shell_asks_it_to(small):
    code = "import sys; sys.argv = ['raydpfl']; from raydpfl.__main__ import main; main()"
    for words, offered in (
        (["ki"], "kinds\n"),
        (["run", str(small), "local.mom"], "local.momentum=\nlocal.momentum=0.0\n"),
    ):
        asked = {"COMP_WORDS": "\n".join(["raydpfl", *words]), "COMP_CWORD": str(len(words))}
        environment = {**os.environ, **asked, "_RAYDPFL_COMPLETE": "complete_bash"}
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert (found.returncode, found.stdout, found.stderr) == (0, offered, "")
