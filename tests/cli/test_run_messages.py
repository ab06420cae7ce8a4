"""What a run says: rates, stops, odd data, and where the user's own code failed."""

import logging
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import experiment, refusal

from raydpfl import run
from raydpfl.cli import exit_codes
from raydpfl.config.registry import load
from raydpfl.errors import RunError, brief_traceback, traceback_text, wrap_user_errors
from raydpfl.simulation.pool import InlinePool
from raydpfl.simulation.resolution import resolve
from raydpfl.storage import files


def test_clients_per_second_leaves_evaluation_out(tmp_path, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr("raydpfl.storage.run_files.time.perf_counter", lambda: float(next(ticks)))

    def slow(self, *_):  # an evaluation that lasts 1000 ticks of the clock
        for _ in range(1000):
            next(ticks)
        return []

    monkeypatch.setattr(InlinePool, "evaluate", slow)
    result = run(experiment(evaluate={"every": 1}), tmp_path / "out")
    rows = result.rounds.to_pylist()
    assert all(row["seconds_evaluate"] >= 1000 for row in rows)
    for row in rows:
        assert row["clients_per_second"] == 20 / (row["seconds"] - row["seconds_evaluate"])
    working = sum(row["seconds"] - row["seconds_evaluate"] for row in rows)
    assert result.summary["clients_per_second"] == pytest.approx(20 * 4 / working)


def test_a_budget_that_stops_the_first_round_says_that_nothing_was_released(small, typed):
    code, said, _ = typed("run", small, "privacy.budget=1e-3", "--out", small.parent / "o")
    assert code == 0 and "No round was run: nothing of the data was released" in said
    assert "No privacy guarantee" not in said


def table(path, labels, clients, **more) -> dict:
    x = np.random.default_rng(0).normal(size=len(labels)).astype(np.float32)
    pq.write_table(pa.table({"x": x, "y": labels, "who": clients}), path)
    named = {"kind": "table", "train": str(path), "x": ["x"], "y": "y", "client": "who", **more}
    return {**named, "partition": {"kind": "natural"}}


def test_a_table_of_one_row_per_client_says_to_give_test_rows(tmp_path):
    data = table(tmp_path / "t.parquet", np.arange(30) % 2, np.arange(30))
    said = "data.test = None: expected a table that leaves .* or a file of test rows: each client k"
    with refusal(said):
        resolve(experiment(data=data))
    assert resolve(experiment(data={**data, "test": data["train"]})).population.samples == 30


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, 1, 3], "no training sample is of 1 of the 4 classes (2)"),
        ([1, 2, 9], "no training sample is of 7 of the 10 classes (0, 3, 4, 5, 6, ...)"),
        ([4, 4, 4], "all training samples are of one class"),
        (["a", "a", "a"], "all training samples are of one class"),
        ([0, 1, 2], None),
    ],
)
def test_a_gap_in_the_labels_or_a_single_class_is_warned_of_at_every_run(
    labels, said, tmp_path, caplog
):
    data = table(tmp_path / "t.parquet", np.array(labels * 30), np.arange(90) // 6)
    for _ in range(2):  # the second time the data are in the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            resolve(experiment(data=data, selection={"kind": "full"})).check_guarantees()
        assert any(said in each.message for each in caplog.records) if said else not caplog.records


MINE = """
from torch import nn
from raydpfl.methods.bounding import Clip
class Net(nn.Linear):
    def forward(self, x):
        if self.training and len(x) == 10:
            return deeper(super().forward(x.flatten(1)))
        return super().forward(x.flatten(1))
class Rule(Clip):
    def factor(self, norm, bound):
        return deeper(norm)
def deeper(x):
    return [][len(str(x))]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("member", "hook"),
    [
        (
            "model={kind: frames:Net, args: {in_features: 784, out_features: 10}}",
            "Net.forward, the training of client ",
        ),
        ("bounding={kind: frames:Rule, bound: 1.0}", "Rule.factor"),
    ],
)
def test_an_error_in_the_users_own_code_shows_their_frames_first(
    member, hook, small, own_module, tmp_path, typed
):
    place = own_module("frames", MINE)
    code, _, said = typed("run", small, member, "--out", tmp_path / "o")
    first, source, *rest = said.splitlines()
    assert code == 1
    assert first == f"raydpfl: {place}:13: IndexError: list index out of range"
    assert source == "    return [][len(str(x))]"
    assert rest[0].startswith(f"  called by {place}:") and "raydpfl/" not in "".join(rest)
    assert rest[1].strip().startswith("return deeper(") and "round 0" in rest[2]
    assert rest[2].startswith(f"in {hook}")
    assert rest[3:] == ["all frames: the same with --debug"]
    reason = yaml.safe_load((tmp_path / "o" / "summary.json").read_text())["reason"]
    assert "all frames:\nTraceback (most recent call last):\n" in reason


@pytest.mark.slow
def test_all_frames_are_shown_where_they_are_asked_for(small, own_module, monkeypatch, typed):
    monkeypatch.setenv(exit_codes.DEBUG, "")
    own_module("deep", MINE)
    rule = "bounding={kind: deep:Rule, bound: 1.0}"
    code, _, said = typed("run", small, rule, "--out", small.parent / "o", "--debug")
    assert code == 1
    assert "raydpfl/cli/exit_codes.py" in said and "in factor" in said


RAISING = {
    "Mine.direction, round 0": {"server": {"kind": "raising:Mine"}},
    "Rule.factor, round 0": {"bounding": {"kind": "raising:Rule", "bound": 1.0}},
    "Reads.factor, round 0": {"bounding": {"kind": "raising:Reads", "bound": 1.0}},
    "Weigh.of": {"weights": {"kind": "raising:Weigh"}},
}


@pytest.mark.parametrize("hook", ["Mine.direction, round 0", "Rule.factor, round 0", "Weigh.of"])
def test_a_hook_is_named_with_its_round(hook, own_module, tmp_path):
    place = own_module("raising", HOOKS)
    with pytest.raises(RunError) as failed:
        run(experiment(**RAISING[hook]), tmp_path / "o")
    first, source, where, *_ = str(failed.value).splitlines()
    assert first.startswith(f"{place}:") and first.endswith(": KeyError: 'x'")
    assert source == '    return {}["x"]' and where == f"in {hook}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "hook"),
    [
        ({"bounding": {"kind": "reading:Rule", "bound": 1.0}}, "Rule.factor"),
        ({"server": {"kind": "reading:Mine"}}, "Mine.direction"),
    ],
)
def test_a_file_that_the_users_code_misses_is_told_with_its_line(
    sections, hook, own_module, tmp_path
):
    reader = own_module("rows_file", "def read():\n    return open('/nowhere/at/all')\n")
    caller = own_module("reading", READING)
    with pytest.raises(RunError) as failed:
        run(experiment(**sections), tmp_path / "o")
    said = brief_traceback(str(failed.value)).splitlines()
    assert said[0].startswith(f"{reader}:2: FileNotFoundError: [Errno 2]")
    assert said[2].startswith(f"  called by {caller}:") and said[4] == f"in {hook}, round 0"


def test_a_file_that_the_project_misses_for_a_user_is_not_laid_to_their_code(own_module, tmp_path):
    own_module("asking", "def ask(path):\n    return files.digest(path)\n")
    load("asking:ask", "x").__globals__["files"] = files
    with pytest.raises(FileNotFoundError), wrap_user_errors():
        load("asking:ask", "x")(tmp_path / "nothing")


READING = """
import rows_file
from raydpfl.methods.bounding import Clip
from raydpfl.methods.server import Server
class Rule(Clip):
    def factor(self, norm, bound):
        return rows_file.read()
class Mine(Server):
    def direction(self, update, state):
        return rows_file.read()
"""


def test_what_is_raised_on_an_actor_is_told_as_here(own_module, tmp_path, shared_ray):
    place = own_module("raising", HOOKS)
    for hook in [*RAISING][:3]:
        with pytest.raises(RunError) as failed:
            run(experiment(client={"actors": 1}, **RAISING[hook]), tmp_path / hook)
        first, _, where, *_ = brief_traceback(str(failed.value)).splitlines()
        assert first.startswith(f"{place}:") and where == f"in {hook}"


def test_what_an_import_raises_is_told_with_its_line(own_module):
    place = own_module("broken", "import math\n\nhalf = 1 / 0\n")
    said = f"ZeroDivisionError: division by zero; {place}, line 3: half = 1 / 0"
    with refusal(re.escape(said)):
        experiment(bounding={"kind": "broken:Rule", "bound": 1.0})


HOOKS = """
from raydpfl.methods.bounding import Clip
from raydpfl.methods.server import Server
from raydpfl.methods.weights import Weights
class Mine(Server):
    def direction(self, update, state):
        return {}["x"]
class Rule(Clip):
    def factor(self, norm, bound):
        return {}["x"]
class Reads(Clip):
    def factor(self, norm, bound):
        return open("/nowhere/at/all")
class Weigh(Weights):
    def of(self, sizes, samples, cohort):
        return {}["x"]
"""


def test_an_error_without_frames_of_the_users_shows_all():
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2) @ torch.zeros(3)
    assert traceback_text(caught.value).startswith("RuntimeError: inconsistent tensor size")
    assert traceback_text(RunError("x")).startswith("raydpfl.errors.RunError: x\nall frames:")


RELATIONS = {
    "with replacement": (
        ["selection={kind: multinomial, cohort: 20}", "privacy.relation=add_remove"],
        "privacy.accountants = 'rdp': expected one that covers the run: draws with replacement are "
        "covered under replace_one only",
    ),
    "allocation": (
        [
            "selection={kind: random_allocation, epoch: 10}",
            "privacy={relation: replace_one, accountants: [pld]}",
        ],
        "privacy.relation = 'replace_one': expected add_remove or zero_out with "
        "selection.kind random_allocation",
    ),
    "whose noise": (
        ["selection.kind=full", "privacy.relation=add_remove"],
        "privacy.relation = 'add_remove': expected replace_one or zero_out "
        "with selection.kind full; or add_",
    ),
    "the accountant": (
        ["selection={kind: multinomial, cohort: 20}"],
        "privacy.accountants = 'rdp': expected one that covers the run: draws with",
    ),
}


@pytest.mark.parametrize("name", RELATIONS)
def test_what_no_accountant_covers_blames_what_was_asked_for(name, small, complain):
    overrides, line = RELATIONS[name]
    assert complain(["budget", small, *overrides]).startswith(line)
