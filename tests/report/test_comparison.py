"""Runs side by side: nothing but seeds is averaged, and labels are what tells runs apart."""

import csv
import io
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import refusal
from rich.console import Console
from test_report import GUARANTEE, keep, lean, made, pieces, results, studied, summarise, swept

from raydpfl.cli.comparison_table import show
from raydpfl.privacy.guarantee import DECLARED_SUFFIX
from raydpfl.report import compare, compare_runs
from raydpfl.report.figures import Plot
from raydpfl.report.pages.comparison import comparison_page


def changed(folder, **sections):
    """With other values in the config of a run that is there."""
    path = folder / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    for section, values in sections.items():
        tree[section] = {**tree[section], **values} if isinstance(values, dict) else values
    path.write_text(yaml.safe_dump(tree))
    return folder


def run(folder, seed=0, accuracy=0.75, summary=None, **sections):
    return changed(made(folder, seed, test_accuracy=accuracy, **(summary or {})), **sections)


def labels(*folders, **more) -> list[tuple[str, int]]:
    return [(each.label, len(each.runs)) for each in compare_runs(folders, **more).settings]


def test_seeds_are_averaged_and_labels_say_what_else_differs(tmp_path):
    folders = [
        run(tmp_path / f"{place}", seed, accuracy, local={"lr": lr})
        for place, (seed, lr, accuracy) in enumerate([(0, 0.1, 0.5), (1, 0.1, 0.6), (0, 0.2, 0.7)])
    ]
    assert labels(*folders) == [("local lr 0.1", 2), ("local lr 0.2", 1)]
    found = compare_runs(folders)
    spread = found.settings[0].spread("test_accuracy")
    assert (round(spread.mean, 9), round(spread.std, 9)) == (0.55, round(0.1 / 2**0.5, 9))
    assert found.ranking()[0].label == "local lr 0.2"


def test_a_member_is_named_and_its_own_fields_only_where_they_tell_it_from_its_like(tmp_path):
    folders = [
        run(tmp_path / "a", bounding={"kind": "clip", "bound": 1.0}),
        run(tmp_path / "b", bounding={"kind": "clip", "bound": 2.0}),
        run(tmp_path / "c", bounding={"kind": "normalize", "bound": 3.0}),
    ]
    assert labels(*folders) == [("clip, bound 1.0", 1), ("clip, bound 2.0", 1), ("normalize", 1)]


def test_how_a_run_is_carried_out_tells_two_of_one_seed_apart_and_else_its_directory(tmp_path):
    a = run(tmp_path / "a", client={"actors": 0})
    b = run(tmp_path / "b", client={"actors": 2})
    other = run(tmp_path / "c", seed=1, client={"actors": 2})
    same = run(tmp_path / "d", client={"actors": 0})
    assert labels(a, b) == [("actors 0", 1), ("actors 2", 1)]
    assert labels(a, other) == [("a", 2)]
    assert labels(a, same) == [("a", 1), ("d", 1)]


def test_what_makes_another_method_is_no_seed_of_it(tmp_path):
    values = [{"precision": "float32"}, {"precision": "bfloat16"}, {"on_error": "drop"}]
    runs = [run(tmp_path / str(seed), seed, client=each) for seed, each in enumerate(values)]
    assert [count for _, count in labels(*runs)] == [1, 1, 1]
    noise = [{"coefficients": [1.0, 0.5]}, {"coefficients": [1.0, 0.9]}]
    runs = [run(tmp_path / f"noise{seed}", seed, noise=each) for seed, each in enumerate(noise)]
    assert [count for _, count in labels(*runs)] == [1, 1]
    ways = [{"chunk": 4, "backend": "loop", "timeout": 9.0}, {"num_cpus": 2, "num_gpus": 0.5}]
    runs = [run(tmp_path / f"way{seed}", seed, client=each) for seed, each in enumerate(ways)]
    assert [count for _, count in labels(*runs)] == [2]


def test_other_data_and_other_metrics_are_refused_in_a_line(tmp_path, complain):
    a = run(tmp_path / "a")
    dealt = run(tmp_path / "dealt", data={"clients": 7})
    assert labels(a, dealt) == [("clients 50", 1), ("clients 7", 1)]
    other = run(tmp_path / "other", data={"kind": "mnist"})
    said = complain(["compare", a, other])
    assert "runs on the same data; data.kind is fashion_mnist_mini in a and mnist here" in said
    loss = lean(tmp_path / "loss", "test_loss")
    keep(loss, ["round", "cohort", "test_loss"])
    summarise(loss, test_accuracy=None)
    said = complain(["compare", a, loss])
    assert said.startswith("--metric") and "a score that all of them have (test_loss)" in said
    said = complain(["compare", a, loss, "--metric", "test_accuracy"])
    assert said.endswith("loss does not have it")
    assert compare_runs([a, loss], "test_loss").metric == "test_loss"
    with refusal("has no run that has ended"):
        (tmp_path / "sweep").mkdir()
        (tmp_path / "sweep" / "sweep.yaml").write_text("")
        compare_runs([a, tmp_path / "sweep"])


def test_the_trials_of_a_sweep_are_runs_and_those_that_were_stopped_are_not(tmp_path):
    swept(tmp_path)
    one = run(tmp_path / "alone", seed=2)
    assert labels(tmp_path, one) == [(tmp_path.name + "/a", 3)]
    rows = results(tmp_path)
    rows[1]["status"] = "stopped"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "results.parquet")
    assert labels(tmp_path, one) == [(tmp_path.name + "/a", 2)]


@pytest.mark.slow
def test_the_final_runs_of_a_study_are_compared_each_once(tmp_path):
    folder = studied(tmp_path / "study")
    runs = compare_runs([folder]).runs
    ended = [row["directory"] for row in results(folder) if row["status"] == "completed"]
    assert [str(run.folder.relative_to(folder)) for run in runs] == [*dict.fromkeys(ended)]
    assert all(run.name.startswith("study/") for run in runs)


HEAD = ["setting", "seeds", "test accuracy", "best", "epsilon", "rounds", "seconds"]


def printed(*folders) -> list[str]:
    console = Console(width=200, highlight=False, file=io.StringIO())
    show(console, compare_runs(folders))
    return console.file.getvalue().splitlines()


def test_a_terminal_has_one_table_of_eighty_columns_best_first(tmp_path):
    free = {"guarantees": [], "holds": []}
    other = {**GUARANTEE, "accountant": "rdp", "delta": 1e-4}
    other["exclusions"] = [f"sampling declared by mine:Draw {DECLARED_SUFFIX}"]
    folders = [
        run(tmp_path / "a", 0, 0.5, local={"lr": 0.1}),
        run(tmp_path / "b", 1, 0.6, local={"lr": 0.1}),
        run(tmp_path / "c", 0, 0.8, summary=free, local={"lr": 0.2}),
        run(tmp_path / "d", 0, 0.7, {"guarantees": [other], "holds": [other]}, local={"lr": 0.4}),
    ]
    lines = printed(*folders)
    assert max(map(len, lines)) <= 80
    assert re.split(" {2,}", lines[0]) == HEAD
    assert [line.split()[2] for line in lines[1:4]] == ["0.2", "0.4", "0.1"]
    assert "55.00 ± 7.07 %" in lines[3] and "3 (pld)" in lines[3] and "3^ (rdp)" in lines[2]
    assert "none" in lines[1].split()
    said = " ".join(" ".join(lines[4:]).split())
    assert "They differ in delta: 1e-05 and 0.0001." in said
    assert "^ relies on what a user-defined class declares" in said
    assert "showing several runs spends several" in said


def test_a_page_has_the_metric_by_round_second_and_epsilon_with_a_band(tmp_path):
    folders = [
        lean(tmp_path / name, "epsilon_pld", "seconds", seed=seed) for seed, name in enumerate("ab")
    ]
    folders.append(changed(lean(tmp_path / "c", "epsilon_pld", "seconds"), local={"lr": 0.7}))
    page = comparison_page(compare_runs(folders))
    section = next(each for each in page.sections if each.title.startswith("Test accuracy by"))
    drawings = [piece for piece in section.pieces if isinstance(piece, Plot)]
    assert [each.name.rpartition("-")[2] for each in drawings] == ["round", "seconds", "epsilon"]
    assert all("means over 1 to 2 seeds; bands" in each.caption for each in drawings)
    assert [key.label for key in drawings[0].keys] == ["local lr 0.1", "local lr 0.7"]
    every = [each.name for part in page.sections for each in part.pieces if isinstance(each, Plot)]
    assert len(set(every)) == len(every)


@pytest.mark.slow
def test_figures_have_the_best_of_many_settings_and_say_so(tmp_path):
    folders = [
        run(tmp_path / f"{place}", 0, place / 10, local={"lr": 1.0 + place}) for place in range(9)
    ]
    page = comparison_page(compare_runs(folders))
    assert any("the 7 settings with the best test accuracy of 9" in each for each in page.warnings)
    found = pieces(*folders)
    assert len(found["results"].rows) == 9
    assert found["differences"].heads == ["setting", "local.lr"]


@pytest.mark.slow
def test_the_command_prints_the_table_and_writes_the_page(tmp_path, typed):
    folders = [run(tmp_path / f"{lr}", local={"lr": lr}) for lr in (0.1, 0.2)]
    out = tmp_path / "page"
    code, said, _ = typed("compare", *folders, "--out", out)
    assert code == 0 and str(out / "index.html") in said
    assert said.splitlines()[0].startswith("setting")
    rows = list(csv.DictReader((out / "tables" / "results.csv").open()))
    shown = {row["setting"]: row["test accuracy"] for row in rows}
    assert shown == {"local lr 0.1": "0.75", "local lr 0.2": "0.75"}
    assert (out / "figures" / "test_accuracy-by-epsilon.svg").exists()
    with refusal("DIR"):
        compare([])
