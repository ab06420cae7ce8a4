"""Studies: what a file stands for, its order, its tables, and how one goes on."""

import copy
import hashlib
import io
import json
import math
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import SMALL, experiment, messages, refusal
from rich.console import Console
from scipy import stats
from test_same_bits import kill_tree
from test_sweep import finished

import raydpfl
from raydpfl import run
from raydpfl.cli.search_display import StudyDisplay
from raydpfl.data.sources.image_sets import TorchvisionImages
from raydpfl.privacy import Composition
from raydpfl.report.figures import parse
from raydpfl.report.figures.table import PublishedTable
from raydpfl.sweep.study import Study, StudyRunner, builtin, reproduce
from raydpfl.sweep.study.claims import verdict_line
from raydpfl.sweep.study.identities import compare, words
from raydpfl.sweep.study.schema import RESERVED
from raydpfl.sweep.trials import name_of, short_text
from raydpfl.sweep.tune import take_turns

ONE_TRY = {"tuning_seeds": 1, "grow": 0}
ARMS = ("Free", "Data", "Uniform")  # of which none takes a number
MACHINE = ["seconds", "wall_seconds", "clients_per_second", "peak_rss_mb"]
OWN = """
from raydpfl.methods.bounding import Bounding


class Halve(Bounding):
    \"\"\"Norms of at most a half of the bound, whatever they were.\"\"\"

    bound: float = 1.0

    def factor(self, norm, bound):
        return 0.5 * bound / max(bound, norm)
"""


def tree(**parts) -> dict:
    """A small study: two panels, four arms: one tunes, one takes a number, two are the same."""
    base = {key: SMALL[key] for key in ("data", "model", "selection", "local", "privacy")}
    base = copy.deepcopy(base) | {"rounds": 2, "measure": [], "evaluate": {"every": 2}}
    base["data"] |= {"clients": 20}
    base["selection"] |= {"cohort": 8}
    noise = {"kind": "gaussian", "multiplier": 1.0, "delta": 1e-5, "common": True}
    arms = {
        "Free": {},
        "Clip": {
            "bounding": {
                "kind": "clip",
                "bound": {"from": {"arm": "Free", "value": "norm_mean", "times": 0.5}},
            },
            "noise": noise,
            "local.lr": {"tune": [0.05, 0.2]},
        },
        "Data": {
            "bounding": {"kind": "clip", "bound": 1.0},
            "noise": noise,
            "weights": {"kind": "data"},
        },
        "Uniform": {"bounding": {"kind": "clip", "bound": 1.0}, "noise": noise},
    }
    made = {
        "study": {"id": "mine/small", "seeds": 2, "same_bits": [["Data", "Uniform"]]} | ONE_TRY,
        **base,
        "panels": {"data.partition": {"iid": {"kind": "iid"}, "shards": {"kind": "shards"}}},
        "arms": arms,
        "show": [{"table": "test_accuracy", "rows": ["data.partition"], "columns": "arm"}],
    }
    if "panels" in parts:
        made["show"] = []  # of other axes
    return {**made, **parts}


def study(**parts) -> Study:
    return Study.from_dict(tree(**parts))


# --- what a file stands for ---


def test_cells_are_all_arms_at_all_labels_and_a_section_of_an_arm_is_whole():
    asked = study(
        panels={"data.clients": [20, 40], "size": {"few": {"rounds": 1}, "many": {"rounds": 3}}},
        arms={
            "Free": {},
            "Clip": {"bounding": {"kind": "clip", "bound": 2.0}, "server": {"kind": "momentum"}},
        },
        server={"kind": "adam", "lr": 0.1},
        study={"id": "a"},
    )
    assert [cell.display_name() for cell in asked.cells] == [
        f"{arm} data.clients={clients} size={size}"
        for clients in (20, 40)
        for size in ("few", "many")
        for arm in ("Free", "Clip")
    ]
    clip = asked.cells[3].experiment({}, 7)
    assert (clip.seed, clip.rounds, clip.data.clients, clip.bounding.bound) == (7, 3, 20, 2.0)
    assert clip.server.kind == "momentum" and clip.server.lr == 1.0  # none of Adam's
    assert clip.client.actors == 0


def test_the_scale_is_put_in_last_and_keeps_what_the_new_data_have_a_place_for():
    given = tree(scales={"smoke": {"data.kind": "mnist", "rounds": 1, "seeds": 1, "tries": 1}})
    small, smoke = (Study.from_dict(given, scale) for scale in ("small", "smoke"))
    assert [small.seeds, smoke.seeds] == [2, 1]
    for cell in smoke.cells:
        made = cell.first_experiment(1)
        assert (made.data.kind, made.data.clients, made.rounds) == ("mnist", 20, 1)
        assert made.data.partition.kind == cell.labels["data.partition"]
    given["scales"]["smoke"]["data.kind"] = "synthetic"  # which is split by its own law
    data = Study.from_dict(given, "smoke").cells[0].tree["data"]
    assert data == {"kind": "synthetic", "clients": 20}
    tried = [[len([*cell.setting_values()]) for cell in of.cells[:2]] for of in (small, smoke)]
    assert tried == [[1, 2], [1, 1]]
    # of one value there is nothing to choose
    assert smoke.cells[1].fixed_values == {"local.lr": 0.05} and not smoke.cells[1].grid
    assert smoke.runs() == {"tried": 0, "final": 8}


@pytest.mark.parametrize("name", ["../mine", "mine/../..", "/mine", "mine//small", "."])
def test_an_id_that_leads_out_of_a_directory_is_refused(name):
    with refusal(r"study\.id = "):
        study(study={"id": name})


def test_only_some_labels_of_an_arm_or_of_a_scale():
    given = tree(scales={"smoke": {"only": {"arm": ["Free", "Data"], "data.partition": "iid"}}})
    given["arms"]["Data"]["only"] = {"data.partition": ["shards"]}
    assert len(Study.from_dict(given).cells) == 7
    smoke = Study.from_dict(given, "smoke")
    assert [cell.display_name() for cell in smoke.cells] == ["Free data.partition=iid"]
    (identity,) = smoke.same_bits  # it stays, with nothing to compare here
    found = compare(identity, {})
    assert found["held"] is None and words(found).endswith("not compared, as there are no two runs")


def test_a_key_that_may_be_skipped_is_left_out_where_the_kind_has_none():
    asked = study(panels={"noise.multiplier?": [1.0, 2.0]})
    assert asked.axes == ["noise.multiplier"]
    made = {arm: [c.experiment({}, 1) for c in asked.cells if c.arm == arm] for arm in ARMS}
    assert len({name_of(experiment) for experiment in made["Free"]}) == 1
    assert [experiment.noise.multiplier for experiment in made["Data"]] == [1.0, 2.0]
    with refusal(r"noise\.multiplier = 1\.0: expected one of the keys.*in Free"):
        study(panels={"noise.multiplier": [1.0]})


def test_accounting_is_an_axis_that_arms_without_privacy_ignore():
    given = tree()
    given["study"] |= {"accounting": {"paper": {"noise.v": 9.0}, True: {}}}
    given["arms"]["Uniform"]["accounting"] = {"paper": {"noise.v": 2.0}}
    given["study"]["same_bits"] = [["Data", "Uniform", {"accounting": True}]]
    asked = Study.from_dict(given)
    made = {
        (cell.arm, cell.accounting): cell.experiment({}, 1)
        for cell in asked.cells[:8]
        if cell.arm in ARMS
    }
    assert name_of(made["Free", "paper"]) == name_of(made["Free", "true"])
    v = [made[at].noise.v for at in (("Data", "paper"), ("Uniform", "paper"), ("Data", "true"))]
    assert v == [9.0, 2.0, 4.0]
    (identity,) = asked.same_bits
    assert {cell.accounting for place in identity.groups for cell in place} == {"true"}


def test_runs_are_counted_once_however_many_cells_share_them():
    asked = study(panels={"noise.multiplier?": [1.0, 2.0]})
    # Free is one experiment at both labels; Clip tries two values at each
    assert asked.runs() == {"tried": 4, "final": 2 * (1 + 3 * 2)}


def test_a_study_is_what_its_own_yaml_says(tmp_path):
    given = tree(scales={"smoke": {"rounds": 1, "seeds": 1}})
    for scale, seeds in (("smoke", None), ("smoke", 5), ("paper", 4)):
        asked = Study.from_dict(given, scale, seeds)
        (tmp_path / "study.yaml").write_text(asked.to_yaml())
        again = Study.from_directory(tmp_path)
        assert (again.scale, again.seeds) == (asked.scale, asked.seeds)
        assert [cell.tree for cell in again.cells] == [cell.tree for cell in asked.cells]
    (tmp_path / "study.yaml").write_text(asked.to_yaml().removesuffix("...\n"))
    with refusal("it is cut"):
        Study.from_directory(tmp_path)


def changed(path: str, value) -> dict:
    """The tree of the small study with one thing changed."""
    made = tree()
    *sections, last = path.rstrip().split("/")
    node = made
    for name in sections:
        node = node[int(name)] if name.isdigit() else node.setdefault(name, {})
    node[last] = value
    return made


WRONG = messages("studies")


@pytest.mark.parametrize("scale", ["smoke", "small", "paper"])
def test_the_file_that_the_documentation_shows_can_be_run(scale, own_module):
    own_module("mine", OWN.replace("Halve", "Tanh"))
    page = Path(raydpfl.__file__).parent.parent / "docs" / "studies.md"
    text = page.read_text().partition("```yaml")[2].partition("```")[0]
    asked = Study.from_dict(yaml.safe_load(text), scale)
    if scale == "smoke":
        assert {cell.arm for cell in asked.cells} == {"Clip", "Free"} and asked.seeds == 2
    else:
        arms = ("Free", "Clip", "Weighted", "Mine")
        count = [sum(cell.arm == arm for cell in asked.cells) for arm in arms]
        assert count == [16, 16, 16, 8] and asked.runs()["tried"] == 2 * 2 * 2 * 2 * 2 * 2
        (identity,) = asked.same_bits
        assert len(identity.groups) == 8  # half of all


@pytest.mark.parametrize(
    "axis",
    ["arm", "validation_accuracy", "epsilon_pld", "test_loss", "best_test_accuracy", "mean"],
)
def test_an_axis_has_no_name_of_a_column(axis):
    with refusal(rf"panels\.{axis} = .*another name"):
        study(panels={axis: {"few": {"rounds": 1}}})


def test_the_names_that_no_axis_may_have_are_all_columns_that_are_no_numbers(tmp_path):
    found = played(study(), tmp_path)
    texts = {"seed", "chosen", "seconds"}
    for table in (found.results, found.resamples, found.tuning):
        texts |= {field.name for field in table.schema if str(field.type) == "string"}
    assert texts - {"data.partition"} == RESERVED


def test_an_identity_of_arms_that_stand_nowhere_together_is_refused():
    given = tree()
    given["arms"]["Data"]["only"] = {"data.partition": ["iid"]}
    given["study"]["same_bits"] = [["Data", "Uniform", {"data.partition": "shards"}]]
    with refusal(r"same_bits\.0 = .*labels at which two of the arms stand"):
        Study.from_dict(given)


def test_a_claim_of_a_cell_that_stands_nowhere_is_refused():
    given = tree()
    given["arms"]["Clip"]["only"] = {"data.partition": ["iid"]}
    side, other = ({"arm": arm, "data.partition": "shards"} for arm in ("Clip", "Free"))
    given["study"]["claims"] = [{"says": "x", "larger": side, "smaller": other}]
    with refusal(r"claims\.0 = .*labels at which cells of the study stand"):
        Study.from_dict(given)


def test_a_study_is_read_without_the_code_that_it_names():
    given = changed("arms/Data/bounding", {"kind": "nowhere:Mine", "bound": 1.0})
    asked = Study.from_dict(given, imports=())
    assert len(asked.cells) == 8 and asked.runs()["final"] == 16
    with refusal("nowhere:Mine"):
        Study.from_dict(given)


@pytest.mark.parametrize("path", WRONG)
def test_what_is_wrong_with_a_file_is_said_by_field(path):
    value, said = WRONG[path]
    with refusal(said):
        Study.from_dict(changed(path, value))


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        (["x"], "scales = ['x']: expected a mapping"),
        ({"small": ["x"]}, "scales.small = ['x']: expected a mapping"),
        ({"small": {"only": ["x"]}}, "scales.small.only = ['x']: expected a mapping"),
    ],
)
def test_scales_that_are_no_mappings_are_refused_with_only_too(scales, said):
    with refusal(re.escape(said)):
        Study.from_dict(tree(scales=scales), only={"arm": ["Free"]})


@pytest.mark.slow
def test_every_study_that_ships_can_be_run_at_every_scale_and_is_found_by_all_its_names():
    names = []
    for name, path in builtin.paths().items():
        for scale in ("smoke", "small", "paper"):
            assert Study.named(name, scale).about.id == name
        names += [name, *builtin.header(path).get("answers", ())]
    assert len(set(names)) == len(names)
    assert {builtin.find(name) for name in names} == {*builtin.paths().values()}
    with refusal("study = '009/fig1': expected the file of a study, or one of"):
        Study.named("009/fig1")


@pytest.mark.slow
def test_every_printed_table_is_read_by_a_study_which_finds_its_numbers():
    read = set()
    for path in builtin.paths().values():
        asked = Study.named(path, "paper")
        for item in (parse(output, path.stem) for output in asked.show if "published" in output):
            read.add(item.published)
            printed = PublishedTable.read(builtin.PUBLISHED / item.published)
            columns = printed.columns(asked.labels, item.match)
            assert any(
                printed.row({**cell.labels, "arm": cell.arm}, columns, "", item.where, item.value)
                for cell in asked.cells
            ), (path, item.published)
    known = {path.name for path in builtin.PUBLISHED.glob("*.csv")}
    assert read == known - {"mentioned_in_text.csv"}


# --- in what order it is run ---


def a_number(text: str) -> float:
    """A number between 0 and 1 that looks like chance and is none."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 0xFFFFFFFF


def finish(trial, failing: tuple[str, ...]) -> None:
    """What a run would have left, without the run."""
    if any(each in trial.display_name() for each in failing):
        trial.fail("diverged")
        return
    name = name_of(trial.experiment)
    score = "validation" if trial.experiment.evaluate.validation > 0 else "test"
    scores = {f"{score}_accuracy": a_number(f"{score}_accuracy{name}")}
    complete(trial, norm_mean=a_number("norm" + name), **scores)


def complete(trial, **scores: float) -> None:
    """Gives a trial the summary of a run with these scores."""
    trial.status = "completed"
    facts = {"seed": trial.seed, "model_sha256": name_of(trial.experiment), "seconds": 1.0}
    trial.summary = {"status": "completed", "guarantees": [], **facts, **scores}


def play(runners, order: int, failing: tuple[str, ...] = ()) -> list:
    """Finishes all trials of a source, several at once; returns the order they came out in."""
    chance = random.Random(order)
    runners = runners if isinstance(runners, list) else [runners]
    running = []
    given = []
    for trial in take_turns(runners):
        if trial is not None:
            given.append(trial)
            running.append(trial)
        if trial is None or len(running) > chance.randrange(4):
            assert running, "waits for nothing"
            finish(running.pop(chance.randrange(len(running))), failing)
    for trial in running:
        finish(trial, failing)
    return given


def runner_of(asked: Study, folder: Path) -> StudyRunner:
    folder.mkdir(parents=True, exist_ok=True)
    return StudyRunner(asked, folder, lambda runner: None)


def played(asked: Study | dict, folder: Path, order: int = 0, failing: tuple[str, ...] = ()):
    """What comes of a study, whose runs finish in one of many orders."""
    asked = asked if isinstance(asked, Study) else Study.from_dict(asked)
    runner = runner_of(asked, folder)
    given = play(runner, order, failing)
    assert len(given) == len(set(given))
    assert asked.grow or len(given) <= sum(asked.runs().values())
    return runner.gather(is_over=True)


def rows_of(result) -> tuple[list, list]:
    return result.results.to_pylist(), result.tuning.to_pylist()


def value_of(row: dict, key: str = "local.lr"):
    """The value of a row, by default its rate; None where it has none."""
    return json.loads(row["values"]).get(key)


def reasons(result) -> dict[str, str]:
    return {each["cell"]: each["reason"] for each in result.summary["failed"]}


def test_whatever_the_order_of_the_results_the_same_is_run_and_chosen(tmp_path):
    results = [rows_of(played(study(), tmp_path / str(order), order)) for order in range(12)]
    assert all(each == results[0] for each in results)
    final, tried = results[0]
    by = {(row["data.partition"], row["arm"], row["seed"]): row for row in final}
    for partition in ("iid", "shards"):
        norms = [a_number("norm" + by[partition, "Free", seed]["model_sha256"]) for seed in (1, 2)]
        rows = [row for row in tried if row["data.partition"] == partition]
        assert [value_of(row, "bounding.bound") for row in rows] == [0.5 * sum(norms) / 2] * 2
        best = max(rows, key=lambda row: row["validation_accuracy"])
        assert [row["chosen"] for row in rows] == [row is best for row in rows]
        assert by[partition, "Clip", 1]["values"] == best["values"]
    assert {row["seed"] for row in tried} == {0} and {row["seed"] for row in final} == {1, 2}


def scored(monkeypatch, score) -> None:
    """Has every run reach what `score` says of its experiment, in place of a number by chance."""

    def finish(trial, failing):
        scores = dict.fromkeys(("validation_accuracy", "test_accuracy"), score(trial.experiment))
        complete(trial, norm_mean=1.0, **scores)

    monkeypatch.setattr("test_study.finish", finish)


def two(**about) -> dict:
    """A study of two arms, at one label."""
    noise = {"kind": "gaussian", "multiplier": 1.0, "delta": 1e-5}
    arms = {
        "Clip": {"bounding": {"kind": "clip", "bound": 1.0}, "noise": noise},
        "Free": {"bounding": {"kind": "none"}, "noise": {"kind": "none"}},
    }
    given = tree(arms=arms, panels={"size": {"few": {"data.clients": 20}}}, show=[])
    given["study"] = {"id": "mine/two", "seeds": 3, "tuning_seeds": 1, **about}
    return given


def two_sizes(**about) -> dict:
    """The same at two labels: with 20 clients, and with 40."""
    given = two(**about)
    given["panels"]["size"]["many"] = {"data.clients": 40}
    return given


def ahead(monkeypatch, gain, by_seed: float = 0.001) -> None:
    """Has Clip reach `gain` of its experiment more than Free, and both more with each seed."""

    def score(run):
        return 0.5 + by_seed * run.seed + (gain(run) if run.bounding.kind == "clip" else 0)

    scored(monkeypatch, score)


def two_tuned(**about) -> dict:
    """The same, of which each tunes its rate."""
    given = two(tuning_seeds=2, **about)
    given["local"]["lr"] = {"tune": [0.1, 0.2]}
    return given


def test_grids_of_all_arms_of_a_panel_grow_where_one_chooses_an_end(tmp_path, monkeypatch):
    # Clip is best at a rate of 0.8, two doublings beyond its grid; Free at 0.1
    best = {"clip": 0.8, "none": 0.1}
    scored(monkeypatch, lambda run: -abs(np.log(run.local.lr / best[run.bounding.kind])) / 10)
    results = [played(two_tuned(grow=3), tmp_path / str(order), order) for order in range(6)]
    final, tried = rows_of(results[0])
    assert all(rows_of(each) == (final, tried) for each in results)
    # three values at the upper end, as Clip asks for two of them and a third proves the choice
    # to lie inside; and below, as Free's choice was an end
    for arm in ("Clip", "Free"):
        rates = {value_of(row) for row in tried if row["arm"] == arm}
        assert rates == {0.05, 0.1, 0.2, 0.4, 0.8, 1.6}
    assert {row["arm"]: value_of(row) for row in final} == {"Clip": 0.8, "Free": 0.1}
    assert all(each.summary["tuning"]["equal"] for each in results)


def test_a_grid_grows_within_its_limit_and_where_its_key_takes_the_value(tmp_path, monkeypatch):
    scored(monkeypatch, lambda run: run.local.lr / 10)
    rows = rows_of(played(two_tuned(grow=1), tmp_path / "one"))[1]
    assert {value_of(row) for row in rows} == {0.1, 0.2, 0.4}
    scored(monkeypatch, lambda run: run.server.momentum)
    given = two(grow=2)
    given["server"] = {"kind": "momentum", "momentum": {"tune": [0.3, 0.9]}}  # 2.7 is none
    rows = rows_of(played(given, tmp_path / "two"))[1]
    assert {value_of(row, "server.momentum") for row in rows} == {0.3, 0.9}


def test_tuning_runs_are_adaptive_where_a_grid_grew_or_was_changed(tmp_path, monkeypatch):
    scored(monkeypatch, lambda run: run.local.lr / 10)
    adaptive = []
    monkeypatch.setattr(
        "raydpfl.sweep.study.runner.compose_search", lambda *args: adaptive.append(args[2])
    )
    for grow in range(2):
        played(two_tuned(grow=grow), tmp_path / str(grow))
    assert adaptive == [False, False, True, True]
    given = two_tuned(grow=0)
    with runner_of(Study.from_dict(given), tmp_path / "changed").started(resume=False):
        run = tmp_path / "changed" / "trials" / "0"
        run.mkdir(parents=True)
        (run / "ledger.jsonl").write_text("{}\n")
    for rates in ([0.1, 0.2], [0.1, 0.4]):
        given["local"]["lr"] = {"tune": rates}
        runner = runner_of(Study.from_dict(given), tmp_path / "changed")
        runner.check_directory(resume=True)
        assert runner.is_adaptive == (rates[1] == 0.4)
    given = two_tuned(grow=0)
    given["local"]["steps"] = 7  # another cell by the same labels
    runner = runner_of(Study.from_dict(given), tmp_path / "changed")
    runner.check_directory(resume=True)
    assert runner.is_adaptive


def test_former_runs_on_the_same_data_count_in_every_private_cell(tmp_path, monkeypatch):
    given = two_tuned(grow=0)
    runner = runner_of(Study.from_dict(given), tmp_path)
    play(runner, 1)
    tried = runner.progress[runner.study.cells[0]].tuning_trials[0].experiment
    # `other` is on other data
    experiments = {"former": tried, "other": experiment(data={"kind": "synthetic", "clients": 50})}
    for name, former in experiments.items():
        (tmp_path / "trials" / name).mkdir(parents=True)
        (tmp_path / "trials" / name / "config.yaml").write_text(former.to_yaml())
        (tmp_path / "trials" / name / "ledger.jsonl").write_text("{}\n")
    composed = []

    def compose(runs, root, adaptive):
        composed.append(([path.name for path, _ in runs if path.name in experiments], adaptive))
        return Composition()

    monkeypatch.setattr("raydpfl.sweep.study.runner.compose_search", compose)
    runner.gather(is_over=True)
    # Clip, which may have been tried by what those show, and Free without noise
    assert composed == [(["former"], True), ([], False)]
    (tmp_path / "trials" / "other" / "config.yaml").write_text("nonsense")
    statement = runner.gather(is_over=True).summary["tuning"]["statement"]
    assert "a run in trials/ cannot be read" in statement


@pytest.mark.parametrize("bounds", [[1.0], ["1.0", "2.0"]])
def test_a_grid_without_two_numbers_does_not_grow_beside_one_that_does(
    bounds, tmp_path, monkeypatch
):
    scored(monkeypatch, lambda run: run.local.lr / 10)
    given = two_tuned(grow=1)
    given["arms"]["Clip"]["bounding"]["bound"] = {"tune": [1.0, 2.0]}
    given["arms"]["Other"] = {"bounding": {"kind": "clip", "bound": {"tune": bounds}}}
    rows = [row for row in rows_of(played(given, tmp_path))[1] if row["arm"] == "Other"]
    assert {value_of(row) for row in rows} == {0.1, 0.2, 0.4}
    assert len(rows) == 2 * 3 * len(bounds)


def test_the_choice_is_by_means_over_tuning_seeds_and_each_resample_has_one(tmp_path, monkeypatch):
    def score(run):  # seed 0 is for 0.1, by little; seed 1 for 0.2
        by = {0: {0.1: 0.6, 0.2: 0.5}, 1: {0.1: 0.1, 0.2: 0.9}}
        return by.get(run.seed, {0.1: 0.3, 0.2: 0.4})[run.local.lr]

    scored(monkeypatch, score)
    runner = runner_of(Study.from_dict(two_tuned(grow=0)), tmp_path)
    play(runner, 3)
    result = runner.gather(is_over=True)
    final, tried = rows_of(result)
    assert {row["seed"] for row in tried} == {0, 1} and {row["seed"] for row in final} == {2, 3, 4}
    assert {value_of(row) for row in final} == {0.2}
    chosen = {
        row["tuning_seeds"]: (value_of(row), row["test_accuracy"])
        for row in result.resamples.to_pylist()
    }
    assert chosen == {"0 0": (0.1, 0.3), "0 1": (0.2, 0.4), "1 1": (0.2, 0.4)}
    # the mean by resample: 0.3 with probability 1/4, else 0.4; K / (K - 1) = 2
    spread = next(iter(runner.progress.values())).values("test_accuracy").spread()
    assert spread.mean == pytest.approx(0.4)
    assert spread.error == pytest.approx(np.sqrt(2 * 0.25 * 0.75 * 0.1**2))
    assert spread.freedom == pytest.approx(1.0)  # all of it is of two tuning seeds


CLAIM = {"says": "Clip is ahead", "larger": {"arm": "Clip"}, "smaller": {"arm": "Free"}}


@pytest.mark.parametrize(
    ("gain", "more", "verdict"),
    [
        ([0.1, 0.12, 0.11], {}, "holds"),
        ([-0.1, -0.12, -0.11], {}, "reversed"),
        ([0.1, -0.1, 0.02], {}, "not resolved"),
        ([0.1, 0.12, 0.11], {"by": 0.2}, "reversed"),
        ([0.001, -0.001, 0.0], {"within": 0.01}, "holds"),
        ([0.1, 0.12, 0.11], {"within": 0.01}, "reversed"),
        ([0.0, 0.0, 0.0], {}, "equal"),
        ([0.0, 0.0, 0.0], {"within": 0.01}, "holds"),
        ([0.0, 0.0, 0.0], {"by": 0.01}, "reversed"),
    ],
)
def test_the_verdict_on_a_claim_is_of_paired_differences(
    gain, more, verdict, tmp_path, monkeypatch
):
    ahead(monkeypatch, lambda run: gain[run.seed - 1], by_seed=0.1)
    given = two(claims=[CLAIM | more, CLAIM | {"at": {"size": "few"}}])
    claim, other = played(given, tmp_path).summary["claims"]
    assert claim["verdict"] == verdict
    assert claim["difference"] == pytest.approx(np.mean(gain))
    # two claims: each interval is at 1 - 0.05 / 2
    half = stats.t.ppf(1 - 0.05 / 4, 2) * np.std(gain, ddof=1) / np.sqrt(3)
    assert other["high"] - other["low"] == pytest.approx(2 * half, abs=1e-5)  # rounding
    assert (claim["cells"], claim["seeds"], claim["level"]) == (1, 3, 0.975)


def test_a_run_of_what_other_tuning_seeds_choose_that_failed_is_told_and_resolves_no_claim(
    tmp_path, monkeypatch
):
    best = {0: 0.1, 1: 0.19}  # by tuning seed; the two together choose 0.1
    scored(
        monkeypatch,
        lambda run: (
            (run.bounding.kind == "clip") - abs(run.local.lr - best.get(run.seed, 0.18)) / 10
        ),
    )
    runner = runner_of(Study.from_dict(two_tuned(grow=0, claims=[CLAIM])), tmp_path)
    play(runner, 1)
    assert runner.gather(is_over=True).summary["claims"][0]["verdict"] == "holds"
    cell = next(cell for cell in runner.progress.values() if cell.cell.arm == "Clip")
    for trial in {trial for s in cell.resample_settings.values() for trial in s.trials}:
        if trial not in cell.finals:
            trial.fail("diverged")
    result = runner.gather(is_over=True)
    claim = result.summary["claims"][0]
    assert (claim["verdict"], claim["low"], claim["seeds"]) == ("not resolved", None, 3)
    assert reasons(result) == {
        f"Clip size=few local.lr=0.2 seed={seed}": "diverged" for seed in (2, 3, 4)
    }
    assert result.problem.startswith("without a result: Clip size=few local.lr=0.2 seed=")


@pytest.mark.parametrize("sign", [1, -1])
def test_a_claim_is_not_resolved_where_a_cell_shows_the_opposite(sign, tmp_path, monkeypatch):
    ahead(monkeypatch, lambda run: sign * {20: 0.3, 40: -0.1}[run.data.clients])
    drop = {"says": "a difference of differences"}
    drop["larger"] = [{"arm": "Clip", "size": "few"}, {"arm": "Free", "size": "many"}]
    drop["smaller"] = [{"arm": "Free", "size": "few"}, {"arm": "Clip", "size": "many"}]
    claim, drop = played(two_sizes(claims=[CLAIM, drop]), tmp_path).summary["claims"]
    counts = [claim[name] for name in ("cells", "holds", "reversed")]
    assert claim["difference"] == pytest.approx(sign * 0.1) and counts == [2, 1, 1]
    assert claim["verdict"] == "not resolved"
    assert drop["difference"] == pytest.approx(sign * 0.4)
    assert drop["verdict"] == ("holds" if sign > 0 else "reversed")


@pytest.mark.parametrize(
    ("gains", "more", "verdict", "shown"),
    [
        ([0.3, 0.1], {}, "holds", 0.1),
        ([0.3, -0.1], {}, "reversed", -0.1),
        ([0.3, 0.0], {}, "not resolved", 0.0),
        ([0.0, 0.0], {}, "equal", 0.0),
        ([0.3, math.nan], {}, "not resolved", 0.3),
        ([0.01, -0.02], {"within": 0.03}, "holds", -0.02),
        ([0.01, -0.1], {"within": 0.03}, "reversed", -0.1),
        ([0.3, 0.1], {"by": 0.2}, "reversed", 0.1),
    ],
)
def test_a_claim_of_every_cell_is_that_of_the_cell_that_decides(
    gains, more, verdict, shown, tmp_path, monkeypatch
):
    ahead(monkeypatch, lambda run: gains[run.data.clients // 20 - 1] * (1 + run.seed / 100))
    study = two_sizes(claims=[CLAIM | {"every_cell": True} | more])
    (claim,) = played(study, tmp_path).summary["claims"]
    assert claim["verdict"] == verdict
    assert claim["difference"] == pytest.approx(1.02 * shown)
    # the level is that of any single cell
    half = stats.t.ppf(1 - 0.05 / 2 / 2, 2) * 0.01 * abs(shown) / np.sqrt(3)
    assert claim["high"] - claim["low"] == pytest.approx(2 * half, abs=1e-5)  # rounding
    assert claim["level"] == 1 - 0.05 / 2


@pytest.mark.parametrize("every_cell", [False, True])
@pytest.mark.parametrize("gain", [0.3, -0.3, 0.0])
@pytest.mark.parametrize("lost", [[(20, 2), (40, 3)], [(40, 1), (40, 2), (40, 3)]])
def test_no_claim_is_resolved_by_the_seeds_and_cells_that_are_left(
    lost, gain, every_cell, tmp_path, monkeypatch
):
    ahead(monkeypatch, lambda run: math.nan if (run.data.clients, run.seed) in lost else gain)
    study = two_sizes(claims=[CLAIM | {"every_cell": every_cell}])
    (claim,) = played(study, tmp_path).summary["claims"]
    # one cell with all its seeds shows that not every cell is as claimed
    is_shown = every_cell and gain < 0 and len(lost) == 3
    assert claim["verdict"] == ("reversed" if is_shown else "not resolved")
    assert claim["cells"] == 2
    seeds = 3 if len(lost) == 3 else 2 if every_cell else 1
    assert (claim["seeds"], claim["planned_seeds"]) == (seeds, 3)
    assert verdict_line(claim).endswith(f", in {seeds} of 3 seeds") == (seeds < 3)


def test_sides_are_equal_where_no_cell_differs(tmp_path, monkeypatch):
    ahead(monkeypatch, lambda run: {20: 0.25, 40: -0.25}[run.data.clients], by_seed=0.0)
    (claim,) = played(two_sizes(claims=[CLAIM]), tmp_path).summary["claims"]
    assert (claim["difference"], claim["verdict"]) == (0.0, "not resolved")


def test_a_claim_is_not_run_where_none_of_its_cells_is(tmp_path, monkeypatch):
    scored(monkeypatch, lambda run: 0.5)
    given = two(claims=[CLAIM]) | {"scales": {"small": None}}
    asked = Study.from_dict(given, only={"arm": ["Free"]})
    assert [cell.arm for cell in asked.cells] == ["Free"]
    assert Study.from_dict(yaml.safe_load(asked.to_yaml())).cells[0].arm == "Free"
    (claim,) = played(asked, tmp_path).summary["claims"]
    assert claim["verdict"] == "not run"


@pytest.mark.parametrize("every_cell", [False, True])
def test_a_claim_is_not_resolved_by_the_cells_that_only_leaves(every_cell, tmp_path, monkeypatch):
    ahead(monkeypatch, lambda run: 0.1)
    given = two_sizes(claims=[CLAIM | {"every_cell": every_cell}])
    whole = Study.from_dict(given, only={"size": ["few"]})
    assert {cell.labels["size"] for cell in whole.cells} == {"few"}
    (claim,) = played(whole, tmp_path / "only").summary["claims"]
    assert (claim["verdict"], claim["cells"], claim["holds"]) == ("not resolved", 2, 1)
    assert verdict_line(claim).endswith(", 1 cell without numbers")
    # a scale has the claims of its own cells, and the directory goes on with the rest
    given["scales"] = {"small": {"only": {"size": ["few"]}}}
    (claim,) = played(given, tmp_path / "scale").summary["claims"]
    assert (claim["verdict"], claim["cells"]) == ("holds", 1)
    resumed = Study.from_dict(yaml.safe_load(whole.to_yaml()), only={"size": ["many", "few"]})
    assert len(resumed.cells) == 4


def test_arms_that_are_the_same_bits_are_named(tmp_path):
    given = tree()
    given["arms"]["Twin"] = given["arms"]["Uniform"]
    equal = played(given, tmp_path).summary["equal_arms"]
    assert equal == [
        {"arms": ["Uniform", "Twin"], "at": {"data.partition": name}} for name in ("iid", "shards")
    ]


def test_a_label_stays_what_it_is_where_runs_have_a_number_of_its_name(tmp_path):
    final, _ = rows_of(played(study(panels={"rounds": [1, 2]}), tmp_path))
    assert {row["rounds"] for row in final} == {"1", "2"}


def test_one_value_is_no_choice_and_is_not_tried(tmp_path):
    final, tried = rows_of(played(changed("arms/Clip/local.lr", {"tune": [0.2]}), tmp_path))
    assert not tried and {value_of(row) for row in final if row["arm"] == "Clip"} == {0.2}


def test_values_that_are_chosen_at_one_label_are_taken_at_the_others(tmp_path):
    given = tree()
    given["study"] |= {"chosen_at": {"data.partition": "shards"}, "same_bits": []}
    asked = Study.from_dict(given)
    assert asked.runs()["tried"] == 2
    results = [rows_of(played(asked, tmp_path / str(order), order)) for order in range(6)]
    assert all(each == results[0] for each in results)
    final, tried = results[0]
    assert {row["data.partition"] for row in tried} == {"shards"}
    (best,) = [json.loads(row["values"]) for row in tried if row["chosen"]]
    clip = [row for row in final if row["arm"] == "Clip"]
    values = {row["data.partition"]: json.loads(row["values"]) for row in clip}
    assert values["shards"] == best and values["iid"]["local.lr"] == best["local.lr"]
    # the number of another arm is that of the cell's own label
    assert values["iid"]["bounding.bound"] != best["bounding.bound"]

    failed = played(asked, tmp_path / "failing", failing=("tried",)).summary["failed"][0]
    why = "no values were chosen: Clip data.partition=shards: none of the 2 values"
    assert why in failed["reason"]
    given["arms"]["Clip"]["only"] = {"data.partition": ["iid"]}
    with refusal(r"study\.chosen_at = .*Clip stands with the same"):
        Study.from_dict(given)


@pytest.mark.parametrize(("better", "pick"), [("smaller", min), ("larger", max)])
def test_a_loss_is_better_the_smaller_and_any_number_as_the_study_says(better, pick, tmp_path):
    given = tree()
    given["study"] |= {"judge": "norm_mean", "better": better}
    _, rows = rows_of(played(given, tmp_path))
    for partition in ("iid", "shards"):
        scores = {r["norm_mean"]: r["chosen"] for r in rows if r["data.partition"] == partition}
        assert scores[pick(scores)] and sum(scores.values()) == 1
    assert Study.from_dict(changed("study/judge", "validation_loss")).about.sign == -1


def test_a_value_whose_run_fails_is_not_chosen_and_no_failure_of_the_study(tmp_path):
    asked = study(study={"id": "a", "seeds": 2} | ONE_TRY)
    found = played(asked, tmp_path, failing=("local.lr=0.05 tried",))
    assert {value_of(row) for row in found.results.to_pylist()} == {None, 0.2}
    assert found.problem is None and found.summary["tried"]["failed"] == 2


def test_a_cell_without_a_value_or_a_number_has_no_result_and_the_others_have(tmp_path):
    asked = study(study={"id": "a", "seeds": 2} | ONE_TRY)
    failing = ("Clip data.partition=iid", "Free data.partition=shards seed=2")
    found = played(asked, tmp_path, failing=failing)
    rows = [(row["arm"], row["data.partition"], row["status"]) for row in found.results.to_pylist()]
    assert not [row for row in rows if row[0] == "Clip"]
    assert rows.count(("Free", "shards", "failed")) == 1 and len(rows) == 2 * 6
    why = reasons(found)
    expected = "none of the 2 values tried has a result (diverged)"
    assert expected in why["Clip data.partition=iid"]
    expected = "the runs of Free data.partition=shards have no number norm_mean"
    assert why["Clip data.partition=shards"] == expected
    assert found.problem.startswith("without a result: Clip data.partition=iid: none of")
    assert found.problem.endswith("and 2 more; go on with --resume")


def test_several_studies_take_turns_where_one_has_to_wait(tmp_path):
    others = [study(study={"id": name, "seeds": 1} | ONE_TRY) for name in ("a", "b")]
    runners = [runner_of(each, tmp_path / each.about.id) for each in others]
    given = play(runners, 5)
    assert len(given) == 2 * sum(others[0].runs().values())
    first = [trial.folder.is_relative_to(runners[0].folder) for trial in given]
    # Clip of the first waits for the norms of Free, and the second begins before it
    assert first.index(False) < len(first) - 1 - first[::-1].index(True)
    alone = rows_of(played(others[0], tmp_path / "alone", 6))
    assert [rows_of(runner.gather(is_over=True)) for runner in runners] == [alone] * 2


@pytest.mark.parametrize(("part", "key"), [("bounding", "bound"), ("local", "lr")])
def test_a_number_that_makes_no_experiment_costs_its_own_cell_alone(part, key, tmp_path):
    given = tree()
    del given["arms"]["Clip"]["local.lr"]
    derived = {"from": {"arm": "Free", "value": "norm_mean", "times": -1.0}}
    given["arms"]["Clip"] |= {f"{part}.{key}": derived, "server.lr": {"tune": [0.5, 1.0]}}
    found = played(given, tmp_path)
    assert [row["arm"] for row in found.results.to_pylist()].count("Uniform") == 4
    why = reasons(found)
    assert why.keys() == {f"Clip data.partition={name}" for name in ("iid", "shards")}
    assert all(reason.startswith(f"{part}.{key} = -0.") for reason in why.values())


def test_what_was_tried_once_counts_though_the_study_has_it_no_more(tmp_path):
    runner = runner_of(study(), tmp_path)
    play(runner, 1)
    statement = runner.gather(is_over=True).summary["tuning"]["statement"]
    assert "among 4 private runs is itself" in statement
    final = next(iter(runner.progress.values())).finals[0].folder
    for folder in (tmp_path / "trials" / "former", final):
        folder.mkdir(parents=True)
        (folder / "ledger.jsonl").write_text("{}\n")
    statement = runner.gather(is_over=True).summary["tuning"]["statement"]
    assert "among 5 private runs, 1 of which are of former settings or arms, is itself" in statement


def test_runs_of_what_other_tuning_seeds_choose_are_of_the_study(tmp_path, monkeypatch):
    best = {0: 0.1, 1: 0.2}  # by tuning seed
    scored(monkeypatch, lambda run: -abs(run.local.lr - best.get(run.seed, 0.12)))
    runner = runner_of(Study.from_dict(two_tuned()), tmp_path)
    play(runner, 1)
    settings = [s for cell in runner.progress.values() for s in cell.resample_settings.values()]
    finals = {trial.folder for cell in runner.progress.values() for trial in cell.finals}
    other, *_ = {trial.folder for setting in settings for trial in setting.trials} - finals
    other.mkdir(parents=True)
    (other / "ledger.jsonl").write_text("{}\n")
    assert "former" not in runner.gather(is_over=True).summary["tuning"]["statement"]


def test_printed_tables_in_a_folder_are_found_again_where_a_study_goes_on(tmp_path):
    given = tree()
    given["show"][0]["published"] = "tables/mine.csv"
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "mine.csv").write_text("arm,accuracy\nData,0.5\n")
    runner = runner_of(Study.from_dict(given, place=tmp_path), tmp_path / "out")
    with runner.started(resume=False):
        pass
    shutil.rmtree(tmp_path / "tables")
    again = Study.from_directory(tmp_path / "out")
    assert again.published_tables() == {
        "tables/mine.csv": tmp_path / "out" / "published" / "tables" / "mine.csv"
    }
    for name in ("../tables/mine.csv", str(tmp_path / "out" / "study.yaml")):
        given["show"][0]["published"] = name
        with refusal(r"show\.0\.published = .*: expected a file in the folder"):
            Study.from_dict(given, place=tmp_path / "out")


def test_what_came_of_a_study_is_told_in_whole_lines_where_no_terminal_is(tmp_path):
    asked = study()
    result = played(asked, tmp_path, failing=("Free data.partition=iid seed=2",))
    console = Console(file=io.StringIO(), soft_wrap=True, highlight=False)
    StudyDisplay(console, [asked]).report(result)
    lines = console.file.getvalue().splitlines()
    (line,) = [line for line in lines if line.startswith("shards") and " Clip " in line]
    seeds = {line.split()[1]: line.split()[-1] for line in lines if line.startswith("iid")}
    assert seeds == {"Free": "1", "Data": "2", "Uniform": "2"}  # those that have a number
    values = json.loads(result.results.to_pylist()[-6]["values"])
    assert line.split()[-2:] == [f"{key}={short_text(value)}" for key, value in values.items()]


# --- identities and comparisons ---


def test_an_identity_is_held_where_the_models_of_every_seed_are_equal():
    asked = study()
    (identity,) = asked.same_bits
    models = {cell: {1: (cell.arm, "same"), 2: (cell.arm, "same")} for cell in asked.cells}
    found = compare(identity, models)
    assert (found["held"], found["compared"], found["one_run"]) == (True, 4, 0)
    cell = next(each for each in asked.cells if each.arm == "Uniform")
    models[cell][2] = ("Uniform", "other")
    found = compare(identity, models)
    assert found["held"] is False and len(found["broken"]) == 1
    assert "broken in 1 of 4, first at seed 2 (Data same, Uniform other)" in words(found)
    for each in asked.cells:
        models[each] = {1: None}
    assert compare(identity, models)["held"] is None
    models = {each: {1: ("one", "same")} for each in asked.cells}
    found = compare(identity, models)
    assert (found["one_run"], found["held"]) == (2, None)
    assert words(found).endswith("not compared, as all arms are one run")


def test_a_broken_identity_is_named_and_fails_the_study(tmp_path):
    found = played(study(), tmp_path)  # the digests of `finish` are those of the experiments
    assert found.problem.startswith("an identity is broken: Data and Uniform have the same bits")
    assert found.summary["status"] == "failed"


# --- a study that is run ---


@pytest.fixture(scope="module")
def ran(shared_ray, tmp_path_factory):
    """A small study with a member of its user's own as a fifth arm."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "halving.py").write_text(OWN)
    given = tree()
    given["arms"]["Mine"] = {
        **given["arms"]["Uniform"],
        "bounding": {"kind": "halving:Halve", "bound": {"tune": [0.5, 1.0]}},
    }
    given["show"][0]["published"] = "mine.csv"
    (folder / "mine.csv").write_text("arm,accuracy\nMine,0.5\n")
    (folder / "study.yaml").write_text(yaml.safe_dump(given, sort_keys=False))
    sys.path.insert(0, str(folder))
    try:
        (result,) = reproduce(Study.named(folder / "study.yaml"), out=folder / "out")
    finally:
        sys.path.remove(str(folder))
    return result


def test_a_study_runs_tunes_and_compares_with_an_arm_of_the_users_own(ran):
    assert ran.problem is None and ran.summary["status"] == "completed"
    assert ran.summary["final"]["runs"] == ran.summary["final"]["completed"] == 20
    assert ran.summary["tried"]["runs"] == 8
    rows = ran.results.to_pylist()
    assert {row["arm"] for row in rows} == {"Free", "Clip", "Data", "Uniform", "Mine"}
    assert pq.read_table(ran.out / "results.parquet").equals(ran.results)
    for row in rows:
        trial = ran.out / row["directory"]
        summary = json.loads((trial / "summary.json").read_text())
        assert row["test_accuracy"] == summary["test_accuracy"] is not None
        assert row["model_sha256"] == summary["model_sha256"] and row["seed"] == summary["seed"]
        assert ("epsilon_rdp" in row and row["epsilon_rdp"] is not None) == (row["arm"] != "Free")
    assert json.loads(ran.results.schema.metadata[b"rigorous"]) == ["epsilon_rdp"]
    assert (ran.out / "published" / "mine.csv").exists()


def test_no_run_that_values_were_chosen_by_has_seen_the_test_set(ran):
    tried = ran.tuning.to_pylist()
    assert len(tried) == 8 and sum(row["chosen"] for row in tried) == 4
    for row in tried:
        trial = ran.out / row["directory"]
        rounds = pq.read_table(trial / "rounds.parquet").to_pydict()
        assert rounds["test_loss"] == rounds["test_accuracy"] == [None, None]
        assert rounds["validation_accuracy"][-1] == row["validation_accuracy"] is not None


def test_the_identity_holds_and_the_choice_is_told(ran):
    (identity,) = ran.summary["identities"]
    assert identity["held"] is True and identity["compared"] == 4 and not identity["one_run"]
    tuning = ran.summary["tuning"]
    assert tuning["settings"] == {arm: [0, 0] for arm in ARMS} | {"Clip": [2, 2], "Mine": [2, 2]}
    assert not tuning["equal"] and "8 private runs is itself a query" in tuning["statement"]


def test_a_study_goes_on_with_more_seeds_and_arms_and_runs_nothing_again(ran, shared_ray, tmp_path):
    out = Path(shutil.copytree(ran.out, tmp_path / "out"))
    before = finished(out)
    given = yaml.safe_load((out / "study.yaml").read_text())
    del given["arms"]["Mine"], given["arms"]["Clip"]
    given["arms"]["Sixth"] = {"server": {"kind": "momentum"}}
    given["study"]["seeds"] = 3
    (again,) = reproduce(Study.from_dict(given, place=out), out=out, resume=True)
    assert again.problem is None
    after = finished(out)
    assert before.items() <= after.items() and len(after) == len(before) + 2 * (3 + 3)
    rows = again.results.to_pylist()
    old = {row["directory"] for row in ran.results.to_pylist() if row["arm"] in ARMS}
    assert old <= {row["directory"] for row in rows}
    assert [row["arm"] for row in rows] == [arm for arm in (*ARMS, "Sixth") for _ in range(3)] * 2
    with refusal("--scale = 'paper': expected 'small', as in the study"):
        reproduce(Study.from_dict(given, "paper", place=out), out=out, resume=True)


def test_a_study_keeps_its_code_and_does_not_go_on_with_another(tmp_path, monkeypatch):
    code = tmp_path / "halves.py"
    code.write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    arms = {"Mine": {"bounding": {"kind": "halves:Halve"}}}
    asked = study(arms=arms, study={"id": "mine/code"}, rounds=1)
    runner = runner_of(asked, tmp_path / "out")
    with runner.started(resume=False):
        trial = runner.trials[0]
        run(trial.experiment, trial.folder)
    assert (tmp_path / "out" / "code" / "halves.py").read_text() == OWN
    code.write_text(OWN.replace("0.5 *", "1.0 *"))
    again = runner_of(asked, tmp_path / "out")
    again.advance()
    problem = next(iter(again.progress.values())).problem
    assert f"its code of halves is not that of {code}" in problem


# --- however it ends, for `tests/runtime/test_cluster.py` ---


def command(config: Path, out: Path, *more: str) -> list[str]:
    words = ["reproduce", str(config), "--out", str(out), "--quiet", *more]
    return [sys.executable, "-m", "raydpfl", *words]


def longer(folder: Path) -> Path:
    """The file of a study of 20 runs that last long enough to be killed between two of them."""
    given = tree(rounds=6)
    given["local"] |= {"steps": 60}
    config = folder / "study.yaml"
    config.write_text(yaml.safe_dump(given, sort_keys=False))
    return config


def cut_short(process: subprocess.Popen, out: Path, trials: int) -> dict[str, int]:
    """Kills a study once so many trials have finished; those that had, as `finished` has them."""
    until = time.monotonic() + 600
    while len(finished(out)) < trials and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert process.poll() is None
    kill_tree(process)
    done = finished(out)
    assert trials <= len(done) < 20
    return done


def check_same_tables(here: Path, there: Path) -> None:
    """All but what is measured of the machine, to the last digit."""
    for name in ("results", "tuning"):
        tables = [pq.read_table(each / f"{name}.parquet") for each in (here, there)]
        dropped = [column for column in MACHINE if column in tables[0].column_names]
        first, second = (table.drop_columns(dropped) for table in tables)
        assert first.equals(second) and len(first) > 0


# --- the command ---


@pytest.mark.slow
@pytest.mark.parametrize(("words", "said"), messages("reproduce"))
def test_what_cannot_be_run_is_refused_in_one_line(words, said, tmp_path, monkeypatch, complain):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(changed("study/id", "a b")))
    assert said in complain(["reproduce", *words])
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]


@pytest.mark.slow
def test_the_list_names_every_study_what_it_shows_and_what_is_lost(typed):
    code, shown, _ = typed("reproduce", "--list")
    assert code == 0
    said = re.sub(r"\n +", " ", shown)  # titles are wrapped
    for name, path in builtin.paths().items():
        about = builtin.header(path)
        assert f"{name}  {about['title']}" in said
        assert all(other in said for other in about.get("answers", ()))
    assert "smoke: " in said and "lost: " in said


@pytest.mark.slow
def test_a_study_whose_data_are_not_here_is_listed_without_a_download(tmp_path, typed, monkeypatch):
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    monkeypatch.setattr(TorchvisionImages, "_download", lambda *_: pytest.fail("a download"))
    words = ["--list", "simulators/flute-mnist", "--scale", "small", "--data-root", str(tmp_path)]
    code, shown, _ = typed("reproduce", *words)
    assert code == 0 and shown.startswith("simulators/flute-mnist  ")
    assert shown.splitlines()[-1].endswith("it is not here: mnist (raydpfl data fetch mnist)")


def test_a_study_ends_with_its_report(ran):
    page = (ran.out / "report" / "index.html").read_text()
    assert ran.study.about.id in page and "Mine" in page
    means = (ran.out / "report" / "tables" / "table-test_accuracy.csv").read_text()
    assert "Mine" in means.splitlines()[0].split(",")
