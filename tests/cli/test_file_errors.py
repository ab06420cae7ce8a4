"""What goes wrong with files and with a user's own code ends in one line, never in a traceback."""

import contextlib
import json
import os
import resource

import pytest
import yaml
from conftest import SMALL, experiment

from raydpfl import run
from raydpfl.config.yaml import parse_yaml
from raydpfl.errors import ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The small experiment in a file."""
    monkeypatch.delenv("RAYDPFL_DATA", raising=False)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL | {"rounds": 2}))
    return tmp_path / "small.yaml"


def make(path, how: str) -> None:
    if how == "a directory":
        path.mkdir()
    elif how == "a pipe":
        os.mkfifo(path)
    elif how == "a link to itself":
        path.symlink_to(path)
    elif how == "binary":
        path.write_bytes(bytes(range(256)))
    else:
        path.write_text(how)


CONFIGS = {
    "a directory": "No such file or directory",
    "a pipe": "a file that can be read (Is no regular file)",
    "a link to itself": "a file that can be read (Too many levels of symbolic links)",
    "binary": "a file that can be read ('utf-8' codec can't decode",
    "!!python/object:os.system {}": "a YAML file (could not determine a constructor for the tag",
    "rounds: [1": "a YAML file (while parsing a flow sequence",
    "rounds: 2024-13-45": "a YAML file (month must be in 1..12)",
    "rounds: !!int x": "a YAML file (invalid literal for int()",
    "[" * 3000 + "]" * 3000: "a YAML file (values within values, too deep)",
    "a: " + "[" * 60 + "]" * 60: "a YAML file (values within values, too deep)",
    "a: &a [*a]": "a YAML file (values within values, too deep)",
    "rounds: 2\nseed: 1\nrounds: 3": "the key 'rounds' twice in one mapping",
    "model: {kind: softmax, kind: mlp}": "the key 'kind' twice in one mapping",
    "\n".join(
        [f"a{k}: &a{k} {{{', '.join(f'k{k}_{i}: 0' for i in range(1001))}}}" for k in range(10)]
        + [f"all: {{<<: [{', '.join(f'*a{k}' for k in range(10))}]}}"]
    ): "a mapping that others make larger than 10,000 keys",
    "\n".join(
        ["a0: &a0 [x]", *(f"a{k + 1}: &a{k + 1} [{', '.join([f'*a{k}'] * 9)}]" for k in range(9))]
    ): "aliases that stand for more values",
    "rounds: 0x" + "f" * 5000: "<int that cannot be shown>: ",
    "- rounds": "a mapping of sections",
    "rounds": "a mapping of sections",
}


@pytest.mark.parametrize("content", CONFIGS)
def test_a_config_that_is_none(content, tmp_path, complain):
    make(tmp_path / "bad.yaml", content)
    assert CONFIGS[content] in complain(["show", tmp_path / "bad.yaml"])


STORED = {
    "a directory": "Is a directory",
    "rounds: [1": "a YAML file (",
    "": "its config.yaml is empty",
    "- rounds": "its config.yaml is no mapping",
    "7": "its config.yaml is no mapping",
}


@pytest.mark.parametrize("content", STORED)
def test_a_stored_config_that_is_none(content, small, tmp_path, complain):
    (tmp_path / "out").mkdir()
    make(tmp_path / "out" / "config.yaml", content)
    said = complain(["run", small, "--out", tmp_path / "out", "--resume"])
    assert said.startswith("--resume = ") and STORED[content] in said


@pytest.mark.parametrize(
    "text", ["[" * 3000, "2024-13-45", "{a: &a [*a]}", "!!python/name:os.system"]
)
def test_an_override_that_no_value_is(text, small, complain):
    assert complain(["show", small, f"local.lr={text}"]).endswith("a value in YAML")


def test_aliases_that_mean_what_they_say_are_taken():
    assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    assert len(parse_yaml(f"a: [{', '.join(['0'] * 50_000)}]")["a"]) == 50_000


@pytest.mark.parametrize("name", ["x" * 5000, "nul\0.yaml"])
@pytest.mark.parametrize("command", ["show", "run", "sweep", "budget", "audit"])
def test_a_config_whose_name_no_file_has(command, name, complain):
    assert "a file that can be read" in complain([command, name])


OWN = """
import sys, torch

class Quits(torch.nn.Module):
    def __init__(self, when="make"):
        super().__init__()
        self.linear, self.when = torch.nn.Linear(784, 10), when
        if when == "make":
            sys.exit(7)

    def forward(self, x):
        if self.when == "check" or (self.when == "train" and self.training and len(x) == 10):
            sys.exit("enough")
        if self.when == "evaluate" and not self.training and len(x) > 100:
            raise SystemExit
        return self.linear(x.flatten(1))
"""
QUITS = {
    "make": "model.args = {'when': 'make'}: expected what quits:Quits can be called with "
    "(SystemExit: 7; ",
    "check": "model.kind = 'quits:Quits': expected a module that takes float32 ['batch', 1, 28, "
    "28] (SystemExit: enough; ",
    "train": ": its training called sys.exit('enough') (",
    "evaluate": "code that the config names called sys.exit(None) (",
}


@pytest.mark.parametrize("when", QUITS)
def test_a_model_that_quits(when, small, own_module, tmp_path, complain):
    own_module("quits", OWN)
    started = when in ("train", "evaluate")
    overrides = ["model.kind=quits:Quits", f"model.args={{when: {when}}}"]
    if when == "evaluate":
        overrides.append("noise.kind=none")
    said = complain(["run", small, *overrides, "--out", tmp_path / "out"], 1 if started else 2)
    assert QUITS[when] in said
    if started:
        assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "failed"


def test_clients_that_quit_on_ray(shared_ray, own_module, tmp_path):
    own_module("quits", OWN)
    model = {"kind": "quits:Quits", "args": {"when": "train"}}
    with pytest.raises(RuntimeError, match=r"client \d+: its training called sys.exit\('enough'\)"):
        run(experiment(model=model, client={"actors": 1}), tmp_path / "out")


def test_a_module_that_quits_while_it_is_imported(small, own_module, tmp_path, complain):
    own_module("exits", "raise SystemExit(3)")
    said = complain(["run", small, "bounding.kind=exits:Clip", "--out", tmp_path / "out"])
    assert said.startswith(
        "bounding.kind = 'exits:Clip': expected an import path package.module:Name that can be "
        "imported (SystemExit: 3"
    )


@contextlib.contextmanager
def full_disk(name: str, room: int = 0):
    """Within, the files of a name have no room on the disk, after so many that had."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    sync = os.fsync
    had = []

    def synced(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        had.append(name in path)
        if name in path and sum(had) > room:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", synced)
        if name == "trajectory.bin":  # which is not synced; Python turns the signal into an error
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


FILES = [
    ("config.yaml", 0),
    ("ledger.jsonl", 0),
    ("ledger.jsonl", 5),
    ("rounds.parquet", 0),
    ("rounds.parquet", 2),
    ("checkpoints/", 0),
    ("checkpoints/", 3),
    ("trajectory.bin", 0),
    ("summary.json", 0),
]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize("name,room", FILES)
def test_a_disk_that_is_full_ends_the_run_in_one_line_and_it_goes_on(
    name, room, small, tmp_path, monkeypatch, complain, typed
):
    monkeypatch.setattr("raydpfl.storage.run_files.SHARE", 1e9)  # a checkpoint after every round
    overrides = ["rounds=8", f"measure=[{'trajectory' if 'trajectory' in name else ''}]"]
    whole = run(experiment(rounds=8), tmp_path / "whole")
    with full_disk(name, room):
        said = complain(["run", small, *overrides, "--out", tmp_path / "out"], 1)
    assert said.startswith(f"{tmp_path}/out/{name}")
    assert (tmp_path / "out").exists() == said.endswith("go on with --resume")
    assert not list((tmp_path / "out").glob("**/.*"))  # nothing half written takes up the room
    resume = ["--resume"] if (tmp_path / "out").exists() else []
    assert typed("run", small, *overrides, "--out", tmp_path / "out", *resume)[0] == 0
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert found["model_sha256"] == whole.summary["model_sha256"]


def test_a_value_that_cannot_be_shown_is_named_all_the_same():
    said = "rounds = <int that cannot be shown>: expected fewer"
    assert str(ConfigError("rounds", 10**5000, "fewer")) == said
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    assert str(ConfigError("x", nested, "less")) == "x = <list that cannot be shown>: expected less"


LEDGERS = {
    "a directory": "it is no file",
    "a pipe": "it is no file",
    "a link to itself": "Too many levels of symbolic links",
    "/dev/full": "it is no file",
    "[" * 100_000 + "\n": "line 1, is damaged",
    "null\n": "line 1, is damaged",
    "binary": "line 1, is damaged",
}


@pytest.mark.parametrize("content", LEDGERS)
def test_a_ledger_that_is_none(content, small, tmp_path, complain):
    run(experiment(rounds=2), tmp_path / "out")
    ledger = tmp_path / "out" / "ledger.jsonl"
    ledger.unlink()
    if content == "/dev/full":
        ledger.symlink_to(content)
    else:
        make(ledger, content)
    said = complain(["run", small, "--out", tmp_path / "out", "--resume"], 1)
    assert LEDGERS[content] in said and "ledger" in said


@pytest.mark.parametrize(
    "line, reason",
    [
        ("3", "can be read (ledger.jsonl, line 1, is damaged"),
        ('{"round": 0}', "can be read (ledger.jsonl, line 1, is damaged"),
        ('{"round": 0, "epsilon": {}, "mechanism": "a"}', "has the mechanism of its config"),
    ],
)
def test_a_ledger_whose_budget_is_asked_for_is_that_of_its_run(line, reason, tmp_path, complain):
    run(experiment(rounds=2), tmp_path / "out")
    (tmp_path / "out" / "ledger.jsonl").write_text(f"{line}\n")
    said = complain(["budget", tmp_path / "out"])
    assert said.startswith(f"RUN = '{tmp_path}/out': expected a run whose ledger {reason}")


def test_a_ledger_that_may_not_be_written(small, tmp_path, monkeypatch, complain):
    run(experiment(rounds=2), tmp_path / "out")
    opened = os.open

    def refused(path, flags, *more, **options):
        if str(path).endswith("ledger.jsonl") and flags & os.O_WRONLY:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        said = complain(["run", small, "--out", tmp_path / "out", "--resume"], 1)
    assert said.startswith(
        f"{tmp_path}/out/ledger.jsonl cannot be read and written, as a ledger must be"
    )
    assert said.endswith("Permission denied; when that is mended, go on with --resume")


SOURCE = """
import sys
from raydpfl import data
class Own(data.Data):
    kind: str = ""
    def split(self, seed, root):
        if self.clients == 1:
            sys.exit(9)
        if self.clients == 2:
            raise KeyError("two\\nlines")
        import numpy as np
        def rows(first, last):
            return open("/nowhere/at/all")
        return data.Split(np.array([2] * self.clients), (2,), 2, rows, lambda: rows(0, 0))
"""
SOURCES = {1: "SystemExit: 9; ", 2: "KeyError: 'two", 3: "FileNotFoundError: [Errno 2]"}


@pytest.mark.parametrize("clients", SOURCES)
@pytest.mark.parametrize("command", ["run", "data describe"])
def test_a_source_of_data_that_fails(command, clients, small, own_module, cache, complain):
    own_module("failing", SOURCE)
    data = f"data={{kind: failing:Own, clients: {clients}}}"
    said = complain([*command.split(), small, data, "selection.cohort=1"])
    expected = "data.kind = 'failing:Own': expected a source that gives its samples ("
    assert said.startswith(expected + SOURCES[clients])
    assert "failing.py, line " in said and not list(cache.glob("data/*"))


def test_a_member_that_quits_where_nothing_is_run(small, own_module, complain):
    own_module(
        "quitting",
        "import sys\nfrom raydpfl.methods.server import Server\n"
        "class Own(Server):\n    kind: str = ''\n"
        "    def model_post_init(self, _):\n        sys.exit(5)\n"
        "    def direction(self, update, state):\n        return update\n",
    )
    said = complain(["audit", small, "server={kind: quitting:Own}"], 1)
    assert said.startswith("code that the config names called sys.exit(5) (")
    assert "quitting.py, line 6)" in said


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize("name", ["config.yaml", "audit.json"])
def test_a_disk_that_is_full_under_an_audit(name, small, tmp_path, complain):
    with full_disk(name):
        said = complain(["audit", small, "--canaries", "50", "--out", tmp_path / "out"], 1)
    assert said == f"{tmp_path}/out/{name} cannot be written (No space left on device)"


@pytest.mark.parametrize("raised", ["GeneratorExit", "type('Odd', (BaseException,), {})('x\\ny')"])
def test_a_module_that_raises_what_is_no_exception(raised, small, own_module, tmp_path, complain):
    own_module("odd", f"raise {raised}")
    asked = ["run", small, "model={kind: 'odd:X'}", "--out", tmp_path / "out"]
    assert "code that the config names raised " in complain(asked, code=1)
