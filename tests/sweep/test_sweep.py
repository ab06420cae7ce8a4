"""A sweep tries what its config says, nothing twice, on any cluster, after any kills."""

import copy
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml
from conftest import SMALL, experiment, messages, refusal
from rich.console import Console
from test_same_bits import RUN, kill_tree

from raydpfl import Experiment
from raydpfl import run as run_one
from raydpfl.cli.search_display import SweepDisplay, next_commands, settings_table
from raydpfl.sweep import Sweep, run, tune
from raydpfl.sweep.optuna import propose_settings
from raydpfl.sweep.results import count_runs, gather, statement
from raydpfl.sweep.runner import SweepRunner
from raydpfl.sweep.trials import Trial, identity, override_text

WAIT = 180.0  # seconds for what takes a few on a machine that is not busy with other things


def tree(**sections) -> dict:
    """The small experiment as a sweep's config, with some keys of some sections changed."""
    changed = copy.deepcopy(SMALL)
    for name, value in sections.items():
        merged = isinstance(value, dict) and not value.keys() & {"kind", "grid"}
        changed[name] = {**changed.get(name, {}), **value} if merged else value
    return changed


def settings_of(sweep: Sweep, out: Path) -> list:
    """All settings of a sweep in this directory, with their trials, before any of them is run."""
    runner = SweepRunner(sweep, out, print)
    runner.advance()
    return runner.settings


# --- what a sweep tries ---


def test_a_grid_is_every_combination_in_the_order_of_the_config():
    sweep = Sweep.from_dict(
        tree(
            local={"lr": {"grid": [0.1, 0.2]}},
            bounding={"bound": {"powers_of_two": [-1, 1]}},
            data={"clients": {"choice": [40, 50]}},
        )
    )
    tried = [tuple(values.values()) for values in sweep.setting_values()]
    assert tried == [(n, lr, c) for n in (40, 50) for lr in (0.1, 0.2) for c in (0.5, 1, 2)]
    made = sweep.setting({"data.clients": 40, "local.lr": 0.2, "bounding.bound": 2}).experiment
    assert made == experiment(data={"clients": 40}, local={"lr": 0.2}, bounding={"bound": 2.0})


def test_a_member_and_a_whole_section_can_be_searched():
    sweep = Sweep.from_dict(
        tree(server={"grid": [{"kind": "sgd"}, {"kind": "adam", "lr": 0.01}]}),
        ["bounding.kind={grid: [clip, normalize]}", "bounding.bound=1"],
    )
    made = [sweep.setting(values).experiment for values in sweep.setting_values()]
    assert [(e.bounding.kind, e.server.kind) for e in made] == [
        (b, s) for b in ("clip", "normalize") for s in ("sgd", "adam")
    ]


def sampled(samples: int, seed: int = 3, **spaces) -> list[dict]:
    search = {"search": "random", "samples": samples}
    return [*Sweep.from_dict(tree(**spaces, seed=seed, sweep=search)).setting_values()]


def test_random_values_lie_in_their_spaces_are_distinct_and_stay_when_more_are_asked_for():
    spaces = dict(
        local={"lr": {"loguniform": ["1e-3", 1]}},
        bounding={"bound": {"uniform": [0.5, 2]}},
        server={"kind": "momentum", "lr": {"choice": [0.5, 1.0]}},
    )
    few, many = sampled(20, **spaces), sampled(200, **spaces)
    assert few == many[:20] and few != sampled(20, seed=4, **spaces)
    assert len({identity(values) for values in many}) == 200
    for v in many:
        assert 1e-3 <= v["local.lr"] <= 1 and 0.5 <= v["bounding.bound"] <= 2
        assert v["server.lr"] in (0.5, 1.0)
    # Binomial(200, 1/2) leaves 70 to 130 with probability 3e-5, for each of the two.
    assert 70 < sum(v["local.lr"] < 1e-3**0.5 for v in many) < 130
    assert 70 < sum(v["server.lr"] == 0.5 for v in many) < 130


def test_random_search_of_a_finite_space_takes_every_setting_once_if_asked_for_all():
    bound = {"bound": {"powers_of_two": [-2, 1]}}
    values = sampled(12, local={"lr": {"grid": [0.1, 0.2, 0.3]}}, bounding=bound)
    assert len({identity(each) for each in values}) == 12


def test_a_sweep_is_what_its_own_yaml_says(tmp_path):
    search = {"search": "random", "samples": 3, "scheduler": "asha", "grace": 2}
    sweep = Sweep.from_dict(tree(local={"lr": {"loguniform": [0.001, 1.0]}}, sweep=search))
    (tmp_path / "sweep.yaml").write_text(sweep.to_yaml())
    assert Sweep.from_yaml(tmp_path / "sweep.yaml") == sweep


# --- what it refuses ---

BAD = messages("sweeps")


@pytest.fixture
def refused(tmp_path, monkeypatch, complain):
    """How the small experiment with these overrides is refused as a sweep, with nothing written."""
    monkeypatch.delenv("RAYDPFL_DATA", raising=False)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(SMALL))

    def say(*words: str) -> str:
        said = complain(["sweep", str(tmp_path / "config.yaml"), *words])
        assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
        return said

    return say


@pytest.mark.parametrize("case", BAD)
def test_a_sweep_that_cannot_be_run_is_refused_before_anything_is_written(case, tmp_path, refused):
    overrides, begins = BAD[case]
    assert refused(*overrides, "--out", str(tmp_path / "out")).startswith(begins)


def test_without_optuna_installed_it_says_how_to_install_it(tmp_path, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "optuna", None)
    asked = ["local.lr={grid: [0.1, 0.2]}", "sweep={search: optuna, samples: 2}"]
    assert refused(*asked, "--out", str(tmp_path / "out")).startswith(
        "sweep.search = 'optuna': expected grid or random; optuna needs pip install "
        "'raydpfl[optuna]'"
    )


def test_resume_takes_no_directory_that_is_not_a_sweeps(tmp_path, refused):
    said = refused("local.lr={grid: [0.1, 0.2]}", "--resume", "--out", str(tmp_path))
    expected = "expected the directory of a sweep; it has no sweep.yaml"
    assert said.startswith(f"--resume = '{tmp_path}': {expected}")


# --- what it leaves behind ---


@pytest.fixture(scope="module")
def swept(shared_ray, tmp_path_factory):
    """Three learning rates, one of which diverges, with two seeds each, one trial at a time."""
    sweep = Sweep.from_dict(
        tree(
            local={"lr": {"grid": [0.05, 0.1, 1.0e30]}},
            bounding={"kind": "none"},
            noise={"kind": "none"},
            track=["tensorboard"],
            client={"actors": "auto"},
            sweep={"repeats": 2, "concurrent": 1, "on_error": "choose"},
        )
    )
    seen = []
    out = tmp_path_factory.mktemp("sweep") / "out"

    def see(runner):
        seen.append([trial.status for trial in runner.trials])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "LOOK", 0.0)  # every change, however fast the trials are
        return sweep, out, run(sweep, out, on_change=see), seen


def test_every_trial_has_the_bits_of_the_run_it_stands_for(swept, tmp_path):
    _, out, result, _ = swept
    rows = result.trials.to_pylist()
    assert [(row["local.lr"], row["seed"]) for row in rows] == [
        (lr, seed) for lr in (0.05, 0.1, 1e30) for seed in (3, 4)
    ]
    row = rows[3]
    best = Experiment.from_yaml(out / "best.yaml", ["client.actors=0", "seed=4"])
    alone = run_one(best, tmp_path / "alone").summary
    stored = json.loads((out / row["directory"] / "summary.json").read_text())
    for name in ("model_sha256", "test_accuracy"):
        assert row[name] == alone[name] == stored[name]
    assert row["status"] == "completed" and row["rounds"] == 4 and row["seconds"] > 0
    assert list((out / row["directory"] / "tensorboard").glob("events*"))
    assert pq.read_table(out / "results.parquet").equals(result.trials)


def test_a_trial_that_fails_is_a_row_and_not_the_end_of_the_sweep(swept):
    _, _, result, _ = swept
    failed = result.trials.to_pylist()[4:]
    assert all(row["status"] == "failed" and "diverged" in row["reason"] for row in failed)
    assert result.summary["trials"] == {"completed": 4, "budget": 0, "stopped": 0, "failed": 2}


def test_the_best_is_chosen_by_the_mean_over_the_seeds_and_runs_as_it_is(swept):
    _, out, result, _ = swept
    rows = result.trials.to_pylist()
    means = [(rows[i]["test_accuracy"] + rows[i + 1]["test_accuracy"]) / 2 for i in (0, 2)]
    groups = result.settings.to_pylist()
    assert [group["test_accuracy_mean"] for group in groups] == pytest.approx([*means, None])
    # the sample standard deviation of two
    spread = abs(rows[0]["test_accuracy"] - rows[1]["test_accuracy"]) / math.sqrt(2)
    assert groups[0]["test_accuracy_spread"] == pytest.approx(spread)
    assert result.best.values["local.lr"] == (0.05, 0.1)[means[1] > means[0]]
    best = Experiment.from_yaml(out / "best.yaml")
    assert best == result.best.experiment and best.client.actors == "auto" and best.seed == 3
    lines = (out / "best.yaml").read_text().splitlines(keepends=True)
    assert best.to_yaml() == "".join(line for line in lines if not line.startswith("#"))
    assert result.summary["processes"] == 1  # which ran one trial after another


def printed(*tables) -> list[str]:
    """The lines of tables on a terminal of 120 columns."""
    console = Console(width=120)
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    return captured.get().splitlines()


def test_the_table_shows_the_best_first_and_progress_is_told_as_it_comes(swept):
    sweep, _, result, seen = swept
    lines = printed(settings_table(result.all, sweep))
    assert lines[0].split() == ["local.lr", "test", "accuracy", "rounds", "trials"]
    order = [float(line.split()[0]) for line in lines[1:]]
    assert order[0] == result.best.values["local.lr"] and order[-1] == 1e30
    # each was shown under way, those before it ended and those after it not begun
    for k in range(6):
        assert any(
            states[k : k + 1] == ["running"]
            and {*states[:k]} <= {"completed", "failed"}
            and {*states[k + 1 :]} <= {"waiting"}
            for states in seen
        )


def ended(sweep: Sweep, out: Path, score) -> list:
    """All settings of a sweep, their trials completed with `score(values, seed)` as accuracy."""
    settings = settings_of(sweep, out)
    for setting in settings:
        for trial in setting.trials:
            trial.status = "completed"
            trial.summary = {"test_accuracy": score(setting.values, trial.seed)}
    return settings


def test_the_best_for_each_value_and_the_edges_of_grids_are_told(tmp_path):
    members = [{"kind": "clip", "bound": 1}, {"kind": "normalize", "bound": 1}]
    sweep = Sweep.from_dict(
        tree(
            bounding={"grid": members},
            local={"lr": {"grid": [0.4, 0.05, 0.1]}},
            rounds={"grid": [1, 2]},
            sweep={"repeats": 2},
        )
    )

    def score(values, seed):
        short = values["rounds"] == 1
        good = values["bounding"]["kind"] == ("clip" if short else "normalize")
        best = 0.1 if short else 0.05
        return 0.5 * good - abs(values["local.lr"] - best) + 0.1 * (not short) + seed / 100

    settings = ended(sweep, tmp_path, score)
    result = gather(tmp_path, settings, sweep, True, {})
    best = result.summary["best"]
    assert settings[best["setting"]] is result.best
    assert best["edges"] == {"local.lr": "smallest", "rounds": "largest"}
    rows = result.summary["best_for"]["rounds"]
    assert [row["value"] for row in rows] == [1, 2]
    chosen = [settings[row["setting"]].values for row in rows]
    assert [each["bounding"]["kind"] for each in chosen] == ["clip", "normalize"]
    assert [each["local.lr"] for each in chosen] == [0.1, 0.05]
    assert [row["edges"] for row in rows] == [{}, {"local.lr": "smallest"}]
    assert rows[1]["spread"] == pytest.approx(0.01 / 2**0.5)
    console = Console(width=80)
    with console.capture() as captured:
        SweepDisplay(console).report(result, sweep)
    text = captured.get()
    edges = "At the edge of its grid: rounds 2 (largest), local.lr 0.05 (smallest)."
    assert edges in " ".join(text.split())
    lines = [line.split() for line in text.splitlines()]
    at = lines.index(["Best", "for", "each", "rounds"])
    for line, cells in zip(lines[at + 2 :], ("1 clip 0.1", "2 normalize 0.05"), strict=False):
        assert line[0] == cells[0] and {*cells.split()} <= {*line}
    assert text.count("{") == 1  # the best setting, as overrides
    settings[0].trials[0].status = "failed"
    assert "best_for" not in gather(tmp_path, settings, sweep, True, {}).summary


def test_what_sets_the_privacy_has_no_edge(tmp_path):
    noise = {"kind": "gaussian", "multiplier": {"grid": [0.5, 1, 2]}, "delta": 1e-3}
    sweep = Sweep.from_dict(tree(noise=noise, local={"lr": {"grid": [0.05, 0.1, 0.2]}}))
    settings = ended(sweep, tmp_path, lambda values, seed: -values["noise.multiplier"])
    summary = gather(tmp_path, settings, sweep, True, {}).summary
    assert summary["best"]["edges"] == {"local.lr": "smallest"}


def test_the_end_of_a_sweep_offers_its_page_its_runs_and_its_best_setting():
    found = next_commands(SimpleNamespace(out="s3://b/out", best="some"))
    commands = [line.partition("raydpfl ")[2] for line in found[1:]]
    assert commands == ["report s3://b/out", "compare s3://b/out", "run s3://b/out/best.yaml"]
    assert len(next_commands(SimpleNamespace(out="out", best=None))) == 3


def test_the_table_shows_epsilon_by_an_accountant_that_covers_all_trials(tmp_path):
    sweep = Sweep.from_dict(tree(local={"lr": {"grid": [0.05, 0.1]}}))
    settings = settings_of(sweep, tmp_path)
    for setting, rdp in zip(settings, (3.0, "infinity"), strict=True):
        spent = {"rdp": rdp, "paper": 0.5, "pld": 2.5}
        guarantees = [{"accountant": name, "epsilon": value} for name, value in spent.items()]
        setting.trials[0].summary = {"guarantees": guarantees}
    parts = (settings, settings[:1], settings[1:])
    lines = printed(*(settings_table(part, sweep) for part in parts))
    kinds = [line.split()[4] for line in lines if "epsilon" in line]
    assert kinds == ["(pld)", "(rdp)", "(pld)"] and "inf" not in "".join(lines)


def test_the_result_says_that_choosing_is_a_query_and_among_how_many(swept):
    _, out, result, _ = swept
    assert "by the test accuracy of 6 runs on one test set" in result.summary["choice"]
    assert result.summary["choice"] in (out / "best.yaml").read_text()
    assert "private" not in result.summary["choice"]  # these were not
    private = Sweep.from_dict(tree(local={"lr": {"grid": [0.05, 0.1]}}, sweep={"repeats": 3}))
    settings = settings_of(private, out / "nowhere")
    runs = count_runs([trial for setting in settings for trial in setting.trials], out / "nowhere")
    assert "Choosing among 6 private runs is itself a query on the data" in statement(
        settings, private, runs
    )


def test_a_sweep_goes_on_with_more_values_and_seeds_but_not_as_another_sweep(swept, tmp_path):
    sweep, out, result, _ = swept
    shutil.copytree(out, tmp_path / "out")
    for directory in result.trials["directory"].to_pylist()[2:]:
        shutil.rmtree(tmp_path / "out" / directory)
    fewer = {"local": {**sweep.tree["local"], "lr": {"grid": [0.05]}}, "sweep": {"repeats": 1}}
    again = run(Sweep.from_dict({**sweep.tree, **fewer}), tmp_path / "out", resume=True)
    assert again.summary["processes"] == 0  # nothing had to be run
    assert (
        again.trials.drop_columns(["reason"]).to_pylist()
        == result.trials.drop_columns(["reason"]).to_pylist()[:1]
    )
    other = Sweep.from_dict({**sweep.tree, "rounds": 5, "sweep": {"repeats": 2}})
    with refusal("rounds = 5: expected 4, as in the sweep to be resumed"):
        run(other, out, resume=True)
    with refusal("a new or empty directory, or --resume"):
        run(sweep, out)


def test_a_setting_that_cannot_be_run_is_named_and_sections_are_printed_as_a_config_has_them():
    boundings = [{"kind": "clip", "bound": 0.5}, {"kind": "quantile_clip"}]
    with refusal(r"bound = None: .* \(in the setting bounding={kind: quantile_clip}\)"):
        Sweep.from_dict(tree(bounding={"grid": boundings}))
    values = {"bounding": boundings[0], "local.lr": 0.123456}
    assert override_text(values) == "bounding={kind: clip, bound: 0.5} local.lr=0.1235"


def test_a_trial_refused_on_the_way_ends_the_sweep_and_frees_the_cluster(shared_ray, tmp_path):
    shards = {"kind": "shards", "per_client": {"grid": [5, 200]}}
    sweep = Sweep.from_dict(tree(data={"partition": shards}, sweep={"concurrent": 1}))
    with refusal(r"data\.clients = 50: expected from 1 to 45 with 200 one-class shards each"):
        run(sweep, tmp_path / "out")
    cores = shared_ray.cluster_resources()["CPU"]
    until = time.monotonic() + WAIT
    while shared_ray.available_resources().get("CPU") != cores and time.monotonic() < until:
        time.sleep(0.1)
    assert shared_ray.available_resources().get("CPU") == cores


# --- stopping early, and Optuna ---


def asha(**evaluate) -> dict:
    """A good and a poor rate, one trial at a time: which is first is no matter of chance."""
    search = {"concurrent": 1, "scheduler": "asha", "grace": 2, "reduction": 2}
    evaluate = {"every": 1, **evaluate}
    return tree(rounds=8, evaluate=evaluate, local={"lr": {"grid": [0.1, 0.001]}}, sweep=search)


def test_asha_stops_a_poor_trial_which_can_be_gone_on_with(shared_ray, tmp_path):
    result = run(Sweep.from_dict(asha()), tmp_path / "out")
    good, poor = result.trials.to_pylist()
    assert (good["status"], good["rounds"], poor["status"]) == ("completed", 8, "stopped")
    assert 2 <= poor["rounds"] <= 3 and 0 < poor["epsilon_rdp"] < good["epsilon_rdp"]
    assert result.best.values["local.lr"] == 0.1 and result.summary["processes"] == 1
    changed = experiment(rounds=8, evaluate={"every": 1}, local={"lr": 0.001})
    whole = run_one(changed, tmp_path / "whole").summary
    resumed = run_one(changed, tmp_path / "out" / poor["directory"], resume=True).summary
    assert resumed["model_sha256"] == whole["model_sha256"] and resumed["status"] == "completed"


def test_chosen_by_validation_no_trial_looks_at_the_test_set(shared_ray, tmp_path):
    sweep = Sweep.from_dict(asha(validation=0.3), ["sweep.metric=validation_loss"])
    result = run(sweep, tmp_path / "out")
    good, poor = result.trials.to_pylist()
    assert (good["status"], good["rounds"], poor["status"]) == ("completed", 8, "stopped")
    for row in (good, poor):
        assert row["test_loss"] is None and row["test_accuracy"] is None
        assert 0 < row["validation_accuracy"] < 1
        rounds = pq.read_table(tmp_path / "out" / row["directory"] / "rounds.parquet")
        assert rounds["test_loss"].null_count == rounds.num_rows
        assert rounds["validation_loss"].null_count == 0
    assert good["validation_loss"] < poor["validation_loss"]
    assert result.best.values["local.lr"] == 0.1
    assert result.summary["best"]["mean"] == good["validation_loss"]
    assert "2 runs on rows held out of their training" in result.summary["choice"]
    assert "raydpfl run best.yaml does, once" in result.summary["choice"]
    best = Experiment.from_yaml(tmp_path / "out" / "best.yaml")
    assert best.evaluate.test and best.evaluate.validation == 0.3
    best = best.model_copy(update={"client": experiment().client})
    once = run_one(best, tmp_path / "once").summary
    for name in ("model_sha256", "validation_loss"):
        assert once[name] == good[name]
    assert once["test_accuracy"] > 0
    again = run(sweep, tmp_path / "out", resume=True)  # its trials are known again
    assert again.trials.select(["model_sha256"]).equals(result.trials.select(["model_sha256"]))


@pytest.mark.parametrize(("test", "looked"), [(None, False), (False, False), (True, True)])
def test_trials_look_at_the_test_set_where_the_config_says_so(test, looked, tmp_path):
    evaluate = {"validation": 0.3} | ({} if test is None else {"test": test})
    rates = {"lr": {"grid": [0.1, 0.2]}}
    search = {"metric": "validation_accuracy"}
    sweep = Sweep.from_dict(tree(evaluate=evaluate, local=rates, sweep=search))
    assert {probe.evaluate.test for probe in sweep.probes} == {looked}
    assert Sweep.from_dict(yaml.safe_load(sweep.to_yaml())) == sweep
    settings = settings_of(sweep, tmp_path)
    assert all(setting.experiment.evaluate.test is (test is not False) for setting in settings)
    runs = count_runs([trial for each in settings for trial in each.trials], tmp_path)
    said = statement(settings, sweep, runs)
    assert "by the validation accuracy of 2 runs on rows held out" in said
    asked = "raydpfl run best.yaml evaluate.test=true does, once"
    assert (asked in said) is (test is False)
    assert ("the test set too, which had no part in the choice" in said) is looked
    none = statement(settings, sweep, runs, has_best=False)
    assert "No setting was chosen by the validation" in none
    by_test = Sweep.from_dict(tree(evaluate={"validation": 0.3}, local=rates))
    assert all(probe.evaluate.test for probe in by_test.probes)


def test_the_median_rule_stops_a_trial_below_the_others_and_pauses_none(tmp_path):
    sweep = Sweep.from_dict(
        tree(local={"lr": {"grid": [0.1, 0.2]}}, sweep={"scheduler": "median", "grace": 2})
    )
    rule = SweepRunner(sweep, tmp_path, print).scheduler()
    decided = {}
    for name, accuracy in (("a", 0.5), ("b", 0.6), ("c", 0.7), ("poor", 0.4), ("good", 0.65)):
        trial = type("Trial", (), {"trial_id": name})()
        rounds = (1, 2) if name == "poor" else (1, 2, 3, 4)
        decided[name] = [
            rule.on_trial_result(None, trial, {"round": t, "test_accuracy": accuracy})
            for t in rounds
        ]
    assert decided.pop("poor") == ["CONTINUE", "STOP"]
    assert all(set(decisions) == {"CONTINUE"} for decisions in decided.values())


def proposed(order: int, failing: float = math.inf) -> list[float]:
    """What Optuna proposes when -(log10 lr + 2)^2 is to be large, results arriving in one of
    several orders. Learning rates from `failing` on have no result.
    """
    spaces = {"local": {"lr": {"loguniform": [1e-4, 1]}}}
    spaces["bounding"] = {"bound": {"powers_of_two": [-3, 3]}}
    sweep = Sweep.from_dict(tree(**spaces, sweep={"search": "optuna", "samples": 40, "ahead": 4}))

    def add(values):
        setting = sweep.setting(values)
        setting.trials.append(Trial("", setting.experiment, Path("nowhere"), status="running"))
        return setting

    rates = []
    pending = []
    for setting in propose_settings(sweep, add):
        if setting is not None:
            rates.append(setting.values["local.lr"])
            pending.append(setting)
            if len(pending) < 4:
                continue
        setting = pending.pop(order % len(pending))
        trial = setting.trials[0]
        rate = setting.values["local.lr"]
        trial.status = "completed" if rate < failing else "failed"
        trial.summary = {"test_accuracy": -((math.log10(rate) + 2) ** 2)}
    return rates


@pytest.mark.slow
def test_optuna_proposes_the_same_in_whatever_order_the_results_arrive_and_gets_better():
    pytest.importorskip("optuna")
    first = proposed(0)
    assert first == proposed(3) == proposed(1)
    assert len(first) == 40 and all(1e-4 <= lr <= 1 for lr in first)
    # After ten random settings. Thirty uniform draws would have mean 1 and standard deviation
    # 0.105: below 0.75 with probability 0.009.
    assert sum(abs(math.log10(lr) + 2) for lr in first[10:]) / 30 < 0.75
    # it goes on without the settings that fail
    rates = proposed(0, failing=1e-2)
    assert len(rates) == 40 and rates == proposed(2, failing=1e-2) != first


def test_a_resumed_optuna_sweep_proposes_what_it_had_proposed(shared_ray, tmp_path):
    optuna = pytest.importorskip("optuna")
    spaces = {"local": {"lr": {"loguniform": [1e-3, 1]}}}
    spaces["bounding"] = {"bound": {"powers_of_two": [-1, 1]}}
    search = {"search": "optuna", "samples": 6, "ahead": 2, "concurrent": 1}
    search["storage"] = f"sqlite:///{tmp_path / 'optuna.db'}"
    sweep = Sweep.from_dict(tree(**spaces, sweep=search))
    whole = run(sweep, tmp_path / "out")
    assert whole.trials["status"].to_pylist() == ["completed"] * 6
    again = run(sweep, tmp_path / "out", resume=True)
    assert again.trials.equals(whole.trials) and again.summary["processes"] == 0
    study = optuna.load_study(study_name="out", storage=search["storage"])
    shown = {trial.params["local.lr"]: trial.value for trial in study.trials}
    pairs = (whole.trials[name].to_pylist() for name in ("local.lr", "test_accuracy"))
    assert len(study.trials) == 6 and shown == dict(zip(*pairs, strict=True))
    assert study.trials[0].user_attrs["directories"][0].startswith("trials/")
    assert [*study.trials[0].intermediate_values] == [2, 4]


# --- however it ends ---


def finished(out: Path) -> dict[str, int]:
    """When each completed trial wrote its summary, in ns."""
    return {
        path.parent.name: path.stat().st_mtime_ns
        for path in out.glob("trials/*/summary.json")
        if json.loads(path.read_text())["status"] == "completed"
    }


def seconds_of(folder: Path) -> list[float]:
    """What each recorded round of a trial took."""
    return pq.read_table(folder / "rounds.parquet")["seconds"].to_pylist()


def under_way(out: Path) -> dict[Path, list[float]]:
    """What each recorded round took, of the trials that have begun and not completed."""
    done = finished(out)
    begun = [path.parent for path in out.glob("trials/*/rounds.parquet")]
    return {folder: seconds_of(folder) for folder in begun if folder.name not in done}


def begin(config: Path, out: Path, trials: int, *more: str) -> subprocess.Popen:
    """Starts a sweep; returns when `trials` trials are done and the next has a checkpoint."""
    command = [sys.executable, "-c", RUN, "sweep", str(config), "--out", str(out), *more]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    until = time.monotonic() + WAIT
    while time.monotonic() < until and process.poll() is None:
        done = finished(out)
        begun = [
            path
            for path in out.glob("trials/*/checkpoints/round-*.npz")
            if path.name != "round-00000000.npz"
        ]
        if len(done) >= trials and any(path.parent.parent.name not in done for path in begun):
            return process
        time.sleep(0.02)
    process.kill()
    raise AssertionError(process.communicate()[0].decode())


def test_a_sweep_interrupted_and_then_killed_ends_as_if_it_had_not_been(shared_ray, tmp_path):
    config = tmp_path / "sweep.yaml"
    out = tmp_path / "out"
    changes = {"rounds": 600, "evaluate": {"every": 50}}
    rates = [0.05, 0.1, 0.2]
    given = tree(**changes, local={"lr": {"grid": rates}}, sweep={"repeats": 2})
    config.write_text(yaml.safe_dump(given))

    process = begin(config, out, 1)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=WAIT)[0].decode()
    assert process.returncode == 130 and "--resume" in said and "Traceback" not in said, said
    first = finished(out)
    cut_off = under_way(out)

    process = begin(config, out, len(first) + 1, "--resume")
    kill_tree(process)
    second = finished(out)
    recorded = {folder: seconds for folder, seconds in under_way(out).items() if seconds}
    assert cut_off or recorded  # a trial may finish in the instant before the blow

    result = run(Sweep.from_yaml(config, ["sweep.concurrent=1"]), out, resume=True)
    third = finished(out)
    # no finished trial was run again
    assert len(third) == 6 and first.items() <= second.items() <= third.items()
    # and those under way went on: rounds that they had recorded were not done again
    for folder, seconds in recorded.items():
        assert seconds_of(folder)[: len(seconds)] == seconds
    rows = result.trials.to_pylist()
    assert [(row["local.lr"], row["seed"]) for row in rows] == [
        (lr, seed) for lr in rates for seed in (3, 4)
    ]
    assert {row["status"] for row in rows} == {"completed"}
    for row in (row for row in rows if out / row["directory"] in cut_off | recorded):
        check_as_if_alone(row, changes, tmp_path)
    assert not list(out.glob(".*"))


def check_as_if_alone(row: dict, changes: dict, folder: Path) -> None:
    """A row of the results is what a run of its own comes to."""
    changed = experiment(**changes, seed=row["seed"], local={"lr": row["local.lr"]})
    alone = run_one(changed, folder / row["directory"]).summary
    for name in ("status", "rounds", "test_accuracy", "test_loss", "model_sha256"):
        assert row[name] == alone[name]
    assert row["epsilon_rdp"] == alone["guarantees"][0]["epsilon"]


def test_writing_the_results_so_far_takes_a_twentieth_of_the_time_at_most(monkeypatch):
    seconds, saves = [0.0], []

    def save():
        saves.append(seconds[0])
        seconds[0] += 8.0

    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    runner = SimpleNamespace(timeout=None, trials=[], on_change=lambda runner: None, save=save)
    resources = SimpleNamespace(watch=lambda: None, nodes=lambda: [])
    watch = tune.Watch([runner], {"a": SimpleNamespace(finished=True)}, resources)
    while seconds[0] < 1000:
        seconds[0] += 1.0
        watch.on_trial_start(0, [], SimpleNamespace(trial_id="a"))
        watch.on_step_end(0, [])
    assert saves[0] <= 6.0
    assert 5 <= len(saves) <= 0.05 * 1000 / 8 + 1
