"""What a shell completes of a command line."""

import os
import sys

import processes
import pytest

from raydpfl.cli import completion


def test_kinds_members_and_studies_are_completed():
    assert completion.kinds("bou")[:2] == ["bounding", "bounding.none"]
    assert "bounding.clip" in completion.kinds("bounding.c")
    assert completion.members("server:y") == ["server:yogi"]
    assert completion.studies("002/fig1") == ["002/fig1", "002/fig1-network"]
    assert "all" in completion.studies("")
    assert completion.data_kinds("cifar100") == ["cifar100"]


def test_the_kinds_are_kept_until_the_code_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    found = completion.kinds_by_family()
    monkeypatch.setattr(completion, "_import_kinds", lambda: pytest.fail("classes are read again"))
    assert completion.kinds_by_family() == found
    monkeypatch.setattr(completion, "_code_version", lambda: "another")
    monkeypatch.setattr(completion, "_import_kinds", lambda: {"bounding": []})
    assert completion.kinds_by_family() == {"bounding": []}


@pytest.mark.slow
def test_the_command_completes_as_a_shell_asks_it_to():
    code = "import sys; sys.argv = ['raydpfl']; from raydpfl.__main__ import main; main()"
    for words, offered in (
        (["ki"], "kinds\n"),
        (["kinds", "bounding.clip"], "bounding.clip\nbounding.clip_l1\n"),
    ):
        asked = {"COMP_WORDS": "\n".join(["raydpfl", *words]), "COMP_CWORD": str(len(words))}
        environment = {**os.environ, **asked, "_RAYDPFL_COMPLETE": "complete_bash"}
        found = processes.run([sys.executable, "-c", code], env=environment)
        assert (found.returncode, found.stdout, found.stderr) == (0, offered, "")
