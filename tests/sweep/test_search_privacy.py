"""What a search spends: the composition of its trials, or less where the best is released alone."""

import json
import math
import shutil
from dataclasses import replace

import pytest
from conftest import experiment, messages, refusal
from test_sweep import tree

from raydpfl import run as run_one
from raydpfl.config.yaml import read
from raydpfl.data import FAMILY as SOURCES
from raydpfl.data import parse
from raydpfl.privacy import Mechanism, Query, Sampling
from raydpfl.privacy.accountants import ACCOUNTANTS
from raydpfl.simulation.composed_runs import StoredRun, compose, compose_trials
from raydpfl.sweep import Sweep
from raydpfl.sweep.results import exclusion_note
from raydpfl.sweep.runner import SweepRunner
from raydpfl.sweep.search_privacy import compose_search, private_search_composition

GRID = {"lr": {"grid": [0.05, 0.1]}}
BOTH = {"accountants": ["pld", "rdp"]}
PRIVATE = {"private": {"runs": "geometric", "mean": 3}}


def private(**sections) -> Sweep:
    sections = {"local": GRID, "privacy": BOTH, "sweep": PRIVATE, **sections}
    return Sweep.from_dict(tree(**sections))


def finished(sweep: Sweep, out) -> SweepRunner:
    """The runner of a sweep, started or resumed, whose trials have all run, here."""
    runner = SweepRunner(sweep, out, print)
    with runner.started(resume=True):
        pass
    if sweep.search.private:
        runner._composition = private_search_composition(sweep, None)
    for trial in runner.trials:
        if not trial.before:
            run_one(trial.experiment, trial.folder)
            trial.read()
    return runner


def hidden(guarantees) -> dict[str, float]:
    return {
        one["accountant"]: float(one["epsilon"])
        for one in guarantees
        if one["knows"] == "cohort hidden"
    }


# --- the best alone ---

REFUSED = messages("private searches")


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_private_search_can_have_is_refused(case):
    *changes, said = REFUSED[case]
    with refusal(line=said):
        private_search_composition(Sweep.from_dict(tree(local=GRID, sweep=PRIVATE), changes), None)


def test_a_search_by_test_rows_of_the_clients_says_that_no_epsilon_covers_them():
    table = {"kind": "table", "train": "users.csv", "client": "user"}
    for extra, tested in ({}, True), ({"test": "others.csv"}, False):
        one = experiment(data={**table, **extra})
        assert one.data.tests_clients == tested
        assert ("test accuracy" in exclusion_note("test_accuracy", one)) == tested
        assert any("evaluate.test" in words for words in one.setting().exclusions) == tested
        if not tested:
            private(data={**table, **extra})
    kinds = {"synthetic": False, "fashion_mnist_mini": False, "scalar_quadratics": True}
    examples = {kind: {"kind": kind, **SOURCES[kind].examples[0]} for kind in kinds}
    assert {kind: parse(examples[kind]).tests_clients for kind in kinds} == kinds


def test_trials_are_independent_and_their_number_is_drawn():
    sweep = private(sweep={"private": {"runs": "poisson", "mean": 30}})
    values = [*sweep.setting_values()]
    assert len(values) == sweep.size and len(values) > 10
    assert {value["local.lr"] for value in values} == {0.05, 0.1}  # drawn again and again
    seeds = [seed for place in range(len(values)) for seed in sweep.seeds(place)]
    assert len({*seeds}) == len(values)
    others = {private(seed=seed).size for seed in range(8)}
    assert len(others) > 2 and min(others) >= 1
    tree = {**sweep.tree, "sweep": sweep.search.model_dump(exclude_unset=True)}
    assert Sweep.from_dict(tree).size == sweep.size


def test_a_private_search_spends_as_its_costliest_trial_repeated():
    """The noise is searched too: all that can be drawn costs at most what the least noise does."""
    multipliers = {"multiplier": {"grid": [3.0, 1.5, 2.0]}}
    sweep = private(noise=multipliers)
    spent = hidden(one.to_dict() for one in private_search_composition(sweep, None).guarantees)
    mechanism = Mechanism(Sampling("fixed", 50, 20), (Query("updates", 1.0, 1.5),), 4)
    for name, epsilon in spent.items():
        repetition = sweep.search.private.repetition()
        part = (mechanism.event("replace_one"), 4)
        expected = ACCOUNTANTS[name].best_of(repetition, [part], 1e-5)
        assert epsilon == pytest.approx(expected, rel=1e-9)
    assert spent["pld"] < spent["rdp"]


def test_the_budget_command_says_what_a_private_search_would_spend(tmp_path, typed):
    sweep = private(noise={"multiplier": {"grid": [3.0, 1.5]}})
    (tmp_path / "sweep.yaml").write_text(sweep.to_yaml())
    code, said, _ = typed("budget", tmp_path / "sweep.yaml", "noise.multiplier=1.5", "--json")
    spent = private_search_composition(private(noise={"multiplier": 1.5}), None)
    assert code == 0 and json.loads(said) == json.loads(json.dumps(spent.to_dict()))
    code, said, _ = typed("budget", tmp_path / "sweep.yaml")
    assert "best run alone, of a geometric number" in " ".join(said.split())
    assert "noise.multiplier=3 " in said and f"{spent.epsilon.epsilon:.4g}" in said


@pytest.mark.slow
def test_the_result_of_a_private_search_is_the_best_run_alone(tmp_path):
    sweep = private(sweep={"private": {"runs": "poisson", "mean": 4}})
    runner = finished(sweep, tmp_path)
    assert len(runner.trials) > 1
    before = runner.gather(is_over=False, seconds=1.0)
    assert before.best is None and not before.trials.num_rows
    result = runner.gather(is_over=True, seconds=1.0)
    runner.write(result)
    best = max(runner.trials, key=lambda trial: trial.summary["test_accuracy"])
    assert result.problem is None and result.best.trials == [best]
    assert result.trials.column("model_sha256").to_pylist() == [best.summary["model_sha256"]]
    written = [path for path in tmp_path.iterdir() if path.is_file()]
    text = "".join(path.read_text() for path in written if path.suffix in (".json", ".yaml"))
    for trial in runner.trials:
        shown = [trial.summary["model_sha256"], trial.folder.name, str(trial.seed)]
        assert trial is best or not any(word in text for word in shown)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["settings"] == 1 and "seconds" not in summary
    assert hidden(summary["guarantees"]).keys() == {"pld", "rdp"}
    assert "Epsilon of the whole search" in summary["choice"]
    assert "of the best run alone does not cover the choice" in summary["choice"]
    # the config of the best gives its bits again, and so no other release
    again = run_one(type(best.experiment).from_yaml(tmp_path / "best.yaml"), tmp_path / "again")
    assert again.summary["model_sha256"] == best.summary["model_sha256"]
    # on whatever machine
    paths = (tmp_path / "best.yaml", best.folder / "config.yaml")
    pinned, stored = (read(path)["client"] for path in paths)
    assert pinned == stored and pinned["backend"] != "auto"
    # another run in trials/ may not be shown
    (best.folder.parent / "other").mkdir()
    (best.folder.parent / "other" / "ledger.jsonl").write_text("{}\n")
    refused = runner.gather(is_over=True).summary
    assert "best" not in refused and "guarantees" not in refused
    assert refused["choice"] == "No run is released."


@pytest.mark.parametrize("every", [False, True])
def test_trials_of_a_private_search_that_failed_are_not_shown(tmp_path, every):
    runner = SweepRunner(private(seed=7), tmp_path, print)
    runner.advance()
    runner._composition = private_search_composition(runner.sweep, None)
    assert len(runner.trials) > 1
    for place, trial in enumerate(runner.trials):
        trial.status = "failed" if every or place else "completed"
        trial.summary = {"test_accuracy": 0.5 + place, "reason": "nan"}
    result = runner.gather(is_over=True)
    assert result.summary["failed"] == [] and result.summary["trials"]["failed"] == 0
    assert result.summary["reason"] == ("no setting has a result" if every else None)
    assert bool(result.best) != every


def test_a_poisson_number_may_be_none(tmp_path):
    sweeps = (private(seed=k, sweep={"private": {"runs": "poisson", "mean": 1}}) for k in range(40))
    runner = finished(next(sweep for sweep in sweeps if sweep.size == 0), tmp_path)
    result = runner.gather(is_over=True)
    assert result.problem is None and result.best is None
    assert "gave none to release" in result.summary["choice"]


# --- all that was tried ---


def test_the_trials_of_a_grid_are_one_gaussian_a_round(tmp_path):
    """They have one seed, and so one cohort a round: three sums of mu are one of mu sqrt(3)."""
    rates = {"lr": {"grid": [0.05, 0.1, 0.2]}}
    runner = finished(private(local=rates, sweep={}), tmp_path)
    result = runner.gather(is_over=True)
    mechanism = Mechanism(Sampling("fixed", 50, 20), (Query("updates", 1.0, 1.0),), 4)
    event = mechanism.event("replace_one")
    joint = replace(event, mu=event.mu * math.sqrt(3))
    for name, epsilon in hidden(result.summary["guarantees"]).items():
        assert epsilon == pytest.approx(ACCOUNTANTS[name].together([(joint, 4)], 1e-5), rel=1e-9)
    assert "Epsilon of all of them together" in result.summary["choice"]


@pytest.mark.slow
def test_runs_of_former_values_count_and_hide_nothing(tmp_path):
    """What was added after results were seen is adaptive: of a cohort of fixed size and one seed
    no epsilon with the cohorts hidden is proved.
    """
    finished(private(sweep={}), tmp_path)
    later = finished(private(local={"lr": {"grid": [0.1, 0.4]}}, sweep={}), tmp_path)
    summary = later.gather(is_over=True).summary
    assert not hidden(summary["guarantees"])
    assert "no epsilon with the cohorts hidden" in summary["choice"]
    assert "3 runs together" in summary["guarantees"][0]["sampling"]


def test_values_that_were_added_when_there_were_runs_hide_nothing(tmp_path):
    """Nor do they in later resumes. The same values may be written otherwise."""
    for rates in ([1, 0.1], [0.1, 1.0], [0.1, 1, 2], [0.1, 1, 2]):
        sweep = private(local={"lr": {"grid": rates}}, rounds=1, sweep={})
        guarantees = finished(sweep, tmp_path).gather(is_over=True).summary["guarantees"]
        assert bool(hidden(guarantees)) == (len(rates) < 3), rates


def test_samples_that_were_added_when_there_were_runs_hide_nothing(tmp_path):
    for samples in (2, 2, 3):
        search = {"search": "random", "samples": samples}
        rates = {"lr": {"loguniform": [0.05, 0.5]}}
        sweep = private(local=rates, rounds=1, sweep=search)
        guarantees = finished(sweep, tmp_path).gather(is_over=True).summary["guarantees"]
        assert bool(hidden(guarantees)) == (samples < 3)


@pytest.mark.parametrize("kept", ["local", "model"])
def test_state_of_clients_counts_in_whichever_trial_it_is(kept):
    """By a plan of their own, whatever the trials before have: no proof has the cohorts hidden."""
    rule = {"steps": 2, "batch": 8}
    local = {"sgd": {"kind": "sgd", **rule}, "scaffold": {"kind": "scaffold", **rule}}
    kinds = {"local": local, "model": {"all": {"kind": "mlp"}, "own": {"kind": "mlp"}}}[kept]
    if kept == "model":
        kinds["own"]["local"] = ["3.*"]
    sections = {"model": {"kind": "mlp"}, "evaluate": {"test": False, "validation": 0.2}}
    runs = [
        StoredRun(name, experiment(**{**sections, kept: section}))
        for name, section in kinds.items()
    ]
    for order in (runs, runs[::-1]):
        (together,) = compose_trials(order)
        gaps = [one for one in together.guarantees if one.kind == "unproven"]
        assert gaps and all("has state" in one.conditions_failed[0] for one in gaps[:1])


def test_a_private_search_counts_what_any_of_its_values_depends_on():
    """Noise that is correlated over the rounds depends on the server; it is the second value."""
    noises = {"kind": {"grid": ["gaussian", "square_root_gaussian"]}, "multiplier": 4.0}
    noises["delta"] = 1e-5
    sections = {
        "noise": noises,
        "server": {"momentum": {"grid": [0.0, 0.9]}},
        "selection": {"kind": "full"},
        "local": {},
    }
    epsilons = []
    for kinds in (noises["kind"]["grid"], noises["kind"]["grid"][::-1]):
        noises["kind"]["grid"] = kinds
        composition = private_search_composition(private(**sections), None)
        assert len({run.name for run in composition.runs}) == 4
        epsilons.append(composition.epsilon.epsilon)
    assert epsilons[0] == pytest.approx(epsilons[1])


def test_what_a_trial_released_before_it_was_restarted_counts(tmp_path):
    folder, whole = tmp_path / "run", experiment(rounds=3)
    run_one(whole, folder)
    shutil.rmtree(folder / "checkpoints")
    (folder / "summary.json").unlink()
    run_one(whole, folder, resume=True, fresh_noise=True)
    composition = compose_search([(folder, whole)], None)
    alone = compose([StoredRun.of("run", whole, folder)])
    assert composition.epsilon.epsilon == alone.epsilon.epsilon
    assert alone.epsilon.epsilon > 1.2 * compose([StoredRun("run", whole)]).epsilon.epsilon


def test_histograms_of_trials_with_the_same_sums_all_count(tmp_path):
    runs = []
    for score in ("accuracy", "loss"):
        histogram = {"bins": 4, "std": 1.0}
        evaluate = {"per_client": score, "histogram": histogram, "test": False}
        run = experiment(rounds=2, evaluate=evaluate)
        run_one(run, tmp_path / score)
        runs.append((tmp_path / score, run))
    one, both = (compose_search(part, None).epsilon.epsilon for part in (runs[:1], runs))
    assert both > 1.2 * one


def test_two_runs_with_noise_of_the_system_are_two_releases(tmp_path):
    noise = {"kind": "discrete_gaussian", "source": "system", "multiplier": 4.0, "delta": 1e-5}
    runs = [(tmp_path / name, experiment(rounds=2, noise=noise)) for name in ("a", "b")]
    for folder, run in runs:
        run_one(run, folder)
    one, both = (compose_search(part, None).epsilon.epsilon for part in (runs[:1], runs))
    assert both > 1.2 * one
    joint = compose([StoredRun.of(folder.name, run, folder) for folder, run in runs])
    assert joint.epsilon.epsilon >= both  # that of runs one after another


def test_how_rows_look_makes_no_other_people(tmp_path):
    data = {"kind": "fashion_mnist_mini", "clients": 20}
    images = [{**data, "normalize": flag} for flag in (True, False)]
    rows = "".join(f"{n % 7},{n % 5},{n % 2}\n" for n in range(400))
    (tmp_path / "rows.csv").write_text("a,b,y\n" + rows)
    table = {"kind": "table", "train": str(tmp_path / "rows.csv"), "y": "y", "clients": 20}
    columns = [{**table, "x": names} for names in (["a", "b"], ["a"])]
    for pair in (images, columns):
        runs = [StoredRun(str(place), experiment(data=one)) for place, one in enumerate(pair)]
        (together,) = compose_trials(runs)
        assert len(together.runs) == 2


@pytest.mark.parametrize("name", ["config.yaml", "ledger.jsonl"])
def test_a_damaged_former_run_leaves_a_search_without_an_epsilon(name, tmp_path):
    runner = finished(private(rounds=1, sweep={}), tmp_path)
    former = tmp_path / "trials" / "former"
    shutil.copytree(runner.trials[0].folder, former)
    (former / name).write_text("nonsense\n")
    summary = runner.gather(is_over=True).summary
    assert summary["status"] == "completed" and summary["guarantees"] == []
    assert "a run in trials/ cannot be read" in summary["choice"]


def test_a_run_whose_ledger_is_gone_leaves_a_search_without_an_epsilon(tmp_path):
    runner = finished(private(rounds=1, sweep={}), tmp_path)
    (runner.trials[0].folder / "ledger.jsonl").unlink()
    summary = runner.gather(is_over=True).summary
    assert summary["guarantees"] == [] and "has no whole line" in summary["choice"]


def test_a_trial_without_noise_leaves_a_search_without_an_epsilon(tmp_path):
    noises = [{"kind": "none"}, {"kind": "gaussian", "multiplier": 1.0, "delta": 1e-5}]
    sweep = private(local={}, rounds=1, noise={"grid": noises}, sweep={})
    summary = finished(sweep, tmp_path).gather(is_over=True).summary
    assert summary["guarantees"] == [] and "1 run without noise" in summary["choice"]


def test_trials_with_common_noise_have_no_epsilon(tmp_path):
    runner = finished(private(noise={"common": True}, sweep={}), tmp_path)
    summary = runner.gather(is_over=True).summary
    assert summary["guarantees"] == [] and "No epsilon covers all of them" in summary["choice"]


def test_seeds_that_divide_the_rows_otherwise_are_other_people(tmp_path):
    runner = finished(private(local={}, sweep={"repeats": 2}), tmp_path / "two")
    summary = runner.gather(is_over=True).summary
    assert "1 runs together" in summary["guarantees"][0]["sampling"]
    assert "of the clients of one seed" in summary["choice"]
    fixed = finished(private(local={}, data={"seed": 9}, sweep={"repeats": 2}), tmp_path / "one")
    together = fixed.gather(is_over=True).summary
    assert "2 runs together" in together["guarantees"][0]["sampling"]
    assert hidden(together["guarantees"])["pld"] > hidden(summary["guarantees"])["pld"]


def test_of_clients_of_several_seeds_those_count_of_which_the_larger_epsilon_is_stated(tmp_path):
    """Of the first the cohort seen costs most, of the second the cohort hidden."""
    noises = {1: (1, 0.4), 2: (150, 2.0)}
    runs, stated = [], []
    for seed, (cohort, multiplier) in noises.items():
        run = experiment(
            seed=seed,
            rounds=20,
            data={"kind": "synthetic", "clients": 200, "samples": 5},
            selection={"kind": "poisson", "cohort": cohort},
            noise={"multiplier": multiplier},
            client={"chunk": 50},
        )
        run_one(run, tmp_path / str(seed))
        runs.append((tmp_path / str(seed), run))
        stated.append(compose_search(runs[-1:], None).epsilon.epsilon)
    assert stated[0] < stated[1]
    assert compose_search(runs, None).epsilon.epsilon == stated[1]
